"""The values of an Arrow array as one run of bytes, with the start and end of each value.

Types whose text has a syntax (arrays, hstore, vector) are parsed with array operations over all bytes of a column at
once. The result is again (start, end) in the same bytes, and becomes an Arrow array without copying value by value, as
in `pgoutput.columns`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from walmere.errors import CastError
from walmere.types.base import Mask

Bytes: TypeAlias = NDArray[np.uint8]
Places: TypeAlias = NDArray[np.int64]

LARGE: Final = 1 << 31
"""From this many bytes or elements on, 64-bit offsets are needed."""

QUOTE, BACKSLASH = b'"\\'


class Flat(NamedTuple):
    """Value i is data[starts[i]:ends[i]]. Values are in order, without gaps."""

    data: Bytes
    starts: Places
    ends: Places


def flat(text: pa.Array) -> Flat:
    """The bytes of an array of binary or large_binary. The bytes under a null are included."""
    _, where, data = text.buffers()
    if not len(text) or data is None:
        none = np.zeros(len(text), np.int64)
        return Flat(np.empty(0, np.uint8), none, none)
    wide = text.type == pa.large_binary()
    there = np.frombuffer(where, np.int64 if wide else np.int32)[text.offset :][: len(text) + 1]
    first, last = int(there[0]), int(there[-1])
    offsets: Places = there.astype(np.int64) - first
    return Flat(np.frombuffer(data, np.uint8)[first:last], offsets[:-1], offsets[1:])


def binary_of(data: Bytes, starts: Places, ends: Places, null: Mask | None = None) -> pa.Array:
    """The bytes between these positions as an array. The ranges must be ascending and must not overlap."""
    count = len(starts)
    wide = len(data) >= LARGE
    kind = pa.large_binary() if wide else pa.binary()
    offsets = np.empty(2 * count, np.int64 if wide else np.int32)
    offsets[0::2], offsets[1::2] = starts, ends
    alternating = pa.Array.from_buffers(kind, max(2 * count - 1, 0), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    values = alternating.take(pa.array(np.arange(0, 2 * count, 2)))
    if null is not None and null.any():
        values = pa.Array.from_buffers(kind, count, [bitmap(~null), *values.buffers()[1:]])
    return values


def nested(kind: pa.DataType, counts: Places, valid: Mask | None, elements: pa.Array) -> pa.Array:
    """A list or map array with these numbers of elements; null where it is not valid."""
    if int(counts.sum()) >= LARGE:
        raise CastError(f"building {kind}", "one array has 2**31 elements or more", "cast fewer rows at a time")
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    validity = None if valid is None or valid.all() else bitmap(valid)
    return pa.Array.from_buffers(kind, len(counts), [validity, pa.py_buffer(offsets)], children=[elements])


def bitmap(valid: Mask) -> Any:
    """A mask as an Arrow validity bitmap."""
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


class Unescaped(NamedTuple):
    """Bytes without the backslashes that escape; `literal` marks the bytes that were escaped."""

    text: Flat
    literal: Mask | None  # None: nowhere


def unescape(text: Flat) -> Unescaped:
    r"""Replace `\x` by a literal x. In a run of backslashes, every other one escapes the next."""
    data, starts, ends = text
    backslashes = np.flatnonzero(data == BACKSLASH)
    if not len(backslashes):
        return Unescaped(text, None)
    index = np.arange(len(backslashes))
    begins = np.diff(backslashes, prepend=-2) != 1
    in_run = index - np.maximum.accumulate(np.where(begins, index, 0))
    escapes = backslashes[in_run % 2 == 0]
    keep = np.ones(len(data), np.bool_)
    keep[escapes] = False
    literal = np.zeros(len(data) + 1, np.bool_)
    literal[escapes + 1] = True
    starts = starts - np.searchsorted(escapes, starts)
    ends = ends - np.searchsorted(escapes, ends)
    return Unescaped(Flat(data[keep], starts, ends), literal[:-1][keep])


def where_is(text: Unescaped, *characters: int) -> Mask:
    """Where one of these characters is, and is not escaped."""
    data = text.text.data
    found: Mask = data == characters[0]
    for character in characters[1:]:
        found |= data == character
    if text.literal is not None:
        found &= ~text.literal
    return found
