"""Story 200: publisher and subscriber are of different versions."""

from __future__ import annotations

import pytest

from side_by_side import Pair, SideBySide

pytestmark = pytest.mark.long


@pytest.mark.parametrize("both", [Pair(18, 15), Pair(15, 18), Pair(14, 18)], indirect=True, ids=str)
def test_publisher_and_subscriber_of_different_versions(both: SideBySide) -> None:
    both.everywhere(
        "CREATE TABLE t (a int PRIMARY KEY, b text, c numeric, d jsonb, e int4multirange)",
        "CREATE TABLE f (a int, b text)",
        "ALTER TABLE f REPLICA IDENTITY FULL",
    )
    both.source(
        "INSERT INTO t SELECT i, 'v' || i, i / 3.0, '{\"k\": 1}', '{[1,2)}' FROM generate_series(1, 100) i",
        "INSERT INTO f SELECT i % 3, 'x' FROM generate_series(1, 9) i",
        "CREATE PUBLICATION pub FOR TABLE t, f",
    )
    both.start()
    both.source(
        "UPDATE t SET b = 'changed' WHERE a <= 10",
        "UPDATE t SET a = -a WHERE a BETWEEN 20 AND 30",
        "DELETE FROM t WHERE a > 90",
        "UPDATE f SET b = 'y' WHERE a = 1",
        "BEGIN; TRUNCATE f; INSERT INTO f VALUES (1, 'after'), (1, 'after'); COMMIT",
    )
    both.sync()
    both.assert_equal(source=True)
