"""Story 200: publisher and subscriber are of different versions."""

from __future__ import annotations

import pytest

from side_by_side import Pair, SideBySide

pytestmark = pytest.mark.long


PAIRS = [Pair(*each) for each in ((14, 18), (18, 14), (15, 18), (18, 15), (16, 18), (18, 16), (14, 17), (17, 14))]


@pytest.mark.parametrize("both", PAIRS, indirect=True, ids=str)
def test_publisher_and_subscriber_of_different_versions(both: SideBySide) -> None:
    both.everywhere(
        "CREATE TABLE t (a int PRIMARY KEY, b text, c numeric, d jsonb, e int4multirange)",
        "CREATE TABLE f (a int, b text)",
        "ALTER TABLE f REPLICA IDENTITY FULL",
    )
    made = (
        "CREATE TABLE made (a int PRIMARY KEY, b varchar(9) NOT NULL DEFAULT 'x', c int GENERATED ALWAYS AS IDENTITY)"
    )
    both.source(
        f"ALTER DATABASE {both.publisher.name} SET logical_decoding_work_mem = '64kB'",
        "INSERT INTO t SELECT i, 'v' || i, i / 3.0, '{\"k\": 1}', '{[1,2)}' FROM generate_series(1, 100) i",
        "INSERT INTO f SELECT i % 3, 'x' FROM generate_series(1, 9) i",
        made,
        "INSERT INTO made SELECT generate_series(1, 5)",
        "CREATE PUBLICATION pub FOR TABLE t, f, made",
    )
    both.native.execute(made)
    both.start(target={"create_tables": True})
    both.source(
        "UPDATE t SET b = 'changed' WHERE a <= 10",
        "UPDATE t SET a = -a WHERE a BETWEEN 20 AND 30",
        "DELETE FROM t WHERE a > 90",
        "UPDATE f SET b = 'y' WHERE a = 1",
        "BEGIN; TRUNCATE f; INSERT INTO f VALUES (1, 'after'), (1, 'after'); COMMIT",
        "BEGIN; INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1000, 3000) i; SAVEPOINT s;"
        " DELETE FROM t WHERE a > 2000; ROLLBACK TO s; UPDATE made SET b = 'y' WHERE a = 1; COMMIT",
    )
    both.sync()
    both.assert_equal(source=True)
