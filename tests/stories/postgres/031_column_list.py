"""Story 31: column lists of publications."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide

pytestmark = [pytest.mark.long, pytest.mark.since(15, "column lists")]


def test_only_the_listed_columns_arrive(both: SideBySide) -> None:
    both.source(
        'CREATE TABLE t (a int PRIMARY KEY, "B" int, c int)',
        "CREATE TABLE u (a int PRIMARY KEY, b text, c text)",
        "INSERT INTO t VALUES (1, 2, 3), (4, 5, 6)",
        "INSERT INTO u VALUES (1, 'b', 'c')",
        'CREATE PUBLICATION pub FOR TABLE t (a, "B"), u (c, a)',
    )
    both.target(
        'CREATE TABLE t ("B" int, a int PRIMARY KEY)',
        "CREATE TABLE u (a int PRIMARY KEY, b text DEFAULT 'local', c text)",
    )
    both.start()
    both.source(
        "INSERT INTO t VALUES (7, 8, 9)",
        "UPDATE t SET c = 0 WHERE a = 1",
        'UPDATE t SET "B" = 50, a = 40 WHERE a = 4',
        "INSERT INTO u VALUES (2, 'x', 'y')",
        "UPDATE u SET b = 'not sent', c = 'sent' WHERE a = 1",
        "DELETE FROM u WHERE a = 2",
    )
    both.sync()
    both.assert_equal()
    both.assert_equal('SELECT a, "B" FROM t ORDER BY a', "SELECT a, c FROM u ORDER BY a", source=True)
    assert both.rows("SELECT * FROM u") == [(1, "local", "sent")]


def test_after_a_list_is_changed_native_applies_later_changes_and_ours_copies_the_table(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (a int PRIMARY KEY, b int, c int)")
    both.source("INSERT INTO t VALUES (1, 1, 1), (2, 2, 2)", "CREATE PUBLICATION pub FOR TABLE t (a, b)")
    both.start()
    both.source(
        "INSERT INTO t VALUES (3, 3, 3)",
        "ALTER PUBLICATION pub SET TABLE t (a, c)",
        "INSERT INTO t VALUES (4, 4, 4)",
        "UPDATE t SET b = 20, c = 20 WHERE a = 2",
    )
    both.sync()
    rows = "SELECT * FROM t ORDER BY a"
    assert both.native.rows(rows) == [(1, 1, None), (2, 2, 20), (3, 3, None), (4, None, 4)]
    # a and c are the source's. b is not published any more: rows that ours had before keep its values.
    assert both.ours.rows(rows) == [(1, 1, 1), (2, 2, 20), (3, None, 3), (4, None, 4)]


def test_lists_of_partitioned_tables(both: SideBySide) -> None:
    both.source(
        "CREATE TABLE root (a int PRIMARY KEY, b text, c text) PARTITION BY LIST (a)",
        "CREATE TABLE part_1 (c text, b text, a int NOT NULL)",
        "ALTER TABLE root ATTACH PARTITION part_1 FOR VALUES IN (1, 2)",
        "CREATE TABLE part_2 PARTITION OF root FOR VALUES IN (3, 4)",
        "INSERT INTO root VALUES (1, 'b', 'c')",
        "CREATE PUBLICATION pub FOR TABLE root (a, b) WITH (publish_via_partition_root = true)",
    )
    both.target("CREATE TABLE root (b text, a int PRIMARY KEY)")
    both.start()
    both.source("INSERT INTO root VALUES (2, 'bb', 'cc'), (3, 'bbb', 'ccc')", "UPDATE root SET a = 4 WHERE a = 1")
    both.sync()
    both.assert_equal("SELECT a, b FROM root ORDER BY a", source=True)


def test_a_list_and_a_row_filter_of_one_table(both: SideBySide) -> None:
    both.source(
        "CREATE TABLE t (a int PRIMARY KEY, b text, c int)",
        "INSERT INTO t VALUES (1, 'one', 1), (20, 'twenty', 2)",
        "CREATE PUBLICATION pub FOR TABLE t (a, b) WHERE (a > 10)",
    )
    both.target("CREATE TABLE t (a int PRIMARY KEY, b text)")
    both.start()
    both.source("UPDATE t SET a = 11, b = 'entered' WHERE a = 1", "UPDATE t SET a = 2 WHERE a = 20")
    both.sync()
    assert both.rows("SELECT * FROM t") == [(11, "entered")]
