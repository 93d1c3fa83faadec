"""Story 11: generated columns of the publisher."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide

pytestmark = pytest.mark.long


def test_generated_columns_are_not_sent_and_the_subscriber_computes_its_own(both: SideBySide) -> None:
    both.source(
        "CREATE TABLE same (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED)",
        "CREATE TABLE plain (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED)",
        "INSERT INTO same VALUES (1), (2)",
        "INSERT INTO plain VALUES (1), (2)",
        "CREATE PUBLICATION pub FOR TABLE same, plain",
    )
    both.target(
        "CREATE TABLE same (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 22) STORED, c int)",
        "CREATE TABLE plain (a int PRIMARY KEY, b int DEFAULT -1)",
    )
    both.start()
    for table in ("same", "plain"):
        both.source(
            f"INSERT INTO {table} VALUES (4), (5)",
            f"UPDATE {table} SET a = 6 WHERE a = 5",
            f"DELETE FROM {table} WHERE a = 1",
        )
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT a, b FROM same ORDER BY a") == [(2, 44), (4, 88), (6, 132)]
    assert both.rows("SELECT a, b FROM plain ORDER BY a") == [(2, -1), (4, -1), (6, -1)]


@pytest.mark.since(18, "publish_generated_columns")
def test_generated_columns_are_sent_if_the_publication_says_so(both: SideBySide) -> None:
    both.source(
        "CREATE TABLE t (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED)",
        "INSERT INTO t VALUES (1), (2)",
        "CREATE PUBLICATION pub FOR TABLE t WITH (publish_generated_columns = stored)",
    )
    both.target("CREATE TABLE t (a int PRIMARY KEY, b int)")
    both.start()
    both.source("INSERT INTO t VALUES (3)", "UPDATE t SET a = 20 WHERE a = 2")
    both.sync()
    both.assert_equal(source=True)
