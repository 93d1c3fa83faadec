"""Prepared transactions: PREPARE TRANSACTION at the source is one at the target, as with `two_phase` in PostgreSQL.

A prepared transaction does not touch what is stored for the tables, which other batches have to change meanwhile.
Instead it has a row in `prepared`, with the tables that it changes. Nobody sees this row until COMMIT PREPARED. So
after a crash the target itself says what has happened:

    in pg_prepared_xacts    prepared
    a row in `prepared`     committed, and the LSNs of its tables are not stored yet
    neither                 not prepared here: its changes are applied when it is committed

A table whose copy began after PREPARE TRANSACTION is not among them: it gets its changes at COMMIT PREPARED. So does a
transaction whose triggers use a temporary table or NOTIFY: PostgreSQL does not prepare it.
"""

from __future__ import annotations

import hashlib

from psycopg import errors as pg
from psycopg.sql import SQL
from psycopg.sql import Literal as SqlLiteral

from walmere.errors import SinkError, SinkUnavailable
from walmere.names import TableName
from walmere.sinks.postgres.connect import Connection
from walmere.sinks.postgres.errors import without_values
from walmere.sinks.postgres.state import State


def gid_of(state: State, gid: str) -> str:
    """The target's name for a prepared transaction of the source: at most 199 bytes."""
    return f"walmere_{state.subscription}_{hashlib.md5(gid.encode(), usedforsecurity=False).hexdigest()}"


def is_prepared(connection: Connection, gid: str) -> bool:
    """Whether the target has this prepared transaction."""
    query = "SELECT FROM pg_prepared_xacts WHERE gid = $1 AND database = current_database()"
    return bool(connection.execute(query, [gid]).fetchall())


def committed_tables(connection: Connection, state: State, gid: str) -> list[TableName] | None:
    """The tables that a committed one has changed; None: it is not committed."""
    rows = connection.execute(
        state.sql("SELECT tables FROM {schema}.prepared WHERE subscription = $1 AND gid = $2"),
        [state.subscription, gid],
    ).fetchall()
    return None if not rows else [TableName.parse(name) for name in rows[0][0]]


def prepare(connection: Connection, state: State, gid: str, tables: list[TableName]) -> None:
    """Prepare the transaction of the connection."""
    connection.execute(
        state.sql("INSERT INTO {schema}.prepared VALUES ($1, $2, $3)"),
        [state.subscription, gid, [str(each) for each in tables]],
    )
    try:
        connection.execute(SQL("PREPARE TRANSACTION {}").format(SqlLiteral(gid)))
    except pg.FeatureNotSupported:
        return  # a trigger has used a temporary table, or NOTIFY: the changes are applied at COMMIT PREPARED
    except (pg.ObjectNotInPrerequisiteState, pg.OutOfMemory) as error:
        query = "SELECT current_setting('max_prepared_transactions')::int, count(*) FROM pg_prepared_xacts"
        [(places, used)] = connection.execute(query).fetchall()
        if used < places:  # a deferred trigger has raised it
            raise
        raise (SinkUnavailable if places else SinkError)(
            "preparing a transaction at the target",
            without_values(error),
            "increase max_prepared_transactions there, or set source.two_phase = false",
        ) from None


def finish(connection: Connection, gid: str, *, commit: bool) -> None:
    """Commit or roll back a prepared transaction, if the target has it."""
    if is_prepared(connection, gid):
        what = SQL("COMMIT PREPARED {}") if commit else SQL("ROLLBACK PREPARED {}")
        connection.execute(what.format(SqlLiteral(gid)))


def roll_back_all(connection: Connection, state: State) -> list[str]:
    """Roll back what the subscription has prepared and not committed. Returns the names."""
    query = (
        "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        " AND starts_with(gid, $1) AND substr(gid, length($1) + 1) ~ '^[0-9a-f]{32}$'"
    )
    names = [gid for (gid,) in connection.execute(query, [f"walmere_{state.subscription}_"]).fetchall()]
    for gid in names:
        finish(connection, gid, commit=False)
    return names


def forget(connection: Connection, state: State, gid: str) -> None:
    """Delete the row of a committed one, in the transaction that stores the LSNs of its tables."""
    connection.execute(
        state.sql("DELETE FROM {schema}.prepared WHERE subscription = $1 AND gid = $2"), [state.subscription, gid]
    )
