"""Conflicts with rows of a PostgreSQL target: what is skipped, counted, overwritten, or stops the subscription."""

from __future__ import annotations

import psycopg
import pyarrow as pa
import pytest

from conftest import Database
from sinks.histories import Change, delete, insert, row, same_rows, update
from sinks.postgres.target import CREATE, TABLE, begin, clean, conflicts, do, found
from sinks.subjects import BY_ID, DatabaseWriter, sink_of
from walmere.errors import Conflict, WalmereError
from walmere.lsn import Lsn
from walmere.names import Identity
from walmere.sinks.postgres.sink import PostgresSink
from walmere.testing.server import Server


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
    assert caught.value.hint == (
        "change the row of the target that is in the way; or skip the whole transaction: `walmere skip -c … 0/3E9`;"
        ' or set target.on_conflict = "skip" or "overwrite"'
    )
    assert "n" not in caught.value.wrong.partition("key {")[2].partition("}")[0]
    with pytest.raises(Conflict, match=r'update_exists in public\.t.*"id" : "1".*t_count_check') as caught:
        do(sink, update(1, count=100))
    assert caught.value.hint.startswith("alter the constraint of the target; or skip")
    assert same_rows(found(database), [row(1), row(2)])
    assert sink.applied(TABLE) == Lsn(100)


def test_a_conflict_is_recorded_beside_a_transaction_that_has_recorded_one_and_stays_open(
    database: Database, sink: PostgresSink
) -> None:
    """As a prepared transaction does: only this subscription can commit it."""
    begin(sink, row(1))
    with psycopg.connect(database.dsn) as other:
        other.execute("INSERT INTO walmere.conflicts (subscription, relation, conflict) VALUES ('s', 't', 'c')")
        with pytest.raises(Conflict):
            do(sink, insert(1))
        other.rollback()
    assert [line[0] for line in conflicts(database)] == ["insert_exists"]


@pytest.mark.parametrize("on_conflict", ["skip", "overwrite"])
def test_a_conflict_that_stops_several_tries_is_one_line(
    database: Database, sink: PostgresSink, on_conflict: str
) -> None:
    begin(sink, row(1), row(2))
    goes_on = sink_of(database, on_conflict=on_conflict)
    do(goes_on, insert(1), lsn=1001)
    earlier = ("insert_exists", '{"id" : "1"}', "t_pkey")
    changes = (update(1), update(7), insert(2, count=7), insert(1))
    for _ in range(3):
        with pytest.raises(Conflict):
            do(sink_of(database), *changes, lsn=2000)
    stopped = ("insert_exists", '{"id" : "2"}', "t_pkey")
    assert conflicts(database) == [earlier, stopped]
    assert sink.conflicts() == {"public.t": 2}
    do(goes_on, *changes, lsn=2000)
    assert conflicts(database) == [
        earlier,
        stopped,
        ("update_missing", '{"id" : "7"}', None),
        ("insert_exists", '{"id" : "1"}', "t_pkey"),
    ]


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


def test_on_conflict_overwrite_replaces_a_row_with_equal_nulls(database: Database, sink: PostgresSink) -> None:
    if database.major < 15:
        pytest.skip("PostgreSQL 14 has no NULLS NOT DISTINCT")
    database.execute("ALTER TABLE t ADD UNIQUE NULLS NOT DISTINCT (count, note)")
    sink = sink_of(database, on_conflict="overwrite")
    begin(sink, ("p", 1, None, "n", None), ("p", 2, None, None, None), row(3, count=3, note=None))
    do(sink, insert(4, count=None), update(3, count=None, note=None), insert(5, count=None, note="other"))
    assert sorted(key for _, key, *_ in found(database)) == [3, 4, 5]
    do(sink, insert(3, count=None), lsn=300)
    assert [kind for kind, *_ in conflicts(database)] == [
        "insert_exists",
        "update_exists",
        "multiple_unique_conflicts",
    ]


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
    assert conflicts(database) == [("insert_exists", '{"id" : "1"}', "t_pkey")]


def test_a_truncate_followed_by_a_row_that_is_refused_is_not_undone(database: Database, sink: PostgresSink) -> None:
    """What came before the TRUNCATE is not applied again, row by row, after it."""
    database.execute("ALTER TABLE t ADD CHECK (count < 10)")
    sink = sink_of(database, on_conflict="skip")
    begin(sink, row(9))
    do(sink, insert(1), update(9, count=1), Change("T"), insert(2), insert(3, count=10))
    assert same_rows(found(database), [row(2)])
    assert [(conflict, key) for conflict, key, _ in conflicts(database)] == [("insert_exists", '{"id" : "3"}')]


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
