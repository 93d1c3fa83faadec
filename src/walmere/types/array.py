r"""Arrays of one dimension as lists.

`array_out` writes `{1,NULL,3}`, `{"with, comma","NULL","say \"so\""}`, `{}`. An element is quoted when it is empty, is
the word NULL, or has a brace, a quote, a backslash, a blank or the delimiter in it; inside quotes, a backslash escapes
a quote or a backslash. An array with more dimensions begins with `{{`, one with a lower bound other than 1 with a
prefix such as `[0:2]=`: these are not lists, and are rejected.

All arrays of a column are split together. First the escapes are removed, and the bytes that they escaped are marked.
Then quotes are counted: where the count is odd, the byte is inside quotes, and braces and delimiters have no meaning.
The other braces and delimiters are the borders of elements. The elements of all rows are one array, which is cast at
once by the codec of the elements. A row with a rejected element is rejected as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from walmere.types.base import Cast, Codec, Mask, as_mask
from walmere.types.flat import QUOTE, Flat, Places, binary_of, flat, nested, unescape, where_is

_OPEN, _CLOSE = b"{}"
_NULL: Final = b"NULL"


class Split(NamedTuple):
    """The elements of all rows, and their number for each row."""

    elements: pa.Array
    counts: Places


@dataclass(frozen=True)
class Array(Codec):
    """An array as a list."""

    element: Codec
    delimiter: str = ","

    def _cast(self, text: pa.Array) -> Cast:
        valid = as_mask(text.is_valid())
        data, starts, ends = flat(text)
        data = np.append(data, np.zeros(2, np.uint8))  # room to look at two bytes of an empty value
        many = (data[starts] == ord("[")) | ((data[starts] == _OPEN) & (data[starts + 1] == _OPEN))
        many &= valid & (ends - starts >= 2)
        if (cast := self._lists(text, valid & ~many)) is None:
            raise self.refused("a value is not an array in PostgreSQL's format")
        values, rejected = cast
        rejected |= many
        return Cast(values, rejected) if rejected.any() else Cast(values)

    def _lists(self, text: pa.Array, wanted: Mask) -> tuple[pa.Array, Mask] | None:
        """The wanted values as lists, null elsewhere, and which of them were rejected."""
        present = text if wanted.all() else text.filter(pa.array(wanted))
        if (found := split(flat(present), _OPEN, _CLOSE, ord(self.delimiter))) is None:
            return None
        elements = self.element.cast(found.elements)
        rejected = np.zeros(len(text), np.bool_)
        if elements.rejected is not None and elements.rejected.any():
            row_of = np.repeat(np.flatnonzero(wanted), found.counts)
            rejected[row_of[elements.rejected]] = True
            again = self._lists(text, wanted & ~rejected)
            return None if again is None else (again[0], rejected)
        counts = found.counts
        if present is not text:
            counts = np.zeros(len(text), np.int64)
            counts[wanted] = found.counts
        return nested(self.arrow, counts, wanted, elements.values), rejected


def split(text: Flat, opening: int, closing: int, delimiter: int) -> Split | None:
    """Split all values at once; None if one is not well-formed."""
    if not len(text.starts):
        return Split(pa.array([], pa.binary()), np.zeros(0, np.int64))
    if (text.ends - text.starts < 2).any():
        return None
    escaped = unescape(text)
    (data, starts, ends), literal = escaped
    borders = where_is(escaped, opening, closing, delimiter)
    quotes = where_is(escaped, QUOTE)
    has_quotes = bool(quotes.any())
    if has_quotes:
        odd = np.cumsum(quotes, dtype=np.uint8) & 1  # the count overflows, but its last bit stays right
        outside = odd == 0
        if odd[ends - 1].any() or (literal is not None and (literal & outside).any()):
            return None
        borders &= outside
    elif literal is not None:
        return None
    at = np.flatnonzero(borders)
    letter = data[at]
    opens, closes = np.flatnonzero(letter == opening), np.flatnonzero(letter == closing)
    if not (np.array_equal(at[opens], starts) and np.array_equal(at[closes], ends - 1)):
        return None
    counts = closes - opens
    begin, end = at + 1, np.append(at[1:], 0)
    is_element = letter != closing
    empty_rows = ends - starts == 2
    is_element[opens[empty_rows]] = False
    counts[empty_rows] = 0
    begin, end = begin[is_element], end[is_element]
    if (begin == end).any():
        return None  # an empty element must be quoted
    quoted = None
    if has_quotes:
        quoted = quotes[begin]
        if 2 * np.count_nonzero(quoted) != np.count_nonzero(quotes) or not quotes[end[quoted] - 1].all():
            return None
        if (end[quoted] - begin[quoted] < 2).any():
            return None
    null = end - begin == len(_NULL)
    maybe = np.flatnonzero(null)
    null[maybe] = (data[begin[maybe][:, np.newaxis] + np.arange(len(_NULL))] == np.frombuffer(_NULL, np.uint8)).all(1)
    if quoted is not None:
        begin, end = begin + quoted, end - quoted
    return Split(binary_of(data, begin, end, null), counts)
