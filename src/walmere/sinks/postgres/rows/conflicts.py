"""Rows that the target refuses: the part of the PL/pgSQL block that handles them, and the lines that are kept.

    insert_exists, update_exists   a constraint is violated
    multiple_unique_conflicts      several unique constraints are violated
    insert_failed, update_failed,  a value does not fit its column, or a trigger has raised an exception
    delete_failed
    truncate_failed                a TRUNCATE is refused, or its trigger has raised an exception
    commit_failed                  a constraint or a trigger that is deferred refuses a transaction of the source

Code that the target runs for a row (a trigger, a function of a constraint) may also fail in itself: a table that it
uses does not exist. This ends the block, whatever `on_conflict` says: it is not a property of the row.

With `on_conflict = "stop"`, the first such row ends the block with an error of SQLSTATE `WALCF`, whose detail is a
`Refused` as JSON. Only values of the key are shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from psycopg.sql import SQL, Composable, Composed, Identifier
from psycopg.sql import Literal as SqlLiteral

from walmere.errors import Conflict
from walmere.libpq import SYNTAX_ERROR, VALUE_ERRORS
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.sinks.postgres.connect import Connection
from walmere.sinks.postgres.errors import NOT_VALID, REMOTE_COMMAND, ROW_REFUSED, SESSION_ERROR
from walmere.sinks.postgres.rows.changes import MARK, RowChanges, found, key_text, new_value, old_value
from walmere.sinks.postgres.rows.refused import Refused
from walmere.sinks.postgres.state import State

SQLSTATE: Final = "WALCF"
DECLARATIONS: Final = (
    "failed_state text; failed_conflict text; failed_constraint text; failed_column text; failed_type text;"
    " failed_message text; failed_context text; failed_in_function bool;"
)
"""The variables of the block that are used here."""
_DIAGNOSTICS: Final = SQL(
    "GET STACKED DIAGNOSTICS failed_state = RETURNED_SQLSTATE, failed_constraint = CONSTRAINT_NAME,"
    " failed_message = MESSAGE_TEXT, failed_context = PG_EXCEPTION_CONTEXT;\n"
    "failed_constraint := nullif(failed_constraint, '');\n"
    "failed_in_function := regexp_replace(failed_context, {}, '') ~ {};\n"
).format(SqlLiteral(REMOTE_COMMAND), SqlLiteral(rf"\n[^\n]*{re.escape(MARK.as_string(None))}"))
"""A function has raised the error if there is a line before that of the statement, whatever the language of the server.
The context is not shown, because it may have values."""
_VALUE_ERROR: Final = SQL("CASE failed_state {} ELSE 'SQLSTATE ' || failed_state END").format(
    SQL(" ").join(SQL("WHEN {} THEN {}").format(*map(SqlLiteral, each)) for each in VALUE_ERRORS.items())
)
"""As `value_error`."""
_NULL: Final = SQL("NULL")


def probe_declaration(number: int, changes: RowChanges) -> Composable:
    """The declaration of a row of the table, to find the column that a value does not fit."""
    return SQL(f"probe_{number} {{}};\n").format(changes.relation.sql)


def guarded(number: int, changes: RowChanges, state: State, statement: Composable, on_conflict: str) -> Composable:
    """The statement in a subtransaction, with what to do if the target refuses its row."""
    relation = changes.relation
    about = {"relation": SqlLiteral(str(relation.table)), "key": key_text(changes)}
    stop = _stop({**about, "partitioned": SqlLiteral(relation.kind == "p")})
    then: Composable = stop
    if on_conflict != "stop":
        stops = SQL("failed_state {} {}").format(
            *((SQL("!~"), ROW_REFUSED) if on_conflict == "skip" else (SQL("NOT LIKE"), "23%"))
        )
        then = SQL("IF {} THEN {} END IF;").format(stops, stop) + _record_refused(changes, state)
    if on_conflict == "overwrite":
        then += guarded(number, changes, state, _clear(changes) + statement, "stop")
    return _caught(statement, _diagnose(number, changes) + then)


def guarded_truncate(statement: Composable) -> Composable:
    """A TRUNCATE in a subtransaction. If it fails, the block ends with an error that names its transaction."""
    diagnose = _DIAGNOSTICS + SQL("failed_conflict := 'truncate_failed'; ")
    about = {"relation": SQL("(r.old)[1]"), "tables": SQL("to_json(r.old)")}
    return _caught(statement, diagnose + _stop(about))


def guarded_commit(statement: Composable, tables: Sequence[str]) -> Composable:
    """A check of what these tables have deferred, for the transaction `last_lsn` of the source."""
    diagnose = _DIAGNOSTICS + SQL("failed_conflict := 'commit_failed'; ")
    about = {
        "relation": SqlLiteral(tables[0]),
        "tables": SQL("{}::json").format(SqlLiteral(json.dumps(tables))),
        "commit_lsn": SQL("last_lsn"),
    }
    return _caught(statement, diagnose + _stop(about))


def _caught(statement: Composable, then: Composable) -> Composable:
    return SQL(
        "BEGIN {}\nEXCEPTION WHEN OTHERS OR assert_failure THEN IF SQLSTATE ~ {} THEN RAISE; END IF;\n{}\nEND;"
    ).format(statement, SqlLiteral(SESSION_ERROR), then)


def _diagnose(number: int, changes: RowChanges) -> Composable:
    """What was refused, and why. The server's message about a value shows it, so another one is recorded."""
    return _DIAGNOSTICS + SQL(
        "failed_column := NULL;\n"
        "IF failed_state LIKE '22%' OR NOT (failed_state LIKE '23%' OR failed_in_function) THEN {}\n"
        "IF failed_column IS NOT NULL AND failed_state NOT LIKE '22%' THEN failed_state := {}; END IF;\n"
        "IF failed_state LIKE '22%' OR failed_state = {} THEN failed_message := {}; END IF;\n"
        "failed_message := coalesce('column ' || failed_column || ': ', '') || failed_message"
        " || coalesce(' for type ' || failed_type, ''); END IF;\n"
        "failed_conflict := CASE WHEN failed_state LIKE '23%' AND r.kind <> 'D' THEN {} WHEN r.kind = 'I'"
        " THEN 'insert_failed' WHEN r.kind = 'U' THEN 'update_failed' ELSE 'delete_failed' END;"
    ).format(
        _find_column(number, changes),
        SqlLiteral(NOT_VALID),
        SqlLiteral(SYNTAX_ERROR),
        _VALUE_ERROR,
        _violation(changes),
    )


def _find_column(number: int, changes: RowChanges) -> Composable:
    """Assign each value to a column of its own: the server does not say which one has failed.

    An input function may fail with any SQLSTATE: `regclass` with that of a table that does not exist.
    """
    tries: list[tuple[Composable, str]] = [
        (SQL(f"probe_{number}.{{}} := {{}};").format(Identifier(name), new_value(changes, name)), name)
        for name in changes.names
    ]
    if changes.identity.keyed:
        tries += [(SQL("PERFORM {};").format(old_value(changes, name)), name) for name in changes.old_names]
    one = SQL(
        "BEGIN {} EXCEPTION WHEN OTHERS THEN IF SQLSTATE = failed_state THEN failed_column := {}; failed_type := {};"
        " END IF; END;"
    )
    columns = changes.relation.columns
    return SQL("failed_type := NULL;\n") + SQL("\n").join(
        one.format(attempt, SqlLiteral(name), SqlLiteral(columns[name].declared)) for attempt, name in reversed(tries)
    )


def _stop(about: Mapping[str, Composable]) -> Composable:
    """End the block with an error. `about`: what is refused."""
    values = {
        "conflict": SQL("failed_conflict"),
        "key": _NULL,
        "constraint": SQL("failed_constraint"),
        "message": SQL("failed_message"),
        "sqlstate": SQL("failed_state"),
        "commit_lsn": SQL("r.commit_lsn"),
        "in_function": SQL("failed_in_function"),
        **about,
    }
    pairs = SQL(", ").join(SQL("{}, {}").format(SqlLiteral(name), value) for name, value in values.items())
    detail = SQL("json_build_object({})::text").format(pairs)
    return SQL("RAISE EXCEPTION USING ERRCODE = {}, MESSAGE = failed_message, DETAIL = {};").format(
        SqlLiteral(SQLSTATE), detail
    )


def _record_refused(changes: RowChanges, state: State) -> Composable:
    return record(changes, state, SQL("failed_conflict"), SQL("failed_constraint"), SQL("failed_message"))


def record(
    changes: RowChanges,
    state: State,
    conflict: Composable,
    constraint: Composable = _NULL,
    message: Composable = _NULL,
) -> Composable:
    """Write a line to the table of conflicts."""
    return _insert(state) + SQL(" VALUES ({}, {}, {}, {}, {}, ('0/0'::pg_lsn + r.commit_lsn), {});").format(
        SqlLiteral(state.subscription),
        SqlLiteral(str(changes.relation.table)),
        conflict,
        key_text(changes),
        constraint,
        message,
    )


def _insert(state: State) -> Composed:
    """The beginning of a statement that writes lines to the table of conflicts."""
    return state.sql(
        'INSERT INTO {schema}.conflicts (subscription, relation, conflict, key, "constraint", lsn, message)'
    )


def _unique_keys(changes: RowChanges) -> list[tuple[str, ...]]:
    return [key for key in changes.relation.keys if set(key) <= set(changes.names)]


def _in_the_way(changes: RowChanges, key: tuple[str, ...]) -> Composable:
    """The condition for other rows that have the new values of a unique key."""
    relation = changes.relation
    test = "t.{0} {1} {2} OR (t.{0} IS NULL AND {2} IS NULL)" if key in relation.null_keys else "t.{0} {1} {2}"
    same = SQL(" AND ").join(
        SQL(f"({test})").format(Identifier(name), relation.columns[name].equals, new_value(changes, name))
        for name in key
    )
    return SQL("{} AND NOT (r.kind = 'U' AND {})").format(same, found(changes))


def _violation(changes: RowChanges) -> Composable:
    """The name of the conflict: PostgreSQL has another one if several unique constraints are violated."""
    one = SQL("CASE r.kind WHEN 'I' THEN 'insert_exists' ELSE 'update_exists' END")
    keys = _unique_keys(changes)
    if len(keys) < 2:
        return one
    exists = SQL("(EXISTS(SELECT FROM {} AS t WHERE {}))::int")
    violated = SQL(" + ").join(exists.format(changes.relation.only, _in_the_way(changes, key)) for key in keys)
    return SQL("CASE WHEN {} > 1 THEN 'multiple_unique_conflicts' ELSE {} END").format(violated, one)


def _clear(changes: RowChanges) -> Composable:
    """Delete the rows that are in the way of a new row."""
    delete = SQL("DELETE {} FROM {} AS t WHERE {}; ")
    return SQL("").join(
        delete.format(MARK, changes.relation.only, _in_the_way(changes, key)) for key in _unique_keys(changes)
    )


def record_conflict(connection: Connection, state: State, conflict: Conflict) -> None:
    """Write a line for a conflict whose transaction was rolled back; not again when the batch is tried again.

    The session must keep others from applying changes: an attempt at the same time could write the line, too.
    """
    refused = Refused.from_json(conflict.found)
    connection.execute(
        _insert(state)
        + state.sql(
            " SELECT $1, $2, $3, $4, $5, $6::pg_lsn, $7 WHERE NOT EXISTS(SELECT FROM {schema}.conflicts c"
            " WHERE (c.subscription, c.relation, c.conflict, c.lsn) = ($1, $2, $3, $6::pg_lsn)"
            ' AND c.key IS NOT DISTINCT FROM $4 AND c."constraint" IS NOT DISTINCT FROM $5)'
        ),
        [
            state.subscription,
            refused.relation,
            refused.conflict,
            refused.key,
            refused.constraint,
            str(Lsn(refused.commit_lsn)),
            refused.message,
        ],
    )


def delete_repeated(connection: Connection, state: State, tables: Iterable[TableName], applied: Lsn) -> None:
    """Delete lines of this transaction, about rows of these tables, that an earlier try has written already.

    An earlier try writes a line if a conflict stops it (`record_conflict`). Only lines of this transaction are deleted,
    which have its time: another line may be locked by a prepared transaction, or be of a row that is not refused any
    more. Each line of an earlier try stands for one of this transaction, because a transaction of the source may change
    a row several times, and rows without a key are all alike.

    `applied`: the batch has only transactions from this LSN on.
    """
    connection.execute(
        state.sql(
            "WITH lines AS (SELECT *, at = now() AS is_new, row_number() OVER (PARTITION BY at = now(), relation,"
            ' conflict, key, "constraint", lsn ORDER BY id) AS number FROM {schema}.conflicts'
            " WHERE subscription = $1 AND relation = ANY($2) AND lsn >= $3::pg_lsn)"
            " DELETE FROM {schema}.conflicts WHERE id IN (SELECT n.id FROM lines n JOIN lines o"
            " ON (o.relation, o.conflict, o.lsn, o.number) = (n.relation, n.conflict, n.lsn, n.number)"
            ' AND o.key IS NOT DISTINCT FROM n.key AND o."constraint" IS NOT DISTINCT FROM n."constraint"'
            " WHERE n.is_new AND NOT o.is_new)"
        ),
        [state.subscription, [str(each) for each in tables], str(applied)],
    )
