"""A table of a key and a text, for tests of the Delta sink: its rows, changes and content."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from delta_rows import read_delta
from sinks.histories import Change, rows_of, typed
from walmere.apply.fold import fold
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import OVERWRITE
from walmere.sinks.delta.sink import DeltaSink

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
BY_ID = Identity("d", ("id",))


def rows(*ids: int, text: str = "x") -> pa.Table:
    return pa.table([list(ids), [text] * len(ids)], schema=SCHEMA)


def begin(sink: DeltaSink, *parts: pa.Table) -> None:
    sink.create(TABLE, parts[0].schema if parts else SCHEMA)
    staged = [file for part in parts for file in sink.stage(TABLE, part.to_batches())]
    sink.commit(TABLE, staged, Lsn(1), OVERWRITE)


def do(sink: DeltaSink, *changes: Change) -> int:
    """Apply a batch. Columns that the table has in addition are NULL in it."""
    schema = sink.current(TABLE).arrow_schema
    wider = [Change(c.kind, _wide(c.new, schema), _wide(c.old, schema), c.old_kind) for c in changes]
    return sink.apply(TABLE, fold(typed(wider, schema), BY_ID), next_lsn(sink), BY_ID)


def _wide(values: tuple[Any, ...] | None, schema: pa.Schema) -> tuple[Any, ...] | None:
    return values and (*values, *[None] * (len(schema) - len(values)))


def next_lsn(sink: DeltaSink) -> Lsn:
    return Lsn((sink.applied(TABLE) or 0) + 1)


def update(key: int, text: str = "new") -> Change:
    return Change("U", (key, text))


def insert(key: int, text: str = "x") -> Change:
    return Change("I", (key, text))


def delete(key: int) -> Change:
    return Change("D", None, (key, None), ord("K"))


def content(sink: DeltaSink) -> list[tuple[Any, ...]]:
    return sorted(rows_of(read_delta(sink.open(TABLE))))
