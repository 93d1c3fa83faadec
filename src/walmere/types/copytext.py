"""What `COPY … TO STDOUT` sends, in CSV → Arrow columns of text, ready to be cast.

CSV can tell NULL from an empty string: NULL is empty and not quoted, an empty string is quoted. A line break inside a
value is quoted. Lines end in a plain newline. Nothing is guessed from the text: every column is binary, and the codec
of the column does the rest, as with text from the stream.

Data is given in whole rows, and parsed in one block, so that no row can be larger than a block. (PostgreSQL sends each
row as a message of its own, and so drivers hand out whole rows.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
from pyarrow import csv

from walmere.errors import CastError

COPY_OPTIONS: Final = "FORMAT csv, DELIMITER ',', QUOTE '\"', NULL '', ENCODING 'UTF8'"
"""For the parentheses behind COPY … TO STDOUT. What csv has by default is said all the same: `read` relies on it."""

_BOM: Final = b"\xef\xbb\xbf"


def read_options(names: Sequence[str], size: int) -> csv.ReadOptions:
    """One block, no header."""
    return csv.ReadOptions(column_names=list(names), block_size=max(size, 1), use_threads=False)


def parse_options() -> csv.ParseOptions:
    """As CSV of PostgreSQL is; an empty line is a row whose only column is NULL."""
    return csv.ParseOptions(
        delimiter=",",
        quote_char='"',
        double_quote=True,
        escape_char=False,
        newlines_in_values=True,
        ignore_empty_lines=False,
    )


def convert_options(names: Sequence[str]) -> csv.ConvertOptions:
    """Everything as it is; NULL is empty and not quoted."""
    return csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.binary()),
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        check_utf8=False,
    )


def read(data: bytes | bytearray | memoryview | pa.Buffer, names: Sequence[str]) -> pa.Table:
    """Whole rows of CSV as a table of binary columns with these names."""
    buffer: Any = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
    if not buffer.size:
        return pa.table({name: pa.array([], pa.binary()) for name in names})
    if memoryview(buffer)[: len(_BOM)].tobytes() == _BOM:
        # The first value begins with U+FEFF. The reader takes one away, as from a file: give it one to take.
        buffer = pa.py_buffer(_BOM + buffer.to_pybytes())
    try:
        return csv.read_csv(
            pa.BufferReader(buffer),
            read_options=read_options(names, buffer.size),
            parse_options=parse_options(),
            convert_options=convert_options(names),
        )
    except pa.ArrowInvalid:  # its message has the row in it
        raise CastError(
            "reading rows from COPY", f"they are not CSV of {len(names)} columns", "the table may have been altered"
        ) from None
