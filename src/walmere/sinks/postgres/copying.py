"""The copy of a table into the target: many tasks, each with its own connection and transaction.

If the table is empty, ranges are copied straight into it, and each commits on its own: a crash is undone by removing
the rows of these transactions. Otherwise (it is copied again, or has rows of its own) ranges are copied to an unlogged
staging table, and one transaction moves all rows: readers see the old rows until then. So it is with triggers that
fire: what they do elsewhere cannot be undone, and those of a statement must fire once.

A crash of the target's server empties unlogged tables, but not the record of their ranges. So beside the staging table
there is another unlogged table, whose one row is missing then: the copy fails, and begins again.

A range is recorded in the transaction that copies it, so an attempt that is repeated does nothing. An attempt of an
older copy finds that its copy is not the current one any more.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Protocol

from psycopg.sql import SQL, Composable, Identifier

from walmere.errors import SinkConflict, SinkUnavailable
from walmere.libpq import Address
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.owner import Owner
from walmere.sinks.postgres import origin
from walmere.sinks.postgres.connect import Connection, connect
from walmere.sinks.postgres.errors import translate_errors
from walmere.sinks.postgres.relation import TargetRelation, missing_table, read_relations
from walmere.sinks.postgres.staged_copy import empty, insert_rows, replace_rows
from walmere.sinks.postgres.state import State
from walmere.sinks.postgres.statements import copy_into

_CREATED, _DIRECT, _STAGED = "created", "direct", "staged"


class Creation(Protocol):
    """How a table is created: its statements, from the source's catalogs."""

    @property
    def types(self) -> tuple[str, ...]:
        """The statements that create the types of its columns, if they do not exist."""

    @property
    def create(self) -> tuple[str, ...]:
        """The statements that create it."""

    @property
    def after(self) -> tuple[str, ...]:
        """Those that follow when its rows are there."""

    @property
    def added(self) -> Mapping[str, str]:
        """By name, the definition of a column that is added later: its default is the value of existing rows."""

    @property
    def defaults(self) -> Mapping[str, str]:
        """By name, the default of a column for new rows."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A running copy of one table. It pickles."""

    address: Address
    state: State
    table: TableName
    names: tuple[str, ...]  # of the columns
    number: str
    direct: bool
    created: bool = False  # the table was created for this copy, or for one that has failed
    after: tuple[str, ...] = ()  # statements after the rows are copied
    use_origin: bool = False

    @property
    def stored(self) -> str:
        """As `tables.copy` has it."""
        kind = _STAGED if not self.direct else _CREATED if self.created else _DIRECT
        return f"{kind}:{self.number}"

    @property
    def into(self) -> Composable:
        """The table that ranges are copied to."""
        return Identifier(*self.table) if self.direct else _staging(self.state, self.number)

    def copy_range(self, name: str, text: Iterable[bytes]) -> None:
        """Copy one range, from within a task: COPY's text, in pieces."""
        doing = f"copying to the target's table {self.table}"
        with (
            translate_errors(self.address, doing),
            closing(connect(self.address, f"walmere {self.state.subscription} copy")) as connection,
            connection.transaction(),
        ):
            self._require_current(connection, doing, "FOR SHARE")
            done = connection.execute(
                self.state.sql(
                    "INSERT INTO {schema}.copied_ranges VALUES ($1, $2, pg_current_xact_id()) ON CONFLICT DO NOTHING"
                ),
                [self.number, name],
            )
            if done.rowcount:
                with connection.cursor() as cursor, cursor.copy(copy_into(self.into, self.names)) as copy:
                    for piece in text:
                        copy.write(piece)
                self._mark(connection)

    def finish(self, lsn: Lsn) -> int:
        """Make the copy the contents of the table, at this LSN. Returns the table's version."""
        doing = f"committing the copy of {self.table}"
        with (
            translate_errors(self.address, doing),
            closing(connect(self.address, f"walmere {self.state.subscription} copy")) as connection,
            connection.transaction(),
        ):
            copied_before = self._require_current(connection, doing, "FOR UPDATE")
            if not self.direct:
                self._require_staged(connection, doing)
                relation = read_relations(connection, [self.table])[self.table]
                if copied_before:
                    kept = Identifier(self.state.schema, f"copy_{self.number}_kept")
                    replace_rows(connection, relation, self.into, self.names, kept)
                else:
                    insert_rows(connection, relation, self.into, self.names)
                _drop_staging(connection, self.state, self.number)
            for statement in self.after:
                connection.execute(statement.encode())
            versions = self.state.advance(connection, [(self.table, lsn)])
            self._end(connection)
            self._mark(connection)
        return versions[self.table]

    def _mark(self, connection: Connection) -> None:
        """Let the commit have an origin, so that a publication with origin = none does not publish the rows.

        Others that commit wait until the connection is closed.
        """
        if self.use_origin:
            origin.set_up(connection, origin.of_copies(self.state.subscription))

    def abandon(self) -> None:
        """Leave nothing behind of a copy that has failed."""
        with (
            translate_errors(self.address, f"removing the rows of a failed copy of {self.table}"),
            closing(connect(self.address, f"walmere {self.state.subscription} copy")) as connection,
            suppress(SinkConflict),
            connection.transaction(),
        ):
            self._require_current(connection, "removing the rows of a failed copy", "FOR UPDATE")
            undo(connection, self.state, self.table, self.stored)
            if self.created:
                _drop_if_empty(connection, self.table)
            self._end(connection)

    def _require_current(self, connection: Connection, doing: str, lock: str) -> bool:
        """Raise SinkConflict if another copy has begun. Returns whether the table was copied before."""
        stored = self.state.read(connection, [self.table], f"{lock} OF t").get(self.table)
        if stored is None or stored.copy != self.stored:
            raise SinkConflict(doing, "another copy of the table has begun since")
        return stored.copied

    def _require_staged(self, connection: Connection, doing: str) -> None:
        """Raise SinkUnavailable if the staging table was emptied since the copy began."""
        query = SQL("SELECT FROM {}").format(_marker(self.state, self.number))
        if not connection.execute(query).fetchall():
            wrong = "a crash of the target's server has emptied the staging table"
            raise SinkUnavailable(doing, wrong, "no action needed: the table is copied again")

    def _end(self, connection: Connection) -> None:
        connection.execute(
            self.state.sql(
                "UPDATE {schema}.tables SET copy = NULL WHERE subscription = $1 AND schema = $2 AND name = $3"
            ),
            [self.state.subscription, *self.table],
        )
        connection.execute(self.state.sql("DELETE FROM {schema}.copied_ranges WHERE copy = $1"), [self.number])


def begin(
    address: Address,
    state: State,
    table: TableName,
    names: Sequence[str],
    owner: Owner | None,
    definition: Creation | None,
) -> Copy:
    """Begin the copy of a table. Rows of an earlier copy that was interrupted are removed.

    `definition`: how to create the table, or its columns, if they are missing; None: that is an error.
    """
    doing = f"preparing the copy of {table}"
    with (
        translate_errors(address, doing),
        closing(connect(address, f"walmere {state.subscription} copy")) as connection,
    ):
        state.create(connection)
        use_origin = origin.may_use(connection)
        if use_origin:
            origin.reserve(connection, state.subscription)
        with connection.transaction():
            state.put(connection, table, owner)
            stored = state.read(connection, [table], "FOR UPDATE OF t")[table]
            relation = read_relations(connection, [table]).get(table)
            created = definition is not None and (relation is None or (stored.copy or "").startswith(_CREATED))
            if definition is not None:
                with translate_errors(address, doing, of_rows=False):
                    _create(connection, relation, names, definition)
                relation = read_relations(connection, [table]).get(table)
            if relation is None:
                raise missing_table(table, doing)
            relation.require(names, doing)
            if stored.copy is not None:
                undo(connection, state, table, stored.copy)
            [row] = connection.execute(SQL("SELECT EXISTS(SELECT FROM {})").format(relation.only)).fetchall()
            direct = not row[0] and not relation.has_triggers
            copy = Copy(
                address,
                state,
                table,
                tuple(names),
                secrets.token_hex(8),
                direct,
                created,
                definition.after if created and definition is not None else (),
                use_origin,
            )
            if not direct:
                columns = SQL(", ").join(map(Identifier, names))
                query = SQL("CREATE UNLOGGED TABLE {} AS SELECT {} FROM {} WITH NO DATA")
                connection.execute(query.format(copy.into, columns, relation.sql))
                query = SQL("CREATE UNLOGGED TABLE {} AS SELECT true AS whole")
                connection.execute(query.format(_marker(state, copy.number)))
            connection.execute(
                state.sql("UPDATE {schema}.tables SET copy = $4 WHERE subscription = $1 AND schema = $2 AND name = $3"),
                [state.subscription, *table, copy.stored],
            )
    return copy


def _create(
    connection: Connection, relation: TargetRelation | None, names: Sequence[str], definition: Creation
) -> None:
    # two that create the same schema or type at once would fail in the catalogs
    connection.execute("SELECT pg_advisory_xact_lock(hashtext('walmere'), hashtext('create_tables'))")
    if relation is None:
        for statement in (*definition.types, *definition.create):
            connection.execute(statement.encode())
        return
    add_columns(connection, relation, [name for name in names if name not in relation.columns], definition)


def add_columns(connection: Connection, relation: TargetRelation, names: Sequence[str], definition: Creation) -> None:
    """Add columns to a table, and their types."""
    for statement in definition.types if names else ():
        connection.execute(statement.encode())
    for name in names:
        column = SQL(definition.added[name])
        connection.execute(SQL("ALTER TABLE {} ADD COLUMN {}").format(relation.sql, column))
        default = definition.defaults.get(name)
        change = SQL("DROP DEFAULT") if default is None else SQL("SET DEFAULT ") + SQL(default)
        connection.execute(SQL("ALTER TABLE {} ALTER COLUMN {} {}").format(relation.sql, Identifier(name), change))


def undo(connection: Connection, state: State, table: TableName, copy: str) -> None:
    """Remove what an unfinished copy has written."""
    kind, _, number = copy.partition(":")
    relation = read_relations(connection, [table]).get(table)
    if kind in (_CREATED, _DIRECT) and relation is not None:
        _remove_copied(connection, state, relation, number)
    elif kind == _STAGED:
        _drop_staging(connection, state, number)
    connection.execute(state.sql("DELETE FROM {schema}.copied_ranges WHERE copy = $1"), [number])


def _remove_copied(connection: Connection, state: State, relation: TargetRelation, number: str) -> None:
    """Remove the rows of a copy. Others may have written to the table since: their rows stay."""
    query = state.sql("SELECT array_agg(xid::xid::text) FROM {schema}.copied_ranges WHERE copy = $1")
    [row] = connection.execute(query, [number]).fetchall()
    if row[0] is None:
        return
    connection.execute(SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(relation.only))
    others = SQL("SELECT EXISTS(SELECT FROM {} WHERE xmin <> ALL($1::text[]::xid[]))").format(relation.only)
    [(has_others,)] = connection.execute(others, [row[0]]).fetchall()
    if has_others:
        connection.execute(SQL("DELETE FROM {} WHERE xmin = ANY($1::text[]::xid[])").format(relation.only), [row[0]])
    else:
        empty(connection, relation)


def _drop_if_empty(connection: Connection, table: TableName) -> None:
    """Drop a table that was created for a copy, unless others have written rows to it."""
    if (relation := read_relations(connection, [table]).get(table)) is None:
        return
    connection.execute(SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(relation.only))
    [(has_rows,)] = connection.execute(SQL("SELECT EXISTS(SELECT FROM {})").format(relation.only)).fetchall()
    if not has_rows:
        connection.execute(SQL("DROP TABLE {}").format(relation.sql))


def _staging(state: State, number: str) -> Identifier:
    return Identifier(state.schema, f"copy_{number}")


def _marker(state: State, number: str) -> Identifier:
    """The table whose row is there as long as no crash has emptied the staging table."""
    return Identifier(state.schema, f"copy_{number}_whole")


def _drop_staging(connection: Connection, state: State, number: str) -> None:
    names = SQL(", ").join([_staging(state, number), _marker(state, number)])
    connection.execute(SQL("DROP TABLE IF EXISTS {}").format(names))
