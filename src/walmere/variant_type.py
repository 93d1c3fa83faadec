"""The Arrow type of a VARIANT column: its two binary parts. `walmere.types.variant` makes them from JSON.

A struct that is NULL is SQL's NULL; JSON's null is a value. In files both parts are required, as Parquet's
specification has it. In memory they are nullable, because Arrow's arrays of NULLs have NULL parts.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

VARIANT: Final = pa.struct([("metadata", pa.binary()), ("value", pa.binary())])
_IN_FILES: Final = pa.struct([pa.field(each.name, each.type, nullable=False) for each in VARIANT])


def file_schema(schema: pa.Schema) -> pa.Schema:
    """The columns as they are in files."""
    return pa.schema([field.with_type(_IN_FILES) if field.type == VARIANT else field for field in schema])


def for_file(rows: pa.Table) -> pa.Table:
    """The rows with the columns of `file_schema`."""
    for place, field in enumerate(rows.schema):
        if field.type == VARIANT:
            chunks = [_required(chunk) for chunk in rows.column(place).chunks]
            rows = rows.set_column(place, field.with_type(_IN_FILES), pa.chunked_array(chunks, _IN_FILES))
    return rows


def _required(values: pa.StructArray) -> pa.StructArray:
    parts = [part.fill_null(b"") for part in values.flatten()]
    return pa.StructArray.from_arrays(parts, fields=list(_IN_FILES), mask=values.is_null())
