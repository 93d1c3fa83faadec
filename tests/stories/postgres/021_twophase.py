"""Stories 21 to 23: PREPARE TRANSACTION, COMMIT PREPARED and ROLLBACK PREPARED."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from conftest import version_under_test
from side_by_side import SideBySide
from walmere.testing.server import Server

pytestmark = [pytest.mark.long, pytest.mark.since(15, "two_phase for subscriptions")]

PREPARED = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
ROWS = "SELECT i, sha256(i::text::bytea) FROM generate_series({}, {}) i"


def _start(both: SideBySide, two_phase: bool = True) -> None:
    both.everywhere("CREATE TABLE t (a int PRIMARY KEY, b bytea)", "CREATE TABLE u (a int PRIMARY KEY)")
    both.source("INSERT INTO t VALUES (1, 'one')", "CREATE PUBLICATION pub FOR TABLE t, u")
    both.start(two_phase=two_phase)


def test_a_prepared_transaction_is_prepared_on_the_subscriber_until_it_ends(both: SideBySide) -> None:
    _start(both)
    both.source(
        "BEGIN; INSERT INTO t VALUES (2, 'two'); INSERT INTO u VALUES (2); UPDATE t SET b = 'x' WHERE a = 1;"
        " PREPARE TRANSACTION 'it''s a \"gid\"'",
        "BEGIN; INSERT INTO t VALUES (3, 'three'); PREPARE TRANSACTION 'second'",
        "INSERT INTO u VALUES (100)",
    )
    both.sync()
    assert both.value(PREPARED) == 2
    both.assert_equal()
    assert both.rows("SELECT a FROM t") == [(1,)]
    assert both.rows("SELECT a FROM u") == [(100,)]
    both.source("COMMIT PREPARED 'it''s a \"gid\"'", "INSERT INTO u VALUES (101)")
    both.sync()
    assert both.value(PREPARED) == 1
    both.assert_equal(source=True)
    both.source("ROLLBACK PREPARED 'second'", "INSERT INTO t VALUES (3, 'again')")
    both.sync()
    assert both.value(PREPARED) == 0
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
    assert both.value(PREPARED) == 2
    both.assert_equal()
    assert both.rows("SELECT a FROM t ORDER BY a") == [(1,), (10000,)]
    both.source("COMMIT PREPARED 'large'", "ROLLBACK PREPARED 'gone'")
    both.sync()
    assert both.value(PREPARED) == 0
    both.assert_equal(source=True)


def test_large_prepared_transactions_with_subtransactions_that_are_rolled_back(both: SideBySide) -> None:
    """Story 23."""
    both.source(f"ALTER DATABASE {both.publisher.name} SET logical_decoding_work_mem = '64kB'")
    _start(both)
    both.source(
        f"BEGIN; INSERT INTO t {ROWS.format(10, 800)}; SAVEPOINT s; INSERT INTO t {ROWS.format(801, 1600)};"
        " UPDATE t SET b = 'gone'; TRUNCATE u; ROLLBACK TO s; DELETE FROM t WHERE mod(a, 3) = 0;"
        f" INSERT INTO t {ROWS.format(801, 810)}; INSERT INTO u VALUES (1); PREPARE TRANSACTION 'kept'",
        f"BEGIN; INSERT INTO t {ROWS.format(5000, 5800)}; SAVEPOINT s; DELETE FROM t; ROLLBACK TO s;"
        " PREPARE TRANSACTION 'gone'",
    )
    both.sync()
    assert both.value(PREPARED) == 2
    both.assert_equal()
    both.source("ROLLBACK PREPARED 'gone'", "INSERT INTO u VALUES (2)", "COMMIT PREPARED 'kept'")
    both.sync()
    assert both.value(PREPARED) == 0
    both.assert_equal(source=True)


def test_a_prepared_transaction_outlives_a_crash_of_the_subscriber(both: SideBySide) -> None:
    """Before it ends, and while the subscriber is down, at the source."""
    _start(both)
    for number, end in ((2, "COMMIT"), (3, "ROLLBACK")):
        both.source(
            f"BEGIN; INSERT INTO t VALUES ({number}, 'x'); UPDATE t SET b = '{number}' WHERE a = 1;"
            f" PREPARE TRANSACTION 'crash{number}'"
        )
        both.sync()
        assert both.value(PREPARED) == 1
        with both.subscriber_down():
            both.source(f"{end} PREPARED 'crash{number}'", f"INSERT INTO u VALUES ({number})")
        both.sync()
        assert both.value(PREPARED) == 0
        both.assert_equal(source=True)


@pytest.mark.timeout(400)
def test_a_prepared_transaction_outlives_a_crash_of_the_publisher(
    private_server: Server, more_servers: Callable[[str, int], Server], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    both = SideBySide(private_server, more_servers("subscriber", version_under_test(pytestconfig)), tmp_path)
    try:
        _start(both)
        both.source(
            "BEGIN; INSERT INTO t VALUES (2, 'two'); PREPARE TRANSACTION 'one'",
            "BEGIN; DELETE FROM t; PREPARE TRANSACTION 'two'",
        )
        both.sync()
        assert both.value(PREPARED) == 2
        private_server.stop(signal.SIGKILL)
        private_server.start()
        both.native_stops()  # at the lost connection
        both.enable_native()
        both.publisher.connection.close()
        both.publisher.connection = psycopg.connect(both.publisher.dsn, autocommit=True)
        both.source("COMMIT PREPARED 'one'", "ROLLBACK PREPARED 'two'", "INSERT INTO u VALUES (1)")
        both.sync()
        assert both.value(PREPARED) == 0
        both.assert_equal(source=True)
    finally:
        both.drop()


def test_values_of_a_deferrable_constraint_are_swapped_in_a_prepared_transaction(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE d (a int PRIMARY KEY, v int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    both.everywhere("CREATE TABLE t (a int PRIMARY KEY, b bytea)", "CREATE TABLE u (a int PRIMARY KEY)")
    both.source("INSERT INTO d VALUES (1, 1), (2, 2), (3, 3)", "CREATE PUBLICATION pub FOR TABLE d")
    both.start(two_phase=True)
    both.source(
        "BEGIN; UPDATE d SET v = 4 - v; INSERT INTO d VALUES (4, 3); DELETE FROM d WHERE a = 1;"
        " PREPARE TRANSACTION 'swap'",
    )
    both.sync()
    assert both.value(PREPARED) == 1
    both.source("COMMIT PREPARED 'swap'", "BEGIN; UPDATE d SET v = 5 - v WHERE a IN (2, 4); COMMIT")
    both.sync()
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


def test_a_prepared_transaction_is_sent_on_when_it_is_prepared(both: SideBySide) -> None:
    _start(both)
    both.publish_on("u", two_phase=True)
    both.source("BEGIN; INSERT INTO u VALUES (2); PREPARE TRANSACTION 'one'")
    both.sync()
    assert both.sent_on() == ["b", "I", "P"]
    both.source("COMMIT PREPARED 'one'")
    both.sync()
    assert both.sent_on() == ["b", "I", "P", "K"]
    both.assert_equal(source=True)


def test_changes_that_fire_triggers_are_prepared(both: SideBySide) -> None:
    """They are applied row by row, and so is an update of a row that is missing."""
    both.target(
        "CREATE TABLE fired (n int GENERATED ALWAYS AS IDENTITY, a int)",
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO public.fired (a) VALUES (NEW.a); RETURN NULL; END $$",
    )
    _start(both)
    both.target(
        "CREATE TRIGGER note AFTER INSERT ON u FOR EACH ROW EXECUTE FUNCTION note()",
        "ALTER TABLE u ENABLE ALWAYS TRIGGER note",
    )
    both.source("INSERT INTO t VALUES (7, 'seven')")
    both.sync()
    both.target("DELETE FROM t WHERE a = 7")
    both.source(
        "BEGIN; INSERT INTO u VALUES (1), (2); INSERT INTO t VALUES (2, 'two'); UPDATE t SET b = 'x' WHERE a = 7;"
        " PREPARE TRANSACTION 'one'",
        "BEGIN; INSERT INTO u VALUES (3); PREPARE TRANSACTION 'gone'",
    )
    both.sync()
    assert both.value(PREPARED) == 2
    both.assert_equal()
    both.source("COMMIT PREPARED 'one'", "ROLLBACK PREPARED 'gone'", "INSERT INTO u VALUES (4)")
    both.sync()
    assert both.value(PREPARED) == 0
    both.assert_equal()
    both.assert_equal("SELECT a FROM u ORDER BY a", source=True)
    assert both.rows("SELECT a FROM fired ORDER BY n") == [(1,), (2,), (4,)]
    assert both.our_conflicts() == {"update_missing": 1}
    assert both.ours.rows("SELECT FROM walmere.staged_changes") == []


def test_a_prepared_transaction_whose_triggers_use_a_temporary_table_is_applied_when_it_is_committed(
    both: SideBySide,
) -> None:
    """Such a transaction cannot be prepared. Native stops at it."""
    both.target(
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " CREATE TEMP TABLE IF NOT EXISTS noted (a int); RETURN NULL; END $$",
    )
    _start(both)
    both.target(
        "CREATE TRIGGER note AFTER INSERT ON u FOR EACH ROW EXECUTE FUNCTION note()",
        "ALTER TABLE u ENABLE ALWAYS TRIGGER note",
    )
    both.source("BEGIN; INSERT INTO u VALUES (1); PREPARE TRANSACTION 'one'")
    assert "temporary" in both.native_stops()
    both.sync_ours()
    assert both.ours.value(PREPARED) == 0
    both.source("COMMIT PREPARED 'one'")
    both.sync_ours()
    assert both.ours.rows("SELECT a FROM u") == [(1,)]
