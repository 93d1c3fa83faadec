"""The bytes of VARIANT, by the specification: VariantEncoding.md of Apache Parquet, version 1.

    metadata   header, number of keys, offsets of the keys, keys     each key of the document once, sorted by its bytes
    value      header, and what it needs
      integer  1, 2, 4 or 8 bytes, the fewest
      decimal  scale, then 4, 8 or 16 bytes
      string   its length, if it has 64 bytes or more; its bytes
      array    number of elements, their offsets, elements
      object   number of fields, the keys' numbers in the order of the keys, offsets of the values, values

Integers are little-endian. A length, number or offset takes as few bytes as are enough for it.

1. Sizes, from the innermost level to the outermost: the size of an array or object follows from those in it.
2. Places, from the outermost level to the innermost.
3. All bytes of one kind are written at once, wherever they belong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from walmere.types.base import Mask
from walmere.types.flat import Bytes, Flat, Places, binary_of, flat
from walmere.types.variant.numbers import Numbers, numbers
from walmere.types.variant.strings import unescaped
from walmere.types.variant.tokens import ARRAY, OBJECT, SCALAR, STRING, NotJson, Tree, Unsuitable, tree

MAX_DEPTH: Final = 1_000
_SORTED_VERSION_1: Final = 0x11
_NULL, _TRUE, _FALSE = 0, 1, 2
_INTEGERS: Final = ((1, 3), (2, 4), (4, 5), (8, 6))  # bytes, and the type's number
_DECIMALS: Final = ((4, 8, 9), (8, 9, 18), (16, 10, 38))  # bytes, number, digits
_LONG_STRING: Final = 16
_SHORT: Final = 64
_STRING, _OBJECT, _ARRAY = 1, 2, 3
"""The last two bits of a header. 0: one of the types above."""


def encoded(text: Flat) -> tuple[pa.Array, pa.Array]:
    """Metadata and values of documents. Raises NotJson, or Unsuitable for those that VARIANT cannot hold."""
    found = tree(text, MAX_DEPTH)
    strings, removed = text.data, np.zeros(0, np.int64)
    if len(found.escapes):
        strings, removed, lone = unescaped(text.data, found.escapes)
        if len(lone):
            raise Unsuitable(np.unique(np.searchsorted(text.starts, lone, "right") - 1))
    keys = _Keys(found, strings, removed, len(text.starts))
    return keys.metadata(), _Values(found, text.data, strings, removed, keys).written()


class _Keys:
    """The keys of the documents."""

    def __init__(self, found: Tree, strings: Bytes, removed: Places, documents: int) -> None:
        self._documents = documents
        texts = binary_of(strings, _moved(found.key_start, removed), _moved(found.key_end, removed))
        encoded_texts = texts.dictionary_encode()
        self._names = encoded_texts.dictionary
        order = pc.sort_indices(self._names).to_numpy().astype(np.int64)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        ranks = rank[encoded_texts.indices.to_numpy().astype(np.int64)] if len(texts) else np.zeros(0, np.int64)
        count = max(len(order), 1)
        pairs, place = np.unique(found.document[found.keyed] * count + ranks, return_inverse=True)
        self._name_of, of_document = order[pairs % count] if len(pairs) else pairs, pairs // count
        self.counts = np.bincount(of_document, minlength=documents)
        first = np.cumsum(self.counts) - self.counts
        self.number = place - first[found.document[found.keyed]]  # of each key, in its document's metadata
        self._first = first
        parent = found.parent[found.keyed]
        self.order = np.lexsort((self.number, parent))  # the fields of each object, in the order of their keys
        same = np.diff(parent[self.order]) == 0
        same &= np.diff(self.number[self.order]) == 0
        if same.any():
            raise Unsuitable(np.unique(found.document[found.keyed][self.order[1:][same]]))

    def metadata(self) -> pa.Array:
        names = flat(self._names.take(pa.array(self._name_of)))
        lengths = names.ends - names.starts
        document = np.repeat(np.arange(self._documents), self.counts)
        total = np.bincount(document, lengths, self._documents).astype(np.int64)
        width = _width(np.maximum(total, self.counts))
        sizes = 1 + width * (self.counts + 2) + total
        ends = np.cumsum(sizes)
        starts = ends - sizes
        out = np.zeros(int(ends[-1]), np.uint8)
        out[starts] = _SORTED_VERSION_1 | (width - 1) << 6
        _put(out, starts + 1, self.counts, width)
        before = np.append(0, np.cumsum(total)[:-1])
        nth = np.arange(len(document)) - self._first[document]
        _put(
            out,
            (starts + 1 + width)[document] + nth * width[document],
            names.starts - before[document],
            width[document],
        )
        _put(out, starts + 1 + width * (self.counts + 1), total, width)
        texts = (starts + 1 + width * (self.counts + 2))[document] + names.starts - before[document]
        _copy(out, texts, names.data, names.starts, lengths)
        return _binary(out, ends)


@dataclass(slots=True, eq=False)
class _Values:
    """The values of the documents."""

    found: Tree
    data: Bytes
    strings: Bytes
    removed: Places
    keys: _Keys

    def written(self) -> pa.Array:
        found, kind = self.found, self.found.kind
        size = np.ones(len(kind), np.int64)
        header = np.zeros(len(kind), np.uint8)
        is_string = np.flatnonzero(kind == STRING)
        begin = _moved(found.start[is_string], self.removed)
        length = _moved(found.end[is_string], self.removed) - begin
        is_long = length >= _SHORT
        size[is_string] += length + 4 * is_long
        header[is_string] = np.where(is_long, _LONG_STRING << 2, _STRING | (length & 63) << 2)
        scalars = np.flatnonzero(kind == SCALAR)
        is_number = self._literals(scalars, header)
        number = scalars[is_number]
        found_numbers = numbers(self.data, found.start[number], found.end[number])
        if found_numbers.unsuitable.any():
            raise Unsuitable(np.unique(found.document[number[found_numbers.unsuitable]]))
        width = _number_widths(found_numbers)
        for bytes_, type_number in _INTEGERS:
            header[number[(found_numbers.scale < 0) & (width == bytes_)]] = type_number << 2
        is_decimal = (found_numbers.scale >= 0) | (width == 16)
        for bytes_, type_number, _ in _DECIMALS:
            header[number[is_decimal & (width == bytes_)]] = type_number << 2
        size[number] += width + is_decimal
        nested = _Nested(found, size, header, self.keys)

        start, out = nested.start, np.zeros(int(nested.ends[-1]), np.uint8)
        out[start] = header
        _put(out, start[is_string[is_long]] + 1, length[is_long], 4)
        _copy(out, start[is_string] + 1 + 4 * is_long, self.strings, begin, length)
        at = start[number] + 1 + is_decimal
        out[at[is_decimal] - 1] = np.maximum(found_numbers.scale[is_decimal], 0)
        _put(out, at, found_numbers.low, np.minimum(width, 8))
        _put(out, at[width == 16] + 8, found_numbers.high[width == 16].view(np.uint64), 8)
        nested.write(out)
        return _binary(out, nested.ends)

    def _literals(self, scalars: Places, header: NDArray[np.uint8]) -> Mask:
        """Write the headers of true, false and null. Returns which scalars are numbers."""
        start, length = self.found.start[scalars], self.found.end[scalars] - self.found.start[scalars]
        letter = self.data[start]
        is_number = np.ones(len(scalars), np.bool_)
        for word, type_number in ((b"null", _NULL), (b"true", _TRUE), (b"false", _FALSE)):
            places = np.flatnonzero(letter == word[0])
            if (length[places] != len(word)).any():
                raise NotJson
            if (self.data[start[places][:, None] + np.arange(len(word))] != np.frombuffer(word, np.uint8)).any():
                raise NotJson
            header[scalars[places]] = type_number << 2
            is_number[places] = False
        return is_number


def _number_widths(found_numbers: Numbers) -> Places:
    """How many bytes each number takes, without header and scale."""
    width = np.full(len(found_numbers.low), 16, np.int64)
    integer, value = (found_numbers.scale < 0) & found_numbers.is_int64, found_numbers.low.view(np.int64)
    for bytes_, _ in reversed(_INTEGERS):
        limit = 1 << (8 * bytes_ - 1)
        width[integer & (value >= -limit) & (value <= limit - 1)] = bytes_
    for bytes_, _, digits in reversed(_DECIMALS[:-1]):
        width[(found_numbers.scale >= 0) & (found_numbers.scale <= digits) & found_numbers.below(digits)] = bytes_
    return width


class _Nested:
    """Where every value begins, and the parts of arrays and objects that are not values."""

    def __init__(self, found: Tree, size: Places, header: NDArray[np.uint8], keys: _Keys) -> None:
        self._found, self._keys = found, keys
        count = len(found.kind)
        inner = found.parent >= 0
        self._children = np.bincount(found.parent[inner], minlength=count)
        self._inside = np.zeros(count, np.int64)  # bytes of the values in an array or object
        self._offset = np.zeros(count, np.int64)  # of a value, in what it is in
        self._id_width = _width(np.maximum(keys.counts - 1, 0))[found.document]
        self._count_width = np.where(self._children > 255, 4, 1)
        self._offset_width = np.ones(count, np.int64)
        self._before = np.zeros(count, np.int64)  # bytes before the first value
        order = np.argsort(found.depth, kind="stable")
        bounds = np.searchsorted(found.depth[order], np.arange(int(found.depth.max()) + 2))
        levels = [order[bounds[level] : bounds[level + 1]] for level in range(len(bounds) - 1)]
        for level in reversed(levels):
            containers = level[found.kind[level] >= OBJECT]
            if len(containers):
                self._measure(containers, header)
                size[containers] = self._before[containers] + self._inside[containers]
            if level is not levels[0]:
                self._add(level, size[level])
        self.ends = np.cumsum(size[levels[0]])
        self.start = np.zeros(count, np.int64)
        self.start[levels[0]] = self.ends - size[levels[0]]
        for level in levels[1:]:
            parent = found.parent[level]
            self.start[level] = self.start[parent] + self._before[parent] + self._offset[level]

    def _measure(self, containers: Places, header: NDArray[np.uint8]) -> None:
        """The parts of arrays and objects whose values have known sizes."""
        children, is_object = self._children[containers], self._found.kind[containers] == OBJECT
        width = _width(self._inside[containers])
        self._offset_width[containers] = width
        ids = np.where(is_object, self._id_width[containers], 0)
        self._before[containers] = 1 + self._count_width[containers] + children * ids + (children + 1) * width
        large = (children > 255).astype(np.int64)
        objects = _OBJECT | (width - 1) << 2 | (self._id_width[containers] - 1) << 4 | large << 6
        header[containers] = np.where(is_object, objects, _ARRAY | (width - 1) << 2 | large << 4)

    def _add(self, level: Places, size: Places) -> None:
        """Add the sizes of values to what they are in. Values in one array or object follow each other."""
        parent = self._found.parent[level]
        first = np.flatnonzero(np.append(True, parent[1:] != parent[:-1]))
        self._inside[parent[first]] = np.add.reduceat(size, first)
        before = np.cumsum(size) - size
        self._offset[level] = before - np.repeat(before[first], np.diff(np.append(first, len(level))))

    def write(self, out: NDArray[np.uint8]) -> None:
        """Write the numbers of keys and the offsets."""
        found, keys = self._found, self._keys
        containers = np.flatnonzero(found.kind >= OBJECT)
        _put(out, self.start[containers] + 1, self._children[containers], self._count_width[containers])
        after_count = self.start + 1 + self._count_width
        ids = np.where(found.kind == OBJECT, self._id_width * self._children, 0)
        width = self._offset_width
        _put(out, (after_count + ids + width * self._children)[containers], self._inside[containers], width[containers])

        fields = found.keyed[keys.order]
        parent = found.parent[fields]
        nth = _nth(parent)
        _put(out, after_count[parent] + nth * self._id_width[parent], keys.number[keys.order], self._id_width[parent])
        _put(out, (after_count + ids)[parent] + nth * width[parent], self._offset[fields], width[parent])
        inner = np.flatnonzero(found.parent >= 0)
        elements = inner[found.kind[found.parent[inner]] == ARRAY]
        elements = elements[np.argsort(found.parent[elements], kind="stable")]
        parent = found.parent[elements]
        _put(out, after_count[parent] + _nth(parent) * width[parent], self._offset[elements], width[parent])


def _nth(group: Places) -> Places:
    """The place of each member in its group. Members of a group follow each other."""
    index = np.arange(len(group))
    begins = np.append(True, group[1:] != group[:-1])[: len(group)]
    return index - np.maximum.accumulate(np.where(begins, index, 0))


def _moved(places: Places, removed: Places) -> Places:
    """Places in the bytes without escapes."""
    return places - np.searchsorted(removed, places) if len(removed) else places


def _width(values: Places) -> Places:
    """How many bytes are enough for these numbers, of 1 to 4."""
    return 1 + (values > 0xFF).astype(np.int64) + (values > 0xFFFF) + (values > 0xFFFFFF)


def _put(out: Bytes, at: Places, values: NDArray[np.int64] | NDArray[np.uint64], width: Places | int) -> None:
    """Write integers of so many bytes, little-endian."""
    if isinstance(width, int):
        width = np.full(len(at), width)
    for byte in range(int(width.max()) if len(width) else 0):
        places = width > byte
        out[at[places] + byte] = (values[places] >> values.dtype.type(8 * byte)).astype(np.uint8)


def _copy(out: Bytes, to: Places, data: Bytes, start: Places, length: Places) -> None:
    """Copy ranges of bytes. On both sides, they are ascending and do not overlap."""
    out[_covered(len(out), to, length)] = data[_covered(len(data), start, length)]


def _covered(size: int, start: Places, length: Places) -> Mask:
    """Which bytes are in one of these ranges."""
    steps = np.zeros(size + 1, np.int8)
    present = length > 0
    steps[start[present]] += 1
    steps[(start + length)[present]] -= 1  # may be the start of the next one
    covered: Mask = np.cumsum(steps[:-1], dtype=np.int8).view(np.bool_)
    return covered


def _binary(data: Bytes, ends: Places) -> pa.Array:
    offsets = np.zeros(len(ends) + 1, np.int32)
    offsets[1:] = ends
    return pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
