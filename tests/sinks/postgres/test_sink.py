"""What the PostgreSQL sink does besides `test_behaviour`: triggers, other columns, origins, privileges."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import psycopg
import pyarrow as pa
import pytest
from pydantic import SecretStr

from conftest import Database
from processes import eventually
from sinks.histories import SCHEMA, Change, delete, insert, row, same_rows, update
from sinks.postgres.target import CREATE, NAMES, TABLE, begin, clean, conflicts, do, found
from sinks.subjects import BY_ID, DatabaseWriter, sink_of, text_changes
from walmere.apply.fold_rows import fold_rows
from walmere.apply.transaction import TableChanges, apply_changes
from walmere.config import PostgresTarget
from walmere.errors import ColumnMissing, SinkMismatch, SinkRefused, SinkUnavailable
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.owner import Owner
from walmere.sinks.postgres import prepared, statements
from walmere.sinks.postgres.sink import PostgresSink


def test_the_origin_has_the_progress_and_marks_the_changes(database: Database, sink: PostgresSink) -> None:
    begin(sink, row(1))
    do(sink, insert(2), lsn=0x1234)
    progress = database.rows("SELECT external_id, remote_lsn::text FROM pg_replication_origin_status")
    assert ("walmere_test", "0/1234") in progress
    lines = sink.drop()
    assert "dropped replication origin walmere_test" in lines
    assert not database.rows("SELECT FROM pg_replication_origin WHERE starts_with(roname, 'walmere_test')")
    assert not database.rows("SELECT FROM pg_namespace WHERE nspname = 'walmere'")


def test_one_of_several_rows_with_a_key_is_changed(database: Database, sink: PostgresSink) -> None:
    database.execute("ALTER TABLE t DROP CONSTRAINT t_pkey")
    begin(sink, row(1), row(1), row(2))
    do(sink, update(1, count=5), delete(2))
    assert same_rows(found(database), [row(1), row(1, count=5)])


def test_columns_of_the_target_that_are_not_published_stay(database: Database, sink: PostgresSink) -> None:
    database.execute("ALTER TABLE t ADD mine int DEFAULT 7")
    begin(sink, row(1), row(2))
    database.execute("UPDATE t SET mine = 8 WHERE id = 1")
    do(sink, update(1, count=1), update(9, was=2), insert(3))
    assert sorted(database.rows("SELECT id, mine FROM t")) == [(1, 8), (3, 7), (9, 7)]


def test_other_types_and_another_order_of_columns(database: Database, sink: PostgresSink) -> None:
    database.execute(
        "DROP TABLE t", "CREATE TABLE t (tags text, note varchar(5), count numeric(9, 2), id text, part text)"
    )
    begin(sink, row(1), row(2))
    do(sink, update(1, count=5), delete(2), insert(3, tags=["a"]))
    assert sorted(database.rows("SELECT id, count::text, tags FROM t")) == [("1", "5.00", None), ("3", "0.00", '{"a"}')]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("box", "(3,4),(1,2)"),  # an array of it has another delimiter
        ("box[]", "{(3,4),(1,2);(1,1),(0,0)}"),
        ("int[]", "{{1,2},{3,NULL}}"),
        ("pair", '(7,"a ""b"", c")'),
        ("pair[]", '{"(1,x)","(2,)"}'),
        ("kind", "odd, one"),
        ("small", "42"),
        ('"char"', "\\377"),
        ("bit(3)", "101"),
        ("varbit", ""),
        ("int4range", "[1,5)"),
        ("jsonb", '{"k": ["a\\\\b", null]}'),
        ("tsvector", "'a':1 'b c':2"),
        ("bytea", "\\x005c22"),
        ("text", 'NULL, "quoted" \\ {}'),
        ("timestamptz", "infinity"),
    ],
)
def test_values_of_every_kind_are_updated_and_found_by_sets_of_rows(database: Database, kind: str, value: str) -> None:
    database.execute(
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TYPE kind AS ENUM ('even', 'odd, one')",
        "CREATE DOMAIN small AS int2",
        f"CREATE TABLE t (id int8 PRIMARY KEY, v {kind}, w {kind})",
    )
    schema = pa.schema([("id", pa.int64()), ("v", pa.string()), ("w", pa.string())])
    writer = DatabaseWriter(sink_of(database))
    copy = writer.begin_copy(TABLE, schema)
    copy.range(0, [(1, None, None), (2, None, value), (3, None, None)])
    copy.commit(100)
    writer.apply(TABLE, [Change("U", (1, value, None)), Change("U", (2, None, None))], 200, BY_ID, schema)
    expected = [(1, value, None), (2, None, None), (3, None, None)]
    assert database.rows("SELECT id, v::text, w::text FROM t ORDER BY id") == expected
    writer.apply(TABLE, [Change("D", None, (1, value, None), ord("O"))], 300, Identity("f", ()), schema)
    assert database.rows("SELECT id FROM t ORDER BY id") == [(2,), (3,)]
    assert not conflicts(database)
    clean(database)
    database.execute("DROP TYPE pair, kind, small")


def test_identity_columns_are_written(database: Database, sink: PostgresSink) -> None:
    database.execute("ALTER TABLE t ALTER id ADD GENERATED ALWAYS AS IDENTITY")
    database.execute(
        "ALTER TABLE t ALTER count SET NOT NULL", "ALTER TABLE t ALTER count ADD GENERATED ALWAYS AS IDENTITY"
    )
    begin(sink, row(1, count=1), row(2, count=2))
    do(sink, update(1, count=1, note="x"), update(2, count=5), insert(3, count=6), update(9, was=1, count=1, note="y"))
    assert same_rows(found(database), [row(9, count=1, note="y"), row(2, count=5), row(3, count=6)])


def test_triggers_that_are_enabled_for_replicas_fire_for_each_change_in_order(
    database: Database, sink: PostgresSink
) -> None:
    database.execute(
        "CREATE TABLE log (n int GENERATED ALWAYS AS IDENTITY, what text)",
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO public.log (what) VALUES (TG_OP || coalesce(NEW.id, OLD.id)); RETURN NULL; END $$",
        "CREATE TRIGGER fires AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note()",
        "CREATE TRIGGER silent AFTER INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION note()",
        "ALTER TABLE t ENABLE REPLICA TRIGGER fires",
    )
    begin(sink, row(1))
    do(sink, update(1, count=1), update(1, count=2), insert(2), delete(2))
    logged = [what for (what,) in database.rows("SELECT what FROM log ORDER BY n")]
    assert logged == ["INSERT1", "UPDATE1", "UPDATE1", "INSERT2", "DELETE2"]
    database.execute("DROP TABLE log", "DROP FUNCTION note CASCADE")


def test_missing_tables_columns_and_privileges_are_named(database: Database, sink: PostgresSink) -> None:
    with pytest.raises(SinkMismatch, match=r"does not have the table public\.absent"):
        sink.require_tables({TABLE: NAMES, TableName("public", "absent"): ["id"]})
    with pytest.raises(ColumnMissing, match=r"public\.t lacks the column other"):
        sink.require_tables({TABLE: [*NAMES, "other"]})


def test_missing_privileges_are_named_one_after_the_other(database: Database, sink: PostgresSink) -> None:
    role = f"{database.name}_writer"
    database.execute(f"CREATE ROLE {role} LOGIN", "CREATE SCHEMA shop", "CREATE TABLE shop.t (id int)")
    target = PostgresTarget(kind="postgres", dsn=SecretStr(database.server.dsn(database.name, role)))
    sink = replace(sink, address=target)
    tables = {TableName("shop", "t"): ["id"]}
    with pytest.raises(SinkRefused, match="session_replication_role"):
        sink.require_tables(tables)
    if database.major >= 15:  # before, only a superuser may set it
        missing = [
            ("may not create schema walmere", f"CREATE SCHEMA walmere AUTHORIZATION {role}"),
            ("lacks USAGE on the schema shop of shop.t", f"GRANT USAGE ON SCHEMA shop TO {role}"),
            (
                "lacks SELECT, INSERT, UPDATE, DELETE, TRUNCATE on shop.t",
                f"GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON shop.t TO {role}",
            ),
        ]
        database.execute(f"GRANT SET ON PARAMETER session_replication_role TO {role}")
        for wrong, grant in missing:
            with pytest.raises(SinkRefused, match=wrong) as refused:
                sink.require_tables(tables)
            assert refused.value.hint == f"{grant};".replace(f"TO {role};", "TO …;")
            database.execute(grant)
        sink.require_tables(tables)
        creating = replace(sink, create_tables=True)
        with pytest.raises(SinkRefused, match=r"may not create the table shop\.new") as refused:
            creating.require_tables({TableName("shop", "new"): ["id"]})
        database.execute(refused.value.hint)
        with pytest.raises(SinkRefused, match=r"may not create the table other\.new"):
            creating.require_tables({TableName("shop", "new"): ["id"], TableName("other", "new"): ["id"]})
    database.execute("DROP SCHEMA shop CASCADE", f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


def test_a_target_that_refuses_connections_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    dsn = SecretStr(f"postgresql://someone@127.0.0.1:{port}/db")
    sink = PostgresSink(PostgresTarget(kind="postgres", dsn=dsn), "test")
    with pytest.raises(SinkUnavailable) as caught:
        sink.standing(TABLE)
    wrong = f'connection to server at "127.0.0.1", port {port} failed: Connection refused'
    assert caught.value.wrong == wrong, "without libpq's question whether the server is running there"


def test_the_state_of_another_owner_is_refused_or_taken_over(database: Database, sink: PostgresSink) -> None:
    begin(sink, row(1))
    other = sink_of(database, owner=Owner("test", "2", 2))
    with pytest.raises(SinkMismatch, match="belongs to subscription test"):
        other.claim(TABLE)
    assert sink_of(database, owner=Owner("test", "2", 2), take_over=True).claim(TABLE)
    assert other.applied(TABLE) is None
    begin(other, row(1), row(2), lsn=50)
    assert same_rows(found(database), [row(1), row(2)])


def test_rows_are_found_by_the_index_however_many_change(database: Database, sink: PostgresSink) -> None:
    """Otherwise the planner reads the whole table for a batch of this size."""
    begin(sink, *(row(number) for number in range(20_000)))
    database.execute("ANALYZE t")
    updates = text_changes([update(number, count=1) for number in range(0, 20_000, 5)])
    deletes = text_changes([delete(number) for number in range(1, 20_000, 5)])
    with sink.transaction([TABLE]) as transaction:
        for changes in (updates, deletes):
            net = fold_rows(changes.changes, BY_ID)
            [statement] = statements.changes_of(transaction.relations[TABLE], net)
            for to_index, expected in ((True, "Index Scan"), (False, "Seq Scan")):
                transaction.connection.execute(statements.restrict_plans(to_index=to_index))
                explain = psycopg.sql.SQL("EXPLAIN ") + statement.query
                lines = transaction.connection.execute(explain, statement.parameters).fetchall()
                assert any(expected in line and " t " in line for (line,) in lines), lines
    do(sink, *(update(number, count=1) for number in range(0, 20_000, 5)))
    assert database.rows("SELECT count(*) FROM t WHERE count = 1") == [(4000,)]


def test_a_truncate_that_is_applied_row_by_row_may_have_any_name(database: Database) -> None:
    odd = TableName("public", 'a\n\t"b\\')
    with database.connection.cursor() as cursor:
        quoted = psycopg.sql.Identifier(odd.name).as_string(cursor)
    database.execute(
        f"CREATE TABLE {quoted} (id int PRIMARY KEY)",
        f"CREATE RULE never AS ON UPDATE TO {quoted} WHERE false DO INSTEAD NOTHING",
        f"ALTER TABLE {quoted} ENABLE ALWAYS RULE never",
    )
    sink = sink_of(database)
    schema = pa.schema([("id", pa.int32())])
    copy = DatabaseWriter(sink).begin_copy(odd, schema)
    copy.range(0, [(1,)])
    copy.commit(100)
    changes = [Change("I", (2,)), Change("T"), Change("I", (3,))]
    DatabaseWriter(sink).apply(odd, changes, 200, BY_ID, schema)
    assert database.rows(f"SELECT id FROM {quoted}") == [(3,)]
    database.execute(f"DROP TABLE {quoted}", "DROP SCHEMA walmere CASCADE")


def test_settings_of_the_planner_hold_only_for_the_statements_that_need_them(
    database: Database, sink: PostgresSink
) -> None:
    begin(sink, row(1))
    with sink.transaction([TABLE]) as transaction:
        net = fold_rows(text_changes([update(1, count=1)], SCHEMA).changes, BY_ID)
        assert transaction.apply_set(statements.row_set(transaction.relations[TABLE], net))
        names = ("enable_hashjoin", "enable_mergejoin", "enable_seqscan")
        settings = ", ".join(f"current_setting('{name}')" for name in names)
        assert transaction.connection.execute(f"SELECT {settings}".encode()).fetchall() == [("on",) * 3]


def test_an_index_of_another_collation_is_not_relied_on(database: Database) -> None:
    database.execute(
        'CREATE TABLE t (part text, id int8, count int, note text COLLATE "C" NOT NULL, tags text[])',
        'CREATE UNIQUE INDEX ON t (note COLLATE "POSIX")',
    )
    sink = sink_of(database)
    begin(sink, row(1, note="a"))
    by_note = Identity("i", ("note",))
    with sink.transaction([TABLE]) as transaction:
        net = fold_rows(text_changes([Change("D", None, row(1, note="a"), ord("K"))], SCHEMA).changes, by_note)
        [statement] = statements.changes_of(transaction.relations[TABLE], net)
        assert not statement.by_index
        assert transaction.apply_set(statements.row_set(transaction.relations[TABLE], net))
    clean(database)


@pytest.mark.parametrize(
    ("kind", "value"), [("numeric(9,2)", "5"), ("char(10)", "ab"), ("timestamp(0)", "2026-01-01 00:00:00.6")]
)
def test_a_row_is_found_by_values_that_the_target_has_rounded_or_padded(
    database: Database, kind: str, value: str
) -> None:
    database.execute(f"CREATE TABLE t (id int8, v {kind})")
    schema, whole = pa.schema([("id", pa.int64()), ("v", pa.string())]), Identity("f", ())
    writer = DatabaseWriter(sink_of(database))
    copy = writer.begin_copy(TABLE, schema)
    copy.range(0, [(1, value), (2, value)])
    copy.commit(100)
    writer.apply(TABLE, [Change("D", None, (1, value), ord("O"))], 200, whole, schema)
    assert [key for key, _ in database.rows("SELECT * FROM t")] == [2]
    assert not conflicts(database)
    clean(database)


def test_a_key_that_is_longer_than_the_targets_column_finds_no_other_row(database: Database) -> None:
    database.execute("CREATE TABLE t (id varchar(3) PRIMARY KEY, v text)")
    schema = pa.schema([("id", pa.string()), ("v", pa.string())])
    writer = DatabaseWriter(sink_of(database))
    copy = writer.begin_copy(TABLE, schema)
    copy.range(0, [("abc", "stays")])
    copy.commit(100)
    writer.apply(TABLE, [Change("D", None, ("abcdef", None), ord("K"))], 200, BY_ID, schema)
    assert database.rows("SELECT * FROM t") == [("abc", "stays")]
    assert [conflict for conflict, *_ in conflicts(database)] == ["delete_missing"]
    clean(database)


def test_drop_leaves_a_subscription_whose_name_begins_with_its_own(database: Database, sink: PostgresSink) -> None:
    begin(sink, row(1))
    database.execute("SELECT pg_replication_origin_create('walmere_test_copy_of_another')")
    sink.drop()
    assert database.rows("SELECT roname FROM pg_replication_origin WHERE starts_with(roname, 'walmere_test')") == [
        ("walmere_test_copy_of_another",)
    ]
    database.execute("SELECT pg_replication_origin_drop('walmere_test_copy_of_another')")


def test_a_retried_prepare_waits_for_the_attempt_before_it_and_finds_its_transaction(database: Database) -> None:
    """Also without origins. Otherwise it would wait for the prepared transaction, which nobody ends."""
    if database.major < 15:
        pytest.skip("before PostgreSQL 15, only a superuser may set session_replication_role")
    role = f"{database.name}_writer"
    database.execute(
        CREATE,
        "ALTER TABLE t ADD PRIMARY KEY (id)",
        f"CREATE ROLE {role} LOGIN",
        f"GRANT CREATE ON DATABASE {database.name} TO {role}",
        f"GRANT SET ON PARAMETER session_replication_role TO {role}",
        f"ALTER TABLE t OWNER TO {role}",
    )
    target = PostgresTarget(kind="postgres", dsn=SecretStr(database.server.dsn(database.name, role)))
    sink = sink_of(database, address=target)
    begin(sink, row(1))
    changes = [TableChanges(TABLE, BY_ID, text_changes([insert(2)]), Lsn(200))]
    waiting = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    found_prepared: list[bool] = []

    def again() -> None:
        with sink.transaction([TABLE], prepares=True) as second:
            found_prepared.append(prepared.is_prepared(second.connection, "gid"))

    retried = threading.Thread(target=again)
    with sink.transaction([TABLE], prepares=True) as first:
        apply_changes(first, changes)
        retried.start()
        eventually(lambda: bool(database.rows(waiting)))
        sink.prepare_transaction(first, "gid", [TABLE], Lsn(200))
    retried.join(30)
    assert found_prepared == [True]
    assert sink.finish_prepared("gid", commit=True, end_lsn=Lsn(200)) == [TABLE]
    assert same_rows(found(database), [row(1), row(2)])
    clean(database)
    database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
