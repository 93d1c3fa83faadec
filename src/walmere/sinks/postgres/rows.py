"""Changes that are applied row by row, in the order of the source, by one PL/pgSQL block on the target's server.

This is for what sets of rows cannot do as PostgreSQL's own subscriber does:

- tables with triggers or rules that are enabled for a subscriber: each change has to fire them, in order;
- tables in which a key can have several rows, of which one is changed;
- a set that failed: two rows that swap a unique value violate the constraint in passing, and one that really violates
  it has to be named.

All changes go to one temporary table of the session, with their values as arrays of text. The block loops over it. So
rows are not sent back and forth, and tables are changed in the order of the source, also among each other. (A
transaction that has used a temporary table cannot be prepared: then it is a table of Walmere's schema.)

A row that violates a constraint ends the block with an error that names it; or it is skipped, or replaces the rows that
are in its way (`on_conflict`). This needs a subtransaction for each row, so it is done only after a first try failed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import psycopg
import pyarrow as pa
from numpy.typing import NDArray
from psycopg.sql import SQL, Composable, Composed, Identifier
from psycopg.sql import Literal as SqlLiteral

from walmere.errors import Conflict
from walmere.lsn import Lsn
from walmere.names import Identity
from walmere.sinks.postgres.connect import Connection
from walmere.sinks.postgres.relation import TargetColumn, TargetRelation
from walmere.sinks.postgres.state import STAGED_COLUMNS, State
from walmere.sinks.postgres.text import array_rows, copy_text

_STAGING: Final = f"CREATE TEMP TABLE IF NOT EXISTS walmere_changes ({STAGED_COLUMNS}) ON COMMIT DELETE ROWS"
_CONFLICT: Final = "WALCF"
"""The SQLSTATE of an error that names a conflict."""


@dataclass(frozen=True, slots=True)
class RowChanges:
    """Changes of one table in order, their values as text. A TRUNCATE has a statement, and belongs to no table."""

    relation: TargetRelation
    identity: Identity
    kind: NDArray[np.uint8]  # I, U, D
    new: pa.Table
    unchanged: Sequence[NDArray[np.bool_] | None]
    old: pa.Table  # by which a row is found: its key, or of a multiset the whole row
    commit_lsn: NDArray[np.uint64]
    sequence: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class TruncateRows:
    """A TRUNCATE of several tables."""

    statement: str
    commit_lsn: int
    sequence: int


def apply_rows(
    connection: Connection,
    state: State,
    changes: Sequence[RowChanges],
    truncates: Sequence[TruncateRows],
    on_conflict: str,
    our_origins: Sequence[int] | None = None,
    *,
    prepares: bool = False,
) -> None:
    """Apply changes row by row, in the transaction of the connection. Raises Conflict.

    `our_origins`: record changes of rows that others have written last; None: the server cannot tell. `prepares`:
    whether the transaction will be prepared.
    """
    staging = Identifier(state.schema, "staged_changes") if prepares else Identifier("pg_temp", "walmere_changes")
    if not prepares:
        connection.execute(_STAGING)
        connection.execute(SQL("TRUNCATE {}").format(staging))  # of an earlier try in this transaction
    copy_in = SQL("COPY {} FROM STDIN").format(staging)
    with connection.cursor() as cursor, cursor.copy(copy_in) as copy:
        for number, each in enumerate(changes):
            for piece in copy_text(_staged(number, each)):
                copy.write(piece)
        for piece in copy_text(_staged_truncates(truncates)):
            copy.write(piece)
    _run(connection, state, changes, staging, on_conflict, our_origins)
    if prepares:
        connection.execute(SQL("DELETE FROM {}").format(staging))


def _run(
    connection: Connection,
    state: State,
    changes: Sequence[RowChanges],
    staging: Identifier,
    on_conflict: str,
    our_origins: Sequence[int] | None,
) -> None:
    """Run the block. The first try has no subtransaction for each row."""
    try:
        with connection.transaction():
            connection.execute(_block(state, changes, staging, None, our_origins))
        return
    except psycopg.IntegrityError:
        pass
    try:
        with connection.transaction():
            connection.execute(_block(state, changes, staging, on_conflict, our_origins))
    except psycopg.Error as error:
        if error.sqlstate != _CONFLICT:
            raise
        raise _conflict(error) from None


def _staged_truncates(truncates: Sequence[TruncateRows]) -> pa.Table:
    """Rows of the temporary table whose new value is a statement."""
    count = len(truncates)
    statements = pa.array([each.statement.encode() for each in truncates], pa.binary())
    return pa.table(
        {
            "commit_lsn": _numbers(np.array([each.commit_lsn for each in truncates], np.int64)),
            "sequence": _numbers(np.array([each.sequence for each in truncates], np.int64)),
            "relation": _numbers(np.full(count, -1)),
            "kind": pa.array([b"T"] * count, pa.binary()),
            "old": pa.nulls(count, pa.binary()),
            "new": array_rows([statements]),
            "unchanged": pa.nulls(count, pa.binary()),
        }
    )


def _numbers(values: Any) -> pa.Array:
    """Numbers as text."""
    return pa.array(values).cast(pa.string()).cast(pa.binary())


def _staged(number: int, changes: RowChanges) -> pa.Table:
    count = len(changes.kind)
    unchanged = pa.nulls(count, pa.binary())
    if any(mask is not None for mask in changes.unchanged):
        unchanged = array_rows([_flags(mask, count) for mask in changes.unchanged])

    return pa.table(
        {
            "commit_lsn": _numbers(changes.commit_lsn.astype(np.int64)),
            "sequence": _numbers(changes.sequence.astype(np.int64)),
            "relation": _numbers(np.full(count, number)),
            "kind": pa.array(changes.kind.view("S1"), pa.binary()),
            "old": array_rows(changes.old.columns),
            "new": array_rows(changes.new.columns),
            "unchanged": unchanged,
        }
    )


def _flags(mask: NDArray[np.bool_] | None, count: int) -> pa.Array:
    return pa.array(np.where(np.zeros(count, np.bool_) if mask is None else mask, b"t", b"f"), pa.binary())


def _conflict(error: psycopg.Error) -> Conflict:
    found = json.loads(error.diag.message_detail or "{}")
    lsn = Lsn(found["commit_lsn"])
    row = "a row without a key" if found["key"] is None else f"the row with the key {found['key']}"
    wrong = (
        f"{found['conflict']} in {found['relation']}: {row} violates"
        f" {found['constraint'] or 'a constraint'} ({found['message']}); its transaction has the commit LSN {lsn}"
    )
    return Conflict(
        "applying changes to the target",
        wrong,
        f"change the row of the target that is in the way; or skip the whole transaction: `walmere skip -c … {lsn}`;"
        " or set target.on_conflict",
        error.diag.message_detail or "{}",
    )


def record_conflict(connection: Connection, state: State, conflict: Conflict) -> None:
    """Write a line for a conflict whose transaction was rolled back."""
    found = json.loads(conflict.found)
    connection.execute(
        state.sql(
            'INSERT INTO {schema}.conflicts (subscription, relation, conflict, key, "constraint", lsn, message)'
            " VALUES ($1, $2, $3, $4, $5, $6::pg_lsn, $7)"
        ),
        [
            state.subscription,
            *(found[name] for name in ("relation", "conflict", "key", "constraint")),
            str(Lsn(found["commit_lsn"])),
            found["message"],
        ],
    )


def _block(
    state: State,
    changes: Sequence[RowChanges],
    staging: Identifier,
    on_conflict: str | None,
    our_origins: Sequence[int] | None,
) -> Composed:
    branches = [
        SQL("WHEN {} THEN\n{}").format(number, _branch(each, state, on_conflict, our_origins))
        for number, each in enumerate(changes)
    ]
    body = SQL(
        "DECLARE r record; affected int8; failed_constraint text; failed_message text;\n"
        "BEGIN\n"
        "FOR r IN SELECT * FROM {} ORDER BY commit_lsn, sequence LOOP\n"
        "CASE r.relation WHEN -1 THEN EXECUTE (r.new)[1];\n{}\nEND CASE;\nEND LOOP;\nEND"
    ).format(staging, SQL("\n").join(branches))
    return SQL("DO {}").format(SqlLiteral(body.as_string(None)))


def _branch(
    changes: RowChanges, state: State, on_conflict: str | None, our_origins: Sequence[int] | None
) -> Composable:
    """The part of the block for one table."""
    relation, names = changes.relation, changes.new.column_names
    columns = [relation.columns[name] for name in names]
    new = [SQL(f"(r.new)[{place + 1}]::{column.type}") for place, column in enumerate(columns)]
    found = _found(changes)
    insert = SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE VALUES ({});").format(
        relation.sql, SQL(", ").join(map(Identifier, names)), SQL(", ").join(new)
    )
    missing = [
        SQL("GET DIAGNOSTICS affected = ROW_COUNT; IF affected = 0 THEN {} END IF;").format(
            _record(changes, state, SqlLiteral(what), SQL("NULL"), SQL("NULL"))
        )
        for what in ("update_missing", "delete_missing")
    ]
    update = (
        SQL("UPDATE {} AS t SET {} WHERE {};").format(relation.only, _assignments(columns, new), found) + missing[0]
    )
    always = [place for place, column in enumerate(columns) if column.identity == "a"]
    if always:  # SQL cannot update such a column: a row whose value changes is written again
        differs = SQL(" OR ").join(
            SQL("t.{} IS DISTINCT FROM {}").format(columns[place].sql, new[place]) for place in always
        )
        moved = SQL("EXISTS(SELECT FROM {} AS t WHERE {} AND ({}))").format(relation.only, found, differs)
        delete = SQL("DELETE FROM {} AS t WHERE {};").format(relation.only, found)
        update = SQL("IF {} THEN {} {} ELSE {} END IF;").format(moved, delete, insert, update)
    delete = SQL("DELETE FROM {} AS t WHERE {};").format(relation.only, found) + missing[1]
    guarded = [
        _guarded(changes, state, statement, what, on_conflict)
        for statement, what in ((insert, "insert_exists"), (update, "update_exists"), (delete, "delete"))
    ]
    if our_origins is not None:
        guarded[1:] = [
            SQL("IF EXISTS(SELECT FROM {} AS t WHERE {} AND {}) THEN {} END IF; {}").format(
                relation.only,
                found,
                written_by_others(our_origins),
                _record(changes, state, SqlLiteral(what), SQL("NULL"), SQL("NULL")),
                statement,
            )
            for statement, what in zip(guarded[1:], ("update_origin_differs", "delete_origin_differs"), strict=True)
        ]
    return SQL("IF r.kind = 'I' THEN {} ELSIF r.kind = 'U' THEN {} ELSE {} END IF;").format(*guarded)


def written_by_others(our_origins: Sequence[int]) -> Composable:
    """The condition for a row, as t, whose last writer was not Walmere."""
    numbers = SQL(", ").join(map(SqlLiteral, our_origins))
    return SQL("(pg_xact_commit_timestamp_origin(t.xmin)).roident <> ALL(ARRAY[{}]::oid[])").format(numbers)


def _found(changes: RowChanges) -> Composable:
    """The condition for the row that an UPDATE or DELETE changes: one row, also if several have the key."""
    relation = changes.relation
    places = {name: place + 1 for place, name in enumerate(changes.old.column_names)}
    # with the modifier of the target's column: it has rounded or padded the value when the row was written
    wanted = {name: SQL(f"(r.old)[{place}]::{relation.columns[name].compared}") for name, place in places.items()}

    def same(names: Sequence[str]) -> Composable:
        return SQL(" AND ").join(
            SQL("t.{} {} {}").format(Identifier(name), relation.columns[name].equals, wanted[name]) for name in names
        )

    if changes.identity.keyed:
        condition: Composable = same(changes.identity.key)
        if relation.is_unique(changes.identity):
            return condition
    else:
        here = SQL(", ").join(SQL("t.{}").format(Identifier(name)) for name in places)
        condition = SQL("ROW({})::text = ROW({})::text").format(here, SQL(", ").join(wanted.values()))
        # PostgreSQL compares whole rows: columns that are not published must be NULL
        for column in relation.local(places):
            condition = SQL("{} AND t.{} IS NULL").format(condition, column.sql)
        if relation.primary_key and set(relation.primary_key) <= set(places):
            condition = SQL("{} AND {}").format(same(relation.primary_key), condition)  # finds it by the index
    return SQL("(t.tableoid, t.ctid) = (SELECT t.tableoid, t.ctid FROM {} AS t WHERE {} LIMIT 1)").format(
        relation.only, condition
    )


def _assignments(columns: Sequence[TargetColumn], new: Sequence[Composable]) -> Composable:
    return SQL(", ").join(
        SQL("{0} = CASE WHEN (r.unchanged)[{1}] THEN t.{0} ELSE {2} END").format(column.sql, place + 1, value)
        for place, (column, value) in enumerate(zip(columns, new, strict=True))
        if column.identity != "a"
    ) or SQL("{0} = t.{0}").format(columns[0].sql)


def _key(changes: RowChanges) -> Composable:
    """The key of the row, as text; NULL if it has none: other values are not shown."""
    key = changes.identity.key if changes.identity.keyed else changes.relation.primary_key
    parts: list[Composable] = []
    for name in key:
        if name not in changes.new.column_names:
            continue
        value: Composable = SQL(f"(r.new)[{changes.new.column_names.index(name) + 1}]")
        if name in changes.old.column_names:
            value = SQL("coalesce({}, {})").format(SQL(f"(r.old)[{changes.old.column_names.index(name) + 1}]"), value)
        parts += [SqlLiteral(name), value]
    return SQL("json_build_object({})::text").format(SQL(", ").join(parts)) if parts else SQL("NULL::text")


def _record(
    changes: RowChanges, state: State, conflict: Composable, constraint: Composable, message: Composable
) -> Composable:
    """Write a line to the table of conflicts."""
    return SQL(
        'INSERT INTO {} (subscription, relation, conflict, key, "constraint", lsn, message) VALUES'
        " ({}, {}, {}, {}, {}, ('0/0'::pg_lsn + r.commit_lsn), {});"
    ).format(
        Identifier(state.schema, "conflicts"),
        SqlLiteral(state.subscription),
        SqlLiteral(str(changes.relation.table)),
        conflict,
        _key(changes),
        constraint,
        message,
    )


def _guarded(
    changes: RowChanges, state: State, statement: Composable, conflict: str, on_conflict: str | None
) -> Composable:
    """The statement in a subtransaction, with what to do if it violates a constraint."""
    if on_conflict is None or conflict == "delete":
        return statement
    several = _conflict_name(changes, conflict)
    if on_conflict == "stop":
        detail = SQL(
            "json_build_object('conflict', {}, 'relation', {}, 'key', {}, 'constraint', failed_constraint,"
            " 'message', failed_message, 'commit_lsn', r.commit_lsn)::text"
        ).format(several, SqlLiteral(str(changes.relation.table)), _key(changes))
        then: Composable = SQL("RAISE EXCEPTION USING ERRCODE = {}, MESSAGE = failed_message, DETAIL = {};").format(
            SqlLiteral(_CONFLICT), detail
        )
    else:
        then = _record(changes, state, several, SQL("failed_constraint"), SQL("failed_message"))
        if on_conflict == "overwrite":
            then = then + _clear(changes) + statement
    return SQL(
        "BEGIN {} EXCEPTION WHEN integrity_constraint_violation THEN"
        " GET STACKED DIAGNOSTICS failed_constraint = CONSTRAINT_NAME, failed_message = MESSAGE_TEXT;"
        " {} END;"
    ).format(statement, then)


def _unique_keys(changes: RowChanges) -> list[tuple[str, ...]]:
    return [key for key in changes.relation.keys if set(key) <= set(changes.new.column_names)]


def _in_the_way(changes: RowChanges, key: Sequence[str]) -> Composable:
    """The condition for other rows that have the new values of a unique key."""
    names, columns = changes.new.column_names, changes.relation.columns
    same = SQL(" AND ").join(
        SQL("t.{} {} {}").format(
            Identifier(name), columns[name].equals, SQL(f"(r.new)[{names.index(name) + 1}]::{columns[name].type}")
        )
        for name in key
    )
    return SQL("{} AND NOT (r.kind = 'U' AND {})").format(same, _found(changes))


def _conflict_name(changes: RowChanges, conflict: str) -> Composable:
    """The name of the conflict: PostgreSQL has another one if several unique constraints are violated."""
    keys = _unique_keys(changes)
    if len(keys) < 2:
        return SqlLiteral(conflict)
    exists = SQL("(EXISTS(SELECT FROM {} AS t WHERE {}))::int")
    violated = SQL(" + ").join(exists.format(changes.relation.only, _in_the_way(changes, key)) for key in keys)
    return SQL("CASE WHEN {} > 1 THEN 'multiple_unique_conflicts' ELSE {} END").format(violated, SqlLiteral(conflict))


def _clear(changes: RowChanges) -> Composable:
    """Delete the rows that are in the way of a new row."""
    delete = SQL("DELETE FROM {} AS t WHERE {};")
    return SQL(" ").join(
        delete.format(changes.relation.only, _in_the_way(changes, key)) for key in _unique_keys(changes)
    )
