"""64-bit hashes of keys, the same in every process and version. Vectorised, for all types that a column can have.

Equal keys (see `row_index`) have equal hashes. Of one column with at most eight bytes, different keys also have
different hashes, because the last step can be inverted: a key is found without a look at its value (`is_exact`).
Texts are hashed eight bytes at a time, up to a limit: what differs only in the middle of a long text has one hash.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

U64: TypeAlias = NDArray[np.uint64]

_NULL: Final = np.uint64(0x9AE16A3B2F90404F)
_NEXT: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST_BYTES: Final = 256
_LAST_BYTES: Final = 64
_NAN: Final = 0x7FF8000000000000


def is_exact(schema: pa.Schema) -> bool:
    """Whether different keys without NULLs have different hashes."""
    return len(schema) == 1 and _is_small(schema.field(0).type)


def _is_small(kind: Any) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_temporal(kind)
    )


def hashes(columns: list[pa.Array]) -> U64:
    """One hash per row."""
    total = _column(columns[0])
    for column in columns[1:]:
        total = _mix(total * _NEXT + _column(column))
    return total


def _mix(values: U64) -> U64:
    """Distribute the bits. Can be inverted."""
    values = values + _NEXT
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _column(column: pa.Array) -> U64:
    found = _mix(_small(column)) if _is_small(column.type) else _large(column)
    if column.null_count:
        found = np.where(column.is_null().to_numpy(zero_copy_only=False), _NULL, found)
    return found


def _small(column: pa.Array) -> U64:
    """The bits of a value of at most eight bytes."""
    kind = column.type
    if pa.types.is_floating(kind):
        values = pc.fill_null(column.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
        return np.where(np.isnan(values), np.uint64(_NAN), values.view(np.uint64))
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif pa.types.is_temporal(kind):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    wide = values.astype(np.uint64) if values.dtype.kind == "u" else values.astype(np.int64).view(np.uint64)
    return np.asarray(wide, np.uint64)


def _large(column: pa.Array) -> U64:
    kind = column.type
    if pa.types.is_decimal(kind):
        words = np.frombuffer(column.buffers()[1], np.uint64).reshape(-1, kind.byte_width // 8)
        words = words[column.offset : column.offset + len(column)]
        total = _mix(words[:, 0])
        for word in range(1, words.shape[1]):
            total = _mix(total * _NEXT + words[:, word])
        return total
    if pa.types.is_struct(kind):
        fields = column.flatten()
        return hashes(fields) if fields else np.zeros(len(column), np.uint64)
    if pa.types.is_map(kind):
        entries = pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])
        return _lists(entries, column.offsets)
    if pa.types.is_nested(kind):
        if pa.types.is_fixed_size_list(kind):
            column = column.cast(pa.list_(kind.value_field))
        return _lists(column.values, column.offsets)
    return _binary(column.cast(pa.binary()) if pa.types.is_fixed_size_binary(kind) else column)


def _lists(elements: pa.Array, offsets: pa.Array) -> U64:
    """Hashes of lists, by their elements, which are in `elements` from one offset to the next."""
    ends = offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    inner = _column(elements) if len(elements) else np.zeros(0, np.uint64)
    lengths = np.diff(ends)
    within = np.arange(len(inner), dtype=np.int64)
    within[ends[0] : ends[-1]] -= np.repeat(ends[:-1], lengths)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mix(inner + _mix(within.view(np.uint64))))])
    return _mix(sums[ends[1:]] - sums[ends[:-1]] + lengths.view(np.uint64))


def _binary(column: pa.Array) -> U64:
    wide = column.cast(pa.large_string() if pa.types.is_string(column.type) else pa.large_binary())
    _, ends, data = wide.buffers()
    offsets = np.frombuffer(ends, np.int64)[wide.offset : wide.offset + len(wide) + 1]
    begins, lengths = offsets[:-1], np.diff(offsets)
    used = np.frombuffer(data, np.uint8)[: offsets[-1]] if data is not None else np.zeros(0, np.uint8)
    padded = np.concatenate([used, np.zeros(8, np.uint8)])
    words = np.ndarray((len(padded) - 7,), "<u8", padded, strides=(1,))  # the eight bytes from each byte on
    total = _mix(lengths.view(np.uint64))
    _hash_words(total, words, begins, np.minimum(lengths, _FIRST_BYTES))
    long = np.flatnonzero(lengths > _FIRST_BYTES)
    if long.size:
        rest = np.minimum(lengths[long] - _FIRST_BYTES, _LAST_BYTES)
        ending = total[long]
        _hash_words(ending, words, begins[long] + lengths[long] - rest, rest)
        total[long] = ending
    return total


def _hash_words(total: U64, words: U64, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """Add the bytes of each text to its hash, eight at a time."""
    unfinished, done = np.flatnonzero(lengths), 0
    while unfinished.size:
        word = words[begins[unfinished] + done]
        left = lengths[unfinished] - done
        short = left < 8
        word[short] &= (np.uint64(1) << (left[short] * 8).view(np.uint64)) - np.uint64(1)
        total[unfinished] = _mix(total[unfinished] * _NEXT + word)
        done += 8
        unfinished = unfinished[left > 8]
