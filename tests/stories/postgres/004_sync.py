"""Story 4: the copy of tables: when it fails, when tables are added, and when a table is missing."""

from __future__ import annotations

import psycopg
import pytest

from side_by_side import SideBySide
from walmere.errors import SinkMismatch

pytestmark = pytest.mark.long


@pytest.mark.since(15, "disable_on_error")
def test_a_copy_that_violates_a_constraint_stops_both_and_leaves_nothing_behind(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    both.source("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 20) i", "CREATE PUBLICATION pub FOR TABLE t")
    both.target("INSERT INTO t VALUES (20, 'local'), (30, 'local')")
    both.subscribe()
    log, error = both.both_stop()
    assert "t_pkey" in log
    assert "t_pkey" in str(error)
    assert both.rows("SELECT * FROM t ORDER BY id") == [(20, "local"), (30, "local")]
    both.target("DELETE FROM t WHERE id = 20")
    both.enable_native()
    both.source("INSERT INTO t VALUES (21, 'later')")
    both.sync()
    both.assert_equal()
    assert both.value("SELECT count(*) FROM t") == 22


def test_rows_that_the_subscriber_has_already_stay(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE no_key (id int)")
    both.source(
        "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 3) i",
        "INSERT INTO no_key VALUES (1), (2)",
        "CREATE PUBLICATION pub FOR TABLE t, no_key",
    )
    both.target("INSERT INTO t VALUES (30, 'local')", "INSERT INTO no_key VALUES (1)")
    both.start()
    both.source("UPDATE t SET v = 'new' WHERE id = 1", "INSERT INTO no_key VALUES (3)")
    both.sync()
    both.assert_equal()
    assert both.value("SELECT count(*) FROM t") == 4
    assert both.rows("SELECT id FROM no_key ORDER BY id") == [(1,), (1,), (2,), (3,)]


def test_tables_that_are_added_to_the_publication_are_copied(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE first (id int PRIMARY KEY)", "CREATE TABLE second (id int PRIMARY KEY, v text)")
    both.source(
        "INSERT INTO first SELECT generate_series(1, 10)",
        "INSERT INTO second SELECT i, 'v' FROM generate_series(1, 10) i",
        "CREATE PUBLICATION pub FOR TABLE first",
    )
    both.start()
    assert both.value("SELECT count(*) FROM second") == 0
    both.source(
        "ALTER PUBLICATION pub ADD TABLE second",
        "INSERT INTO first VALUES (11)",
        "UPDATE second SET v = 'changed' WHERE id = 1",
    )
    both.refresh()
    both.sync()
    both.source("DELETE FROM second WHERE id = 2", "DELETE FROM first WHERE id = 2")
    both.sync()
    both.assert_equal()
    both.assert_equal(source=True)


def test_a_table_that_the_subscriber_does_not_have_is_refused_before_anything_is_copied(both: SideBySide) -> None:
    both.everywhere("CREATE SCHEMA shop")
    both.source(
        "CREATE TABLE present (id int PRIMARY KEY)",
        "CREATE TABLE shop.absent (id int PRIMARY KEY)",
        "INSERT INTO present VALUES (1)",
        "CREATE PUBLICATION pub FOR TABLE present, shop.absent",
    )
    both.target("CREATE TABLE present (id int PRIMARY KEY)")
    with pytest.raises(psycopg.errors.UndefinedTable, match=r"shop\.absent"):
        both.subscribe()
    error = both.ours_stops(SinkMismatch)
    assert "shop.absent" in str(error)
    assert both.rows("SELECT * FROM present") == []
    both.target("CREATE TABLE shop.absent (id int PRIMARY KEY)")
    both.start()
    both.assert_equal(source=True)


def test_a_table_that_is_emptied_on_the_subscriber_is_not_copied_again(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    both.source("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 10) i", "CREATE PUBLICATION pub FOR TABLE t")
    both.start()
    both.target("TRUNCATE t")
    both.source("INSERT INTO t VALUES (11, 'new')", "UPDATE t SET v = 'changed' WHERE id = 1")
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT * FROM t") == [(11, "new")]
