"""The rows of all tables, each as a JSON object. `types.jsontext` defines the JSON of values.

An object does not have values that were not sent: unchanged TOASTed values, and in a key tuple the columns outside the
key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walmere.changelog.decoded import REJECTS, DecodedRows, Rejected
from walmere.pgoutput.columns import KEY
from walmere.pgoutput.messages import Relation
from walmere.source.change_rows import CHANGE, CHANGE_NAMES, change_column
from walmere.types import PgType
from walmere.types.base import Codec, Mask, without
from walmere.types.codec import codec
from walmere.types.jsontext import joined, json_text

SCHEMA: Final = pa.schema(
    [
        ("_schema", pa.string()),
        ("_table", pa.string()),
        *CHANGE,
        ("row", pa.string()),
        ("before", pa.string()),
        ("_rejects", REJECTS),
    ]
)


@dataclass(frozen=True)
class JsonRows:
    """The rows of all tables."""

    types: Mapping[int, PgType]
    wanted: tuple[str, ...] = ()  # columns of SCHEMA; empty: all

    def schema(self) -> pa.Schema:
        """All columns."""
        return SCHEMA

    def batch(self, messages: pa.RecordBatch, relation: Relation, streamed: bool) -> pa.RecordBatch:
        """The rows of messages of one definition."""
        fields = [SCHEMA.field(name) for name in self.wanted or SCHEMA.names]
        wanted = {each.name for each in fields}
        codecs = [codec(each.type_oid, each.type_modifier, self.types) for each in relation.columns]
        objects = _Objects(codecs, DecodedRows(messages, relation, streamed))
        count = messages.num_rows
        arrays = {
            "_schema": pa.repeat(relation.namespace or "pg_catalog", count),
            "_table": pa.repeat(relation.name, count),
            **{name: change_column(name, messages) for name in CHANGE_NAMES},
            "row": objects.row() if "row" in wanted else None,
            "before": objects.before() if "before" in wanted else None,
        }
        arrays["_rejects"] = objects.rejects()
        return pa.RecordBatch.from_arrays([arrays[each.name] for each in fields], schema=pa.schema(fields))


class _Objects:
    """The objects of one batch."""

    def __init__(self, codecs: Sequence[Codec], decoded: DecodedRows) -> None:
        self._codecs = codecs
        self._decoded = decoded
        self._rows = decoded.rows
        self._columns = decoded.rows.relation.columns
        self._key_only = decoded.rows.old_kind == KEY
        self._rejected = Rejected(len(decoded.rows))

    def row(self) -> pa.Array:
        """The row; for a deleted row, the old tuple."""
        members = []
        for place, column in enumerate(self._columns):
            current = self._decoded.current(place)
            absent = current.unchanged
            if self._decoded.deleted is not None and not column.is_key:
                gone = self._decoded.deleted & self._key_only
                absent = gone if absent is None else absent | gone
            members.append(self._member(place, "", current.text, absent))
        return self._decoded.spread(_object(members, len(self._rows)))

    def before(self) -> pa.Array:
        """The old tuple, where there is one."""
        none = self._rows.old_kind == 0
        if none.all():
            return self._decoded.spread(pa.nulls(len(none), pa.string()))
        members = [
            self._member(place, "_before.", self._rows.old[place].text, None if column.is_key else self._key_only)
            for place, column in enumerate(self._columns)
        ]
        return self._decoded.spread(without(_object(members, len(none)), none))

    def rejects(self) -> pa.Array:
        """The rejected values of both."""
        return self._decoded.spread(self._rejected.maps())

    def _member(self, place: int, prefix: str, text: pa.Array, absent: Mask | None) -> pa.Array:
        """`,"name":value`, or null where the value is absent."""
        if absent is not None and absent.all():
            return pa.nulls(len(text), pa.string())
        name = self._columns[place].name
        value = self._rejected.keep(prefix + name, text, json_text(self._codecs[place], text))
        member = joined(f",{json.dumps(name, ensure_ascii=False)}:", value)
        return member if absent is None or not absent.any() else without(member, absent)


def _object(members: Sequence[pa.Array], count: int) -> pa.Array:
    # null_handling="skip" drops rows where all are null. So each member has its comma, and the first is replaced
    inside = pc.binary_join_element_wise(
        pa.array(np.full(count, "", object), pa.string()), *members, "", null_handling="replace", null_replacement=""
    )
    return joined(pc.utf8_replace_slice(inside, 0, 1, "{"), "}")
