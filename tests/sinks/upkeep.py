"""A table of two columns for tests of upkeep: changes, content and files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from delta_rows import read_delta
from sinks.histories import Change, rows_of, typed
from walmere.apply.fold import fold
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import OVERWRITE, Upkeep
from walmere.sinks.delta.maintenance import Rewritten, Work
from walmere.sinks.delta.sink import DeltaSink

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64()), ("n", pa.int64())])
BY_ID = Identity("d", ("id",))
K = ord("K")
ALL = Upkeep(deleted_share=0)


def rows(*ids: int, n: int = 0) -> pa.Table:
    return pa.table([list(ids), [n] * len(ids)], schema=SCHEMA)


def begin(sink: DeltaSink, *parts: pa.Table, lsn: int = 1) -> None:
    sink.create(TABLE, SCHEMA)
    staged = [file for part in parts for file in sink.stage(TABLE, part.to_batches(), identity=BY_ID)]
    sink.commit(TABLE, staged, Lsn(lsn), OVERWRITE)


def do(sink: DeltaSink, *changes: Change) -> int:
    lsn = Lsn((sink.applied(TABLE) or 0) + 1)
    return sink.apply(TABLE, fold(typed(changes, sink.current(TABLE).arrow_schema), BY_ID), lsn, BY_ID)


def update(key: int, n: int) -> Change:
    return Change("U", (key, n))


def delete(key: int) -> Change:
    return Change("D", None, (key, None), K)


def insert(key: int, n: int = 0) -> Change:
    return Change("I", (key, n))


TRUNCATE = Change("T")


def content(sink: DeltaSink, version: int | None = None) -> list[tuple[Any, ...]]:
    return sorted(rows_of(read_delta(DeltaTable(sink.location(TABLE), version))))


def rewritten(sink: DeltaSink) -> list[Rewritten]:
    """As a task returns it."""
    planned: list[Work] = pickle.loads(pickle.dumps(sink.plan_upkeep(TABLE, BY_ID, ALL)))
    return [pickle.loads(pickle.dumps(sink.rewrite_files(work))) for work in planned]


def files(sink: DeltaSink) -> set[str]:
    return {file.name for file in sink.current(TABLE).files}


def on_disk(sink: DeltaSink, directory: str = "") -> set[str]:
    path = Path(sink.location(TABLE), directory)
    return {each.name for each in path.iterdir() if each.is_file()} if path.exists() else set()
