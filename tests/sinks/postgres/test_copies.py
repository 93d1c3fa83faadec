"""Copies to a PostgreSQL target: what they keep, what a failure leaves, and their origin; and what `drop` leaves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psycopg
import pytest
from pydantic import SecretStr

from conftest import Database
from sinks.histories import SCHEMA, insert, row, same_rows, update
from sinks.postgres.target import CREATE, TABLE, begin, clean, conflicts, do, found
from sinks.subjects import DatabaseWriter, sink_of
from walmere.config import PostgresTarget
from walmere.errors import SinkError, SinkUnavailable
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.publisher.ddl import TableDdl
from walmere.publisher.finding import Level
from walmere.sinks.postgres import origin
from walmere.sinks.postgres.sink import PostgresSink
from walmere.subscription.checks import target as check_target
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


def test_rows_of_its_own_stay_when_a_table_is_first_copied(database: Database, sink: PostgresSink) -> None:
    database.execute("INSERT INTO t (id) VALUES (77)")
    begin(sink, row(1))
    assert sorted(key for _, key, *_ in found(database)) == [1, 77]


def test_a_table_that_is_copied_again_keeps_columns_of_its_own(database: Database, sink: PostgresSink) -> None:
    database.execute("ALTER TABLE t ADD mine int")
    begin(sink, row(1), row(2))
    database.execute("UPDATE t SET mine = id")
    begin(sink, row(2, count=5), row(3), lsn=300)
    assert sorted(database.rows("SELECT id, count, mine FROM t")) == [(2, 5, 2), (3, 0, None)]


def test_a_table_with_columns_of_its_own_is_copied_again_although_unique_values_were_swapped(
    database: Database, sink: PostgresSink
) -> None:
    database.execute("ALTER TABLE t ADD mine int DEFAULT 7", "ALTER TABLE t ADD UNIQUE (count)")
    begin(sink, row(1, count=1), row(2, count=2), row(3, count=3))
    database.execute("UPDATE t SET mine = id")
    begin(sink, row(1, count=2), row(2, count=1), row(4, count=3), lsn=300)
    assert sorted(database.rows("SELECT id, count, mine FROM t")) == [(1, 2, 1), (2, 1, 2), (4, 3, 7)]


def test_a_table_with_identity_columns_keeps_columns_of_its_own(database: Database, sink: PostgresSink) -> None:
    database.execute(
        "ALTER TABLE t ALTER id ADD GENERATED ALWAYS AS IDENTITY",
        "ALTER TABLE t ADD mine int GENERATED ALWAYS AS IDENTITY",
    )
    begin(sink, row(1), row(2))
    before = dict(database.rows("SELECT id, mine FROM t"))
    begin(sink, row(2, count=5), row(3), lsn=300)
    after = dict(database.rows("SELECT id, mine FROM t"))
    assert set(after) == {2, 3}
    assert after[2] == before[2]


def test_a_copy_that_fails_leaves_rows_of_others_and_no_effect_of_triggers(
    database: Database, sink: PostgresSink
) -> None:
    copy = DatabaseWriter(sink).begin_copy(TABLE, SCHEMA)
    copy.range(0, [row(1), row(2)])
    database.execute("INSERT INTO t (id) VALUES (77)", "UPDATE t SET note = 'mine' WHERE id = 2")
    copy.range(1, [row(3)])
    copy.abandon()
    assert sorted(key for _, key, *_ in found(database)) == [2, 77]
    database.execute(
        "TRUNCATE t",
        "CREATE TABLE log (what text)",
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO public.log VALUES (TG_LEVEL); RETURN NULL; END $$",
        "CREATE TRIGGER fires AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION note()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER fires",
    )
    copy = DatabaseWriter(sink).begin_copy(TABLE, SCHEMA)
    copy.range(0, [row(1), row(2)])
    copy.abandon()
    assert database.rows("SELECT * FROM log") == []
    begin(sink, row(1), row(2))
    assert database.rows("SELECT * FROM log") == [("ROW",), ("ROW",)]
    database.execute("DROP TABLE log", "DROP FUNCTION note CASCADE")


@pytest.mark.parametrize("rows_before", [0, 1])
def test_drop_removes_unfinished_copies(database: Database, sink: PostgresSink, rows_before: int) -> None:
    """Into an empty table, or into a staging table; while another subscription uses the same schema, or none does."""
    database.execute("CREATE TABLE u (id int)", f"INSERT INTO t (id) SELECT 77 FROM generate_series(1, {rows_before})")
    other = replace(sink, subscription="other")
    other.begin_copy(TableName("public", "u"), ["id"]).finish(Lsn(100))
    for _ in range(2):
        copy = DatabaseWriter(sink).begin_copy(TABLE, SCHEMA)
        copy.range(0, [row(1), row(2)])
        assert "removed the unfinished copy of public.t" in sink.drop()
        assert len(found(database)) == rows_before
        assert not database.rows("SELECT FROM pg_class WHERE relname ~ '^copy_'")
        assert not database.rows("SELECT FROM pg_replication_origin WHERE starts_with(roname, 'walmere_test')")
        other.drop()
    assert not database.rows("SELECT FROM pg_namespace WHERE nspname = 'walmere'")
    database.execute("DROP TABLE u")


def test_a_table_that_was_created_for_a_copy_that_failed_gets_its_key_from_the_next(database: Database) -> None:
    ddl = TableDdl(
        create=("CREATE TABLE public.t (id int8 NOT NULL)",),
        after=("ALTER TABLE public.t ADD PRIMARY KEY (id)",),
        added={"id": "id int8"},
    )
    sink = sink_of(database, create_tables=True)
    sink.begin_copy(TABLE, ["id"], ddl)  # it is killed
    sink.begin_copy(TABLE, ["id"], ddl).finish(Lsn(100))
    assert database.rows("SELECT FROM pg_index WHERE indrelid = 't'::regclass AND indisprimary")
    clean(database)
    sink.begin_copy(TABLE, ["id"], ddl).abandon()
    assert database.rows("SELECT to_regclass('t')") == [(None,)]
    clean(database)


def test_a_staged_copy_of_a_table_without_published_columns(database: Database) -> None:
    database.execute("CREATE TABLE t (mine int)", "INSERT INTO t VALUES (1)")
    copy = sink_of(database).begin_copy(TABLE, [])
    copy.copy_range("0", [b"\n"])
    copy.finish(Lsn(100))
    assert database.rows("SELECT mine FROM t ORDER BY mine") == [(1,), (None,)]
    clean(database)


@pytest.mark.server(settings={"max_active_replication_origins": "2"})
@pytest.mark.since(18, "max_active_replication_origins")
def test_copies_share_one_origin_and_leave_one_for_the_changes(private_server: Server) -> None:
    """An origin keeps its place in the server when it is not used any more."""
    database = Database(private_server)
    database.execute(CREATE, "ALTER TABLE t ADD PRIMARY KEY (id)", "CREATE TABLE u (id int)")
    sink = sink_of(database)
    with sink.connection("counting") as connection:
        assert origin.places_left(connection, "test") == origin.PLACES
    copy = DatabaseWriter(sink).begin_copy(TABLE, SCHEMA)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: copy.range(number, [row(number)]), range(8)))
    copy.commit(100)
    do(sink, insert(8))
    assert same_rows(found(database), map(row, range(9)))
    other = replace(sink, subscription="other")
    with sink.connection("counting") as connection:
        assert origin.places_left(connection, "test") == origin.PLACES
        assert origin.places_left(connection, "other") == 0
        assert origin.places_free(connection, "test") == origin.PLACES
        finding = check_target._progress(connection, other)
        assert (finding.level, finding.fix) == (Level.PROBLEM, origin.MORE_PLACES)
        assert finding.what == "the target has 0 free places for replication origins; a subscription needs 2"
    role = f"{database.name}_role"
    database.execute(f"CREATE ROLE {role} LOGIN")
    with psycopg.connect(private_server.dsn(database.name, role)) as plain:
        assert origin.places_free(plain, "other") == origin.PLACES, "it may not see which are taken"
    with pytest.raises(SinkError, match="could not find free replication state slot") as refused:
        other.begin_copy(TableName("public", "u"), ["id"])
    assert "increase max_active_replication_origins" in refused.value.hint
    database.drop()


def test_all_copied_rows_are_marked_with_the_origin(database: Database, sink: PostgresSink) -> None:
    database.execute(
        "CREATE PUBLICATION on_pub FOR TABLE t",
        f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
    )
    begin(sink, row(1), row(2))
    begin(sink, row(1, count=1), row(3), lsn=300)  # staged
    database.execute("INSERT INTO t (id) VALUES (9)")
    options = "'proto_version', '1', 'publication_names', 'on_pub'"
    peek = f"FROM pg_logical_slot_peek_binary_changes('{database.name}', NULL, NULL, {options}"
    kinds = f"SELECT chr(get_byte(data, 0)) {peek})"
    assert [kind for (kind,) in database.rows(kinds)].count("I") == 5
    if database.major >= 16:
        kinds = f"SELECT chr(get_byte(data, 0)) {peek}, 'origin', 'none')"
        assert [kind for (kind,) in database.rows(kinds) if kind in "IUDT"] == ["I"]
    database.execute(f"SELECT pg_drop_replication_slot('{database.name}')", "DROP PUBLICATION on_pub")
