r"""The source's side: what COPY … TO STDOUT sends, as columns of PostgreSQL's text.

`verify` has to find errors in `walmere.types`, so nothing of it is used here: no codec, and not its parser of COPY.

COPY's text format ends each value with a tab, and the last value of a row with a line break. Within a value, both are
written with a backslash, so they can be counted. Also written so: a backslash itself, and `\b \f \r \v`. NULL is `\N`.

A value that the target's type cannot hold is NULL in the target. `cannot_hold` decides this by the text alone:

    date, timestamp, timestamptz    infinity, years BC, years after 9999
    numeric(p,s)                    NaN and the infinities
    interval in its parts           infinity
    xid8                            from 2^63
    arrays                          several dimensions, a lower bound other than 1, an element that cannot be held
    any text                        bytes that are not UTF-8
    a number as a chosen decimal    too many digits before or after the point; zeros at the end do not count
    json and jsonb as VARIANT       see `json_text`

A masked value is not compared as text. What masks it is called with the whole column, and makes a column of the
target's type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walmere.errors import CastError
from walmere.variant_type import VARIANT
from walmere.verify import json_text

_TEXT: Final = pa.large_binary()
_TAB, _NEWLINE, _BACKSLASH, _N = b"\t\n\\N"
_PAIR: Final = rb"\\"
_ESCAPES: Final = {rb"\b": b"\b", rb"\f": b"\f", rb"\n": b"\n", rb"\r": b"\r", rb"\t": b"\t", rb"\v": b"\v"}
_MAX_INT64: Final = str((1 << 63) - 1).encode()

_SEVERAL_DIMENSIONS: Final = r"^(\{\{|\[-?[0-9]+:)"
_NESTED_DIMENSIONS: Final = r'[{,]"(\{\{|\[-?[0-9]+:)'
_NOT_A_DAY: Final = r"infinity|BC|[0-9]{5}-"
_NOT_FINITE: Final = r"NaN|Infinity"


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Rows of the source as text: c0, c1, …; null also where the target cannot hold the value."""

    batch: pa.RecordBatch
    rejected: dict[int, pa.Array]  # by column, the texts that the target cannot hold


Masking: TypeAlias = Callable[[pa.Array], pa.Array]


def read(
    data: bytes,
    target: pa.Schema,
    decimals: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    masks: Mapping[int, Masking] = MappingProxyType({}),
) -> SourceRows:
    """Whole rows of COPY, for a target with these columns.

    `decimals`: columns for which a decimal was chosen, with precision and scale. `masks`: of columns that are masked.
    """
    columns, rejected, ascii_only = [], {}, data.isascii()
    for place, (text, kind) in enumerate(zip(split(data, len(target)), target.types, strict=True)):
        if place in masks:
            columns.append(masks[place](text))
            continue
        if kind == VARIANT:
            documents, mask = json_text.read(text)
            columns.append(documents)
            if mask is not None:
                rejected[place] = text.filter(mask)
            continue
        mask = _too_many_digits(text, *decimals[place]) if place in decimals else None
        mask = cannot_hold(text, kind, ascii_only=ascii_only) if mask is None else mask
        if mask is not None:
            rejected[place] = text.filter(mask)
            columns.append(pc.if_else(mask, pa.scalar(None, _TEXT), text).view(pa.large_string()))
        else:
            columns.append(text.view(pa.large_string()))
    return SourceRows(pa.RecordBatch.from_arrays(columns, [f"c{place}" for place in range(len(columns))]), rejected)


def split(data: bytes, count: int) -> list[pa.Array]:
    """The columns of whole rows, as large_binary."""
    if not count:
        return []
    letters = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero((letters == _TAB) | (letters == _NEWLINE))
    rows, odd = divmod(len(ends), count)
    if odd or (data and data[-1] != _NEWLINE) or ((letters[ends] == _NEWLINE) != _last(rows, count)).any():
        raise CastError(
            "reading rows from COPY", f"they do not have {count} columns", "the table may have been altered"
        )
    starts = np.append(0, ends[:-1] + 1) if len(ends) else ends
    null = ends - starts == 2
    null[null] = (letters[starts[null]] == _BACKSLASH) & (letters[starts[null] + 1] == _N)
    # values and what is between them, in turn: one Arrow array over the bytes as they are, without a copy
    offsets = np.empty(2 * len(ends) + 1, np.int64)
    offsets[0:-1:2], offsets[1::2], offsets[-1] = starts, np.where(null, starts, ends), len(data)
    values = pa.Array.from_buffers(_TEXT, 2 * len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    columns = []
    for column in range(count):
        taken = values.take(pa.array(np.arange(2 * column, 2 * len(ends), 2 * count)))
        if (missing := null[column::count]).any():
            valid = pa.py_buffer(np.packbits(~missing, bitorder="little"))
            taken = pa.Array.from_buffers(_TEXT, len(taken), [valid, *taken.buffers()[1:]])
        columns.append(unescaped(taken))
    return columns


def _last(rows: int, count: int) -> Any:
    """Where the last value of a row is."""
    return np.tile(np.arange(count) == count - 1, rows)


def unescaped(text: pa.Array) -> pa.Array:
    r"""The values as they are at the source.

    The text is split at each `\\` first, so that `\\n` is not taken for a line break.
    """
    data = bytes(text.buffers()[2] or b"")
    if b"\\" not in data:
        return text
    escapes = [each for each in _ESCAPES if each in data]
    if not escapes:
        return pc.replace_substring(text, _PAIR, b"\\")
    parts = pc.split_pattern(text, _PAIR)
    values = parts.values
    for each in escapes:
        values = pc.replace_substring(values, each, _ESCAPES[each])
    valid = pc.is_valid(text)
    joined = pc.binary_join(pa.ListArray.from_arrays(parts.offsets, values), pa.scalar(b"\\", _TEXT))
    return pc.if_else(valid, joined, pa.scalar(None, _TEXT)) if text.null_count else joined


def cannot_hold(text: pa.Array, kind: pa.DataType, *, ascii_only: bool = False) -> pa.Array | None:
    """Where the target's type cannot hold the value, as a mask without nulls; None: nowhere.

    `ascii_only`: all text is known to be ASCII.
    """
    masks = [mask for mask in (_outside(text, kind), None if ascii_only else _not_utf8(text)) if mask is not None]
    if not masks:
        return None
    mask = masks[0] if len(masks) == 1 else pc.or_(*(each.fill_null(False) for each in masks))
    mask = mask.fill_null(False)
    return mask if pc.any(mask).as_py() else None


def _outside(text: pa.Array, kind: pa.DataType) -> pa.Array | None:
    if pa.types.is_date(kind):
        return pc.not_equal(pc.binary_length(text), len("2026-01-01"))
    if pa.types.is_timestamp(kind):
        has_year = pc.equal(pc.binary_slice(text, 4, 5), pa.scalar(b"-", _TEXT))
        return pc.or_(pc.invert(has_year), pc.ends_with(text, b"BC"))
    if pa.types.is_decimal(kind):
        data = bytes(text.buffers()[2] or b"")
        return pc.match_substring_regex(text, _NOT_FINITE) if b"N" in data or b"I" in data else None
    if pa.types.is_int64(kind):
        return _above_int64(text)
    if pa.types.is_struct(kind):
        return pc.match_substring(text, "infinity")
    if pa.types.is_list(kind):
        return _array_outside(text, kind.value_type)
    return None


def _too_many_digits(text: pa.Array, precision: int, scale: int) -> pa.Array | None:
    """Where a number has more digits than a decimal, or is not a finite number; None: nowhere."""
    fits = rf"^-?0*[0-9]{{0,{precision - scale}}}(\.[0-9]{{0,{scale}}}0*)?$"
    mask = pc.invert(pc.match_substring_regex(text, fits)).fill_null(False)
    return mask if pc.any(mask).as_py() else None


def _above_int64(text: pa.Array) -> pa.Array | None:
    length = pc.binary_length(text)
    if (pc.max(length).as_py() or 0) < len(_MAX_INT64):
        return None
    above = pc.and_(pc.equal(length, len(_MAX_INT64)), pc.greater(text, pa.scalar(_MAX_INT64, _TEXT)))
    return pc.and_(pc.or_(above, pc.greater(length, len(_MAX_INT64))), pc.invert(pc.starts_with(text, b"-")))


def _array_outside(text: pa.Array, element: pa.DataType) -> pa.Array:
    found = [pc.match_substring_regex(text, _SEVERAL_DIMENSIONS)]
    while pa.types.is_list(element):  # an array of a domain over arrays
        found.append(pc.match_substring_regex(text, _NESTED_DIMENSIONS))
        element = element.value_type
    if pa.types.is_date(element) or pa.types.is_timestamp(element):
        found.append(pc.match_substring_regex(text, _NOT_A_DAY))
    elif pa.types.is_decimal(element):
        found.append(pc.match_substring_regex(text, _NOT_FINITE))
    elif pa.types.is_int64(element):
        found.append(_any_element(text, _above_int64))
    outside = found[0]
    for each in found[1:]:
        outside = pc.or_(outside, each)
    return outside


def _any_element(text: pa.Array, test: Callable[[pa.Array], pa.Array | None]) -> pa.Array:
    """Where one of the numbers of an array passes a test."""
    numbers = pc.split_pattern_regex(text, r"[^-0-9]+")
    passed = test(numbers.flatten())
    rows = np.zeros(len(text), np.bool_)
    if passed is not None:
        rows[pc.list_parent_indices(numbers).filter(passed).to_numpy()] = True
    return pa.array(rows)


def _not_utf8(text: pa.Array) -> pa.Array | None:
    try:
        text.cast(pa.large_string())
    except pa.ArrowInvalid:
        return pa.array([value is not None and not _is_utf8(value) for value in text.to_pylist()])
    return None


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
