"""How the PostgreSQL sink finds and writes rows where one statement for many rows is not enough."""

from __future__ import annotations

import random
import string
from dataclasses import replace

import pyarrow as pa
import pytest

from conftest import Database
from sinks.histories import SCHEMA, UNCHANGED, Change, K, insert, row, update
from sinks.postgres.target import TABLE, begin, clean, conflicts, do, found
from sinks.subjects import BY_ID, DatabaseWriter, sink_of, text_changes
from walmere.apply.fold_rows import require_identity
from walmere.apply.transaction import TableChanges, apply_changes
from walmere.errors import ColumnMissing, Conflict, NotMirrored
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.publisher.ddl import TableDdl
from walmere.sinks.postgres.relation import missing_columns
from walmere.sinks.postgres.sink import PostgresSink

FULL = Identity("f", ())
OLD = ord("O")


def test_a_row_whose_identity_column_changes_keeps_toast_values_and_local_columns(
    database: Database, sink: PostgresSink
) -> None:
    """SQL cannot update a column that is GENERATED ALWAYS AS IDENTITY, so the row is deleted and inserted."""
    database.execute("ALTER TABLE t ALTER id ADD GENERATED ALWAYS AS IDENTITY", "ALTER TABLE t ADD local text")
    begin(sink, row(1, note="large", tags=["x"]))
    database.execute("UPDATE t SET local = 'mine'")
    do(sink, update(9, was=1, count=1, note=UNCHANGED, tags=UNCHANGED))
    assert found(database) == [("p", 9, 1, "large", ["x"], "mine")]


def test_an_insert_that_lacks_toast_values_is_not_applied() -> None:
    """A row that enters a row filter: the server sends it as an Insert, without unchanged TOAST values."""
    changes = text_changes([Change("I", row(5, note=UNCHANGED))], SCHEMA).changes
    with pytest.raises(NotMirrored, match="TOAST"):
        require_identity(changes, BY_ID)


@pytest.mark.parametrize("local", [False, True])
def test_replica_identity_full_finds_a_row_by_the_key_of_the_target(
    database: Database, sink: PostgresSink, local: bool
) -> None:
    """As PostgreSQL does: other columns of the target's row may have been changed there."""
    if local:
        database.execute("ALTER TABLE t ADD local text DEFAULT 'preset'")
    begin(sink, row(1), row(2))
    database.execute("UPDATE t SET note = 'mine'")
    do(sink, Change("U", row(1, count=5), row(1), OLD), Change("D", None, row(2), OLD), identity=FULL)
    assert found(database) == [(*row(1, count=5), "preset") if local else row(1, count=5)]
    assert not conflicts(database)


def test_one_of_two_rows_with_the_key_of_a_deferrable_constraint_is_changed(database: Database) -> None:
    """Such a constraint is not checked for a subscriber, so it does not make a key unique."""
    database.execute("CREATE TABLE t (id int8 PRIMARY KEY DEFERRABLE, v text)")
    schema = pa.schema([("id", pa.int64()), ("v", pa.string())])
    writer = DatabaseWriter(sink_of(database))
    writer.begin_copy(TABLE, schema).commit(100)
    writer.apply(TABLE, [Change("I", (1, "a")), Change("I", (1, "a"))], 200, BY_ID, schema)
    writer.apply(TABLE, [Change("U", (1, "b"))], 300, BY_ID, schema)
    assert sorted(found(database)) == [(1, "a"), (1, "b")]
    clean(database)


ENABLE_FOREIGN_KEYS = """
    DO $$ DECLARE r record; BEGIN
        FOR r IN SELECT tgrelid::regclass::text AS t, tgname FROM pg_trigger WHERE tgconstrrelid > 0 LOOP
            IF r.t ~ '^{}' THEN EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', r.t, r.tgname); END IF;
        END LOOP;
    END $$
"""


@pytest.mark.parametrize("enabled", ["(child|parent)", "child", "parent"])
@pytest.mark.parametrize("partitioned", [False, True])
def test_tables_with_foreign_keys_that_a_subscriber_checks_are_changed_in_the_order_of_the_source(
    database: Database, enabled: str, partitioned: bool
) -> None:
    """A row of the first table references one of the other table that is deleted later in the batch."""
    ids = pa.schema([("id", pa.int64())])
    refs = pa.schema([("id", pa.int64()), ("parent", pa.int64())])
    parent, child = TableName("public", "parent"), TableName("public", "child")
    by = " PARTITION BY HASH (id)" if partitioned else ""
    database.execute(
        "DROP TABLE IF EXISTS child, parent",
        f"CREATE TABLE parent (id int8 PRIMARY KEY){by}",
        f"CREATE TABLE child (id int8 PRIMARY KEY, parent int8 REFERENCES parent){by}",
    )
    if partitioned:
        for each in ("parent", "child"):
            database.execute(f"CREATE TABLE {each}_0 PARTITION OF {each} FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
    sink = sink_of(database)
    for table, schema, rows in ((parent, ids, [(1,)]), (child, refs, [])):
        copy = DatabaseWriter(sink).begin_copy(table, schema)
        copy.range(0, rows)
        copy.commit(100)
    database.execute(ENABLE_FOREIGN_KEYS.format(enabled))
    of_child = [Change("I", (2, 1)), Change("D", None, (2, None), K), Change("I", (9, 9))]
    of_parent = [Change("D", None, (1,), K), Change("I", (9,))]
    changes = text_changes(of_child, refs)
    changes.commit_lsn[2] = 2000  # after those of the other table
    work = [
        TableChanges(child, BY_ID, changes, Lsn(3000)),
        TableChanges(parent, BY_ID, text_changes(of_parent, ids, first=1500), Lsn(3000)),
    ]
    with sink.transaction([child, parent]) as transaction:
        apply_changes(transaction, work)
        transaction.reached |= {child: Lsn(3000), parent: Lsn(3000)}
        sink.commit_transaction(transaction, Lsn(3000), None)
    assert database.rows("SELECT * FROM child") == [(9, 9)]
    assert database.rows("SELECT * FROM parent") == [(9,)]
    assert not database.rows("SELECT FROM walmere.conflicts")
    clean(database)
    database.execute("DROP TABLE child, parent")


def test_a_null_stays_a_null_although_the_database_has_array_nulls_off(database: Database, sink: PostgresSink) -> None:
    database.execute(f"ALTER DATABASE {database.name} SET array_nulls = off")
    sink = replace(sink, subscription="array_nulls")  # not a connection that was opened before
    begin(sink, row(1, tags=[]), row(2))
    do(sink, update(1, note=None, tags=[]))
    assert database.rows("SELECT note FROM t WHERE id = 1") == [(None,)]
    database.execute(f"ALTER DATABASE {database.name} RESET array_nulls")


def test_a_value_that_is_too_long_for_an_index_of_the_target_stops_with_key_and_lsn(
    database: Database, sink: PostgresSink
) -> None:
    database.execute("CREATE INDEX ON t (note)")
    begin(sink, row(1))
    long = "".join(random.Random(1).choices(string.ascii_letters, k=9000))  # which cannot be compressed
    with pytest.raises(Conflict, match=r'insert_failed in public.t: the row with the key {"id" : "5"} .* 0/3E8'):
        do(sink, insert(5, note=long))
    assert do(replace(sink, on_conflict="skip"), insert(5, note=long), insert(6)) == 2
    assert sorted(key for _, key, *_ in found(database)) == [1, 6]


def test_a_table_with_more_values_and_masks_than_one_statement_takes(database: Database) -> None:
    """PostgreSQL limits a row to 1,664 columns; each unchanged TOAST column needs one more."""
    names = [f"c{number}" for number in range(1500)]
    database.execute(f"CREATE TABLE t (id int8 PRIMARY KEY, {', '.join(f'{name} text' for name in names)})")
    schema = pa.schema([("id", pa.int64()), *((name, pa.string()) for name in names)])
    writer = DatabaseWriter(sink_of(database))
    copy = writer.begin_copy(TABLE, schema)
    copy.range(0, [(key, *("old" if place // 500 == key else None for place in range(1500))) for key in range(3)])
    copy.commit(100)
    updates = [
        Change(
            "U", (key, *(UNCHANGED if place // 500 == key else "new" if not place else None for place in range(1500)))
        )
        for key in range(3)
    ]
    writer.apply(TABLE, updates, 200, BY_ID, schema)
    assert database.rows("SELECT id, c0, c1, c500, c1000 FROM t ORDER BY id") == [
        (0, "old", "old", None, None),
        (1, "new", None, "old", None),
        (2, "new", None, None, "old"),
    ]
    clean(database)


def test_a_column_that_the_target_has_under_the_name_of_a_new_one_needs_a_copy(
    database: Database, sink: PostgresSink
) -> None:
    """It is that of a column which the source has dropped, and has its values."""
    creates, columns = replace(sink, create_tables=True), {name: f"{name} text" for name in SCHEMA.names}
    begin(creates, row(1))
    assert creates.alter(TABLE, TableDdl(added=columns), {}, ["note"]) is None
    assert creates.alter(TABLE, TableDdl(added=columns), {"note": "part", "part": "note"}) is None
    assert sink.alter(TABLE, TableDdl(added=columns), {}, ["note"]) == 1  # somebody has added it there
    added = {**columns, "more": "more text DEFAULT 'of old rows'"}
    assert creates.alter(TABLE, TableDdl(added=added, defaults={"more": "'of new rows'"}), {}, ["more"]) == 1
    database.execute("INSERT INTO t (id) VALUES (2)")
    assert database.rows("SELECT more FROM t ORDER BY id") == [("of old rows",), ("of new rows",)]


def test_a_second_row_with_the_key_of_one_that_was_not_deleted_stops(database: Database, sink: PostgresSink) -> None:
    """A publication may leave out deletes. Then both inserts of a key may be in one batch."""
    begin(sink, row(1), row(2))
    with pytest.raises(Conflict, match="insert_exists"):
        do(sink, insert(5), update(5, count=1), insert(5, count=2))
    with pytest.raises(Conflict, match="insert_exists"):
        do(sink, update(1, count=1), insert(1, count=2))
    with pytest.raises(Conflict, match="update_exists"):
        do(sink, update(2, count=1), update(2, was=1, count=2))
    assert found(database) == [row(1), row(2)]


def test_an_error_of_its_own_that_a_trigger_raises_stops_with_key_and_lsn(
    database: Database, sink: PostgresSink
) -> None:
    database.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'not this one' USING ERRCODE = 'APP01'; END $$",
        "CREATE TRIGGER refuse BEFORE INSERT ON t FOR EACH ROW WHEN (NEW.count = 9) EXECUTE FUNCTION refuse()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER refuse",
    )
    begin(sink, row(1))
    with pytest.raises(Conflict, match=r'insert_failed in public.t: the row with the key {"id" : "5"} .* 0/3E8'):
        do(sink, insert(5, count=9))
    do(replace(sink, on_conflict="skip"), insert(5, count=9), insert(6))
    assert sorted(key for _, key, *_ in found(database)) == [1, 6]
    database.execute("DROP FUNCTION refuse CASCADE")


def test_triggers_fire_for_rows_of_which_no_column_is_published(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (n int GENERATED BY DEFAULT AS IDENTITY)",
        "CREATE FUNCTION add() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.n := NEW.n + 100; RETURN NEW; END $$",
        "CREATE TRIGGER add BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION add()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER add",
    )
    writer, nothing = DatabaseWriter(sink_of(database)), pa.schema([])
    writer.begin_copy(TABLE, nothing).commit(100)
    writer.apply(TABLE, [Change("I", ()), Change("I", ())], 200, Identity("d", ()), nothing)
    assert found(database) == [(101,), (102,)]
    clean(database)
    database.execute("DROP FUNCTION add")


def test_the_statements_of_a_hint_can_be_run(database: Database) -> None:
    database.execute('CREATE TABLE "Odd Name" (id int, "O""ld" text)')
    names, renamed = ["New", "plain", "Added"], {"New": 'O"ld'}
    definitions = {"plain": "plain int", "Added": '"Added" int'}
    error = missing_columns(TableName("public", "Odd Name"), names, "x", definitions, renamed)
    database.execute(error.hint.partition("or set")[0])
    database.rows('SELECT id, "New", plain, "Added" FROM "Odd Name"')
    database.execute('DROP TABLE "Odd Name"')


def test_a_column_is_renamed_before_its_old_name_is_used_for_a_new_column(
    database: Database, sink: PostgresSink
) -> None:
    begin(sink, row(1, count=3))
    creates = sink_of(database, create_tables=True)
    columns = dict.fromkeys(SCHEMA.names, "") | {"count": "count text DEFAULT 'new'", "was_count": "was_count int"}
    assert creates.alter(TABLE, TableDdl(added=columns), {"was_count": "count"}, ["count"]) == 1
    assert database.rows("SELECT id, was_count, count FROM t") == [(1, 3, "new")]


@pytest.mark.parametrize(
    ("now", "renamed", "added"),
    [
        (["count"], {"was_count": "count"}, ["count"]),
        (["note"], {"note": "count", "was_note": "note"}, []),
        (["note", "count"], {"note": "count", "was_note": "note"}, ["count"]),
    ],
    ids=["name of a new column", "name of another column", "both"],
)
def test_the_hint_for_a_renamed_column_has_all_statements_if_its_old_name_is_used_again(
    database: Database, sink: PostgresSink, now: list[str], renamed: dict[str, str], added: list[str]
) -> None:
    begin(sink, row(1, count=3, note="of note"))
    names = {*SCHEMA.names} - {*renamed.values()} | {*renamed} | {*now}
    columns = {name: f"{name} text DEFAULT 'new'" for name in names}
    with pytest.raises(ColumnMissing) as caught:
        sink.alter(TABLE, TableDdl(added=columns), renamed, added)
    database.execute(caught.value.hint.partition("or set")[0])
    expected = {"count": 3, "note": "of note"}
    wanted = tuple(expected[old] for old in renamed.values()) + ("new",) * len(added)
    assert database.rows(f"SELECT {', '.join([*renamed, *added])} FROM t") == [wanted]


@pytest.mark.parametrize("added", [["count"], []], ids=["name of a new column", "name is not used again"])
def test_a_renamed_column_that_was_added_at_the_target_instead_needs_a_copy(
    database: Database, sink: PostgresSink, added: list[str]
) -> None:
    """Otherwise the new column would keep the values of the old one, and the renamed one would have none."""
    begin(sink, row(1, count=3))
    columns = dict.fromkeys([*(name for name in SCHEMA.names if name != "count" or added), "was_count"], "")
    database.execute("ALTER TABLE t ADD was_count int")
    assert sink.alter(TABLE, TableDdl(added=columns), {"was_count": "count"}, added) is None
