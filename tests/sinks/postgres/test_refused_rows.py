"""Rows that a database refuses, and rows that its triggers leave out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from conftest import Database
from sinks.histories import Change, K, Row
from sinks.subjects import BY_ID, DatabaseWriter, sink_of, text_changes
from walmere.apply.transaction import TableChanges, apply_changes
from walmere.errors import Conflict, SinkMismatch
from walmere.lsn import Lsn
from walmere.names import Identity, TableName

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.string()), ("v", pa.string()), ("w", pa.string())])


@pytest.fixture
def database(database: Database) -> Iterator[Database]:
    yield database
    database.execute(
        "DROP TABLE IF EXISTS t CASCADE", "DROP SCHEMA IF EXISTS walmere CASCADE", "DROP DOMAIN IF EXISTS short, flags"
    )


class Target:
    """A table t of a database, with rows that were copied."""

    def __init__(self, database: Database, columns: str, *rows: Row, **sink: Any) -> None:
        self.database = database
        database.execute(f"CREATE TABLE t ({columns})")
        self.sink = sink_of(database, **sink)
        copy = DatabaseWriter(self.sink).begin_copy(TABLE, SCHEMA)
        copy.range(0, rows)
        copy.commit(100)

    def do(self, *changes: Change, identity: Identity = BY_ID) -> None:
        DatabaseWriter(self.sink).apply(TABLE, changes, 200, identity, SCHEMA)

    def refuses(self, *changes: Change) -> Conflict:
        with pytest.raises(Conflict) as caught:
            self.do(*changes)
        assert self.sink.applied(TABLE) == Lsn(100)
        return caught.value

    def rows(self) -> list[Row]:
        return sorted(self.database.rows("SELECT * FROM t"))

    def conflicts(self) -> list[Row]:
        return self.database.rows("SELECT conflict, key, message FROM walmere.conflicts ORDER BY id")


def insert(*values: str | None) -> Change:
    return Change("I", values)


def update(*values: str | None) -> Change:
    return Change("U", values)


def delete(key: str) -> Change:
    return Change("D", None, (key, None, None), K)


@pytest.mark.parametrize("fires", [False, True], ids=["by sets", "row by row"])
@pytest.mark.parametrize(
    ("kind", "change", "conflict"),
    [
        ("varchar(3)", insert("2", "x", "secret"), "insert_failed"),
        ("smallint", insert("2", "x", "4111111"), "insert_failed"),
        ("int", update("1", "x", "secret"), "update_failed"),
        ("varchar(3)", update("1", "x", "secret"), "update_failed"),
        ("numeric(3, 1)", update("1", "x", "123456"), "update_failed"),
    ],
)
def test_a_value_that_does_not_fit_stops_with_column_key_lsn_and_a_way_out(
    database: Database, kind: str, change: Change, conflict: str, fires: bool
) -> None:
    target = Target(database, f"id int PRIMARY KEY, v text, w {kind}", ("1", "a", "1"))
    if fires:
        enable_trigger(database, "RETURN coalesce(NEW, OLD);")
    error = target.refuses(insert("5", "fits", "1"), change)
    assert change.new is not None
    expected = f'{conflict} in public.t: the row with the key {{"id" : "{change.new[0]}"}} is refused (column w: '
    assert expected in error.wrong
    assert "commit LSN 0/3E9" in error.wrong
    assert "walmere skip -c … 0/3E9" in error.hint
    assert change.new[2] not in str(error)
    [(recorded, key, message)] = target.conflicts()
    assert (recorded, key) == (conflict, f'{{"id" : "{change.new[0]}"}}')
    assert change.new[2] not in message
    assert len(target.rows()) == 1


def test_a_key_that_does_not_fit_stops_at_a_delete(database: Database) -> None:
    target = Target(database, "id smallint PRIMARY KEY, v text, w text", ("1", "a", "b"))
    error = target.refuses(delete("100000"))
    assert 'delete_failed in public.t: the row with the key {"id" : "100000"} is refused (column id: ' in error.wrong


def test_on_conflict_skip_leaves_out_a_value_that_does_not_fit(database: Database) -> None:
    target = Target(database, "id int PRIMARY KEY, v text, w varchar(3)", ("1", "a", "b"), on_conflict="skip")
    target.do(insert("2", "x", "secret"), insert("3", "y", "abc"), update("1", "z", "secret"), update("1", "z", "c"))
    assert target.rows() == [(1, "z", "c"), (3, "y", "abc")]
    too_long = "column w: value too long for type character varying(3)"
    assert target.conflicts() == [
        ("insert_failed", '{"id" : "2"}', too_long),
        ("update_failed", '{"id" : "1"}', too_long),
    ]


def test_on_conflict_overwrite_stops_at_what_it_cannot_overwrite(database: Database) -> None:
    columns = "id int PRIMARY KEY, v text NOT NULL, w varchar(3)"
    target = Target(database, columns, ("1", "a", "b"), on_conflict="overwrite")
    assert "insert_failed in public.t" in target.refuses(insert("2", "x", "secret")).wrong
    error = target.refuses(insert("1", None, "c"))
    assert "insert_exists in public.t" in error.wrong
    assert "not-null" in error.wrong
    assert "commit LSN 0/3E8" in error.wrong
    target.do(insert("1", "x", "c"))
    assert target.rows() == [(1, "x", "c")]


@pytest.mark.parametrize("fires", [False, True], ids=["by sets", "row by row"])
def test_a_domain_of_limited_length_cuts_nothing_off(database: Database, fires: bool) -> None:
    database.execute("CREATE DOMAIN short AS varchar(3)", "CREATE DOMAIN flags AS bit(3)")
    target = Target(database, "id int PRIMARY KEY, v short, w flags", ("1", "abc", "101"))
    if fires:
        enable_trigger(database, "RETURN coalesce(NEW, OLD);")
    assert "column v: " in target.refuses(update("1", "abcd", "101")).wrong
    assert "column w: " in target.refuses(update("1", "ab", "1011")).wrong
    assert "column v: " in target.refuses(insert("2", "abcd", "101")).wrong
    target.do(update("1", "ab", "100"))
    assert target.rows() == [(1, "ab", "100")]


@pytest.mark.parametrize("kind", ["varchar(3)", "char(3)", "short"])
def test_a_row_is_not_found_by_a_key_that_is_cut_off(database: Database, kind: str) -> None:
    database.execute("CREATE DOMAIN short AS varchar(3)")
    target = Target(database, f"id {kind} PRIMARY KEY, v text, w text", ("abc", "stays", "x"), ("a", "goes", "x"))
    target.do(delete("abcdef"), delete("a"))
    assert [row[1] for row in target.rows()] == ["stays"]
    assert [conflict for conflict, *_ in target.conflicts()] == ["delete_missing"]


@pytest.mark.parametrize("kind", ["char(5)", "numeric(9, 2)", "short", "bit(3)"])
def test_a_row_without_a_key_is_found_by_its_values(database: Database, kind: str) -> None:
    database.execute("CREATE DOMAIN short AS char(5)")
    target = Target(database, f"id text, v {kind}, w text", ("1", "101", "x"), ("2", "101", "x"))
    target.do(Change("D", None, ("1", "101", "x"), ord("O")), identity=Identity("f", ()))
    assert [key for key, *_ in target.rows()] == ["2"]
    assert not target.conflicts()


def test_an_exception_of_a_trigger_names_the_row(database: Database) -> None:
    target = Target(database, "id int PRIMARY KEY, v text, w text", ("1", "a", "b"))
    enable_trigger(database, "IF NEW.v = 'no' THEN RAISE 'not this one'; END IF; RETURN coalesce(NEW, OLD);")
    error = target.refuses(update("1", "yes", "b"), insert("2", "no", "b"))
    assert 'insert_failed in public.t: the row with the key {"id" : "2"} is refused (not this one)' in error.wrong
    assert "commit LSN 0/3E9" in error.wrong


def test_a_row_that_a_trigger_leaves_out_is_not_missing(database: Database) -> None:
    target = Target(database, "id int PRIMARY KEY, v text, w text", ("1", "a", "b"), ("2", "a", "b"))
    enable_trigger(database, "RETURN NULL;")
    target.do(update("1", "x", "y"), delete("2"), insert("3", "x", "y"), update("7", "x", "y"), delete("8"))
    assert target.rows() == [(1, "a", "b"), (2, "a", "b")]
    assert [line[:2] for line in target.conflicts()] == [
        ("update_missing", '{"id" : "7"}'),
        ("delete_missing", '{"id" : "8"}'),
    ]


def test_a_character_that_the_encoding_does_not_have_stops_with_key_and_lsn(database: Database) -> None:
    latin = Database(database.server, "ENCODING 'LATIN1' TEMPLATE template0")
    try:
        target = Target(latin, "id int PRIMARY KEY, v text, w text", ("1", "a", "b"))
        error = target.refuses(insert("2", "fits", "\u00e9"), insert("3", "\u0107", "x"))
        assert 'insert_failed in public.t: the row with the key {"id": "3"} is refused' in error.wrong
        assert "commit LSN 0/3E9" in error.wrong
    finally:
        latin.drop()


def test_a_table_whose_only_column_cannot_be_assigned(database: Database) -> None:
    schema = pa.schema([("id", pa.string())])
    for fires in (False, True):
        database.execute("CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY)")
        writer = DatabaseWriter(sink_of(database))
        copy = writer.begin_copy(TABLE, schema)
        copy.range(0, [("1",), ("2",)])
        copy.commit(100)
        if fires:
            enable_trigger(database, "RETURN coalesce(NEW, OLD);")
        changes = [Change("U", ("1",)), Change("U", ("9",), ("2",), K), Change("U", ("5",))]
        writer.apply(TABLE, changes, 200, BY_ID, schema)
        assert sorted(database.rows("SELECT id FROM t")) == [(1,), (9,)]
        assert database.rows("SELECT conflict, key FROM walmere.conflicts") == [("update_missing", '{"id" : "5"}')]
        database.execute("DROP TABLE t", "DROP SCHEMA walmere CASCADE")


def enable_trigger(database: Database, body: str) -> None:
    database.execute(
        f"CREATE OR REPLACE FUNCTION fire() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$",
        "CREATE TRIGGER fires BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION fire()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER fires",
    )


NO_TABLE = "IF NEW.v = 'no' THEN INSERT INTO absent VALUES (1); END IF; RETURN coalesce(NEW, OLD);"


@pytest.mark.parametrize("on_conflict", ["stop", "skip", "overwrite"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (NO_TABLE, 'relation "absent" does not exist'),
        ("IF NEW.v = 'no' THEN PERFORM absent(1); END IF; RETURN NEW;", "function absent(integer) does not exist"),
        ("IF NEW.v = 'no' THEN CREATE TABLE absent.x (); END IF; RETURN NEW;", 'schema "absent" does not exist'),
        ("IF NEW.v = 'no' THEN ASSERT false; END IF; RETURN NEW;", "assertion failed"),
        ("IF NEW.v = 'no' THEN PERFORM lastval(); END IF; RETURN NEW;", "lastval is not yet defined in this session"),
    ],
)
def test_an_error_in_the_code_of_a_trigger_stops_with_key_lsn_and_a_way_out(
    database: Database, body: str, message: str, on_conflict: str
) -> None:
    target = Target(database, "id int PRIMARY KEY, v text, w text", ("1", "a", "b"), on_conflict=on_conflict)
    enable_trigger(database, body)
    error = target.refuses(update("1", "yes", "b"), insert("2", "no", "b"))
    assert f'insert_failed in public.t: the row with the key {{"id" : "2"}} is refused ({message})' in error.wrong
    assert "commit LSN 0/3E9" in error.wrong
    assert error.hint.startswith("correct the trigger, rule or function of the target that fails; or skip")
    assert error.hint.endswith("`walmere skip -c … 0/3E9`"), "on_conflict does not help"
    assert target.rows() == [(1, "a", "b")]


def test_an_error_in_the_code_of_a_constraint_stops_with_key_lsn_and_a_way_out(database: Database) -> None:
    target = Target(database, "id int PRIMARY KEY, v text, w text", ("1", "a", "b"))
    database.execute(
        "CREATE OR REPLACE FUNCTION fine(v text) RETURNS bool LANGUAGE plpgsql AS"
        " $$ BEGIN IF v = 'no' THEN RETURN EXISTS(SELECT FROM absent); END IF; RETURN true; END $$",
        "ALTER TABLE t ADD CHECK (fine(v))",
    )
    error = target.refuses(insert("2", "yes", "b"), insert("3", "no", "b"))
    assert 'the row with the key {"id" : "3"} is refused (relation "absent" does not exist)' in error.wrong
    assert "walmere skip -c … 0/3E9" in error.hint


@pytest.mark.parametrize("fires", [False, True], ids=["by sets", "row by row"])
@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("ALTER TABLE t DROP COLUMN w", "the target's table public.t lacks the column w"),
        ("ALTER TABLE t RENAME TO other", "the target does not have the table public.t"),
        ("DROP TABLE walmere.conflicts", 'relation "walmere.conflicts" does not exist'),
    ],
)
def test_a_table_that_is_altered_while_a_batch_is_applied_has_an_error_of_its_own(
    database: Database, statement: str, message: str, fires: bool
) -> None:
    target = Target(database, "id int PRIMARY KEY, v text, w text", ("1", "a", "b"))
    if fires:
        enable_trigger(database, "RETURN coalesce(NEW, OLD);")
    database.execute("DROP TABLE IF EXISTS other")
    work = [TableChanges(TABLE, BY_ID, text_changes([update("1", "x", "y"), delete("5")], SCHEMA), Lsn(200))]

    def apply() -> None:
        with target.sink.transaction([TABLE]) as transaction:
            database.execute(statement)  # after the table was read
            apply_changes(transaction, work)

    with pytest.raises(SinkMismatch, match=message):
        apply()
    database.execute("DROP TABLE IF EXISTS other")


@pytest.mark.parametrize("fires", [False, True], ids=["by sets", "row by row"])
def test_a_truncate_that_is_refused_stops_with_table_lsn_and_a_way_out(database: Database, fires: bool) -> None:
    target = Target(database, "id int PRIMARY KEY, v text, w text", ("1", "a", "b"))
    if fires:
        enable_trigger(database, "RETURN coalesce(NEW, OLD);")
    database.execute("CREATE TABLE child (id int REFERENCES t)")
    try:
        error = target.refuses(update("1", "x", "y"), Change("T"))
    finally:
        database.execute("DROP TABLE child")
    assert "truncate_failed in public.t: a TRUNCATE is refused (cannot truncate a table referenced" in error.wrong
    assert "commit LSN 0/3E9" in error.wrong
    assert "walmere skip -c … 0/3E9" in error.hint
    assert [line[:2] for line in target.conflicts()] == [("truncate_failed", None)]
    target.do(Change("T"))
    assert not target.rows()


@pytest.mark.parametrize("fires", [False, True], ids=["by statement", "row by row"])
def test_a_truncate_of_several_tables_that_is_refused_names_all_of_them(database: Database, fires: bool) -> None:
    """The server does not say because of which one, and the statement has all of them."""
    database.execute("DROP TABLE IF EXISTS referenced, child")
    target = Target(database, "id int PRIMARY KEY, v text, w text")
    database.execute("CREATE TABLE referenced (id int PRIMARY KEY)")
    other, schema = TableName("public", "referenced"), pa.schema([("id", pa.string())])
    DatabaseWriter(target.sink).begin_copy(other, schema).commit(100)
    database.execute("CREATE TABLE child (id int REFERENCES referenced)")
    if fires:
        enable_trigger(database, "RETURN coalesce(NEW, OLD);")
    work = [
        TableChanges(TABLE, BY_ID, text_changes([Change("T")], SCHEMA), Lsn(200)),
        TableChanges(other, BY_ID, text_changes([Change("T")], schema), Lsn(200)),
    ]
    with pytest.raises(Conflict) as caught, target.sink.transaction([TABLE, other]) as transaction:
        apply_changes(transaction, work)
    assert caught.value.wrong.startswith("truncate_failed in public.t, public.referenced: a TRUNCATE is refused (")
    assert database.rows("SELECT relation, conflict FROM walmere.conflicts") == [("public.t", "truncate_failed")]
    database.execute("DROP TABLE child, referenced")


@pytest.mark.parametrize("on_conflict", ["stop", "skip", "overwrite"])
def test_a_transaction_that_a_deferred_constraint_refuses_stops_with_its_lsn(
    database: Database, on_conflict: str
) -> None:
    target = Target(database, "id int PRIMARY KEY, v text, w text", ("1", "a", "b"), on_conflict=on_conflict)
    database.execute("DROP TABLE IF EXISTS parent", "CREATE TABLE parent (v text PRIMARY KEY)")
    database.execute("INSERT INTO parent VALUES ('a'), ('b')")
    database.execute(
        'ALTER TABLE t ADD CONSTRAINT "odd\'fk" FOREIGN KEY (v) REFERENCES parent DEFERRABLE INITIALLY DEFERRED',
        "DO $$ DECLARE r record; BEGIN FOR r IN SELECT tgname FROM pg_trigger WHERE tgrelid = 't'::regclass LOOP"
        " EXECUTE format('ALTER TABLE t ENABLE ALWAYS TRIGGER %I', r.tgname); END LOOP; END $$",
    )
    try:
        error = target.refuses(insert("2", "b", "x"), insert("3", "absent", "x"), insert("4", "a", "x"))
        assert "commit_failed in public.t: a transaction is refused at its end (insert or update on" in error.wrong
        assert "commit LSN 0/3E9" in error.wrong
        assert error.hint.startswith("correct the rows of the target that the foreign key compares")
        assert error.hint.endswith("`walmere skip -c … 0/3E9`"), "on_conflict does not help"
        assert [line[:2] for line in target.conflicts()] == [("commit_failed", None)]
        assert target.rows() == [(1, "a", "b")]
        changes = text_changes([insert("3", "absent", "x"), update("3", "a", "x"), delete("1")], SCHEMA)
        one_transaction = replace(changes, commit_lsn=np.full(3, 1000, np.uint64))
        with target.sink.transaction([TABLE]) as transaction:
            apply_changes(transaction, [TableChanges(TABLE, BY_ID, one_transaction, Lsn(200))])
            transaction.reached[TABLE] = Lsn(200)
            target.sink.commit_transaction(transaction, Lsn(200), None)
        assert target.rows() == [(3, "a", "x")]
    finally:
        database.execute('ALTER TABLE t DROP CONSTRAINT "odd\'fk"', "DROP TABLE parent")


def test_an_exception_of_a_deferred_trigger_names_the_transaction(database: Database) -> None:
    target = Target(database, "id int PRIMARY KEY, v text, w text", ("1", "a", "b"))
    database.execute(
        "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN IF NEW.v = 'no' THEN RAISE 'not this one'; END IF; RETURN NULL; END $$",
        "CREATE CONSTRAINT TRIGGER refuses AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION refuse()",
        "ALTER TABLE t ENABLE REPLICA TRIGGER refuses",
    )
    error = target.refuses(insert("2", "yes", "x"), insert("3", "no", "x"))
    assert "commit_failed in public.t: a transaction is refused at its end (not this one)" in error.wrong
    assert "commit LSN 0/3E9" in error.wrong
    assert error.hint == "alter the target so that it takes the transaction; or skip the whole transaction:" + (
        " `walmere skip -c … 0/3E9`"
    )


def test_a_row_without_columns_that_is_refused_stops_with_its_lsn(database: Database) -> None:
    database.execute("CREATE TABLE t (own int NOT NULL)")
    writer, schema = DatabaseWriter(sink_of(database)), pa.schema([])
    writer.begin_copy(TABLE, schema).commit(100)
    with pytest.raises(Conflict, match=r"insert_exists in public\.t: a row without a key.*commit LSN 0/3E8"):
        writer.apply(TABLE, [Change("I", ())], 200, Identity("n", ()), schema)


def test_rows_without_columns_before_and_after_a_truncate(database: Database) -> None:
    database.execute("CREATE TABLE t (own int DEFAULT 7)")
    writer, schema = DatabaseWriter(sink_of(database)), pa.schema([])
    writer.begin_copy(TABLE, schema).commit(100)
    changes = [Change("I", ()), Change("T"), Change("I", ()), Change("I", ())]
    writer.apply(TABLE, changes, 200, Identity("n", ()), schema)
    assert database.rows("SELECT * FROM t") == [(7,), (7,)]
