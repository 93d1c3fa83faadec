"""The PL/pgSQL block that applies changes one by one, in the order of the source.

A row that the target refuses ends the block with an error that names it; or it is skipped, or replaces the rows that
are in its way (`on_conflict`): see `conflicts`. This needs a subtransaction for each row, so it is done only after a
first try failed.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg.sql import SQL, Composable, Composed, Identifier
from psycopg.sql import Literal as SqlLiteral

from walmere.sinks.postgres.relation import TargetColumn, TargetRelation
from walmere.sinks.postgres.rows.changes import MARK, RowChanges, found, new_value
from walmere.sinks.postgres.rows.conflicts import (
    DECLARATIONS,
    guarded,
    guarded_commit,
    guarded_truncate,
    probe_declaration,
    record,
)
from walmere.sinks.postgres.state import State


def block(
    state: State,
    changes: Sequence[RowChanges],
    staging: Identifier,
    on_conflict: str | None,
    our_origins: Sequence[int] | None,
) -> Composed:
    """The statement that applies what is in the staging table. `on_conflict`: None for the first try."""
    branches = [
        SQL("WHEN {} THEN\n{}").format(number, _branch(number, each, state, on_conflict, our_origins))
        for number, each in enumerate(changes)
    ]
    probes = [probe_declaration(number, each) for number, each in enumerate(changes) if on_conflict is not None]
    truncate: Composable = SQL("EXECUTE (r.new)[1];")
    truncate = truncate if on_conflict is None else guarded_truncate(truncate)
    body = SQL(
        "DECLARE r record; was record; affected int8; existed bool; last_lsn int8; {}\n{}"
        "BEGIN\n"
        "FOR r IN SELECT * FROM {} ORDER BY commit_lsn, sequence LOOP\n"
        "IF r.commit_lsn <> last_lsn THEN {commit} END IF; last_lsn := r.commit_lsn;\n"
        "CASE r.relation WHEN -1 THEN {}\n{}\nEND CASE;\nEND LOOP;\n"
        "{commit}\nEND"
    ).format(
        SQL(DECLARATIONS),
        SQL("").join(probes),
        staging,
        truncate,
        SQL("\n").join(branches),
        commit=_commit([each.relation for each in changes], guard=on_conflict is not None),
    )
    return SQL("DO {}").format(SqlLiteral(body.as_string(None)))


def _commit(relations: Sequence[TargetRelation], *, guard: bool) -> Composable:
    """Check what is deferred, as at the end of each transaction of the source."""
    deferring = [each for each in relations if each.deferred]
    if not deferring:
        return SQL("NULL;")
    names = SQL(", ".join(sorted({name for each in deferring for name in each.deferred})))
    check = SQL("SET CONSTRAINTS {0} {1} IMMEDIATE; SET CONSTRAINTS {1} DEFERRED;").format(MARK, names)
    return guarded_commit(check, [str(each.table) for each in deferring]) if guard else check


def _branch(
    number: int, changes: RowChanges, state: State, on_conflict: str | None, our_origins: Sequence[int] | None
) -> Composable:
    """The part of the block for one table."""
    relation, names = changes.relation, changes.names
    columns = [relation.columns[name] for name in names]
    new = [new_value(changes, name) for name in names]
    insert = SQL("INSERT {} INTO {} ({}) OVERRIDING SYSTEM VALUE VALUES ({});").format(
        MARK, relation.sql, SQL(", ").join(map(Identifier, names)), SQL(", ").join(new)
    )
    if not names:  # no column is published
        insert = SQL("INSERT {} INTO {} DEFAULT VALUES;").format(MARK, relation.sql)
    update = _counted(changes, state, _update(changes, columns, new), "update_missing")
    delete: Composable = SQL("DELETE {} FROM {} AS t WHERE {};").format(MARK, relation.only, found(changes))
    always = [place for place, column in enumerate(columns) if column.identity == "a"]
    if always:  # SQL cannot update such a column: a row whose value changes is written again
        differs = SQL(" OR ").join(
            SQL("t.{} IS DISTINCT FROM {}").format(columns[place].sql, new[place]) for place in always
        )
        moved = SQL("EXISTS(SELECT FROM {} AS t WHERE {} AND ({}))").format(relation.only, found(changes), differs)
        update = SQL("IF {} THEN {} ELSE {} END IF;").format(moved, _write_again(changes, delete, columns, new), update)
    delete = _counted(changes, state, delete, "delete_missing")
    if our_origins is not None:
        update = _tracked(changes, state, update, "update_origin_differs", our_origins)
        delete = _tracked(changes, state, delete, "delete_origin_differs", our_origins)
    statement = SQL("IF r.kind = 'I' THEN {} ELSIF r.kind = 'U' THEN {} ELSE {} END IF;").format(insert, update, delete)
    return statement if on_conflict is None else guarded(number, changes, state, statement, on_conflict)


def _update(changes: RowChanges, columns: Sequence[TargetColumn], new: Sequence[Composable]) -> Composable:
    relation = changes.relation
    values = [
        SQL("{0} = CASE WHEN (r.unchanged)[{1}] THEN t.{0} ELSE {2} END").format(column.sql, place + 1, value)
        for place, (column, value) in enumerate(zip(columns, new, strict=True))
        if column.identity != "a"
    ]
    if not values:  # no column can be assigned
        return SQL("PERFORM FROM {} AS t WHERE {};").format(relation.only, found(changes))
    return SQL("UPDATE {} {} AS t SET {} WHERE {};").format(MARK, relation.only, SQL(", ").join(values), found(changes))


def _write_again(
    changes: RowChanges, delete: Composable, columns: Sequence[TargetColumn], new: Sequence[Composable]
) -> Composable:
    """Delete a row and insert it with its new values; unchanged TOAST values and local columns stay as they were."""
    relation, local = changes.relation, changes.relation.local(changes.names)
    values = [
        SQL("CASE WHEN (r.unchanged)[{}] THEN was.{} ELSE {} END").format(place + 1, column.sql, value)
        for place, (column, value) in enumerate(zip(columns, new, strict=True))
    ]
    return SQL(
        "SELECT t.* INTO was FROM {} AS t WHERE {}; {}"
        " IF FOUND THEN INSERT {} INTO {} ({}) OVERRIDING SYSTEM VALUE VALUES ({}); END IF;"
    ).format(
        relation.only,
        found(changes),
        delete,
        MARK,
        relation.sql,
        SQL(", ").join(each.sql for each in (*columns, *local)),
        SQL(", ").join([*values, *(SQL("was.{}").format(each.sql) for each in local)]),
    )


def _counted(changes: RowChanges, state: State, statement: Composable, missing: str) -> Composable:
    """The statement, and a line in the table of conflicts if there was no row to change.

    A trigger or a rule can leave out a row that exists. So with triggers, the row is looked for before.
    """
    before: Composable = SQL("")
    is_missing = "affected = 0"
    if changes.relation.fires:
        exists = SQL("existed := EXISTS(SELECT FROM {} AS t WHERE {}); ")
        before, is_missing = exists.format(changes.relation.only, found(changes)), "NOT existed"
    return SQL("{}{} GET DIAGNOSTICS affected = ROW_COUNT; IF {} THEN {} END IF;").format(
        before, statement, SQL(is_missing), record(changes, state, SqlLiteral(missing))
    )


def _tracked(
    changes: RowChanges, state: State, statement: Composable, conflict: str, our_origins: Sequence[int]
) -> Composable:
    """The statement, and before it a line in the table of conflicts if others have written the row last."""
    return SQL("IF EXISTS(SELECT FROM {} AS t WHERE {} AND {}) THEN {} END IF; {}").format(
        changes.relation.only,
        found(changes),
        written_by_others(our_origins),
        record(changes, state, SqlLiteral(conflict)),
        statement,
    )


def written_by_others(our_origins: Sequence[int]) -> Composable:
    """The condition for a row, as t, whose last writer was not Walmere."""
    numbers = SQL(", ").join(map(SqlLiteral, our_origins))
    return SQL("(pg_xact_commit_timestamp_origin(t.xmin)).roident <> ALL(ARRAY[{}]::oid[])").format(numbers)
