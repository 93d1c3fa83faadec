"""Columns of Delta tables: Arrow schemas to Delta schemas, and back."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from deltalake import Schema

from walmere.errors import SinkError

_PLACE: Final = "walmere.place"


def delta_schema(schema: pa.Schema) -> Schema:
    """The columns as Delta has them. All are nullable, because the source may drop a NOT NULL at any time.

    Each column has its place in its metadata: `deltalake` takes two schemas that differ only in the order of their
    columns for equal, and would not store the new one.
    """
    fields = [
        pa.field(column.name, column.type, metadata={_PLACE: str(place)}) for place, column in enumerate(schema, 1)
    ]
    return Schema.from_arrow(pa.schema(fields))


def column_types(schema: Schema) -> tuple[tuple[str, str], ...]:
    """Names and Delta types, as `Standing.columns` has them."""
    return tuple((column.name, column.type.to_json()) for column in schema.fields)


def require_different_names(doing: str, schema: pa.Schema) -> None:
    """Refuse columns that Delta would take for one."""
    if len({name.lower() for name in schema.names}) < len(schema):
        raise SinkError(
            doing,
            "the names of two columns differ only in case, and Delta ignores case",
            "remove one of them from the publication, or rename it",
        )
