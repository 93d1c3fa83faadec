"""Columns of Delta tables: Arrow schemas to Delta schemas, and back."""

from __future__ import annotations

import json
from typing import Final

import pyarrow as pa
from deltalake import Schema

from walmere.errors import SinkError
from walmere.variant_type import VARIANT

_PLACE: Final = "walmere.place"
_VARIANT: Final = "variant"
"""Delta's name of the type."""


def delta_schema(schema: pa.Schema) -> Schema:
    """The columns as Delta has them. All are nullable, because the source may drop a NOT NULL at any time.

    Each column has its place in its metadata: `deltalake` takes two schemas that differ only in the order of their
    columns for equal, and would not store the new one.
    """
    fields = [
        pa.field(column.name, column.type, metadata={_PLACE: str(place)}) for place, column in enumerate(schema, 1)
    ]
    found = Schema.from_arrow(pa.schema(fields))
    if VARIANT not in schema.types:
        return found
    content = json.loads(found.to_json())
    for field, kind in zip(content["fields"], schema.types, strict=True):
        if kind == VARIANT:
            field["type"] = _VARIANT
    return Schema.from_json(json.dumps(content))


def arrow_schema(schema: Schema) -> pa.Schema:
    """The columns of a table as they are in memory."""
    found = pa.schema(schema.to_arrow())
    kinds = [column.type.to_json() for column in schema.fields]
    return pa.schema(
        [
            field.with_type(VARIANT) if kind == f'"{_VARIANT}"' else field
            for field, kind in zip(found, kinds, strict=True)
        ]
    )


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
