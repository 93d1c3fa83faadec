"""The copy of one table: PostgreSQL's tablesync worker, in parallel.

    1. A temporary slot gives a consistent point and an exported snapshot.                i → d
    2. In the snapshot, the catalogs say what is published: columns, row filter, replica identity, size.
    3. The table is divided into ranges of pages. Each is one task: it imports the snapshot, COPYs its range, casts the
       text to Arrow, and stages files in the target. They are not visible yet.
    4. One commit makes all files the contents of the table. It has the snapshot's LSN.   d → f

A task that fails is run again; the files of its first attempt are never used. A copy that is interrupted leaves nothing
visible, and starts again with another snapshot. A table that was copied before is replaced in step 4: until then its
readers see the old rows, in the old columns.

This module also redefines a table whose stream has another definition than its target.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from walmere.apply.logical_messages import MESSAGES
from walmere.apply.rejects import Rejects
from walmere.config import Source
from walmere.definition import MESSAGES_OID, Definition, Shaping
from walmere.errors import ColumnMissing, PublicationMissing, SinkMismatch, SourceUnavailable, WalmereError
from walmere.libpq import self_contained
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import Identity, TableName
from walmere.publisher import catalog, copy, snapshot, table
from walmere.publisher.connect import Connection, connect, translate_errors
from walmere.publisher.copy_progress import application_name, estimated_rows
from walmere.publisher.ddl import TableDdl, table_ddl
from walmere.publisher.snapshot import Snapshot
from walmere.publisher.stream import identify_system
from walmere.publisher.table import Range, Table
from walmere.shaping.clustering import clustered
from walmere.shaping.columns import TargetColumns
from walmere.shaping.rules import TableRules
from walmere.sinks.base import OVERWRITE, Sink, StagedFile, is_lake
from walmere.sinks.postgres.copying import Copy
from walmere.sinks.postgres.sink import PostgresSink
from walmere.subscription import state
from walmere.subscription.copy_progress import OnTasks, RunningCopies
from walmere.subscription.discovery import Discovery, identity_of, require_other_name
from walmere.subscription.evolution import in_place
from walmere.subscription.state import Phase, TableState
from walmere.subscription.tables import Tables
from walmere.types import PgType, copytext

_CANCEL_TIMEOUT: Final = 5.0

Item = TypeVar("Item")
Result = TypeVar("Result")


class Tasks(Protocol):
    """Runs a function over items in parallel."""

    @property
    def parallelism(self) -> int:
        """How many tasks run at the same time."""

    @property
    def remote(self) -> bool:
        """Whether tasks run on other machines."""

    def map(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        on_progress: Callable[[int, int], None] | None = None,
        counted: Callable[[Result], int] | None = None,
    ) -> list[Result]:
        """The results, in the order of the items.

        `on_progress` is called regularly with the number of finished items and of all items. `counted`: add up this
        number of each result instead of 1.
        """

    def cancel(self) -> None:
        """Cancel running tasks; their callers get an error."""


@dataclass(frozen=True, slots=True)
class CopyTask:
    """One range of a table, with everything that a task needs to copy it."""

    source: Source
    snapshot: Snapshot
    table: Table
    piece: Range
    columns: TargetColumns
    sink: Sink
    target: TableName
    cluster_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Copied:
    """The files that one task has staged."""

    files: list[StagedFile]
    rows: int
    rejects: list[StagedFile]
    rejected: int


def copied_rows(task: CopyTask, rejects: Rejects) -> Iterator[pa.RecordBatch]:
    """The rows of one range in the snapshot, in the target's types."""
    columns = task.columns
    command = table.copy_command(task.table, task.piece, columns=columns.names)
    name = application_name(task.snapshot)
    for text in copy.copy_out(task.source, name, task.snapshot, command, task.piece.part):
        parsed = copytext.read(text, columns.names)
        lsn = np.full(parsed.num_rows, task.snapshot.lsn, np.uint64)
        yield columns.rows(rejects.cast(parsed, columns.codecs, lsn), parsed.num_rows)


def copy_piece(task: CopyTask) -> Copied:
    """Copy one range. Runs in a Spark task."""
    assert is_lake(task.sink)
    rows = 0
    rejects = Rejects(task.table.key)

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for batch in clustered(copied_rows(task, rejects), task.cluster_by):
            rows += batch.num_rows
            yield batch

    name = task.target
    identity = Identity(task.table.replica_identity.value, task.table.key)
    files = task.sink.stage(name, batches(), task.columns.schema, identity)
    rejected = rejects.rows()
    if rejected.num_rows:
        task.sink.create(Rejects.table(name), Rejects.SCHEMA)
    return Copied(
        files, rows, task.sink.stage(Rejects.table(name), [rejected]) if rejected.num_rows else [], rejected.num_rows
    )


@dataclass(frozen=True, slots=True)
class TextCopyTask:
    """One range of a table, which goes to a database as the text that the source sends."""

    source: Source
    snapshot: Snapshot
    table: Table
    piece: Range
    number: int
    copy: Copy


def copy_text_piece(task: TextCopyTask) -> int:
    """Copy one range. Runs in a Spark task. Returns the number of rows."""
    rows = 0

    def pieces() -> Iterator[bytes]:
        nonlocal rows
        command, name = table.copy_command(task.table, task.piece), application_name(task.snapshot)
        for text in copy.copy_out(task.source, name, task.snapshot, command, task.piece.part):
            rows += text.count(b"\n")
            yield text

    task.copy.copy_range(str(task.number), pieces())
    return rows


def look(connection: Connection, source: Source, oid: int, gather: bool) -> tuple[Table, dict[int, PgType]]:
    """The definition of a table, in the connection's snapshot if it has one, and its types that are not built in."""
    described = table.describe(connection, source.publications, oid, gather)
    return described, catalog.types_of(connection, (column.type_oid for column in described.columns))


def source_of_tasks(source: Source, tasks: Tasks) -> Source:
    """The source, as tasks connect to it by themselves."""
    return self_contained(source) if tasks.remote else source


class TableSync:
    """Copies tables of one subscription."""

    def __init__(  # noqa: PLR0913  the parts of a subscription
        self,
        source: Source,
        subscription: str,
        tables: Tables,
        sink: Sink,
        tasks: Tasks,
        running: RunningCopies,
        rules: TableRules | None = None,
        *,
        gather: bool = False,
    ) -> None:
        self._source = source
        self.running = running
        self._rules = rules or TableRules()
        self._gather = gather
        self._subscription = subscription
        self._tables = tables
        self._sink = sink
        self._tasks = tasks
        self._stopping = threading.Event()
        self._making_slots: set[Connection] = set()
        self.discovery = Discovery(source, tables, self._rules, gather=gather)
        self.read_rows: set[int] = set()
        """Tables whose last copy has read rows."""

    def use(self, sink: Sink) -> None:
        """Write to this sink from now on."""
        self._sink = sink

    def stop(self) -> None:
        """Cancel running copies, and start none until `resume`. The next run starts them again."""
        self._stopping.set()
        for connection in list(self._making_slots):
            with suppress(Exception):  # the connection may be lost
                connection.cancel_safe(timeout=_CANCEL_TIMEOUT)
        self._tasks.cancel()

    def resume(self) -> None:
        """Copies may start again after `stop`."""
        self._stopping.clear()

    def require_free_messages_name(self, name: TableName | None) -> None:
        """Raise ConfigError if target.messages is the name of a published table. Call it before anything is created."""
        if name is None:
            return
        with (
            closing(connect(self._source, "walmere launcher")) as connection,
            translate_errors(self._source, "reading catalogs"),
        ):
            catalog.set_timeouts(connection)
            published = catalog.published_tables(connection, self._source.publications, self._gather)
        require_other_name(name, self._rules.choose(published))

    def follow_messages(self, name: TableName | None, start_lsn: Lsn) -> None:
        """Create the table of logical messages, which begins at this LSN; or stop following it, if it has no name."""
        known = self._tables.get(MESSAGES_OID)
        require_other_name(name, (each.table for each in self._tables if not each.of_messages))
        if known is not None and known.table != name:
            self._tables.change({MESSAGES_OID: state.unpublished})
        if name is not None and (known is None or known.table != name) and is_lake(self._sink):
            self._sink.create(name, MESSAGES)
            self._tables.put(TableState(name, MESSAGES_OID, Phase.READY, start_lsn, start_lsn))

    def copy(self, oid: int) -> None:
        """Copy one table. Afterwards its phase is finished copy, or init with the error.

        Raises an error that is not transient.
        """
        if oid not in self._tables:
            return
        known = self._tables[oid]
        try:
            self._copy(known)
        except PublicationMissing:
            self._require_gone(oid)
        except Exception as error:  # an error of one table must not stop the others
            wrong = error if isinstance(error, WalmereError) else WalmereError(f"copying {known.name}", repr(error))
            stopping = self._stopping.is_set()
            text = None if stopping else str(wrong)
            self._tables.change(
                {oid: lambda current: state.copy_failed(current, text) if current.table == known.table else current}
            )
            if not (wrong.transient or stopping):
                raise wrong from error

    def redefine(self, oid: int) -> None:
        """For a table that awaits a definition: its target adopts it in place, or the table is copied again."""
        known = self._tables.get(oid)
        if known is None or known.awaits is None or known.definition is None:
            return
        try:
            self._redefine(known, known.definition)
        except PublicationMissing:
            self._require_gone(oid)
        except Exception as error:
            if self._stopping.is_set():
                return  # it was cancelled
            wrong = error if isinstance(error, WalmereError) else WalmereError(f"altering {known.name}", repr(error))
            if isinstance(wrong, ColumnMissing):  # it goes on when somebody has added the column
                self._tables.change({oid: lambda current: state.with_error(current, str(wrong))})
            elif not wrong.transient:  # a copy may succeed; otherwise its error is shown
                self._tables.change({oid: lambda current: state.copy_again(current, str(wrong))})
            raise wrong from error

    def _require_gone(self, oid: int) -> None:
        """Update the states after a table was not found in the publication. Raises if it is published again."""
        self.discovery.refresh()
        if oid in self._tables:
            raise SourceUnavailable(
                f"reading the definition of {self._tables[oid].name}", "it was not in the publication for a time"
            )

    def _redefine(self, known: TableState, had: Definition) -> None:
        oid = known.oid
        assert known.awaits is not None
        if known.awaits.table != known.source_table:
            self.discovery.refresh()  # it was renamed, so it has another place in the target
            self._tables.change({oid: lambda current: current if current.awaits is None else state.copy_again(current)})
            return
        with (
            closing(connect(self._source, "walmere launcher")) as connection,
            translate_errors(self._source, f"reading the definition of {known.name}"),
        ):
            catalog.set_timeouts(connection)
            # before the filenodes, so that a rewrite after it is noticed
            missing = table.missing_values(connection, oid)
            described, types = look(connection, self._source, oid, self._gather)
            statements = TableDdl() if is_lake(self._sink) else table_ddl(connection, described)
        self._tables.add_types(types)
        now = self._definition(described, self._shaping(known, described))
        evolution = None if missing is None else in_place(had, now, missing, self._tables.types, self._rules.hash_key)
        if evolution is None or not now.shape(known.source_table).same(known.awaits):
            self._tables.change({oid: state.copy_again})
            return
        self._tables.shared.check(0.0)
        if is_lake(self._sink):
            version: int | None = self._sink.evolve(known.table, evolution.schema, evolution.values, self._tasks.map)
        else:
            assert isinstance(self._sink, PostgresSink)
            moved = dict(zip(evolution.schema.names, evolution.values, strict=True))
            renamed = {name: was for name, was in moved.items() if isinstance(was, str) and was != name}
            added = [name for name, was in moved.items() if not isinstance(was, str)]
            version = self._sink.alter(known.table, statements, renamed, added)
            if version is None:
                self._tables.change({oid: state.copy_again})
                return
        self._tables.change({oid: lambda current: state.evolved(current, now, version)})

    def _copy(self, known: TableState) -> None:
        source = self._source
        with closing(connect(source, "walmere sync", replication=True)) as replication:
            system = identify_system(replication)
        slot = snapshot.slot_name(self._subscription, known.oid, system.identifier)
        self._start(known)  # from now on, the log keeps changes that the snapshot may not have
        self.read_rows.discard(known.oid)
        with self._exported(slot) as exported:
            self._start(known, exported.lsn)
            with (
                snapshot.imported(source, slot, exported) as connection,
                translate_errors(source, f"reading the definition of {known.name}"),
            ):
                catalog.set_timeouts(connection)
                described, types = look(connection, source, known.oid, self._gather)
                estimated = estimated_rows(connection, [described.published]).get(known.oid)
                statements = None if is_lake(self._sink) else table_ddl(connection, described)
            if (described.schema, described.name) != known.source_table:
                raise SourceUnavailable(f"copying {known.name}", f"it was renamed to {described}")
            self._tables.add_types(types)
            shaping = self._shaping(known, described)
            watched = self.running.watched(known.oid, exported, estimated)
            if statements is not None:
                with watched as on_tasks:
                    self._copy_text(known, described, exported, statements, on_tasks)
                return
            assert is_lake(self._sink)
            columns = self._rules.columns(described.columns, types, shaping)
            cluster_by = self._rules.cluster_by(known.source_table, columns.schema)
            self._sink.create(known.table, columns.schema)
            if (target_lsn := self._sink.applied(known.table)) is not None and target_lsn > exported.lsn:
                raise SinkMismatch(
                    f"copying {known.name}",
                    f"the target's table is at LSN {target_lsn}, but the source is only at {exported.lsn}",
                    "the table was written from another source, or the source was restored from a backup:"
                    " move the target's table to another directory",
                )
            self.read_rows.add(known.oid)
            pieces = self._ranges(described)
            source = source_of_tasks(source, self._tasks)
            work = [
                CopyTask(source, exported, described, piece, columns, self._sink, known.table, cluster_by)
                for piece in pieces
            ]
            with watched as on_tasks:
                copied: list[Copied] = self._tasks.map(copy_piece, work, on_tasks, operator.attrgetter("rows"))
        self._commit(known.table, described, columns.schema, shaping, copied, exported.lsn)

    def _ranges(self, described: Table) -> list[Range]:
        """What each task copies: little, if batches of other tables need the cores, too."""
        others = any(each.follows and not each.of_messages for each in self._tables if each.oid != described.oid)
        size = table.RANGE_BYTES if others else table.LARGE_RANGE_BYTES
        return table.ranges(described, self._tasks.parallelism, size)

    def _copy_text(
        self, known: TableState, described: Table, exported: Snapshot, statements: TableDdl, on_tasks: OnTasks
    ) -> None:
        """Copy a table into a database. A copy that fails leaves nothing there."""
        sink = self._sink
        assert isinstance(sink, PostgresSink)
        names = [column.name for column in described.columns]
        begun = sink.begin_copy(known.table, names, statements)
        self.read_rows.add(known.oid)
        pieces = self._ranges(described)
        source = source_of_tasks(self._source, self._tasks)
        try:
            work = [
                TextCopyTask(source, exported, described, piece, number, begun) for number, piece in enumerate(pieces)
            ]
            rows = sum(self._tasks.map(copy_text_piece, work, on_tasks, int))
            self._tables.shared.check(0.0)
            version = begun.finish(exported.lsn)
        except BaseException:
            with suppress(WalmereError):  # the next copy removes it, too
                begun.abandon()
            raise
        self._finish(known.table, self._definition(described), described.oid, rows, 0, version)

    @contextmanager
    def _exported(self, slot: str) -> Iterator[Snapshot]:
        opened: list[Connection] = []

        def cancellable(connection: Connection) -> None:
            opened.append(connection)
            self._making_slots.add(connection)

        try:
            with snapshot.exported(self._source, slot, cancellable) as exported:
                yield exported
        finally:
            self._making_slots.difference_update(opened)

    def _start(self, known: TableState, snapshot_lsn: Lsn = INVALID_LSN) -> None:
        started = self._tables.change(
            {
                known.oid: lambda current: (
                    state.copy_started(current, snapshot_lsn) if current.table == known.table else current
                )
            }
        )
        if not any(each.table == known.table for each in started):
            raise SourceUnavailable(f"copying {known.name}", "it was removed from the publication, or renamed")

    def _shaping(self, known: TableState, described: Table) -> Shaping | None:
        """How the target differs from the published table, by the sections of the configuration."""
        columns, key = described.columns, described.key
        return self._rules.shaping(known.source_table, columns, key, self._tables.types, known.hidden)

    def _commit(
        self,
        name: TableName,
        described: Table,
        schema: pa.Schema,
        shaping: Shaping | None,
        copied: list[Copied],
        lsn: Lsn,
    ) -> None:
        assert is_lake(self._sink)
        self._tables.shared.check(0.0)
        rejects = [file for each in copied for file in each.rejects]
        if rejects or self._sink.count(Rejects.table(name)):  # those of the previous copy are replaced, too
            self._sink.commit(Rejects.table(name), rejects, lsn, OVERWRITE)
        version = self._sink.commit(name, [file for each in copied for file in each.files], lsn, OVERWRITE, schema)
        rows, rejected = sum(each.rows for each in copied), sum(each.rejected for each in copied)
        self._finish(name, self._definition(described, shaping), described.oid, rows, rejected, version)

    def _finish(
        self, name: TableName, definition: Definition, oid: int, rows: int, rejected: int, version: int
    ) -> None:
        def finish(current: TableState) -> TableState:
            if current.table != name or not current.copying:
                return current  # it was removed from the publication, or has to be copied again
            return state.copy_committed(current, definition, rows, rejected, version=version, now=time.time())

        self._tables.change({oid: finish})

    def _definition(self, described: Table, shaping: Shaping | None = None) -> Definition:
        """The definition that is stored for a table."""
        published = described.published
        partial = published.partial or self._source.origin == "none"
        return Definition(
            described.columns,
            described.natts,
            published.layout,
            published.publication_fingerprint,
            published.leaves,
            partial,
            published.gathered,
            identity_of(published),
            published.xid,
            shaping,
        )
