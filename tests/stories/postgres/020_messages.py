"""Story 20: logical messages change no table."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide

pytestmark = pytest.mark.long


def test_messages_between_changes_do_not_disturb_them(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (a int PRIMARY KEY)")
    both.source("CREATE PUBLICATION pub FOR TABLE t")
    both.start()
    both.source(
        "SELECT pg_logical_emit_message(true, 'prefix', 'alone')",
        "BEGIN; INSERT INTO t VALUES (1); SELECT pg_logical_emit_message(true, 'prefix', 'inside');"
        " SELECT pg_logical_emit_message(false, 'prefix', 'not transactional'); INSERT INTO t VALUES (2); COMMIT",
        "BEGIN; INSERT INTO t VALUES (3); SELECT pg_logical_emit_message(false, 'prefix', 'kept'); ROLLBACK",
    )
    both.sync()
    both.assert_equal(source=True)
    assert both.rows("SELECT a FROM t ORDER BY a") == [(1,), (2,)]
