"""The rows of one table, with typed columns, cast by the same codecs as in copies and batches.

    _before      the old tuple, if the message has one; for a key tuple, only the key
    _unchanged   for updates: which values are not known, because they are TOASTed, unchanged, and were not sent

Columns that the query does not select are not decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walmere.changelog.decoded import REJECTS, DecodedRows, Rejected
from walmere.errors import CastError
from walmere.lsn import INVALID_LSN, Lsn
from walmere.pgoutput.columns import UPDATE
from walmere.pgoutput.messages import Relation
from walmere.source.change_rows import CHANGE, CHANGE_NAMES, OutputColumn, change_column
from walmere.types import PgType
from walmere.types.base import Cast, Codec, as_mask, without
from walmere.types.codec import codec, is_toastable


@dataclass(frozen=True)
class TableRows:
    """The rows of one table, with typed columns."""

    columns: tuple[OutputColumn, ...]
    types: Mapping[int, PgType]
    wanted: tuple[str, ...] = ()  # columns of `schema`; empty: all
    since: Lsn = INVALID_LSN  # where this definition begins

    @property
    def codecs(self) -> dict[str, Codec]:
        """The codecs by column name."""
        return {each.name: codec(each.type_oid, each.typmod, self.types) for each in self.columns}

    def schema(self) -> pa.Schema:
        """All columns."""
        fields = [pa.field(name, each.arrow) for name, each in self.codecs.items()]
        toastable = [
            pa.field(each.name, pa.bool_()) for each in self.columns if is_toastable(each.type_oid, self.types)
        ]
        beside = [pa.field("_before", pa.struct(fields))]
        if toastable:
            beside.append(pa.field("_unchanged", pa.struct(toastable)))
        return pa.schema([*fields, *CHANGE, *beside, pa.field("_rejects", REJECTS)])

    def batch(self, messages: pa.RecordBatch, relation: Relation, streamed: bool) -> pa.RecordBatch:
        """The rows of messages of one definition. Columns of an older definition are found by name."""
        schema = self.schema()
        fields = [schema.field(name) for name in self.wanted or schema.names]
        columns = _TypedColumns(self.codecs, DecodedRows(messages, relation, streamed))
        arrays = {
            each.name: change_column(each.name, messages) if each.name in CHANGE_NAMES else columns.column(each)
            for each in fields
            if each.name != "_rejects"  # filled by the others
        }
        arrays["_rejects"] = columns.rejects()
        return pa.RecordBatch.from_arrays([arrays[each.name] for each in fields], schema=pa.schema(fields))


class _TypedColumns:
    """The columns of one batch, decoded on request."""

    def __init__(self, codecs: Mapping[str, Codec], decoded: DecodedRows) -> None:
        self._codecs = codecs
        self._decoded = decoded
        self._rows = decoded.rows
        self._count = len(decoded.rows)
        self._rejected = Rejected(self._count)
        self._places = {column.name: place for place, column in enumerate(decoded.rows.relation.columns)}

    def column(self, field: pa.Field) -> pa.Array:
        match field.name:
            case "_before":
                array = self._before(field.type)
            case "_unchanged":
                array = self._unchanged(field.type)
            case name if name in self._places:
                array = self._cast(name, name, self._decoded.current(self._places[name]).text)
            case _:
                array = pa.nulls(self._count, field.type)
        return self._decoded.spread(array)

    def rejects(self) -> pa.Array:
        return self._decoded.spread(self._rejected.maps())

    def _cast(self, name: str, kept_as: str, text: pa.Array) -> pa.Array:
        return self._rejected.keep(kept_as, text, _cast(self._codecs[name], text))

    def _before(self, kind: pa.StructType) -> pa.Array:
        absent = self._rows.old_kind == 0
        if absent.all():
            return pa.nulls(self._count, kind)
        parts = [
            self._cast(each.name, f"_before.{each.name}", self._rows.old[self._places[each.name]].text)
            if each.name in self._places
            else pa.nulls(self._count, each.type)
            for each in kind
        ]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=pa.array(absent))

    def _unchanged(self, kind: pa.StructType) -> pa.Array:
        """Only updates have unchanged values."""
        updated = self._rows.kind == UPDATE
        if not updated.any():
            return pa.nulls(self._count, kind)
        nowhere = np.zeros(self._count, np.bool_)
        parts = []
        for each in kind:
            place = self._places.get(each.name)
            mask = None if place is None else self._decoded.current(place).unchanged
            parts.append(pa.array(nowhere if mask is None else mask))
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=pa.array(~updated))


def _cast(to: Codec, text: pa.Array) -> Cast:
    """Cast. Values that an older definition had in another type, and this one cannot read, are rejected."""
    try:
        return to.cast(text)
    except CastError:
        values = pc.unique(text.drop_null())
    readable = [value for value in values if _reads(to, value)]
    rejected = as_mask(text.is_valid()) & ~as_mask(pc.is_in(text, pa.array(readable, text.type)))
    cast = to.cast(without(text, rejected))
    return Cast(cast.values, rejected if cast.rejected is None else rejected | cast.rejected)


def _reads(to: Codec, value: pa.Scalar) -> bool:
    try:
        to.cast(pa.array([value.as_py()], value.type))
    except CastError:
        return False
    return True
