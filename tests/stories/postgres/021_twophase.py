"""Stories 21 to 23: PREPARE TRANSACTION, COMMIT PREPARED and ROLLBACK PREPARED.

With two_phase, a native subscription prepares the transaction on the subscriber. Ours applies it when it is committed.
"""

from __future__ import annotations

import pytest

from side_by_side import SideBySide

pytestmark = [pytest.mark.long, pytest.mark.since(15, "two_phase for subscriptions")]

PREPARED = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
ROWS = "SELECT i, sha256(i::text::bytea) FROM generate_series({}, {}) i"


def _start(both: SideBySide, two_phase: bool = True) -> None:
    both.everywhere("CREATE TABLE t (a int PRIMARY KEY, b bytea)", "CREATE TABLE u (a int PRIMARY KEY)")
    both.source("INSERT INTO t VALUES (1, 'one')", "CREATE PUBLICATION pub FOR TABLE t, u")
    both.start(two_phase=two_phase)


def _assert_prepared(both: SideBySide, native: int) -> None:
    """Ours never prepares a transaction on the subscriber."""
    assert both.native.value(PREPARED) == native
    assert both.ours.value(PREPARED) == 0


def test_a_prepared_transaction_is_visible_when_it_is_committed(both: SideBySide) -> None:
    _start(both)
    both.source(
        "BEGIN; INSERT INTO t VALUES (2, 'two'); INSERT INTO u VALUES (2); UPDATE t SET b = 'x' WHERE a = 1;"
        " PREPARE TRANSACTION 'it''s a \"gid\"'",
        "BEGIN; INSERT INTO t VALUES (3, 'three'); PREPARE TRANSACTION 'second'",
        "INSERT INTO u VALUES (100)",
    )
    both.sync()
    _assert_prepared(both, native=2)
    both.assert_equal()
    assert both.rows("SELECT a FROM t") == [(1,)]
    assert both.rows("SELECT a FROM u") == [(100,)]
    both.source("COMMIT PREPARED 'it''s a \"gid\"'", "INSERT INTO u VALUES (101)")
    both.sync()
    _assert_prepared(both, native=1)
    both.assert_equal(source=True)
    assert both.rows("SELECT a FROM t ORDER BY a") == [(1,), (2,)]
    both.source("ROLLBACK PREPARED 'second'", "INSERT INTO t VALUES (3, 'again')")
    both.sync()
    _assert_prepared(both, native=0)
    both.assert_equal(source=True)


def test_prepared_transactions_that_end_before_the_next_batch(both: SideBySide) -> None:
    _start(both)
    both.source(
        "BEGIN; INSERT INTO t VALUES (2, 'two'); SAVEPOINT s; INSERT INTO t VALUES (3, 'gone'); ROLLBACK TO s;"
        " PREPARE TRANSACTION 'one'",
        "INSERT INTO u VALUES (1)",
        "COMMIT PREPARED 'one'",
        "UPDATE t SET b = 'later' WHERE a = 2",
        "BEGIN; DELETE FROM t WHERE a = 1; PREPARE TRANSACTION 'one'",  # a gid may be used again
        "ROLLBACK PREPARED 'one'",
        "BEGIN; TRUNCATE u; INSERT INTO u VALUES (5); PREPARE TRANSACTION 'three'",
        "COMMIT PREPARED 'three'",
    )
    both.sync()
    assert both.value(PREPARED) == 0
    both.assert_equal(source=True)


def test_large_prepared_transactions(both: SideBySide) -> None:
    both.source(f"ALTER DATABASE {both.publisher.name} SET logical_decoding_work_mem = '64kB'")
    _start(both)
    both.source(
        f"BEGIN; INSERT INTO t {ROWS.format(10, 1500)}; UPDATE t SET b = sha256(b) WHERE mod(a, 2) = 0;"
        " DELETE FROM t WHERE mod(a, 3) = 0; PREPARE TRANSACTION 'large'",
        f"BEGIN; INSERT INTO t {ROWS.format(5000, 6000)}; PREPARE TRANSACTION 'gone'",
        "INSERT INTO t VALUES (10000, 'small')",
    )
    both.sync()
    _assert_prepared(both, native=2)
    both.assert_equal()
    assert both.rows("SELECT a FROM t ORDER BY a") == [(1,), (10000,)]
    both.source("COMMIT PREPARED 'large'", "ROLLBACK PREPARED 'gone'")
    both.sync()
    assert both.value(PREPARED) == 0
    both.assert_equal(source=True)


def test_without_two_phase_a_transaction_arrives_when_it_is_committed(both: SideBySide) -> None:
    _start(both, two_phase=False)
    both.source("BEGIN; INSERT INTO t VALUES (2, 'two'); PREPARE TRANSACTION 'one'", "INSERT INTO u VALUES (1)")
    both.sync()
    assert both.value(PREPARED) == 0
    both.assert_equal(source=False)
    both.source("COMMIT PREPARED 'one'")
    both.sync()
    both.assert_equal(source=True)


def test_native_sends_a_prepared_transaction_on_when_it_is_prepared_and_ours_when_it_is_committed(
    both: SideBySide,
) -> None:
    _start(both)
    both.publish_on("u", two_phase=True)
    both.source("BEGIN; INSERT INTO u VALUES (2); PREPARE TRANSACTION 'one'")
    both.sync()
    assert both.sent_on_by(both.native) == ["b", "I", "P"]
    assert both.sent_on_by(both.ours) == []
    both.source("COMMIT PREPARED 'one'")
    both.sync()
    assert both.sent_on_by(both.native) == ["b", "I", "P", "K"]
    assert both.sent_on_by(both.ours) == ["B", "I", "C"]
    both.assert_equal(source=True)
