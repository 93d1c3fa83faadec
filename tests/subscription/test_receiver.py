"""The receiver against real servers: what prepared transactions, retention and interruptions do to it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from conftest import Database
from processes import Background, eventually
from receiving import changes, files, named_files, receive_all, summary
from walmere.config import Config
from walmere.lsn import Lsn
from walmere.subscription import receiver
from walmere.subscription.progress import SinkPositions
from walmere.subscription.receiver import Receiver

TABLE = ("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION pub FOR TABLE t")
ROWS = {"small": 2, "streamed": 3000}


def ids(config: Config) -> list[int]:
    return [int(change[2]["id"]) for change in changes(config)]


def prepare(database: Database, first: int, count: int) -> str:
    gid = f"{database.name}_{first}"
    with psycopg.connect(database.dsn, autocommit=True) as other:
        other.execute("BEGIN")
        other.execute(
            "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(%s::int, %s) i", [first, first + count - 1]
        )
        other.execute(f"PREPARE TRANSACTION '{gid}'")
    return gid


@pytest.fixture
def streamed(database: Database) -> None:
    database.execute(f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'", *TABLE)


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("size", ROWS)
def test_what_was_prepared_before_two_phase_was_turned_on_comes_with_its_commit(
    database: Database, tmp_path: Path, size: str
) -> None:
    config = database.config(tmp_path)
    receive_all(database, config)
    committed, rolled_back = prepare(database, 100_000, ROWS[size]), prepare(database, 200_000, ROWS[size])
    database.execute("INSERT INTO t VALUES (1)")
    receive_all(database, config)
    config = database.config(tmp_path, two_phase=True)
    receive_all(database, config)
    database.execute(f"COMMIT PREPARED '{committed}'", f"ROLLBACK PREPARED '{rolled_back}'")
    database.execute("INSERT INTO t VALUES (2)")
    receive_all(database, config)
    receive_all(database, config)
    assert ids(config) == [1, *range(100_000, 100_000 + ROWS[size]), 2]
    assert files(config) == named_files(config)


@pytest.mark.usefixtures("streamed")
def test_what_was_prepared_before_two_phase_was_turned_off_comes_once(database: Database, tmp_path: Path) -> None:
    config = database.config(tmp_path, two_phase=True)
    receive_all(database, config)
    gid = prepare(database, 100, 2)
    receive_all(database, config)
    config = database.config(tmp_path)
    receive_all(database, config)
    database.execute(f"COMMIT PREPARED '{gid}'", "INSERT INTO t VALUES (1)")
    receive_all(database, config)
    receive_all(database, config)
    assert ids(config) == [100, 101, 1]


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("size", ROWS)
def test_after_a_rollback_prepared_the_log_can_be_opened_again(database: Database, tmp_path: Path, size: str) -> None:
    config = database.config(tmp_path, two_phase=True)
    receive_all(database, config)
    gid = prepare(database, 100, ROWS[size])
    receive_all(database, config)
    database.execute(f"ROLLBACK PREPARED '{gid}'")
    for number in (1, 2):
        database.execute(f"INSERT INTO t VALUES ({number})")
        receive_all(database, config)
    assert ids(config) == [1, 2]


def with_keep(config: Config, seconds: float) -> Config:
    return config.model_copy(update={"subscription": config.subscription.model_copy(update={"keep_seconds": seconds})})


def test_one_who_only_ever_receives_once_keeps_no_more_than_is_wanted(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(*TABLE)
    config = database.config(tmp_path)
    for number in range(3):
        database.execute(f"INSERT INTO t VALUES ({number})")
        receive_all(database, config)
    time.sleep(0.01)
    kept = ids(config)
    assert kept[-1] == 2
    receive_all(database, with_keep(config, 0.0))
    receive_all(database, config)
    assert ids(config) == []
    assert files(config) == set()
    assert confirmed(database) <= summary(config).end_lsn


def test_a_sink_that_is_behind_keeps_the_log(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(*TABLE)
    config = database.config(tmp_path)
    receive_all(database, config)
    ends = []
    for number in range(3):
        database.execute(f"INSERT INTO t VALUES ({number})")
        ends.append(receive_all(database, config))
    positions = SinkPositions(tmp_path)
    for applied, left in ((Lsn(1), [0, 1, 2]), (ends[0], [1, 2]), (ends[2], [])):
        positions.advance("sink", applied)
        receive_all(database, with_keep(config, 0.0))
        receive_all(database, config)
        assert ids(config) == left


def confirmed(database: Database) -> Lsn:
    query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    return Lsn.parse(database.value(query, database.slot))


def test_the_positions_are_what_the_source_shows(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "FEEDBACK_INTERVAL", 0.05)
    database.execute(*TABLE)
    config = database.config(tmp_path)
    SinkPositions(tmp_path).advance("sink", Lsn(0x1234))
    with Background(config) as background:
        query = (
            "SELECT write_lsn::text, flush_lsn::text, replay_lsn::text FROM pg_stat_replication"
            " JOIN pg_replication_slots ON pid = active_pid WHERE slot_name = %s"
        )
        eventually(database.streaming)
        database.execute("INSERT INTO t VALUES (1)")
        end = Lsn.parse(database.value("SELECT pg_current_wal_lsn()::text"))

        def told() -> bool:
            rows = database.rows(query, database.slot)
            if not rows or not background.receiver.progress.durable:  # what was seen first had only made the slot
                return False
            write, flush, replay = (Lsn.parse(lsn or "0/0") for lsn in rows[0])
            assert replay <= flush <= write
            assert flush <= background.receiver.progress.durable <= summary(config).end_lsn
            return flush >= end and replay == Lsn(0x1234)

        eventually(told)
        state = json.loads((tmp_path / "receiver.json").read_text())
        assert Lsn.parse(state["received_lsn"]) >= end
    assert not (tmp_path / "receiver.json").exists()


def test_ended_while_it_waits_for_the_source_it_says_what_is_durable(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(*TABLE, "INSERT INTO t VALUES (1)")
    config = database.config(tmp_path)
    durable = receive_all(database, config)
    again = Receiver(config)
    original: Callable[..., None] = receiver._Session.start

    def cut(session: receiver._Session, *positions: Lsn) -> None:
        again.stop()
        database.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_replication")
        original(session, *positions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receiver._Session, "start", cut)
        assert again.run() == durable
