r"""What `COPY … TO STDOUT` sends, in its text format → Arrow columns of text, ready to be cast.

A line is a row, and values are separated by tabs. A tab, a line break or a backslash inside a value is escaped with a
backslash; NULL is `\N`. (CSV has no escapes, but the server needs a sixth more time to write it.) No type is guessed:
every column is binary, and the codec of the column casts it, as with text from the stream.

The input has whole rows, and is parsed as one block, so that no row is larger than a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from walmere.errors import CastError

COPY_OPTIONS: Final = "FORMAT text, DELIMITER E'\\t', NULL '\\N', ENCODING 'UTF8'"
"""The options of COPY … TO STDOUT. The defaults are written too, because `read` relies on them."""

_BOM: Final = b"\xef\xbb\xbf"
_MARK: Final = b"\xff"  # never in UTF-8, but a damaged database may have it: then it is marked, too
_BACKSLASH: Final = _MARK + b"1"  # replaces an escaped backslash until the other escapes are removed
_MARKED: Final = _MARK + b"0"
_ESCAPED: Final = (
    (rb"\\", _BACKSLASH),
    (rb"\b", b"\b"),
    (rb"\f", b"\f"),
    (rb"\n", b"\n"),
    (rb"\r", b"\r"),
    (rb"\t", b"\t"),
    (rb"\v", b"\v"),
    (_BACKSLASH, b"\\"),
)


def read_options(names: Sequence[str], size: int) -> csv.ReadOptions:
    """One block, no header."""
    return csv.ReadOptions(column_names=list(names), block_size=max(size, 1), use_threads=False)


def parse_options() -> csv.ParseOptions:
    """Only line breaks and tabs are special. An empty line is a row with one empty column."""
    return csv.ParseOptions(delimiter="\t", quote_char=False, escape_char=False, ignore_empty_lines=False)


def convert_options(names: Sequence[str]) -> csv.ConvertOptions:
    r"""All columns are binary, and `\N` is null."""
    return csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.binary()),
        null_values=["\\N"],
        strings_can_be_null=True,
        check_utf8=False,
    )


def read(data: bytes | bytearray | memoryview | pa.Buffer, names: Sequence[str]) -> pa.Table:
    """Parse whole rows into a table of binary columns with these names."""
    buffer: Any = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
    if not buffer.size:
        return pa.table({name: pa.array([], pa.binary()) for name in names})
    if memoryview(buffer)[: len(_BOM)].tobytes() == _BOM:
        # The first value begins with U+FEFF. The reader removes a BOM, as from a file, so add one.
        buffer = pa.py_buffer(_BOM + buffer.to_pybytes())
    try:
        table = csv.read_csv(
            pa.BufferReader(buffer),
            read_options=read_options(names, buffer.size),
            parse_options=parse_options(),
            convert_options=convert_options(names),
        )
    except pa.ArrowInvalid:  # its message would show the row
        raise CastError(
            "reading rows from COPY", f"they do not have {len(names)} columns", "the table may have been altered"
        ) from None
    for index, column in enumerate(table.columns):
        if _has(column, b"\\"):
            table = table.set_column(index, table.schema.field(index), _unescaped(column))
    return table


def _unescaped(column: pa.ChunkedArray) -> pa.ChunkedArray:
    odd = _has(column, _MARK)
    if odd:
        column = pc.replace_substring(column, _MARK, _MARKED)
    for escaped, plain in _ESCAPED:
        column = pc.replace_substring(column, escaped, plain)
    return pc.replace_substring(column, _MARKED, _MARK) if odd else column


def _has(column: pa.ChunkedArray, byte: bytes) -> bool:
    return any(byte in memoryview(chunk.buffers()[2] or b"").tobytes() for chunk in column.chunks)
