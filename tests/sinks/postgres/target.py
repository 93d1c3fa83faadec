"""A table of a database, for tests of the PostgreSQL sink."""

from __future__ import annotations

from typing import Any

from conftest import Database
from sinks.histories import SCHEMA, Change, Row
from sinks.subjects import BY_ID, DatabaseWriter
from walmere.names import Identity, TableName
from walmere.sinks.postgres.sink import PostgresSink

TABLE = TableName("public", "t")
NAMES = SCHEMA.names
CREATE = "CREATE TABLE t (part text, id int8, count int, note text, tags text[])"


def clean(database: Database) -> None:
    database.execute("DROP TABLE IF EXISTS t CASCADE", "DROP SCHEMA IF EXISTS walmere CASCADE")


def begin(sink: PostgresSink, *rows: Row, lsn: int = 100) -> int:
    """As after the copy of a table, made by two tasks."""
    copy = DatabaseWriter(sink).begin_copy(TABLE, SCHEMA)
    half = len(rows) // 2
    copy.range(0, rows[:half])
    copy.range(1, rows[half:])
    return copy.commit(lsn)


def do(sink: PostgresSink, *changes: Change, lsn: int = 200, identity: Identity = BY_ID) -> int:
    return DatabaseWriter(sink).apply(TABLE, changes, lsn, identity, SCHEMA)


def found(database: Database) -> list[Row]:
    return database.rows("SELECT * FROM t")


def conflicts(database: Database) -> list[tuple[Any, ...]]:
    return database.rows('SELECT conflict, key, "constraint" FROM walmere.conflicts ORDER BY id')
