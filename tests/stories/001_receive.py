"""Story 1: what is committed at the source is in the change log, once, in commit order; what is not, is not."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from conftest import Database
from processes import eventually
from receiving import changes, files, logged, named_files, receive_all, summary
from walmere.lsn import Lsn
from walmere.pgoutput.messages import UNCHANGED
from walmere.subscription.receiver import Receiver
from walmere.testing.server import Server


def test_every_kind_of_change_is_received_in_commit_order(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        "CREATE PUBLICATION pub FOR TABLE t, u",
    )
    config = database.config(tmp_path)
    receive_all(database, config)
    database.execute(
        "INSERT INTO t VALUES (1, 'one'), (2, NULL), (3, '')",
        "UPDATE t SET v = 'uno' WHERE id = 1",
        "UPDATE t SET id = 20 WHERE id = 2",
        "DELETE FROM t WHERE id = 3",
        "INSERT INTO u VALUES (7)",
        "TRUNCATE t, u",
        "SELECT pg_logical_emit_message(true, 'within', 'a transaction')",
        "SELECT pg_logical_emit_message(false, 'beside', 'transactions')",
    )
    receive_all(database, config)
    assert changes(config) == [
        ("I", "t", {"id": "1", "v": "one"}),
        ("I", "t", {"id": "2", "v": None}),
        ("I", "t", {"id": "3", "v": ""}),
        ("U", "t", None, {"id": "1", "v": "uno"}),
        ("U", "t", {"id": "2", "v": None}, {"id": "20", "v": None}),
        ("D", "t", {"id": "3", "v": None}),
        ("I", "u", {"id": "7"}),
        ("T", "t", "u"),
        ("M", "within", b"a transaction"),
        ("M", "beside", b"transactions"),
    ]
    commits = [transaction.commit_lsn for transaction in logged(config)]
    assert commits == sorted(commits)


def test_concurrent_transactions_are_logged_in_the_order_of_their_commits(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database.config(tmp_path)
    receive_all(database, config)
    with psycopg.connect(database.dsn) as first, psycopg.connect(database.dsn) as second:
        first.execute("INSERT INTO t VALUES (1)")
        second.execute("INSERT INTO t VALUES (2)")
        second.commit()
        first.execute("INSERT INTO t VALUES (3)")
        first.commit()
    receive_all(database, config)
    assert [change[2]["id"] for change in changes(config)] == ["2", "1", "3"]


def test_what_is_rolled_back_is_not_in_the_log(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database.config(tmp_path)
    receive_all(database, config)
    database.execute("BEGIN", "INSERT INTO t VALUES (1)", "ROLLBACK")
    database.execute(
        "BEGIN", "INSERT INTO t VALUES (2)", "SAVEPOINT s", "INSERT INTO t VALUES (3)", "ROLLBACK TO s", "COMMIT"
    )
    receive_all(database, config)
    assert changes(config) == [("I", "t", {"id": "2"})]


def test_an_unchanged_toast_value_is_told_apart_from_null(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text, n int)", "CREATE PUBLICATION pub FOR TABLE t")
    database.execute("ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    config = database.config(tmp_path)
    receive_all(database, config)
    database.execute("INSERT INTO t VALUES (1, repeat('x', 100000), 1)", "UPDATE t SET n = 2")
    receive_all(database, config)
    assert changes(config)[1] == ("U", "t", None, {"id": "1", "v": UNCHANGED, "n": "2"})


def test_receiving_again_goes_on_where_the_log_ends(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database.config(tmp_path)
    for number in range(5):
        receive_all(database, config)
        database.execute(f"INSERT INTO t VALUES ({number})")
    receive_all(database, config)
    assert [change[2]["id"] for change in changes(config)] == ["0", "1", "2", "3", "4"]
    assert files(config) == named_files(config)


def test_what_postgres_sends_again_is_not_written_twice(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database.config(tmp_path)
    receive_all(database, config)
    database.execute(f"SELECT pg_copy_logical_replication_slot('{database.slot}', 'before')")
    database.execute("INSERT INTO t VALUES (1)", "INSERT INTO t VALUES (2)")
    receive_all(database, config)
    # the slot as it was: the server has forgotten what was confirmed since, as after its crash
    database.execute(
        f"SELECT pg_drop_replication_slot('{database.slot}')",
        f"SELECT pg_copy_logical_replication_slot('before', '{database.slot}')",
        "INSERT INTO t VALUES (3)",
    )
    receive_all(database, config)
    assert [change[2]["id"] for change in changes(config)] == ["1", "2", "3"]


def test_a_definition_changed_between_rows_goes_with_its_rows(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database.config(tmp_path)
    receive_all(database, config)
    database.execute(
        "BEGIN",
        "INSERT INTO t VALUES (1)",
        "ALTER TABLE t ADD v text DEFAULT 'd'",
        "INSERT INTO t VALUES (2)",
        "ALTER TABLE t RENAME v TO w",
        "INSERT INTO t VALUES (3)",
        "COMMIT",
    )
    receive_all(database, config)
    assert [change[2] for change in changes(config)] == [{"id": "1"}, {"id": "2", "v": "d"}, {"id": "3", "w": "d"}]


def test_the_origin_of_replicated_transactions_is_kept(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database.config(tmp_path)
    receive_all(database, config)
    name = f"far_{database.name}"
    database.execute(
        "INSERT INTO t VALUES (1)",
        f"SELECT pg_replication_origin_create('{name}')",
        f"SELECT pg_replication_origin_session_setup('{name}')",
        "INSERT INTO t VALUES (2)",
        "SELECT pg_replication_origin_session_reset()",
        f"SELECT pg_replication_origin_drop('{name}')",
        "INSERT INTO t VALUES (3)",
    )
    receive_all(database, config)
    # PostgreSQL 14 sends transactions that changed nothing published, too
    assert [transaction.origin for transaction in logged(config) if transaction.changes] == [None, name, None]


def test_any_arrow_tool_can_open_a_segment(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database.config(tmp_path)
    receive_all(database, config)
    database.execute("INSERT INTO t SELECT generate_series(1, 10)")
    receive_all(database, config)
    [segment] = config.changelog.glob("*.arrow")
    table = pa.ipc.open_file(str(segment)).read_all().sort_by("sequence").to_pydict()
    assert table["kind"] == ["B", "R", *"IIIIIIIIII", "C"]
    assert table["sequence"] == list(range(table["sequence"][0], table["sequence"][0] + 13))
    assert set(table["xid"]) == {logged(config)[0].xid}
    assert set(table["commit_lsn"]) == {logged(config)[0].commit_lsn}


def test_a_log_is_read_from_an_lsn_and_by_table(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        "CREATE PUBLICATION pub FOR TABLE t, u",
    )
    config = database.config(tmp_path)
    receive_all(database, config)
    database.execute("INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (1)", "INSERT INTO t VALUES (2)")
    receive_all(database, config)
    assert changes(config, table="u") == [("I", "u", {"id": "1"})]
    second = logged(config)[1].commit_lsn
    assert logged(config, second)[0].commit_lsn == second
    assert len(logged(config, Lsn(second + 1))) == 1


def test_the_slot_advances_on_an_idle_database(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database.config(tmp_path, heartbeat=0.2)
    receiver = Receiver(config)
    thread = threading.Thread(target=receiver.run)
    thread.start()
    try:
        query = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s"
        seen: set[str] = set()
        deadline = time.monotonic() + 30
        while len(seen) < 4 and time.monotonic() < deadline:
            seen |= {row[0] for row in database.rows(query, database.slot) if row[0]}
            time.sleep(0.05)
        assert len(seen) >= 4, "nobody writes, and still the slot moves"
    finally:
        receiver.stop()
        thread.join(30)
    assert not thread.is_alive()
    assert changes(config) == []


def test_feedback_is_given_although_nothing_moves(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("walmere.subscription.receiver.MAX_FEEDBACK_INTERVAL", 0.3)
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database.config(tmp_path)
    receiver = Receiver(config)
    thread = threading.Thread(target=receiver.run)
    thread.start()
    try:
        replies = "SELECT reply_time FROM pg_stat_replication JOIN pg_replication_slots ON pid = active_pid"
        query = f"{replies} WHERE slot_name = %s"
        seen: set[str] = set()
        deadline = time.monotonic() + 30
        while len(seen) < 4 and time.monotonic() < deadline:
            seen |= {row[0] for row in database.rows(query, database.slot) if row[0]}
            time.sleep(0.05)
        assert len(seen) >= 4
    finally:
        receiver.stop()
        thread.join(30)


def test_the_servers_shutdown_is_not_held_up(private_server: Server, tmp_path: Path) -> None:
    """walsender waits at shutdown until everything is confirmed, and asks for it."""
    database = Database(private_server)
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database.config(tmp_path)
    receiver = Receiver(config)
    thread = threading.Thread(target=receiver.run)
    thread.start()
    try:
        eventually(database.streaming)
        database.execute("INSERT INTO t VALUES (1)")
        database.connection.close()
        began = time.monotonic()
        private_server.stop(signal.SIGINT)
        took = time.monotonic() - began
        assert took < 8, took
        private_server.start()
        deadline = time.monotonic() + 30
        while not changes(config) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        receiver.stop()
        thread.join(30)
    assert changes(config) == [("I", "t", {"id": "1"})]
    assert summary(config).end_lsn >= logged(config)[0].commit_lsn
