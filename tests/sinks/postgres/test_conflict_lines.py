"""One conflict is one line of the table of conflicts, however often its batch is tried, and whatever is prepared."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conftest import Database
from processes import eventually
from sinks.histories import TRUNCATE, Change, insert, row, same_rows
from sinks.postgres.target import TABLE, begin, conflicts, do, found
from sinks.subjects import BY_ID, sink_of, text_changes
from walmere.apply.transaction import TableChanges, apply_changes
from walmere.errors import Conflict
from walmere.lsn import Lsn
from walmere.names import Identity
from walmere.sinks.postgres import transaction
from walmere.sinks.postgres.rows.conflicts import record_conflict
from walmere.sinks.postgres.sink import PostgresSink

ONE = ("insert_exists", '{"id" : "1"}', "t_pkey")
TWO = ("insert_exists", '{"id" : "2"}', "t_pkey")


def prepare(sink: PostgresSink, *changes: Change, lsn: int = 1500) -> None:
    """Apply changes in a transaction that is prepared as `gid`."""
    with sink.transaction([TABLE], prepares=True) as begun:
        apply_changes(begun, [TableChanges(TABLE, BY_ID, text_changes(changes), Lsn(lsn))])
        sink.prepare_transaction(begun, "gid", [TABLE], Lsn(lsn))


@contextmanager
def ends_prepared(database: Database) -> Iterator[None]:
    """Rolls back what a test that fails leaves prepared."""
    try:
        yield
    finally:
        for (gid,) in database.rows("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
            database.execute(f"ROLLBACK PREPARED '{gid}'")


@pytest.mark.parametrize("on_conflict", ["skip", "overwrite"])
@pytest.mark.parametrize("commit", [True, False], ids=["committed", "rolled back"])
def test_a_batch_does_not_wait_for_a_prepared_transaction_with_a_conflict_that_has_stopped_before(
    database: Database, sink: PostgresSink, on_conflict: str, commit: bool
) -> None:
    begin(sink, row(1), row(2))
    with pytest.raises(Conflict):
        prepare(sink, insert(1))
    goes_on = sink_of(database, on_conflict=on_conflict)
    with ends_prepared(database):
        prepare(goes_on, insert(1))
        batch = threading.Thread(target=do, args=(goes_on, insert(2)), kwargs={"lsn": 2000})
        batch.start()
        batch.join(20)
        assert not batch.is_alive()
        goes_on.finish_prepared("gid", commit=commit, end_lsn=Lsn(2500))
    assert conflicts(database) == [ONE, TWO]
    assert sink.conflicts() == {"public.t": 2}
    assert same_rows(found(database), [row(1), row(2)])


def test_a_line_stays_although_its_row_is_not_refused_any_more(database: Database, sink: PostgresSink) -> None:
    begin(sink, row(1), row(2))
    with pytest.raises(Conflict):
        do(sink, insert(2), insert(1), lsn=2000)
    database.execute("DELETE FROM t WHERE id = 2")
    do(sink_of(database, on_conflict="skip"), insert(2), insert(1), lsn=2000)
    assert conflicts(database) == [TWO, ONE]


@pytest.mark.parametrize("stops", [False, True])
def test_conflicts_of_one_transaction_that_are_alike_have_a_line_each(
    database: Database, sink: PostgresSink, stops: bool
) -> None:
    """Rows without a key; and a row that is changed several times."""
    database.execute("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD CHECK (count < 10)")
    begin(sink, row(1))
    sink, stopping = sink_of(database, on_conflict="skip"), sink
    changes = [insert(2), insert(3, count=10), insert(4, count=11), insert(5, count=12)]
    if stops:
        for _ in range(2):
            with pytest.raises(Conflict):
                apply_as_one(stopping, changes)
        assert conflicts(database) == [("insert_exists", None, "t_count_check")]
    apply_as_one(sink, changes)
    assert conflicts(database) == [("insert_exists", None, "t_count_check")] * 3
    assert same_rows(found(database), [row(1), row(2)])


def test_recorded_conflicts_of_the_past_are_not_read(database: Database, sink: PostgresSink) -> None:
    begin(sink, row(1))
    do(sink_of(database, on_conflict="skip"), insert(1))
    database.execute(
        "INSERT INTO walmere.conflicts (subscription, relation, conflict, lsn)"
        " SELECT 'test', 'public.t', 'insert_exists', '0/1' FROM generate_series(1, 5000)",
        "ANALYZE walmere.conflicts",
    )
    of_batch = "subscription = 'test' AND relation = ANY('{public.t}') AND lsn >= '0/C8'"
    plan = "\n".join(line for (line,) in database.rows(f"EXPLAIN SELECT * FROM walmere.conflicts WHERE {of_batch}"))
    assert "Seq Scan" not in plan
    assert [line for line in plan.splitlines() if "Index Cond" in line and "lsn >=" in line], plan


@pytest.mark.parametrize("row_by_row", [False, True])
def test_a_truncate_that_stops_several_tries_is_one_line(
    database: Database, sink: PostgresSink, row_by_row: bool
) -> None:
    """Refused by its own statement, then row by row."""
    database.execute("CREATE TABLE child (id int8 REFERENCES t)")
    begin(sink, row(1))
    for _ in range(2):
        with pytest.raises(Conflict):
            do(sink, TRUNCATE)
        if row_by_row:
            database.execute("CREATE OR REPLACE RULE never AS ON UPDATE TO t WHERE false DO INSTEAD NOTHING")
            database.execute("ALTER TABLE t ENABLE ALWAYS RULE never")
    assert conflicts(database) == [("truncate_failed", None, None)]
    database.execute("DROP TABLE child")


def apply_as_one(sink: PostgresSink, changes: Sequence[Change]) -> None:
    """Apply changes of one transaction of the source. Each is a chunk of its own."""
    with sink.transaction([TABLE]) as begun:
        for number, each in enumerate(changes):
            one = replace(text_changes([each], first=number), commit_lsn=np.array([1000], np.uint64))
            apply_changes(begun, [TableChanges(TABLE, Identity("f", ()), one, Lsn(2000))])
        begun.reached[TABLE] = Lsn(2000)
        sink.commit_transaction(begun, Lsn(2000), None)


def test_a_conflict_that_stops_is_recorded_before_another_attempt_applies_the_batch(
    database: Database, sink: PostgresSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise neither attempt would see the line of the other."""
    begin(sink, row(1))
    other = threading.Thread(target=do, args=(sink_of(database, on_conflict="skip"), insert(1)))
    waits = (
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'walmere test apply'"
        " AND query ~ 'pg_replication_origin_session_setup'"
    )

    def beside_another_attempt(*arguments: Any) -> None:
        other.start()
        eventually(lambda: bool(database.rows(waits)))
        record_conflict(*arguments)

    monkeypatch.setattr(transaction, "record_conflict", beside_another_attempt)
    with pytest.raises(Conflict):
        do(sink, insert(1))
    other.join(30)
    assert conflicts(database) == [ONE]
    assert sink.applied(TABLE) == Lsn(200)
