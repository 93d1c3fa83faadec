"""Story 30: changes that came by replication carry their origin, so they need not be sent back."""

from __future__ import annotations

from pathlib import Path

import pytest

from side_by_side import SideBySide
from walmere import config as configuration
from walmere.lsn import Lsn
from walmere.running import launcher

pytestmark = pytest.mark.since(16, "origin = none")


@pytest.mark.long
def test_with_origin_none_a_subscriber_sends_on_only_its_own_changes(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (a int PRIMARY KEY)")
    both.source("INSERT INTO t VALUES (1), (2)", "CREATE PUBLICATION pub FOR TABLE t")
    both.publish_on("t")  # before the copy: copied rows have an origin, too
    both.start()
    both.target("INSERT INTO t VALUES (100)")
    both.source("INSERT INTO t VALUES (3)")
    both.sync()
    both.source("UPDATE t SET a = 4 WHERE a = 3")
    both.sync()
    both.source("DELETE FROM t WHERE a = 4")
    both.sync()
    both.source("TRUNCATE t")
    both.sync()
    both.assert_equal(source=True)
    changes = [letter for letter in both.sent_on(origin="none") if letter in "IUDT"]
    assert changes == ["I"]
    changes = [letter for letter in both.sent_on(origin="any") if letter in "IUDT"]
    assert changes == ["I", "I", "I", "I", "U", "D", "T"]


def test_two_databases_that_are_mirrored_both_ways_do_not_send_changes_back(both: SideBySide, tmp_path: Path) -> None:
    both.everywhere("CREATE TABLE t (a int PRIMARY KEY, v text)")
    both.source("CREATE PUBLICATION pub FOR TABLE t")
    both.ours.execute("CREATE PUBLICATION back FOR TABLE t")
    both.start(origin="none")
    back = tmp_path / "back"
    back.mkdir()
    file = back / "walmere.toml"
    file.write_text(
        f"""
[source]
dsn = "{both.ours.dsn}"
publications = ["back"]
slot = "{both.name}_back"
origin = "none"
[subscription]
name = "{both.name}_back"
directory = "subscription"
[target]
kind = "postgres"
dsn = "{both.publisher.dsn}"
[spark]
master = "local[2]"
"""
    )

    def run_back() -> None:
        until = Lsn.parse(both.ours.value("SELECT pg_current_wal_insert_lsn()::text"))
        launcher(configuration.load(file), file).run(until)

    run_back()
    both.source("INSERT INTO t VALUES (1, 'there'), (2, 'there')")
    both.ours.execute("INSERT INTO t VALUES (11, 'here'), (12, 'here')")
    both.sync_ours()
    run_back()
    both.source("UPDATE t SET v = 'there again' WHERE a = 11", "DELETE FROM t WHERE a = 1")
    both.ours.execute("UPDATE t SET v = 'here again' WHERE a = 2")
    for _ in range(2):  # rows that are sent back would violate the primary key, or be conflicts
        both.sync_ours()
        run_back()
    expected = [(2, "here again"), (11, "there again"), (12, "here")]
    assert both.publisher.rows("SELECT * FROM t ORDER BY a") == expected
    assert both.ours.rows("SELECT * FROM t ORDER BY a") == expected
    for database in (both.ours, both.publisher):
        missing = "SELECT conflict FROM walmere.conflicts WHERE conflict NOT LIKE '%origin_differs'"
        assert database.rows(missing) == []


@pytest.mark.long
def test_with_origin_none_what_the_publisher_received_itself_is_left_out(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (a int PRIMARY KEY)")
    both.source("CREATE PUBLICATION pub FOR TABLE t")
    both.start(origin="none")
    origin = f"{both.name}_upstream"
    both.source(
        f"SELECT pg_replication_origin_create('{origin}')",
        f"SELECT pg_replication_origin_session_setup('{origin}')",
        "INSERT INTO t VALUES (1)",
        "SELECT pg_replication_origin_session_reset()",
        f"SELECT pg_replication_origin_drop('{origin}')",
        "INSERT INTO t VALUES (2)",
    )
    both.sync()
    assert both.rows("SELECT a FROM t") == [(2,)]


@pytest.mark.long
def test_the_origins_of_both_have_reached_the_last_transaction(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (a int PRIMARY KEY)")
    both.source("CREATE PUBLICATION pub FOR TABLE t")
    both.start()
    before = both.publisher.value("SELECT pg_current_wal_insert_lsn()::text")
    both.source("INSERT INTO t VALUES (1)")
    both.sync()
    reached = "SELECT external_id FROM pg_replication_origin_status WHERE remote_lsn > %s::pg_lsn"
    names = [name for (name,) in both.native.rows(reached, before)]
    native = both.native.value("SELECT 'pg_' || oid FROM pg_subscription WHERE subname = %s", both.subscription)
    assert native in names
    assert len(names) == 2, names
