"""The PostgreSQL sink: tables of another database, written as PostgreSQL's own subscriber writes them.

`walmere.sinks.base` has the contract. The parts:

    connect       connections, and errors of the target's server
    state         what Walmere stores in the target; `origin` is the replication origin
    relation      the target's tables, as its catalogs describe them
    copying       the copy of a table; `staged_copy` is its last step, if it was staged
    transaction   one transaction for a batch of all tables
    statements    changes by sets of rows
    rows/         changes one by one
    text          Arrow columns as COPY's text, and as parameters
    scan          reads a table, for `walmere verify`

A table has no old versions: a point can be read only while it is the newest. `version` counts the commits to a table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from psycopg.sql import SQL, Identifier

from walmere.errors import SinkMismatch
from walmere.ledger.entry import Entry
from walmere.libpq import Address, self_contained
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.owner import Owner, owned_by_another
from walmere.sinks.base import Extent, Standing, TableScan, Upkeep, UpkeepWork
from walmere.sinks.postgres import copying, origin, prepared, transaction
from walmere.sinks.postgres import scan as scanning
from walmere.sinks.postgres.connect import Connection, connect
from walmere.sinks.postgres.copying import Copy, Creation
from walmere.sinks.postgres.errors import translate_errors
from walmere.sinks.postgres.relation import (
    TargetRelation,
    missing_columns,
    missing_table,
    read_relations,
    require_creation,
)
from walmere.sinks.postgres.state import State, StoredTable
from walmere.sinks.postgres.transaction import TargetTransaction


class NoPoints:
    """A database has only its newest point, which needs no record."""

    def append(self, point: Entry) -> None: ...


@dataclass(frozen=True, slots=True)
class PostgresSink:
    """A database as a target. The methods are described in `Sink`."""

    address: Address
    subscription: str
    schema: str = "walmere"
    on_conflict: str = "stop"
    create_tables: bool = False
    owner: Owner | None = None
    take_over: bool = False
    snapshot: str | None = None  # read in this snapshot
    two_phase: bool = False  # prepare transactions that the source has prepared

    @property
    def keep_seconds(self) -> float:
        """A version cannot be read after it was replaced."""
        return 0.0

    @property
    def batch_interval(self) -> float:
        """Seconds between the beginnings of two batches: a transaction is cheap."""
        return 0.1

    @property
    def spreads(self) -> bool:
        """One task applies a batch of all tables."""
        return False

    @property
    def transactional(self) -> bool:
        """A batch of all tables is one transaction."""
        return True

    @property
    def state(self) -> State:
        """What is stored in the target."""
        return State(self.schema, self.subscription)

    def owned_by(self, owner: Owner, *, take_over: bool = False) -> PostgresSink:
        """The same sink, writing for this owner."""
        return replace(self, owner=owner, take_over=take_over)

    def portable(self) -> PostgresSink:
        """The same sink, for tasks on other machines: they do not have this machine's password file."""
        return replace(self, address=self_contained(self.address))

    @contextmanager
    def connection(self, doing: str) -> Iterator[Connection]:
        """A connection whose errors are those of a sink."""
        with translate_errors(self.address, doing), closing(connect(self.address, "walmere")) as connection:
            yield connection

    def require_tables(self, tables: Mapping[TableName, Sequence[str]]) -> None:
        """Raise if a table is missing, lacks one of these columns, or may not be written to or created."""
        doing = "checking the tables of the target"
        with self.connection(doing) as connection:
            if not self.state.exists(connection):
                require_creation(connection, self.schema, f"schema {self.schema}, or tables in it", doing)
            found = read_relations(connection, list(tables))
            for table, names in tables.items():
                self.require_table(connection, table, names, found.get(table), doing)

    def require_table(
        self,
        connection: Connection,
        table: TableName,
        names: Sequence[str],
        relation: TargetRelation | None,
        doing: str,
    ) -> None:
        """Raise if a table cannot take these columns, or is missing and cannot be created."""
        if relation is not None:
            present = [name for name in names if name in relation.columns]
            relation.require(present if self.create_tables else names, doing)
        elif self.create_tables:
            require_creation(connection, table.namespace, f"the table {table}", doing)
        else:
            raise missing_table(table, doing)

    def claim(self, table: TableName) -> bool:
        """Make sure that what is stored for a table belongs to the owner; or take it over, and return True."""
        doing = f"reading what is stored for {table} in the target"
        stored = self._stored(table)
        if stored is None or self.owner is None or (stored.owner is not None and stored.owner.same(self.owner)):
            return False
        if stored.owner is not None and not self.take_over:
            raise owned_by_another(doing, f"the table {table} of the target", stored.owner)
        with self.connection(doing) as connection:
            connection.execute(
                self.state.sql(
                    "UPDATE {schema}.tables SET owner = $4, lsn = '0/0'"
                    " WHERE subscription = $1 AND schema = $2 AND name = $3"
                ),
                [self.subscription, *table, self.owner.to_json()],
            )
        return True

    def claim_points(self, subscription: str) -> None:
        """A database has no points of its own."""

    def tables_of_others(self, subscription: str) -> Mapping[str, str]:  # noqa: ARG002
        """Several subscriptions may write to one table, as in PostgreSQL."""
        return {}

    def _stored(self, table: TableName) -> StoredTable | None:
        with self.connection(f"reading what is stored for {table} in the target") as connection:
            return self.state.read(connection, [table]).get(table) if self.state.exists(connection) else None

    def standing(self, table: TableName) -> Standing | None:
        """Version, LSN and owner of a table; None if it does not exist, or nothing was written to it."""
        stored = self._stored(table)
        return None if stored is None else Standing(stored.version, stored.lsn, stored.owner, ())

    def columns(self, schema: pa.Schema) -> tuple[tuple[str, str], ...]:  # noqa: ARG002
        """The target's columns are not compared: they may have other types."""
        return ()

    def changed_by_others(self, table: TableName, after: int, upto: int) -> str | None:  # noqa: ARG002
        """Others may write to the target, as in PostgreSQL."""
        return None

    def begin_copy(self, table: TableName, names: Sequence[str], definition: Creation | None = None) -> Copy:
        """Begin the copy of a table: see `copying.begin`."""
        return copying.begin(
            self.address, self.state, table, names, self.owner, definition if self.create_tables else None
        )

    @contextmanager
    def transaction(self, tables: Sequence[TableName], *, prepares: bool = False) -> Iterator[TargetTransaction]:
        """A transaction that applies a batch to these tables. `commit_transaction` ends it.

        `prepares`: `prepare_transaction` ends it.
        """
        with transaction.begin(self.address, self.state, self.on_conflict, tables, prepares=prepares) as begun:
            yield begun

    def prepare_transaction(self, begun: TargetTransaction, gid: str, tables: list[TableName], end_lsn: Lsn) -> None:
        """End a transaction by PREPARE TRANSACTION."""
        begun.delete_repeated_conflicts()
        transaction.stamp(begun, end_lsn)
        prepared.prepare(begun.connection, self.state, gid, tables)

    def finish_prepared(self, gid: str, *, commit: bool, end_lsn: Lsn) -> list[TableName] | None:
        """Commit or roll back a prepared transaction. Returns the tables of a committed one."""
        with transaction.session(self.address, self.state) as (connection, use_origin):
            if use_origin:
                origin.stamp(connection, end_lsn, "epoch")
            prepared.finish(connection, gid, commit=commit)
            return prepared.committed_tables(connection, self.state, gid)

    def commit_transaction(
        self, begun: TargetTransaction, end_lsn: Lsn, commit_time: str | None
    ) -> Mapping[TableName, int]:
        """Store the LSNs of the tables, and commit. Returns their versions."""
        return transaction.commit(begun, end_lsn, commit_time)

    def alter(
        self, table: TableName, definition: Creation, renamed: Mapping[str, str], added: Collection[str] = ()
    ) -> int | None:
        """Make sure that a table has the columns of a definition. Returns its version; None: it has to be copied again.

        `renamed`: old names by new ones. If the table has columns of both names, their values are not known: somebody
        may have added one instead of renaming the other.

        `added`: the names of new columns. If the table has a column of such a name already, it may be that of a column
        which the source has dropped, so it has other values in the existing rows. Without `create_tables`, somebody has
        added it, as the error for missing columns says.
        """
        doing = f"altering the target's table {table}"
        columns = definition.added
        with self.connection(doing) as connection:
            relation = read_relations(connection, [table]).get(table)
            if relation is None:
                raise missing_table(table, doing)
            missing = [name for name in columns if name not in relation.columns]
            renamed = {name: old for name, old in renamed.items() if old in relation.columns}
            if missing and not self.create_tables:
                raise missing_columns(table, missing, doing, columns, renamed)
            moved = {name: old for name, old in renamed.items() if name in missing}
            moved = {name: old for name, old in moved.items() if old not in columns or old in added}
            freed = moved.values()  # a new column may have the old name of another one
            had = [name for name in added if name in relation.columns and name not in freed]
            if (had and self.create_tables) or any(name in relation.columns for name in renamed):
                return None
            new = [name for name in columns if name in freed or (name in missing and name not in moved)]
            with translate_errors(self.address, doing, of_rows=False), connection.transaction():
                for name, old in moved.items():
                    rename = SQL("ALTER TABLE {} RENAME COLUMN {} TO {}")
                    connection.execute(rename.format(relation.sql, Identifier(old), Identifier(name)))
                copying.add_columns(connection, relation, new, definition)
            stored = self.state.read(connection, [table]).get(table)
        return 0 if stored is None else stored.version

    def extent(self, table: TableName) -> Extent | None:  # noqa: ARG002
        """The server knows how large its tables are."""
        return None

    def plan_upkeep(self, table: TableName, identity: Identity | None, limits: Upkeep) -> Sequence[UpkeepWork]:  # noqa: ARG002
        """Autovacuum does it."""
        return ()

    def rewrite_files(self, work: Any) -> Any:
        """There are none."""
        return work

    def replace_files(self, table: TableName, done: Sequence[Any]) -> int | None:  # noqa: ARG002
        """There are none."""
        return None

    def vacuum(self, table: TableName) -> None:
        """Autovacuum does it."""

    def applied(self, table: TableName) -> Lsn | None:
        """The LSN that the table has reached; None if it has none."""
        stored = self._stored(table)
        return None if stored is None else stored.lsn

    def count(self, table: TableName) -> int:
        """The number of rows; 0 if the table does not exist."""
        with self.connection(f"counting the rows of {table}") as connection:
            relation = read_relations(connection, [table]).get(table)
            if relation is None:
                return 0
            [row] = connection.execute(SQL("SELECT count(*) FROM {}").format(relation.only)).fetchall()
            return int(row[0])

    def version(self, table: TableName) -> int:
        """How often the table was committed to."""
        stored = self._stored(table)
        if stored is None:
            raise SinkMismatch(f"reading what is stored for {table} in the target", f"{table} is not mirrored there")
        return stored.version

    @contextmanager
    def pinned(self) -> Iterator[PostgresSink]:
        """Reads in a snapshot of the database, which lasts as long as the context."""
        with self.connection("exporting a snapshot of the target") as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            [row] = connection.execute("SELECT pg_export_snapshot()").fetchall()
            yield replace(self, snapshot=row[0])

    def scan(self, table: TableName, version: int, at_least: int = 1) -> TableScan:  # noqa: ARG002
        """All rows as they are now, or in the snapshot of `pinned`; in pieces, if the table is large enough."""
        return scanning.scan(self.address, self.snapshot, table, at_least)

    def copy_text(self, piece: scanning.Piece, columns: Mapping[str, str]) -> Iterator[bytes]:
        """The rows of a piece as COPY's text, from within a task: these columns, each as a type of the source."""
        return scanning.copy_text(self.address, piece, columns)

    def open_ledger(self, subscription: str, entries: Iterable[Entry]) -> NoPoints:  # noqa: ARG002
        """A database has only its newest point."""
        return NoPoints()

    def points(self, subscription: str) -> Sequence[Entry]:  # noqa: ARG002
        """None: see `open_ledger`."""
        return ()

    def conflicts(self) -> Mapping[str, int]:
        """How many conflicts each table has had."""
        with self.connection("reading the conflicts of the target") as connection:
            return self.state.conflicts(connection) if self.state.exists(connection) else {}

    def drop(self) -> list[str]:
        """Remove what Walmere stores in the target: staged copies, state, origins. Tables and rows stay."""
        done: list[str] = []
        with self.connection("removing the subscription from the target") as connection:
            rolled_back = prepared.roll_back_all(connection, self.state)
            done += [f"rolled back prepared transaction {gid}" for gid in rolled_back]
            if self.state.exists(connection):
                for table, copy in self.state.unfinished(connection).items():
                    with connection.transaction():
                        copying.undo(connection, self.state, table, copy)
                    done.append(f"removed the unfinished copy of {table}")
                done += self.state.forget(connection)
            if origin.may_use(connection):
                done += [f"dropped replication origin {name}" for name in origin.drop(connection, self.subscription)]
        return done
