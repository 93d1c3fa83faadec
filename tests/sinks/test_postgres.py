"""What the PostgreSQL sink does besides `test_behaviour`: conflicts, triggers, other columns, origins, privileges."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pydantic import SecretStr

from conftest import Database, version_under_test
from processes import eventually
from servers import server_of
from sinks.histories import SCHEMA, Change, Row, delete, insert, row, same_rows, update
from sinks.subjects import BY_ID, DatabaseWriter, sink_of, text_changes
from walmere.apply.fold_rows import fold_rows
from walmere.apply.transaction import TableChanges, apply_changes
from walmere.config import PostgresTarget
from walmere.errors import ColumnMissing, Conflict, SinkError, SinkMismatch, SinkRefused, WalmereError
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.owner import Owner
from walmere.publisher.ddl import TableDdl
from walmere.sinks.postgres import origin, prepared, statements
from walmere.sinks.postgres.sink import PostgresSink
from walmere.testing.server import Server

TABLE = TableName("public", "t")
NAMES = SCHEMA.names
CREATE = "CREATE TABLE t (part text, id int8, count int, note text, tags text[])"


@pytest.fixture(scope="module")
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    made = Database(server_of(version_under_test(request.config)))
    made.connection.prepare_threshold = None  # each test has another table t
    yield made
    made.drop()


@pytest.fixture
def sink(database: Database) -> Iterator[PostgresSink]:
    database.execute(CREATE, "ALTER TABLE t ADD PRIMARY KEY (id)")
    yield sink_of(database)
    clean(database)


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


def test_the_origin_has_the_progress_and_marks_the_changes(database: Database, sink: PostgresSink) -> None:
    begin(sink, row(1))
    do(sink, insert(2), lsn=0x1234)
    progress = database.rows("SELECT external_id, remote_lsn::text FROM pg_replication_origin_status")
    assert ("walmere_test", "0/1234") in progress
    lines = sink.drop()
    assert "dropped replication origin walmere_test" in lines
    assert not database.rows("SELECT FROM pg_replication_origin WHERE starts_with(roname, 'walmere_test')")
    assert not database.rows("SELECT FROM pg_namespace WHERE nspname = 'walmere'")


def test_values_that_are_swapped_between_rows_violate_nothing(database: Database, sink: PostgresSink) -> None:
    database.execute("ALTER TABLE t ADD UNIQUE (count)")
    begin(sink, row(1, count=1), row(2, count=2), row(3, count=3))
    do(sink, update(1, count=-1), update(2, count=1), update(3, count=2), update(1, count=3))
    assert same_rows(found(database), [row(1, count=3), row(2, count=1), row(3, count=2)])
    do(sink, update(8, was=1), update(1, was=2, count=9), update(2, was=8, count=8), lsn=300)
    assert same_rows(found(database), [row(2, count=8), row(1, count=9), row(3, count=2)])
    assert not conflicts(database)


def test_missing_rows_are_skipped_and_counted(database: Database, sink: PostgresSink) -> None:
    begin(sink, row(1), row(2))
    do(sink, update(5), delete(6), update(8, was=7), update(1, count=3), insert(9))
    assert same_rows(found(database), [row(1, count=3), row(2), row(9)])
    assert conflicts(database) == [
        ("update_missing", '{"id" : "5"}', None),
        ("delete_missing", '{"id" : "6"}', None),
        ("update_missing", '{"id" : "7"}', None),
    ]
    assert sink.conflicts() == {"public.t": 3}


def test_a_violated_constraint_stops_with_key_constraint_lsn_and_a_way_out(
    database: Database, sink: PostgresSink
) -> None:
    begin(sink, row(1), row(2))
    database.execute("ALTER TABLE t ADD CHECK (count < 100)")
    with pytest.raises(Conflict, match=r'insert_exists in public\.t.*"id" : "2".*t_pkey.*0/3E9') as caught:
        do(sink, insert(3), insert(2))
    assert "walmere skip -c … 0/3E9" in caught.value.hint
    assert "n" not in caught.value.wrong.partition("key {")[2].partition("}")[0]
    with pytest.raises(Conflict, match=r'update_exists in public\.t.*"id" : "1".*t_count_check'):
        do(sink, update(1, count=100))
    assert same_rows(found(database), [row(1), row(2)])
    assert sink.applied(TABLE) == Lsn(100)


def test_on_conflict_skip_leaves_out_the_row(database: Database, sink: PostgresSink) -> None:
    begin(sink, row(1), row(2))
    do(sink_of(database, on_conflict="skip"), insert(3), insert(2, count=7), insert(4))
    assert same_rows(found(database), [row(1), row(2), row(3), row(4)])
    assert conflicts(database) == [("insert_exists", '{"id" : "2"}', "t_pkey")]


def test_on_conflict_overwrite_replaces_the_rows_in_the_way(database: Database, sink: PostgresSink) -> None:
    database.execute("ALTER TABLE t ADD UNIQUE (count)")
    begin(sink, row(1, count=1), row(2, count=2), row(3, count=3), row(4, count=4))
    do(sink_of(database, on_conflict="overwrite"), insert(1, count=2), update(4, count=3))
    assert same_rows(found(database), [row(1, count=2), row(4, count=3)])
    assert [what for what, *_ in conflicts(database)] == ["multiple_unique_conflicts", "update_exists"]


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


def test_rows_of_its_own_stay_when_a_table_is_first_copied(database: Database, sink: PostgresSink) -> None:
    database.execute("INSERT INTO t (id) VALUES (77)")
    begin(sink, row(1))
    assert sorted(key for _, key, *_ in found(database)) == [1, 77]


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


def test_the_state_of_another_owner_is_refused_or_taken_over(database: Database, sink: PostgresSink) -> None:
    begin(sink, row(1))
    other = sink_of(database, owner=Owner("test", "2", 2))
    with pytest.raises(SinkMismatch, match="belongs to subscription test"):
        other.claim(TABLE)
    assert sink_of(database, owner=Owner("test", "2", 2), take_over=True).claim(TABLE)
    assert other.applied(TABLE) is None
    begin(other, row(1), row(2), lsn=50)
    assert same_rows(found(database), [row(1), row(2)])


@pytest.mark.server(settings={"track_commit_timestamp": "on"})
def test_changes_of_rows_that_others_have_written_are_applied_and_recorded(private_server: Server) -> None:
    database = Database(private_server)
    database.execute(CREATE, "ALTER TABLE t ADD PRIMARY KEY (id)")
    sink = sink_of(database)
    begin(sink, row(1), row(2), row(3))
    do(sink, update(1, count=1))
    assert not conflicts(database)
    database.execute("UPDATE t SET note = 'mine' WHERE id IN (2, 3)")
    do(sink, update(1, count=2), update(2, count=2), delete(3), lsn=300)
    assert same_rows(found(database), [row(1, count=2), row(2, count=2)])
    assert [what for what, *_ in conflicts(database)] == ["update_origin_differs", "delete_origin_differs"]
    database.drop()


def test_a_conflict_that_stops_is_recorded_although_its_batch_is_rolled_back(
    database: Database, sink: PostgresSink
) -> None:
    begin(sink, row(1))
    for _ in range(2):
        with pytest.raises(Conflict):
            do(sink, insert(1))
    assert conflicts(database) == [("insert_exists", '{"id" : "1"}', "t_pkey")] * 2


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


def test_a_truncate_followed_by_a_row_that_is_refused_is_not_undone(database: Database, sink: PostgresSink) -> None:
    """What came before the TRUNCATE is not applied again, row by row, after it."""
    database.execute("ALTER TABLE t ADD CHECK (count < 10)")
    sink = sink_of(database, on_conflict="skip")
    begin(sink, row(9))
    do(sink, insert(1), update(9, count=1), Change("T"), insert(2), insert(3, count=10))
    assert same_rows(found(database), [row(2)])
    assert [(conflict, key) for conflict, key, _ in conflicts(database)] == [("insert_exists", '{"id" : "3"}')]


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


def test_no_value_of_a_row_is_shown(database: Database) -> None:
    schema = pa.schema([("id", pa.int64()), ("v", pa.string())])
    for kind, value, identity in (("smallint", "4111111", BY_ID), ("text UNIQUE", "secret", Identity("f", ()))):
        key = "PRIMARY KEY" if identity.keyed else ""
        database.execute(f"CREATE TABLE t (id int8 {key}, v {kind})")
        writer = DatabaseWriter(sink_of(database))
        copy = writer.begin_copy(TABLE, schema)
        copy.range(0, [(1, "1" if identity.keyed else value)])
        copy.commit(100)
        with pytest.raises(WalmereError) as caught:
            writer.apply(TABLE, [Change("I", (2, value))], 200, identity, schema)
        assert value not in str(caught.value)
        if not identity.keyed:
            assert not [line for line in conflicts(database) if value in str(line)]
        clean(database)


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


def test_drop_leaves_a_subscription_whose_name_begins_with_its_own(database: Database, sink: PostgresSink) -> None:
    begin(sink, row(1))
    database.execute("SELECT pg_replication_origin_create('walmere_test_copy_of_another')")
    sink.drop()
    assert database.rows("SELECT roname FROM pg_replication_origin WHERE starts_with(roname, 'walmere_test')") == [
        ("walmere_test_copy_of_another",)
    ]
    database.execute("SELECT pg_replication_origin_drop('walmere_test_copy_of_another')")


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
