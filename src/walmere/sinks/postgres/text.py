"""Arrow columns of PostgreSQL's text → what COPY … FROM STDIN and array parameters take. No loop over rows.

Values are the bytes that the source's server sent. Only what would be read as syntax is escaped, and only in columns
that have such bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.adapt import Dumper

from walmere.sinks.row_index import one_array

_ROWS: Final = 1 << 13
"""Rows of one piece of COPY. A piece that fits into the socket's buffer is parsed while the next one is made."""
_IN_COPY: Final = ((b"\\", b"\\\\"), (b"\t", b"\\t"), (b"\n", b"\\n"), (b"\r", b"\\r"))
_IN_ARRAY: Final = ((b"\\", b"\\\\"), (b'"', b'\\"'))


def copy_text(rows: pa.Table) -> Iterator[bytes]:
    """The rows as COPY's text format, in pieces of whole rows."""
    for start in range(0, len(rows), _ROWS):
        columns = [one_array(column) for column in rows.slice(start, _ROWS).columns]
        yield _copy_piece([_or(_escaped(column, _IN_COPY), b"\\N") for column in columns], len(rows) - start)


def _copy_piece(columns: Sequence[pa.Array], count: int) -> bytes:
    if not columns:  # a table without columns has rows, too
        return b"\n" * min(count, _ROWS)
    parts: list[Any] = []
    for column in columns:
        parts += [column, _scalar(b"\t")]
    parts[-1] = _scalar(b"\n")
    return _bytes(_joined(*parts))


@dataclass(frozen=True, slots=True)
class TextArray:
    """A parameter that is an array, as text. The statement says of which type."""

    literal: bytes


class TextArrayDumper(Dumper):
    """Sends a TextArray as it is."""

    oid = 0  # unknown

    def dump(self, obj: TextArray) -> bytes:
        return obj.literal


def text_array(column: pa.Array | pa.ChunkedArray) -> TextArray:
    """A column as a parameter."""
    elements = _elements(one_array(column))
    return TextArray(b"{" + _bytes(_joined(elements, _scalar(b",")))[:-1] + b"}")


def bool_array(mask: Any) -> TextArray:
    """A mask as a parameter: its elements are `t` and `f`."""
    return TextArray(b"{" + b",".join(np.where(mask, b"t", b"f").tolist()) + b"}")


def array_rows(columns: Sequence[pa.Array | pa.ChunkedArray], count: int) -> pa.Array:
    """For each of `count` rows, an array of its values, as PostgreSQL writes a text[]."""
    if not columns:  # a table without columns has rows, too
        return pa.repeat(_scalar(b"{}"), count)
    parts: list[Any] = [_scalar(b"{")]
    for column in columns:
        parts += [_elements(one_array(column)), _scalar(b",")]
    parts[-1] = _scalar(b"}")
    return _joined(*parts)


def _elements(column: pa.Array) -> pa.Array:
    quote = _scalar(b'"')
    return _or(_joined(quote, _escaped(column, _IN_ARRAY), quote), b"NULL")


def _escaped(column: pa.Array, escapes: Sequence[tuple[bytes, bytes]]) -> pa.Array:
    data = column.buffers()[2]
    found = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    for plain, escaped in escapes:
        if (found == plain[0]).any():
            column = pc.replace_substring(column, plain, escaped)
    return column


def _or(column: pa.Array, null: bytes) -> pa.Array:
    return pc.fill_null(column, _scalar(null)) if column.null_count else column


def _joined(*parts: Any) -> pa.Array:
    return pc.binary_join_element_wise(*parts, _scalar(b""))


def _scalar(value: bytes) -> pa.Scalar:
    return pa.scalar(value, pa.binary())


def _bytes(column: pa.Array) -> bytes:
    """All values of a column, one after the other."""
    _, offsets, data = column.buffers()
    if data is None or not len(column):
        return b""
    places = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    text: bytes = data.slice(int(places[0]), int(places[-1] - places[0])).to_pybytes()
    return text
