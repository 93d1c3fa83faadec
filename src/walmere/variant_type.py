"""The Arrow type of a VARIANT column: its two binary parts. `walmere.types.variant` makes them from JSON.

A struct that is NULL is SQL's NULL; JSON's null is a value. In files both parts are required, as Parquet's
specification has it. In memory they are nullable, because Arrow's arrays of NULLs have NULL parts.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

VARIANT: Final = pa.struct([("metadata", pa.binary()), ("value", pa.binary())])
_IN_FILES: Final = pa.struct([pa.field(each.name, each.type, nullable=False) for each in VARIANT])
_IN_SPARK: Final = pa.struct(
    [
        pa.field("value", pa.binary(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False, metadata={"variant": "true"}),
    ]
)
"""What Spark takes for its VARIANT in Arrow batches: by the mark, and by the order of the parts."""


def file_schema(schema: pa.Schema) -> pa.Schema:
    """The columns as they are in files."""
    return pa.schema([field.with_type(_IN_FILES) if field.type == VARIANT else field for field in schema])


def for_file(rows: pa.Table) -> pa.Table:
    """The rows with the columns of `file_schema`."""
    return _converted(rows, _IN_FILES)


def for_spark(rows: pa.Table) -> pa.Table:
    """The rows as Spark takes them from a Python task."""
    return _converted(rows, _IN_SPARK)


def _converted(rows: pa.Table, to: pa.StructType) -> pa.Table:
    for place, field in enumerate(rows.schema):
        if field.type == VARIANT:
            chunks = [_required(chunk, to) for chunk in rows.column(place).chunks]
            rows = rows.set_column(place, field.with_type(to), pa.chunked_array(chunks, to))
    return rows


def _required(values: pa.StructArray, to: pa.StructType) -> pa.StructArray:
    parts = dict(zip(VARIANT.names, values.flatten(), strict=True))
    arrays = [parts[name].fill_null(b"") for name in to.names]
    return pa.StructArray.from_arrays(arrays, fields=list(to), mask=values.is_null())
