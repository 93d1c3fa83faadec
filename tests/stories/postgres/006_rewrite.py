"""Story 6: the publisher rewrites a table while its changes are being received."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide

pytestmark = pytest.mark.long


def test_changes_before_in_and_after_a_rewrite_arrive_once(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    both.source("INSERT INTO t VALUES (1, 'copied')", "CREATE PUBLICATION pub FOR TABLE t")
    both.start()
    both.target("ALTER TABLE t ADD c int DEFAULT 5", "ALTER TABLE t ALTER id TYPE bigint")
    both.source(
        "INSERT INTO t VALUES (2, 'before')",
        "BEGIN; INSERT INTO t VALUES (3, 'inside'); ALTER TABLE t ADD c int DEFAULT length(random()::text) * 0;"
        " INSERT INTO t VALUES (4, 'inside', 4); ALTER TABLE t ALTER id TYPE bigint;"
        " UPDATE t SET c = 11 WHERE id = 1; COMMIT",
        "INSERT INTO t VALUES (5, 'after', 55)",
        "VACUUM FULL t",
        "DELETE FROM t WHERE id = 2",
    )
    both.sync()
    both.assert_equal("SELECT * FROM t WHERE id <> 3 ORDER BY id", source=True)
    assert both.rows("SELECT * FROM t WHERE id <> 3 ORDER BY id") == [
        (1, "copied", 11),
        (4, "inside", 4),
        (5, "after", 55),
    ]
    # This row was sent without the column. Native has the default of the subscriber. Ours copies the table again.
    assert both.native.rows("SELECT * FROM t WHERE id = 3") == [(3, "inside", 5)]
    assert both.ours.rows("SELECT * FROM t WHERE id = 3") == [(3, "inside", 0)]
