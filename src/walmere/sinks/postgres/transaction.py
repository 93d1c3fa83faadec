"""One transaction of the target: it applies a batch of all tables, and stores how far they are.

A reader of the target sees the whole batch or nothing of it. A batch ends between two transactions of the source, so
nobody sees half of one.

Each table is changed by sets of rows (`statements`), inside a savepoint. If that fails, or a row is missing in the
target, the savepoint is undone, and the table's changes are applied row by row (`rows`), which says what was in the
way. So are tables with triggers, always. New rows go by COPY straight into their table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg
from psycopg.sql import SQL

from walmere.errors import Conflict, WalmereError
from walmere.libpq import Address
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import Identity, TableName
from walmere.sinks.postgres import origin
from walmere.sinks.postgres.connect import Connection, reused
from walmere.sinks.postgres.errors import is_in_function, is_session_error, translate_errors, without_values
from walmere.sinks.postgres.relation import TargetRelation, linked, read_relations, require_same
from walmere.sinks.postgres.rows.apply import RowMode, apply_rows
from walmere.sinks.postgres.rows.block import written_by_others
from walmere.sinks.postgres.rows.changes import MARK, RowChanges, TruncateRows
from walmere.sinks.postgres.rows.conflicts import delete_repeated, record_conflict
from walmere.sinks.postgres.rows.refused import Refused, conflict_of
from walmere.sinks.postgres.state import State, StoredTable
from walmere.sinks.postgres.statements import RowSet, Statement, restrict_plans


class _RowsMissing(Exception):
    """The target lacks rows that are updated or deleted, or others have written them."""


@dataclass(slots=True)
class TargetTransaction:
    """An open transaction."""

    connection: Connection
    state: State
    on_conflict: str
    relations: Mapping[TableName, TargetRelation]
    stored: Mapping[TableName, StoredTable]
    use_origin: bool
    linked: Set[TableName] = frozenset()  # tables that depend on each other by foreign keys
    our_origins: Sequence[int] | None = None  # None: the server does not track who has written a row last
    prepares: bool = False  # it will be prepared
    reached: dict[TableName, Lsn] = field(default_factory=dict)
    refused: set[TableName] = field(default_factory=set)  # tables whose refused rows were skipped or overwritten

    def apply_set(self, rows: RowSet) -> bool:
        """Apply a net effect by sets of rows. Returns False if that is not possible: nothing was changed then."""
        try:
            with self.connection.transaction():
                for statement in rows.statements:
                    self._change(statement)
                if rows.copy is not None:
                    with self.connection.cursor() as cursor, cursor.copy(rows.copy) as copy:
                        for piece in rows.copied:
                            copy.write(piece)
        except _RowsMissing:
            return False
        except psycopg.Error as error:
            if is_session_error(error):
                raise
            return False
        return True

    def _change(self, statement: Statement) -> None:
        if statement.by_index:
            self.connection.execute(restrict_plans(to_index=True))
        if self._written_by_others(statement):
            raise _RowsMissing
        done = self.connection.execute(statement.query, statement.parameters)
        if done.rowcount < statement.rows:
            raise _RowsMissing
        if statement.by_index:  # not for other statements, nor for triggers
            self.connection.execute(restrict_plans(to_index=False))

    def insert_defaults(self, table: TableName, count: int) -> bool:
        """Insert rows of a table of which no column is published. Returns False if the target refuses them."""
        query = SQL("INSERT INTO {} SELECT FROM generate_series(1, {})").format(self.relations[table].sql, count)
        return self.apply_set(RowSet([Statement(query, (), 0, by_index=False)], None, ()))

    def _written_by_others(self, statement: Statement) -> bool:
        """Whether rows that are changed were written last by others: then each of them is recorded."""
        if self.our_origins is None or statement.matches is None:
            return False
        query = SQL("SELECT EXISTS(SELECT {} AND {})").format(statement.matches, written_by_others(self.our_origins))
        [row] = self.connection.execute(query, statement.parameters).fetchall()
        return bool(row[0])

    def truncation(self, tables: Sequence[TableName], *, cascade: bool, restart_identity: bool) -> str:
        """The statement that truncates tables."""
        names = SQL(", ").join(self.relations[each].only for each in tables)
        more = (" RESTART IDENTITY" if restart_identity else "") + (" CASCADE" if cascade else "")
        return (SQL("TRUNCATE {} {}").format(MARK, names) + SQL(more)).as_string(self.connection)

    def truncate(self, tables: Sequence[TableName], truncate: TruncateRows) -> None:
        """Truncate tables. Raises Conflict if the target refuses it."""
        try:
            with self.connection.transaction():
                self.execute(truncate.statement)
        except psycopg.Error as error:
            if is_session_error(error):
                raise
            require_same(self.connection, [(table, ()) for table in tables])
            refused = Refused(
                conflict="truncate_failed",
                relation=truncate.tables[0],
                key=None,
                constraint=error.diag.constraint_name,
                message=without_values(error),
                sqlstate=error.sqlstate or "",
                commit_lsn=truncate.commit_lsn,
                in_function=is_in_function(error),
                tables=truncate.tables,
            )
            raise conflict_of(refused, on_conflict=None) from None

    def execute(self, statement: str) -> None:
        """Run a statement."""
        self.connection.execute(statement.encode())

    def apply_rows(self, changes: Sequence[RowChanges], truncates: Sequence[TruncateRows]) -> None:
        """Apply changes row by row, in the order of the source."""
        if changes or truncates:
            mode = RowMode(self.on_conflict, self.our_origins, self.prepares)
            if apply_rows(self.connection, self.state, changes, truncates, mode) and self.on_conflict != "stop":
                self.refused |= {each.relation.table for each in changes}

    def delete_repeated_conflicts(self) -> None:
        """Delete the lines of conflicts that an earlier try has written already. Call it before the end."""
        if self.refused:
            stored = (self.stored.get(table) for table in self.refused)
            applied = min((each and each.lsn) or INVALID_LSN for each in stored)
            delete_repeated(self.connection, self.state, self.refused, applied)

    def one_by_one(self, table: TableName, identity: Identity, names: Sequence[str]) -> bool:
        """Whether the changes of a table, which have these columns, must be applied row by row."""
        relation = self.relations[table]
        if relation.fires or relation.deferred or table in self.linked:
            return True
        if identity.multiset:  # an update by sets is a delete and an insert, which would lose local columns
            return bool(relation.local(names))
        return identity.keyed and not relation.is_unique(identity)


@contextlib.contextmanager
def begin(
    address: Address, state: State, on_conflict: str, tables: Sequence[TableName], *, prepares: bool = False
) -> Iterator[TargetTransaction]:
    """A transaction that has locked what is stored for these tables. It must be ended by `commit`.

    `prepares`: it will be prepared, and locks nothing.
    """
    with session(address, state) as (connection, use_origin):
        connection.execute("BEGIN")
        stored = state.read(connection, tables, "" if prepares else "FOR UPDATE OF t")
        our_origins = origin.ours(connection, state.subscription) if use_origin else None
        relations = read_relations(connection, tables)
        rest = (use_origin, linked(relations.values()), our_origins, prepares)
        try:
            yield TargetTransaction(connection, state, on_conflict, relations, stored, *rest)
        except Conflict as error:  # its line is written before another session can apply the changes
            with suppress(psycopg.Error):
                connection.execute("ROLLBACK")
                record_conflict(connection, state, error)
            raise
        if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            connection.execute("ROLLBACK")


@contextlib.contextmanager
def session(address: Address, state: State) -> Iterator[tuple[Connection, bool]]:
    """A session that uses the subscription's origin, if the role may; and whether it does.

    Only one session applies changes at a time: a task that was given up may still be in its transaction, and even
    prepare it. The origin keeps the others out, or else an advisory lock.
    """
    doing = "applying changes to the target"
    with translate_errors(address, doing), reused(address, f"walmere {state.subscription} apply") as connection:
        use_origin = origin.may_use(connection)
        if use_origin:
            origin.set_up(connection, origin.name_of(state.subscription))
        else:
            state.lock(connection)
        yield connection, use_origin
        if use_origin:
            origin.reset(connection)
        else:
            state.unlock(connection)


def stamp(transaction: TargetTransaction, lsn: Lsn, commit_time: str | None = None) -> None:
    """Let the end of the transaction advance the origin."""
    if transaction.use_origin:
        origin.stamp(transaction.connection, lsn, commit_time or "epoch")


def commit(transaction: TargetTransaction, end_lsn: Lsn, commit_time: str | None) -> dict[TableName, int]:
    """Store the LSNs of the tables, and commit. Returns their versions."""
    if not transaction.reached:
        return {}
    versions = transaction.state.advance(transaction.connection, transaction.reached.items())
    if set(versions) != set(transaction.reached):
        raise WalmereError("committing to the target", "the rows of its tables are not stored there any more")
    transaction.delete_repeated_conflicts()
    stamp(transaction, end_lsn, commit_time)
    transaction.connection.execute("COMMIT")
    return versions
