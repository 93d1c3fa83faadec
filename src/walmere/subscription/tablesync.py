"""The copy of one table: PostgreSQL's tablesync worker, with many hands.

    1. A temporary slot gives a consistent point and a snapshot, which is exported.      i → d
    2. Inside the snapshot the catalogs say what is published: columns, row filter, identity, where the rows lie.
    3. The table is divided into ranges of pages. Each is one task: it imports the snapshot, COPYs its range, casts the
       text to Arrow, and stages files in the target. Nobody sees them.
    4. One commit makes all of them the table's contents, with the snapshot's LSN in it.  d → f

A task that fails is run again, and the files of its first attempt are nobody's. A copy that is cut off leaves nothing
visible and begins anew with another snapshot. A table that was copied before is replaced in step 4: until then its
readers see the old rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from walmere.config import Source
from walmere.errors import WalmereError
from walmere.lsn import Lsn
from walmere.publisher import catalog, copy, snapshot, table
from walmere.publisher.connect import Connection, connect, speaking
from walmere.publisher.snapshot import Snapshot
from walmere.publisher.stream import identify_system
from walmere.publisher.table import Range, Table
from walmere.sinks.base import OVERWRITE, Sink, StagedFile, TableName
from walmere.subscription import state
from walmere.subscription.rejects import Rejects
from walmere.subscription.state import TableState
from walmere.subscription.tables import Tables
from walmere.types import copytext
from walmere.types.base import Codec
from walmere.types.codec import codec

_PATIENCE: Final = 5.0
Item = TypeVar("Item")
Result = TypeVar("Result")


class Tasks(Protocol):
    """Something that runs a function over items in parallel."""

    @property
    def parallelism(self) -> int:
        """How many run at once."""

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The results, in the order of the items."""

    def cancel(self) -> None:
        """End what is running; its callers get an error."""


@dataclass(frozen=True, slots=True)
class CopyTask:
    """One range of a table, with all that a task needs to copy it."""

    source: Source
    snapshot: Snapshot
    table: Table
    piece: Range
    codecs: tuple[Codec, ...]
    sink: Sink


@dataclass(frozen=True, slots=True)
class Copied:
    """What one task has staged."""

    files: list[StagedFile]
    rows: int
    rejects: list[StagedFile]
    rejected: int


def copy_piece(task: CopyTask) -> Copied:
    """Copy one range. Runs in a Spark task."""
    rows = 0
    rejects = Rejects(task.table.key)
    names = [column.name for column in task.table.columns]
    schema = schema_of(task.table, task.codecs)

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        command = table.copy_command(task.table, task.piece)
        for text in copy.copy_out(task.source, "walmere copy", task.snapshot, command, task.piece.part):
            parsed = copytext.read(text, names)
            rows += parsed.num_rows
            lsn = np.full(parsed.num_rows, task.snapshot.lsn, np.uint64)
            values = rejects.cast(parsed, task.codecs, lsn)
            yield pa.RecordBatch.from_arrays(values, schema=schema)

    name = TableName(task.table.schema, task.table.name)
    files = task.sink.stage(name, batches())
    rejected = rejects.rows()
    if rejected.num_rows:
        task.sink.create(Rejects.table(name), Rejects.SCHEMA)
    return Copied(
        files, rows, task.sink.stage(Rejects.table(name), [rejected]) if rejected.num_rows else [], rejected.num_rows
    )


def schema_of(described: Table, codecs: Sequence[Codec]) -> pa.Schema:
    """The target's columns: exactly the published ones, in their order."""
    return pa.schema([(column.name, each.arrow) for column, each in zip(described.columns, codecs, strict=True)])


class TableSync:
    """Copies tables of one subscription."""

    def __init__(self, source: Source, subscription: str, tables: Tables, sink: Sink, tasks: Tasks) -> None:
        self._source = source
        self._subscription = subscription
        self._tables = tables
        self._sink = sink
        self._tasks = tasks
        self._stopping = threading.Event()
        self._making_slots: set[Connection] = set()

    def stop(self) -> None:
        """End the copies that are under way. They begin anew with the next run."""
        self._stopping.set()
        for connection in list(self._making_slots):
            with suppress(Exception):  # it is gone already
                connection.cancel_safe(timeout=_PATIENCE)
        self._tasks.cancel()

    def discover(self) -> list[TableState]:
        """Take in what the publications publish now; returns the tables that wait for their copy."""
        with (
            closing(connect(self._source, "walmere launcher")) as connection,
            speaking(self._source, "reading catalogs"),
        ):
            catalog.require_publications(connection, self._source.publications)
            published = catalog.published_tables(connection, self._source.publications)
        new = [TableState(TableName(t.schema, t.name), t.oid) for t in published if t.oid not in self._tables]
        left = {t.oid for t in published}
        new += [state.copy_failed(each, None) for each in self._tables if each.copying and each.oid not in left]
        if new:
            self._tables.put(*new)
        return [state for t in published if not (state := self._tables[t.oid]).phase.copied]

    def copy(self, oid: int) -> TableState:
        """Copy one table. Returns its state: finished copy, or init with the error that was met."""
        try:
            return self._copy(self._tables[oid])
        except WalmereError as error:
            told_to_end = self._stopping.is_set()
            failed = state.copy_failed(self._tables[oid], None if told_to_end else f"{error.doing}: {error.wrong}")
            self._tables.put(failed)
            if error.transient or told_to_end:
                return failed
            raise

    def _copy(self, known: TableState) -> TableState:
        source = self._source
        with closing(connect(source, "walmere sync", replication=True)) as replication:
            system = identify_system(replication)
        slot = snapshot.slot_name(self._subscription, known.oid, system.identifier)
        self._tables.put(state.copy_started(known))  # from now on, the log keeps what the snapshot may not have
        with snapshot.exported(source, slot, self._making_slots.add) as made:
            self._tables.put(state.copy_started(self._tables[known.oid], made.lsn))
            with snapshot.imported(source, slot, made) as connection, speaking(source, f"looking at {known.name}"):
                described = table.describe(connection, source.publications, known.oid)
                types = catalog.types_of(connection, (column.type_oid for column in described.columns))
            self._tables.learn(types)
            codecs = tuple(codec(column.type_oid, column.typmod, types) for column in described.columns)
            name = TableName(described.schema, described.name)
            self._sink.create(name, schema_of(described, codecs))
            pieces = table.ranges(described, self._tasks.parallelism)
            work = [CopyTask(source, made, described, piece, codecs, self._sink) for piece in pieces]
            copied: list[Copied] = self._tasks.map(copy_piece, work)
        return self._commit(self._tables[known.oid], name, copied, made.lsn)

    def _commit(self, known: TableState, name: TableName, copied: list[Copied], lsn: Lsn) -> TableState:
        rejects = [file for each in copied for file in each.rejects]
        if rejects or self._sink.count(Rejects.table(name)):  # those of the copy before go with its rows
            self._sink.commit(Rejects.table(name), rejects, lsn, OVERWRITE)
        self._sink.commit(name, [file for each in copied for file in each.files], lsn, OVERWRITE)
        finished = state.copy_committed(
            known, rows=sum(each.rows for each in copied), rejects=sum(each.rejected for each in copied)
        )
        self._tables.put(finished)
        return finished
