"""Story 42: check, verify, status, resync and drop, if the target is a database."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from side_by_side import SideBySide
from walmere.api import Subscription
from walmere.errors import SinkMismatch
from walmere.publisher.finding import Level


def _differences(subscription: Subscription) -> dict[str, tuple[int, int, int]]:
    """By table: rows that are missing, extra and different at the target."""
    found = subscription.verify().tables
    return {each.name: (each.missing, each.extra, each.different) for each in found if not each.equal}


def test_the_life_of_a_subscription_from_check_to_drop(both: SideBySide) -> None:
    """The target has the columns in another order, of other types, and one of its own; and a table is filtered."""
    both.source(
        "CREATE TABLE t (id int PRIMARY KEY, price numeric(9,2), at timestamp, note text)",
        "CREATE TABLE many (id int PRIMARY KEY, v text)",
        "CREATE TABLE no_key (a int, b text)",
        "ALTER TABLE no_key REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i, i, '2024-01-01', 'x' FROM generate_series(1, 100) i",
        "INSERT INTO many SELECT i, repeat('x', 100) FROM generate_series(1, 5000) i",
        "INSERT INTO no_key VALUES (1, 'one'), (1, 'one'), (NULL, NULL)",
        f"CREATE PUBLICATION pub FOR TABLE t, many{both.publisher.narrowed(' WHERE (id > 10)')}, no_key",
    )
    both.target(
        "CREATE TABLE t (own int DEFAULT 7, note varchar(20), id bigint PRIMARY KEY, price text, at text)",
        "CREATE TABLE many (id int PRIMARY KEY, v text)",
        "CREATE TABLE no_key (b text, a int)",
    )
    both.subscribe()
    subscription = Subscription(both.file)
    found = {(each.what, each.level) for each in subscription.check() if each.name == "target_table"}
    assert found == {
        ("public.t can be written", Level.OK),
        ("public.many can be written", Level.OK),
        ("public.no_key has no unique index: an UPDATE or DELETE has to search the whole table", Level.WARNING),
    }
    both.sync()
    both.source("UPDATE t SET price = 0.50 WHERE id = 1", "DELETE FROM no_key WHERE a IS NULL")
    assert subscription.verify().equal, "it applies what is not applied yet"
    both.sync_native()
    both.assert_equal()
    both.ours.execute(
        "UPDATE t SET own = 8 WHERE id <= 50",  # not published: nobody compares it
        "UPDATE t SET price = '0.51' WHERE id = 1",
        "UPDATE t SET price = '2.000' WHERE id = 2",  # as a value of the source's type, it is the same
        "DELETE FROM many WHERE id IN (11, 12)",
        "INSERT INTO no_key VALUES ('one', 1)",
    )
    assert _differences(subscription) == {
        "public.many": (2, 0, 0),
        "public.no_key": (0, 1, 0),
        "public.t": (0, 0, 1),
    }
    assert [str(table) for table in subscription.resync(["t", "many", "no_key"])] == [
        "public.t",
        "public.many",
        "public.no_key",
    ]
    assert subscription.verify().equal
    assert both.ours.value("SELECT count(*) FROM t WHERE own = 8") == 50, "its own column stays"
    status = subscription.status()
    assert status["error"] is None  # not caught_up: nothing runs, and the source writes WAL of its own
    assert {each["phase"] for each in status["tables"]} <= {"f", "s", "r"}
    lines = subscription.drop()
    assert "dropped schema walmere of the target" in lines
    assert not both.ours.rows("SELECT FROM pg_namespace WHERE nspname = 'walmere'")
    origins = "SELECT FROM pg_replication_origin WHERE starts_with(roname, %s)"
    assert not both.ours.rows(origins, f"walmere_{both.name}")
    assert not both.publisher.rows("SELECT FROM pg_replication_slots WHERE slot_name = %s", both.publisher.slot)
    assert both.ours.value("SELECT count(*) FROM t") == 100, "tables and rows stay"


@pytest.mark.long
def test_verify_and_resync_while_the_run_goes_on(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, n int)", "CREATE TABLE u (id int PRIMARY KEY)")
    both.source("INSERT INTO t SELECT i, 0 FROM generate_series(1, 2000) i", "CREATE PUBLICATION pub FOR TABLE t, u")
    both.start()
    subscription = Subscription(both.file)
    stopping = threading.Event()
    counts: set[int] = set()

    def write() -> None:
        with psycopg.connect(both.publisher.dsn, autocommit=True) as connection:
            while not stopping.wait(0.01):
                connection.execute("UPDATE t SET n = n + 1 WHERE id = (random() * 1999)::int + 1")

    def read() -> None:
        with psycopg.connect(both.ours.dsn, autocommit=True) as connection:
            while not stopping.wait(0.005):
                counts.update(row[0] for row in connection.execute("SELECT count(*) FROM t"))

    threads = [threading.Thread(target=each) for each in (write, read)]
    for thread in threads:
        thread.start()
    try:
        with both.following():
            assert subscription.verify().equal
            both.ours.execute("DELETE FROM t WHERE id = 5")
            assert _differences(subscription) == {"public.t": (1, 0, 0)}
            subscription.resync(["t"])
            assert subscription.verify().equal
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    assert counts <= {1999, 2000}, "readers see the old rows until the copy is complete"


@pytest.mark.long
@pytest.mark.since(15, "GRANT SET ON PARAMETER")
def test_a_role_that_may_not_use_origins_has_its_progress_in_a_table(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    both.source("INSERT INTO t VALUES (1, 'one')", "CREATE PUBLICATION pub FOR TABLE t")
    role = both.role("plain")
    both.ours.execute(
        f"GRANT SET ON PARAMETER session_replication_role TO {role}",
        f"GRANT CREATE ON DATABASE {both.ours.name} TO {role}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON t TO {role}",
    )
    target: dict[str, Any] = {"dsn": both.ours.server.dsn(both.ours.name, role)}
    both.publish_on("t")
    both.subscribe(target=target)
    [found] = [each for each in Subscription(both.file).check() if each.name == "origin"]
    assert (found.level, "progress is stored in a table" in found.what) == (Level.WARNING, True)
    both.sync()
    both.source("INSERT INTO t VALUES (2, 'two')", "UPDATE t SET v = 'x' WHERE id = 1", "DELETE FROM t WHERE id = 2")
    before = both.publisher.value("SELECT pg_current_wal_insert_lsn()")
    both.sync()
    both.assert_equal(source=True)
    assert both.ours.value("SELECT min(lsn) >= %s::pg_lsn FROM walmere.tables", before)
    assert not both.ours.rows("SELECT FROM pg_replication_origin WHERE starts_with(roname, %s)", f"walmere_{both.name}")
    if both.ours.major >= 16:  # unmarked changes are sent on
        assert "I" in both.sent_on_by(both.ours, origin="none")
        assert "I" not in both.sent_on_by(both.native, origin="none")


def test_the_database_of_the_source_is_refused_as_the_target(both: SideBySide) -> None:
    """Its rows would be copied to their own tables. Also if the DSN is changed later."""
    both.everywhere("CREATE TABLE t (id int, v text)")
    both.source("INSERT INTO t VALUES (1, 'one')", "CREATE PUBLICATION pub FOR TABLE t")
    own = both.publisher.dsn.replace("127.0.0.1", "localhost")
    both.subscribe(target={"dsn": own})
    expected = "target.dsn and source.dsn are one database"
    [found] = [each for each in Subscription(both.file).check() if each.what.startswith(expected)]
    assert (found.level, found.fix) == (Level.PROBLEM, "correct target.dsn")
    assert expected in both.ours_stops(SinkMismatch).wrong
    assert not both.publisher.rows("SELECT FROM pg_replication_slots WHERE slot_name = %s", both.publisher.slot)
    both.file.write_text(both.file.read_text().replace(own, both.ours.dsn))
    both.sync()
    both.assert_equal(source=True)
    both.file.write_text(both.file.read_text().replace(both.ours.dsn, own))
    assert expected in both.ours_stops(SinkMismatch).wrong
    assert both.publisher.value("SELECT count(*) FROM t") == 1
