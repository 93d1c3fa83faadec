"""The Delta sink: tables written by `deltalake` and Arrow from within the task. No JVM, no jars, one commit per batch.

`walmere.sinks.base` has the contract. The parts:

    places            where tables are
    tables            how they are opened, who owns them
    ddl               create, claim and change a table
    merge             rows that a batch removes or replaces, by deletion vectors
    rewrite           the same for readers without deletion vectors: files without these rows
    maintenance       joins and purges files, and deletes old ones
    points            which versions belong together, for readers of the lake
    log/replay        a table at one version, from its log; `snapshot` is that for readers of the lake
    log/actions       the actions of a commit, by the rules of Delta's protocol; `schema` has the columns
    log/commit        the compare-and-set commit with the LSN in it
    log/history       what the table's history says about a commit
    log/recorded_size how large a table is, by its newest commit
    log/others        commits of other programs that have changed rows
    log/retention     keeps the log long enough
    files/data_file   the data files of a version, and their rows; `parquet` writes and reads them
    files/vectors     deletion vectors
    files/key_index   finds the rows of a key; `hits` are what it has found
    files/scan        reads a version in pieces; `dataset` is PyArrow's

`deltalake` has a MERGE, and we do not use it. In our measurements it takes more time and CPU. It joins many files into
one, so that the next change of a single row rewrites the whole table. It cannot remove one of several equal rows (a
multiset), and cannot get values from the row of another key (TOAST and a change of key) in the same commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import pyarrow as pa

from walmere import paths
from walmere.directory import Directory
from walmere.ledger.entry import Entry
from walmere.ledger.lake import LakeLedger
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import Identity, TableName
from walmere.object_store import is_url, open_store
from walmere.owner import Owner
from walmere.sinks.base import (
    APPEND,
    OVERWRITE,
    Extent,
    Mode,
    Net,
    Run,
    StagedFile,
    Standing,
    TableScan,
    Upkeep,
    run_here,
)
from walmere.sinks.delta import ddl, maintenance, merge, points
from walmere.sinks.delta.files import scan
from walmere.sinks.delta.files.data_file import count
from walmere.sinks.delta.files.key_index import KeyIndex
from walmere.sinks.delta.files.scan import FilePiece
from walmere.sinks.delta.log import history
from walmere.sinks.delta.log.actions import require_supported
from walmere.sinks.delta.log.commit import Change, commit, missing_file, overtaken, switch_off_vectors
from walmere.sinks.delta.log.others import changed_by_others
from walmere.sinks.delta.log.replay import TableVersion
from walmere.sinks.delta.log.schema import column_types, delta_schema
from walmere.sinks.delta.rewrite import Files, rewrite
from walmere.sinks.delta.tables import DeltaTables, owner_of


@dataclass(frozen=True, slots=True)
class DeltaSink(DeltaTables):
    """A directory of Delta tables as a target. The methods are described in `Sink`."""

    @property
    def spreads(self) -> bool:
        """Whether several tasks can apply a batch of one table."""
        return self.deletion_vectors

    @property
    def transactional(self) -> bool:
        """Tables are committed one by one."""
        return False

    @property
    def two_phase(self) -> bool:
        """A prepared transaction is applied when it is committed."""
        return False

    @property
    def batch_interval(self) -> float:
        """Seconds between the beginnings of two batches: each writes at least a file and a commit per table."""
        if self.batch_seconds is not None:
            return self.batch_seconds
        return 1.0 if is_url(self.path) else 0.5  # each request to a store has its price

    def require_store(self) -> None:
        """Raise StoreError if the tables are in an object store that cannot be written, or ignores conditions.

        Commits are created once, and points are replaced by compare-and-set.
        """
        if is_url(self.path):
            open_store(self.path, self.storage_options).probe(replaces=True)

    def owned_by(self, owner: Owner, *, take_over: bool = False) -> DeltaSink:
        """The same sink, writing for this owner."""
        return replace(self, owner=owner, take_over=take_over)

    def portable(self) -> DeltaSink:
        """The same sink, for tasks on other machines: each has its own cache of key indexes."""
        return self if self.index is None else replace(self, index=paths.INDEX)

    def create(self, table: TableName, schema: pa.Schema) -> int:
        """Create an empty table with these columns, if it does not exist."""
        return ddl.create(self, table, schema)

    def claim(self, table: TableName) -> bool:
        """Make sure that a table, if it exists, belongs to the owner; or take it over, and return True."""
        return ddl.claim(self, table)

    def evolve(
        self, table: TableName, schema: pa.Schema, values: Sequence[str | pa.Scalar], run: Run = run_here
    ) -> int:
        """Change the columns of a table. LSN and rows stay."""
        return ddl.evolve(self, table, schema, values, run)

    def standing(self, table: TableName) -> Standing | None:
        """Version, LSN, owner and columns of a table; None if it does not exist."""
        found = self.newest(table)
        if found is None:
            return None
        return Standing(found.version, self.lsn_of(found), owner_of(found), column_types(found.schema))

    def columns(self, schema: pa.Schema) -> tuple[tuple[str, str], ...]:
        """A schema as `Standing.columns` has it."""
        return column_types(delta_schema(schema))

    def changed_by_others(self, table: TableName, after: int, upto: int) -> str | None:
        """The first commit after a version, up to another, in which another program changes rows; None: none does."""
        return changed_by_others(self.directory(table), after, upto)

    def stage(
        self,
        table: TableName,
        batches: Iterable[pa.RecordBatch],
        schema: pa.Schema | None = None,
        identity: Identity | None = None,
    ) -> list[StagedFile]:
        """Write rows from within a task. A commit makes them visible."""
        rows = (pa.Table.from_batches([batch]) for batch in batches)
        schema = schema or self.current(table).arrow_schema
        index = self._index(table, schema, identity) if identity is not None and identity.keyed else None
        return self.write(table, schema, rows, index)

    def _index(self, table: TableName, schema: pa.Schema, identity: Identity) -> KeyIndex | None:
        if not self.deletion_vectors:
            return None
        return KeyIndex.of(self.directory(table), schema, identity, self.index_of(table))

    def commit(
        self,
        table: TableName,
        staged: Sequence[StagedFile],
        lsn: Lsn,
        mode: Mode = APPEND,
        schema: pa.Schema | None = None,
        after: Lsn | None = None,
    ) -> int:
        """Make staged files part of the table, all at once, with this LSN; with OVERWRITE, also with these columns."""
        operation = "COPY" if mode is OVERWRITE else "APPLY"
        metrics = history.rows(sum(file.rows for file in staged))
        change = Change(staged, mode=mode, schema=schema, operation=operation, metrics=metrics)
        return commit(self, table, lsn, lambda found: self._switched(found, change), after)

    def apply(self, table: TableName, net: Net, lsn: Lsn, identity: Identity, after: Lsn | None = None) -> int:
        """Bring the table to this LSN. An empty batch commits nothing, and its LSN is not stored."""
        if net.empty:
            return self.version(table)
        vectors_stay = self.deletion_vectors or all(file.vector is None for file in self.current(table).files)
        if net.truncate or (net.append_only and vectors_stay):
            return commit(self, table, lsn, self._replacing_or_appending(table, net, identity), after)
        if not self.deletion_vectors:
            return commit(self, table, lsn, lambda found: self._rewrite(table, found, net, identity), after)
        found: list[merge.Found] = []

        def marked(version: TableVersion) -> Change:
            found.append(merge.find(self, table, version, net, identity, found[-1] if found else None))
            return merge.change(self, table, version, found[-1:])

        return commit(self, table, lsn, marked, after)

    def stage_changes(self, table: TableName, net: Net, identity: Identity, after: Lsn | None = None) -> merge.Found:
        """Do all but the commit of `apply`, for a part of a batch, from within a task."""
        found = self.current(table)
        require_supported(table, found)
        if after is not None and (self.lsn_of(found) or INVALID_LSN) != after:
            raise overtaken(table)
        if not net.append_only:
            try:
                return merge.find(self, table, found, net, identity, None)
            except FileNotFoundError as error:
                raise missing_file(self, table, found, error) from error
        index = self._index(table, found.arrow_schema, identity) if identity.keyed else None
        staged = self.write(table, found.arrow_schema, [net.appends], index)
        return merge.Found(self.lsn_of(found), found.arrow_schema, staged, metrics=history.rows(len(net.appends)))

    def commit_changes(self, table: TableName, parts: Sequence[merge.Found], lsn: Lsn) -> int:
        """Bring the table to this LSN, by what tasks have staged."""
        after = parts[0].lsn or INVALID_LSN
        return commit(self, table, lsn, lambda version: merge.change(self, table, version, parts), after)

    def _replacing_or_appending(
        self, table: TableName, net: Net, identity: Identity
    ) -> Callable[[TableVersion], Change]:
        """The commit of a batch that does not depend on the rows of the target. Its files are written once."""
        mode = OVERWRITE if net.truncate else APPEND
        current = self.current(table)
        require_supported(table, current)  # before rows are written
        schema = current.arrow_schema
        index = self._index(table, schema, identity) if identity.keyed else None
        staged = self.write(table, schema, [net.upserts, net.appends], index)
        parameters = {"truncate": "true"} if net.truncate else {}
        metrics = history.rows(sum(file.rows for file in staged))
        change = Change(staged, mode=mode, parameters=parameters, metrics=metrics)

        def checked(found: TableVersion) -> Change:
            if not found.arrow_schema.equals(schema):
                raise overtaken(table)
            return self._switched(found, change)

        return checked

    def _switched(self, found: TableVersion, change: Change) -> Change:
        """The change; it also switches deletion vectors off, if no file has one after it and none is to have one."""
        left = () if change.mode is OVERWRITE else found.files
        if any(file.vector is not None for file in left):
            return change
        return replace(change, properties={**change.properties, **switch_off_vectors(self, found)})

    def _rewrite(self, table: TableName, found: TableVersion, net: Net, identity: Identity) -> Change:
        old = Files(self.directory(table), found.arrow_schema, found.files, self.file_size)
        new = rewrite(old, net, identity)
        added = len(net.appends) + len(net.upserts)
        metrics = history.rows(added - new.replaced, new.replaced, new.hits - new.replaced)
        removed = [file.path for file in new.removed]
        return Change(new.added, removed, properties=switch_off_vectors(self, found), metrics=metrics)

    def extent(self, table: TableName) -> Extent | None:
        """How large a table is now; None if it does not exist."""
        found = self.newest(table)
        if found is None:
            return None
        rows = count(self.directory(table), found.files)
        size = found.size
        return Extent(size.files, size.bytes, size.deleted, found.version, rows, found.written)

    def plan_upkeep(self, table: TableName, identity: Identity | None, limits: Upkeep) -> list[maintenance.Work]:
        """What to rewrite now, each in a task."""
        return maintenance.plan(self, table, identity, limits)

    def rewrite_files(self, work: maintenance.Work) -> maintenance.Rewritten:
        """Do what was planned, from within a task."""
        return maintenance.rewrite(self, work)

    def replace_files(self, table: TableName, done: Sequence[maintenance.Rewritten]) -> int | None:
        """Commit what was rewritten. Returns the version; None if there was nothing to commit."""
        return maintenance.replace(self, table, done)

    def optimize(self, table: TableName, identity: Identity | None = None, limits: Upkeep | None = None) -> int | None:
        """Plan, rewrite and replace in this process. Returns the version; None if there was nothing to do."""
        planned = self.plan_upkeep(table, identity, limits or Upkeep())
        return self.replace_files(table, [self.rewrite_files(work) for work in planned])

    def vacuum(self, table: TableName) -> None:
        """Delete the files that no version within `keep_seconds` needs."""
        maintenance.vacuum(self, table)

    def applied(self, table: TableName) -> Lsn | None:
        """The LSN that the table has reached; None if it has none, or does not exist."""
        found = self.newest(table)
        return None if found is None else self.lsn_of(found)

    def count(self, table: TableName) -> int:
        """The number of rows; 0 if the table does not exist."""
        found = self.newest(table)
        return 0 if found is None else count(self.directory(table), found.files)

    def version(self, table: TableName) -> int:
        """The newest version of the table."""
        return self.current(table).version

    def scan(self, table: TableName, version: int, at_least: int = 1) -> TableScan:
        """All rows of a version, in at least so many pieces if the table is large enough."""
        return scan.scan(self, table, version, at_least)

    def read(self, piece: FilePiece, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of a piece, from within a task; with these columns, or all."""
        return scan.read(self, piece, columns)

    def pinned(self) -> AbstractContextManager[DeltaSink]:
        """Versions can be read for `keep_seconds`, and longer while a table is being compared."""
        return nullcontext(self)

    def open_ledger(self, subscription: str, entries: Iterable[Entry]) -> LakeLedger:
        """Become the writer of a subscription's points, which replace those in the lake."""
        return points.open_ledger(self, subscription, entries)

    def claim_points(self, subscription: str) -> None:
        """Refuse points that another owner has written under this name; or take them over."""
        points.claim(self, subscription)

    def tables_of_others(self, subscription: str) -> dict[str, str]:
        """The tables in the newest points of the other subscriptions, each with the name of its subscription."""
        return points.tables_of_others(self, subscription)

    def points(self, subscription: str) -> list[Entry]:
        """The points of a subscription, oldest first; none if they cannot be read."""
        return points.read(self, subscription)

    def ledger_directory(self, subscription: str) -> Directory:
        """Where the lake has the points of a subscription."""
        return points.directory(self, subscription)

    def subscriptions(self) -> list[str]:
        """The subscriptions that have points in the lake."""
        return points.subscriptions(self)
