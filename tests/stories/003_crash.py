"""Story 3: the receiver is killed, cut off, restarted: nothing is lost, nothing comes twice or is confirmed early."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from conftest import Database
from processes import eventually, write_config
from receiving import files, named_files, receive_all, summary
from walmere.config import Config
from walmere.lsn import Lsn
from workload import MixedLoad, log_says, source_says

Start = Callable[[Config], subprocess.Popen[bytes]]


@pytest.fixture
def start_receiver(tmp_path: Path) -> Iterator[Start]:
    """`walmere receive`, in a process of its own; none outlives the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(config: Config) -> subprocess.Popen[bytes]:
        path = write_config(config, tmp_path / "walmere.toml")
        with (tmp_path / "receiver.log").open("ab") as log:
            command = [sys.executable, "-m", "walmere", "receive", "-c", str(path)]
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
        return started[-1]

    yield start
    for receiver in started:
        receiver.kill()
        receiver.wait()


def wait_until_streaming(database: Database, receiver: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the slot to be this receiver's: the walsender of one that was killed may still hold it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert receiver.poll() is None, log.read_text()
        if database.streaming():
            return
        time.sleep(0.02)
    raise AssertionError(log.read_text())


def confirmed(database: Database) -> Lsn:
    query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    return Lsn.parse(database.value(query, database.slot))


@pytest.mark.parametrize(
    ("streaming", "times"),
    [
        pytest.param(True, 3, id="streaming, 3 times"),
        pytest.param(True, 20, id="streaming, 20 times", marks=pytest.mark.long),
        pytest.param(False, 20, id="whole, 20 times", marks=pytest.mark.long),
    ],
)
def test_killed_many_times_the_log_holds_every_committed_transaction_once_in_order(
    database18: Database, tmp_path: Path, start_receiver: Start, streaming: bool, times: int
) -> None:
    database = database18
    MixedLoad.create(database)
    config = database.config(tmp_path / "subscription", streaming=streaming)
    # small segments, so that many of them are under way when the kill comes
    config = config.model_copy(
        update={"subscription": config.subscription.model_copy(update={"segment_bytes": 1 << 16})}
    )
    receive_all(database, config)
    database.execute(f"SELECT pg_copy_logical_replication_slot('{database.slot}', 'truth_{database.name}')")
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    with MixedLoad(database, seed):
        for _ in range(times):
            receiver = start_receiver(config)
            wait_until_streaming(database, receiver, tmp_path / "receiver.log")
            time.sleep(rng.uniform(0, 0.5))
            receiver.send_signal(signal.SIGKILL)
            receiver.wait()
            assert confirmed(database) <= summary(config).end_lsn, f"seed {seed}"
    receive_all(database, config)
    assert confirmed(database) <= summary(config).end_lsn
    truth, log = source_says(database, f"truth_{database.name}"), log_says(config)
    assert len(truth) > 5 * times, "the load was no load"
    assert [t[:2] for t in log] == [t[:2] for t in truth], f"seed {seed}"
    assert log == truth, f"seed {seed}"
    assert files(config) == named_files(config), "a crash left something behind"


def test_sigterm_ends_the_receiver_cleanly_with_everything_confirmed(
    database: Database, tmp_path: Path, start_receiver: Start
) -> None:
    MixedLoad.create(database)
    config = database.config(tmp_path / "subscription")
    receiver = start_receiver(config)
    wait_until_streaming(database, receiver, tmp_path / "receiver.log")
    database.execute("UPDATE accounts SET balance = 0")
    deadline = time.monotonic() + 30
    while not (summary(config).commit_lsn) and time.monotonic() < deadline:
        time.sleep(0.05)
    receiver.terminate()
    assert receiver.wait(30) == 0, (tmp_path / "receiver.log").read_text()
    assert summary(config).end_lsn == confirmed(database)
    assert len(log_says(config)[0][2]) == 100
    assert confirmed(database) <= Lsn.parse(database.value("SELECT pg_current_wal_lsn()::text"))


@pytest.mark.parametrize("times", [2, pytest.param(5, marks=pytest.mark.long)])
def test_a_cut_connection_is_made_again(database: Database, tmp_path: Path, start_receiver: Start, times: int) -> None:
    MixedLoad.create(database)
    config = database.config(tmp_path / "subscription")
    receive_all(database, config)
    database.execute(f"SELECT pg_copy_logical_replication_slot('{database.slot}', 'truth_{database.name}')")
    receiver = start_receiver(config)
    with MixedLoad(database, seed=1):
        for _ in range(times):
            wait_until_streaming(database, receiver, tmp_path / "receiver.log")
            time.sleep(0.2)
            database.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                f" WHERE slot_name = '{database.slot}' AND active"
            )
    eventually(lambda: "retry in" in (tmp_path / "receiver.log").read_text())
    receiver.terminate()
    assert receiver.wait(30) == 0
    receive_all(database, config)
    assert log_says(config) == source_says(database, f"truth_{database.name}")


def test_sigterm_ends_a_receiver_that_waits_for_open_transactions_to_create_its_slot(
    database18: Database, tmp_path: Path, start_receiver: Start
) -> None:
    database = database18
    MixedLoad.create(database)
    config = database.config(tmp_path / "subscription")
    with psycopg.connect(database.dsn) as other:
        other.execute("INSERT INTO notes VALUES (1)")
        receiver = start_receiver(config)
        query = (
            "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'CREATE_REPLICATION_SLOT%%' AND wait_event_type = 'Lock'"
        )
        deadline = time.monotonic() + 30
        while not database.rows(query) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert database.rows(query), "nobody waits"
        receiver.terminate()
        assert receiver.wait(20) == 0, (tmp_path / "receiver.log").read_text()
    receive_all(database, config)
    database.execute("INSERT INTO notes VALUES (2)")
    receive_all(database, config)
    assert [change.new for _, _, changes in log_says(config) for change in changes] == [(b"2", None)]  # type: ignore[union-attr]
