"""Story 26: conflicts are counted by their kind."""

from __future__ import annotations

import pytest

from processes import eventually
from side_by_side import SideBySide
from walmere.api import Subscription

pytestmark = [pytest.mark.long, pytest.mark.since(18, "counters of conflicts")]


def _start(both: SideBySide, table: str, rows: str) -> None:
    """The rows are streamed: PostgreSQL copies with another origin, which makes later changes of them conflicts."""
    both.everywhere(table)
    both.source("CREATE PUBLICATION pub FOR TABLE t")
    both.start()
    both.source(rows)
    both.sync()


def _assert_conflicts(both: SideBySide, **expected: int) -> None:
    eventually(lambda: both.native_conflicts() == expected, why=lambda: f"native: {both.native_conflicts()}")
    assert both.our_conflicts() == expected


def test_missing_rows_are_counted(both: SideBySide) -> None:
    _start(both, "CREATE TABLE t (a int PRIMARY KEY, b int)", "INSERT INTO t SELECT i, i FROM generate_series(1, 10) i")
    both.target("DELETE FROM t WHERE a <= 5")
    both.source(
        "UPDATE t SET b = 0 WHERE a IN (1, 2, 6)",
        "UPDATE t SET b = -1 WHERE a = 1",  # missing once more
        "DELETE FROM t WHERE a IN (3, 7)",
        "DELETE FROM t WHERE a = 4",
    )
    both.sync()
    both.assert_equal()
    _assert_conflicts(both, update_missing=3, delete_missing=2)
    assert [table["conflicts"] for table in Subscription(both.file).status()["tables"]] == [5]


def test_rows_that_the_subscriber_has_changed_are_counted_and_changed(both: SideBySide) -> None:
    _start(both, "CREATE TABLE t (a int PRIMARY KEY, b int)", "INSERT INTO t SELECT i, i FROM generate_series(1, 10) i")
    both.target("UPDATE t SET b = 100 WHERE a IN (1, 2)")
    both.source("UPDATE t SET b = 0 WHERE a IN (1, 3)", "DELETE FROM t WHERE a IN (2, 4)")
    both.sync()
    both.assert_equal(source=True)
    _assert_conflicts(both, update_origin_differs=1, delete_origin_differs=1)


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("INSERT INTO t VALUES (2, 20, 20)", "insert_exists"),
        ("UPDATE t SET b = 3 WHERE a = 1", "update_exists"),
        ("INSERT INTO t VALUES (2, 3, 4)", "multiple_unique_conflicts"),
        ("UPDATE t SET a = 2, b = 3 WHERE a = 1", "multiple_unique_conflicts"),
    ],
)
def test_a_violated_unique_constraint_is_named_and_counted(both: SideBySide, statement: str, kind: str) -> None:
    _start(both, "CREATE TABLE t (a int PRIMARY KEY, b int UNIQUE, c int UNIQUE)", "INSERT INTO t VALUES (1, 1, 1)")
    both.target("INSERT INTO t VALUES (2, 2, 2), (3, 3, 3), (4, 4, 4)")
    both.source(statement)
    log, error = both.both_stop()
    assert f"conflict={kind}" in log
    assert kind in str(error)
    both.assert_equal()
    eventually(lambda: kind in both.native_conflicts())
    assert set(both.our_conflicts()) == {kind}
    lsn = both.skip()
    assert str(lsn) in str(error)
    both.source("INSERT INTO t VALUES (5, 5, 5)")
    both.sync()
    both.assert_equal()


def test_rows_that_a_trigger_leaves_out_are_not_counted_as_missing(both: SideBySide) -> None:
    _start(both, "CREATE TABLE t (a int PRIMARY KEY, b int)", "INSERT INTO t SELECT i, i FROM generate_series(1, 4) i")
    both.target(
        "CREATE FUNCTION leave_out() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        "CREATE TRIGGER leave_out BEFORE UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION leave_out()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER leave_out",
        "ALTER TABLE t DISABLE TRIGGER leave_out",
        "DELETE FROM t WHERE a = 4",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER leave_out",
    )
    both.source("UPDATE t SET b = 0 WHERE a = 1", "DELETE FROM t WHERE a = 2", "UPDATE t SET b = 0 WHERE a = 4")
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT * FROM t ORDER BY a") == [(1, 1), (2, 2), (3, 3)]
    _assert_conflicts(both, update_missing=1)
