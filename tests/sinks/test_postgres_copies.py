"""Copies to a PostgreSQL target whose server crashes, or whose role may do little; and what `drop` leaves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest
from pydantic import SecretStr

from conftest import Database
from sinks.histories import SCHEMA, row, same_rows, update
from sinks.subjects import DatabaseWriter, sink_of
from sinks.test_postgres import CREATE, TABLE, begin, conflicts, do, found
from walmere.config import PostgresTarget
from walmere.errors import SinkUnavailable
from walmere.sinks.postgres.sink import PostgresSink
from walmere.testing.server import Server


def test_a_staged_copy_begins_again_after_a_crash_of_the_server(private_server: Server) -> None:
    """The crash empties the unlogged staging table, and the ranges before it would be missing."""
    database = Database(private_server)
    database.execute(CREATE, "ALTER TABLE t ADD PRIMARY KEY (id)", "INSERT INTO t (id) VALUES (77)")
    sink = sink_of(database)
    copy = DatabaseWriter(sink).begin_copy(TABLE, SCHEMA)
    copy.range(0, [row(1), row(2)])
    database.connection.close()
    private_server.stop(signal.SIGKILL)
    private_server.start()
    database.connection = psycopg.connect(database.dsn, autocommit=True)
    copy.range(0, [row(1), row(2)])  # a second attempt finds that the range is done
    copy.range(1, [row(3)])
    with pytest.raises(SinkUnavailable, match="crash"):
        copy.commit(100)
    copy.abandon()
    assert [key for _, key, *_ in found(database)] == [77]
    begin(sink, row(1), row(2), row(3))
    assert same_rows(found(database)[1:], [row(1), row(2), row(3)])
    assert not database.rows("SELECT FROM pg_class WHERE relname ~ '^copy_'")
    database.drop()


@pytest.fixture
def plain(database_under_test: Database) -> Iterator[PostgresSink]:
    """The sink of a role that may write to t, and to a schema that another role has created."""
    database = database_under_test
    if database.major < 15:
        pytest.skip("before PostgreSQL 15, only a superuser may set session_replication_role")
    role = f"{database.name}_role"
    database.execute(
        CREATE,
        "ALTER TABLE t ADD PRIMARY KEY (id)",
        "CREATE SCHEMA walmere",
        f"CREATE ROLE {role} LOGIN",
        f"GRANT SET ON PARAMETER session_replication_role TO {role}",
        f"GRANT USAGE, CREATE ON SCHEMA walmere TO {role}",
        f"GRANT ALL ON t TO {role}",
    )
    target = PostgresTarget(kind="postgres", dsn=SecretStr(database.server.dsn(database.name, role)))
    yield replace(sink_of(database), address=target)
    database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_drop_leaves_a_schema_that_another_role_has_created(database_under_test: Database, plain: PostgresSink) -> None:
    begin(plain, row(1), row(2))
    assert plain.drop() == ["dropped the tables of Walmere in schema walmere of the target"]
    assert not database_under_test.rows("SELECT FROM pg_class WHERE relnamespace = 'walmere'::regnamespace")


def test_a_role_that_may_not_create_temporary_tables(database_under_test: Database, plain: PostgresSink) -> None:
    database = database_under_test
    database.execute(f"REVOKE TEMP ON DATABASE {database.name} FROM PUBLIC", "ALTER TABLE t ADD local text")
    begin(plain, row(1), row(2))
    database.execute("UPDATE t SET local = 'mine' WHERE id = 1")
    do(plain, update(1, count=1), update(3))  # one is missing, so they are applied row by row
    assert conflicts(database) == [("update_missing", '{"id" : "3"}', None)]
    begin(plain, row(1), row(4), lsn=300)
    assert sorted(found(database)) == [(*row(1), "mine"), (*row(4), None)]
    assert not database.rows("SELECT FROM walmere.staged_changes")
    assert not database.rows("SELECT FROM pg_class WHERE relname ~ '^copy_'")
