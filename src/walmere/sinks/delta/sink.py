"""The Delta sink: tables written by `deltalake` and Arrow from within the task. No JVM, no jars, one commit per batch.

`walmere.sinks.base` has the contract. The parts:

    tables        where tables are, how they are opened, who owns them
    schema, ddl   columns; create, claim and change a table
    commit        the compare-and-set commit with the LSN in it
    rewrite       files without the rows that a batch removes or replaces; `parquet` writes and reads them
    maintenance   compact and vacuum; `log_retention` keeps the log long enough
    scan          read a version in pieces
    points        which versions belong together, for readers of the lake
    log           commits of other programs that have changed rows

`deltalake` has a MERGE, and we do not use it. In our measurements it takes more time and CPU. It joins many files into
one, so that the next change of a single row rewrites the whole table. It cannot remove one of several equal rows (a
multiset), and cannot get values from the row of another key (TOAST and a change of key) in the same commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from deltalake import DeltaTable

from walmere.errors import SinkMismatch
from walmere.ledger.entry import Entry
from walmere.ledger.lake import LakeLedger
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.owner import Owner
from walmere.sinks.base import APPEND, OVERWRITE, Mode, Net, Run, StagedFile, Standing, TableScan, run_here
from walmere.sinks.delta import ddl, maintenance, points, scan
from walmere.sinks.delta.commit import Change, commit
from walmere.sinks.delta.log import changed_by_others
from walmere.sinks.delta.maintenance import COMPACT_EVERY
from walmere.sinks.delta.rewrite import Files, files_of, rewrite
from walmere.sinks.delta.scan import FilePiece
from walmere.sinks.delta.schema import arrow_schema, column_types, delta_schema
from walmere.sinks.delta.tables import DeltaTables, owner_of
from walmere.storage import Directory


@dataclass(frozen=True, slots=True)
class DeltaSink(DeltaTables):
    """A directory of Delta tables as a target. The methods are described in `Sink`."""

    def owned_by(self, owner: Owner, *, take_over: bool = False) -> DeltaSink:
        """The same sink, writing for this owner."""
        return replace(self, owner=owner, take_over=take_over)

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
        opened = self.find(table)
        if opened is None:
            return None
        return Standing(opened.version(), self.lsn_of(opened), owner_of(opened), column_types(opened.schema()))

    def columns(self, schema: pa.Schema) -> tuple[tuple[str, str], ...]:
        """A schema as `Standing.columns` has it."""
        return column_types(delta_schema(schema))

    def changed_by_others(self, table: TableName, after: int, upto: int) -> str | None:
        """The first commit after a version, up to another, in which another program changes rows; None: none does."""
        return changed_by_others(self.directory(table), after, upto)

    def stage(
        self, table: TableName, batches: Iterable[pa.RecordBatch], schema: pa.Schema | None = None
    ) -> list[StagedFile]:
        """Write rows from within a task. A commit makes them visible."""
        rows = (pa.Table.from_batches([batch]) for batch in batches)
        return self.write(table, schema or arrow_schema(self.open(table)), rows)

    def commit(
        self,
        table: TableName,
        staged: Sequence[StagedFile],
        lsn: Lsn,
        mode: Mode = APPEND,
        schema: pa.Schema | None = None,
    ) -> int:
        """Make staged files part of the table, all at once, with this LSN; with OVERWRITE, also with these columns."""
        return commit(self, table, lsn, lambda _: Change(staged, (), mode, schema))

    def apply(self, table: TableName, net: Net, lsn: Lsn, identity: Identity) -> int:
        """Bring the table to this LSN. An empty batch commits nothing, and its LSN is not stored."""
        if net.empty:
            return self.version(table)
        if not net.append_only:
            return commit(self, table, lsn, lambda opened: self._rewrite(table, opened, net, identity))
        mode = OVERWRITE if net.truncate else APPEND
        staged: list[list[StagedFile]] = []  # written once: new rows do not depend on other commits

        def append(opened: DeltaTable) -> Change:
            if not staged:
                staged.append(self.write(table, arrow_schema(opened), [net.appends]))
            return Change(staged[0], (), mode)

        return commit(self, table, lsn, append)

    def _rewrite(self, table: TableName, opened: DeltaTable, net: Net, identity: Identity) -> Change:
        if opened.metadata().partition_columns:
            raise SinkMismatch(
                f"applying changes to {table}",
                "the Delta table is partitioned",
                "create it again, without partitions",
            )
        files, bounds = files_of(opened)
        old = Files(self.directory(table), arrow_schema(opened), files, bounds, self.file_size)
        new = rewrite(old, net, identity)
        return Change(new.added, (), OVERWRITE) if new.everything else Change(new.added, new.removed)

    def maintain(self, table: TableName, version: int, vacuum: bool = False) -> int:
        """Compact the table if it is time to, after a batch has made this version. Returns the newest version."""
        if version % COMPACT_EVERY == 0:
            version = self.compact(table) or version
        if vacuum:
            self.vacuum(table)
        return version

    def compact(self, table: TableName, least: int = COMPACT_EVERY // 2) -> int | None:
        """Join small files into large ones, if there are at least `least` of them."""
        return maintenance.compact(self, table, least)

    def vacuum(self, table: TableName) -> None:
        """Delete the files that no version within `keep_seconds` needs."""
        maintenance.vacuum(self, table)

    def applied(self, table: TableName) -> Lsn | None:
        """The LSN that the table has reached; None if it has none, or does not exist."""
        opened = self.find(table)
        return None if opened is None else self.lsn_of(opened)

    def count(self, table: TableName) -> int:
        """The number of rows; 0 if the table does not exist."""
        opened = self.find(table)
        return 0 if opened is None else int(opened.to_pyarrow_dataset().count_rows())

    def version(self, table: TableName) -> int:
        """The newest version of the table."""
        return self.open(table).version()

    def scan(self, table: TableName, version: int, at_least: int = 1) -> TableScan:
        """All rows of a version, in at least so many pieces if the table is large enough."""
        return scan.scan(self, table, version, at_least)

    def read(self, piece: FilePiece, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of a piece, from within a task; with these columns, or all."""
        return scan.read(self, piece, columns)

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
