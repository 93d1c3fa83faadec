"""Story 28: row filters of publications."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide

pytestmark = [pytest.mark.long, pytest.mark.since(15, "row filters")]


def test_rows_enter_and_leave_the_filter(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (a int PRIMARY KEY, b text)", "CREATE TABLE f (a int PRIMARY KEY, b text)")
    both.source(
        "ALTER TABLE f REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i, 'v' FROM generate_series(990, 1010) i",
        "INSERT INTO f VALUES (1, 'in'), (2, 'out'), (3, NULL), (4, 'in')",
        "CREATE PUBLICATION pub FOR TABLE t WHERE (a > 1000), f WHERE (b = 'in')",
    )
    both.start()
    assert both.value("SELECT count(*) FROM t") == 10
    both.source(
        "UPDATE t SET a = 500 WHERE a = 1001",  # leaves: a delete
        "UPDATE t SET a = 2000 WHERE a = 990",  # enters: an insert
        "UPDATE t SET b = 'changed' WHERE a IN (991, 1002)",
        "UPDATE t SET a = 3000 WHERE a = 1003",
        "DELETE FROM t WHERE a IN (992, 1004)",
        "INSERT INTO t VALUES (1, 'out'), (5000, 'in')",
        "UPDATE f SET b = 'out' WHERE a = 1",
        "UPDATE f SET b = 'in' WHERE a IN (2, 3)",
        "UPDATE f SET b = NULL WHERE a = 4",
        "DELETE FROM f WHERE a = 1",
        "INSERT INTO f VALUES (5, NULL), (6, 'in')",
    )
    both.sync()
    both.assert_equal()
    both.assert_equal(
        "SELECT * FROM t WHERE a > 1000 ORDER BY a", "SELECT * FROM f WHERE b = 'in' ORDER BY a", source=True
    )


def test_filters_of_several_publications_are_combined(both: SideBySide) -> None:
    both.everywhere(
        "CREATE TABLE t (a int PRIMARY KEY)",
        "CREATE TABLE u (a int PRIMARY KEY)",
        "CREATE TABLE w (a int PRIMARY KEY)",
    )
    for table in ("t", "u", "w"):
        both.source(f"INSERT INTO {table} SELECT generate_series(1, 20)")
    both.source(
        "CREATE PUBLICATION low FOR TABLE t WHERE (a < 5), u WHERE (a < 5), w WHERE (a < 5)",
        "CREATE PUBLICATION high FOR TABLE t WHERE (a > 15), u, w WHERE (a > 15) WITH (publish = 'insert, delete')",
    )
    both.start("low", "high")
    for table in ("t", "u", "w"):
        both.source(
            f"INSERT INTO {table} VALUES (-1), (25)",
            f"UPDATE {table} SET a = 0 WHERE a = 10",
            f"DELETE FROM {table} WHERE a IN (1, 11, 20)",
        )
    both.sync()
    both.assert_equal()


def test_filters_of_partitioned_tables(both: SideBySide) -> None:
    partitions = (
        "CREATE TABLE root (a int PRIMARY KEY, b text) PARTITION BY RANGE (a)",
        "CREATE TABLE part_1 PARTITION OF root FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE part_2 PARTITION OF root FOR VALUES FROM (100) TO (200)",
    )
    both.everywhere(*partitions)
    both.source(
        "INSERT INTO root SELECT i, 'v' FROM generate_series(0, 190, 10) i",
        "CREATE PUBLICATION pub FOR TABLE root WHERE (a >= 50 AND a < 150) WITH (publish_via_partition_root = true)",
    )
    both.start()
    both.source(
        "INSERT INTO root VALUES (1, 'out'), (55, 'in'), (199, 'out')",
        "UPDATE root SET a = 155 WHERE a = 60",
        "UPDATE root SET a = 145 WHERE a = 20",  # to another partition, and into the filter
        "UPDATE root SET a = 75 WHERE a = 140",
        "DELETE FROM root WHERE a IN (0, 100)",
    )
    both.sync()
    both.assert_equal()
    both.assert_equal("SELECT * FROM root WHERE a >= 50 AND a < 150 ORDER BY a", source=True)


@pytest.mark.long
def test_a_large_value_of_a_row_that_enters_the_filter_is_copied_with_ours_and_null_with_native(
    both: SideBySide,
) -> None:
    """The publisher sends such a row as an insert, without the value."""
    both.everywhere("CREATE TABLE t (a int PRIMARY KEY, b text)")
    both.source(
        "ALTER TABLE t ALTER b SET STORAGE EXTERNAL",
        "INSERT INTO t VALUES (1, repeat('x', 20000)), (2, 'stays out')",
        "CREATE PUBLICATION pub FOR TABLE t WHERE (a > 10)",
    )
    both.start()
    both.source("UPDATE t SET a = 20 WHERE a = 1", "INSERT INTO t VALUES (30, 'later')")
    both.sync()
    query = "SELECT a, length(b) FROM t ORDER BY a"
    assert both.native.rows(query) == [(20, None), (30, 5)]
    assert both.ours.rows(query) == [(20, 20000), (30, 5)]


def test_a_filter_on_a_large_value_that_is_not_sent(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (a text NOT NULL, b int)")
    both.source(
        "ALTER TABLE t ALTER a SET STORAGE EXTERNAL",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t VALUES (repeat('1234567890', 2000), 1), (repeat('x', 20000), 2)",
        "CREATE PUBLICATION pub FOR TABLE t WHERE (a = repeat('1234567890', 2000))",
    )
    both.start()
    both.source("UPDATE t SET b = b + 10", "INSERT INTO t VALUES ('short', 3)")
    both.sync()
    assert both.rows("SELECT length(a), b FROM t") == [(20000, 11)]
