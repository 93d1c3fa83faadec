"""`walmere receive`, `status`, `check` and `drop`, as scripts rely on them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psycopg
import pytest

from conftest import Database
from processes import eventually, running, walmere, write_config
from receiving import changes, receive_all, summary
from walmere.config import Config
from walmere.lsn import Lsn
from walmere.subscription.progress import SinkPositions

LSN = re.compile(r"[0-9A-F]{1,8}/[0-9A-F]{1,8}\Z")


@pytest.fixture
def config(database18: Database, tmp_path: Path) -> Config:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    return database18.config(tmp_path / "s")


@pytest.fixture
def path(config: Config, tmp_path: Path) -> Path:
    return write_config(config, tmp_path / "walmere.toml")


def slots(database: Database) -> list[str]:
    return [name for (name,) in database.rows("SELECT slot_name FROM pg_replication_slots")]


def ids(config: Config) -> list[int]:
    return [int(change[2]["id"]) for change in changes(config)]


# receive


def test_once_receives_what_the_source_has_and_ends(database18: Database, config: Config, path: Path) -> None:
    for number in range(2):  # the first on an idle database, without slot and log
        result = walmere("receive", "--once", "-c", path)
        assert result.returncode == 0, result.stderr
        assert "is durable in" in result.stderr
        assert ids(config) == list(range(number))
        again = walmere("receive", "--once", "-c", path)
        assert again.returncode == 0, again.stderr
        assert ids(config) == list(range(number))
        database18.execute(f"INSERT INTO t VALUES ({number})")


def test_until_an_lsn_is_durable(database18: Database, config: Config, path: Path) -> None:
    receive_all(database18, config)
    database18.execute("INSERT INTO t VALUES (1)")
    until = database18.value("SELECT pg_current_wal_lsn()::text")
    result = walmere("receive", "--until", until, "-c", path)
    assert result.returncode == 0, result.stderr
    assert ids(config) == [1]
    assert summary(config).end_lsn >= Lsn.parse(until)
    past = walmere("receive", "--until", "0/1", "-c", path)
    assert past.returncode == 0


def test_until_an_lsn_that_is_still_to_come_is_waited_for(
    database18: Database, config: Config, path: Path, tmp_path: Path
) -> None:
    until = Lsn(Lsn.parse(database18.value("SELECT pg_current_wal_lsn()::text")) + 1_000_000)  # others write, too
    output = tmp_path / "out"
    with running("receive", "--until", str(until), "-c", path, output=output) as process:
        eventually(database18.streaming, why=output.read_text)
        database18.execute("INSERT INTO t VALUES (1)")
        eventually(lambda: (config.changelog / "manifest.jsonl").exists() and ids(config) == [1])
        assert process.poll() is None
        database18.execute("INSERT INTO t SELECT generate_series(2, 20000)")
        assert process.wait(30) == 0, output.read_text()
    assert summary(config).end_lsn >= until


# status


def walk(state: object) -> object:
    """Its keys, all the way down."""
    if isinstance(state, dict):
        return {key: walk(value) for key, value in state.items()}
    return [walk(each) for each in state] if isinstance(state, list) else None


KEYS = {
    "subscription": None,
    "paused": None,
    "slot": dict.fromkeys(("name", "active", "wal_status", "confirmed_lsn", "retained_bytes")),
    "source_lsn": None,
    "received_lsn": None,
    "durable_lsn": None,
    "applied_lsn": None,
    "lag_bytes": None,
    "lag_seconds": None,
    "caught_up": None,
    "behind": [],
    "receiver": dict.fromkeys(("running", "lag_bytes", "lag_seconds")),
    "tables": [
        dict.fromkeys(
            (
                *("name", "source_table", "phase", "rows_copied", "snapshot_lsn", "applied_lsn", "rejects", "error"),
                "published",
                *("rows_estimated", "lag_bytes", "lag_seconds", "locked", "next_copy"),
                *("files", "bytes", "deleted_rows", "written_bytes_per_hour", "upkeep_waits_for", "conflicts"),
            )
        )
    ],
    "disk": dict.fromkeys(("log_bytes", "lake_bytes")),
    "next_batch": None,
    "store": None,
    "queries": [],
    "error": None,
}


def test_status_has_the_keys_that_scripts_rely_on(
    database18: Database, config: Config, path: Path, tmp_path: Path
) -> None:
    before = json.loads(walmere("status", "--json", "-c", path).stdout)
    assert walk(before) == KEYS | {"slot": None}
    assert before["durable_lsn"] is before["received_lsn"] is None
    receive_all(database18, config)
    with running("receive", "-c", path, output=tmp_path / "out"):
        eventually(database18.streaming)
        database18.execute("INSERT INTO t VALUES (1)")
        eventually(lambda: ids(config) == [1])
        result = walmere("status", "--json", "-c", path)
        assert result.returncode == 0
        during = json.loads(result.stdout)
        assert walk(during) == KEYS
        assert during["slot"]["name"] == database18.slot
        assert during["slot"]["active"] is True
        assert during["slot"]["wal_status"] == "reserved"
        for lsn in ("source_lsn", "received_lsn", "durable_lsn"):
            assert LSN.match(during[lsn])
        assert LSN.match(during["slot"]["confirmed_lsn"])
        assert Lsn.parse(during["slot"]["confirmed_lsn"]) <= Lsn.parse(during["durable_lsn"])
        assert Lsn.parse(during["durable_lsn"]) <= Lsn.parse(during["received_lsn"])
        assert during["tables"][0]["name"] == "public.t"
        assert during["error"] is None
        people = walmere("status", "-c", path)
        assert people.returncode == 0
        assert "public.t" in people.stdout
        [shown] = re.findall(r"durable +([0-9A-F]+/[0-9A-F]+)", people.stdout)
        assert Lsn.parse(shown) >= Lsn.parse(during["durable_lsn"])


def test_status_without_a_source_tells_what_is_known_here(database18: Database, config: Config, tmp_path: Path) -> None:
    durable = receive_all(database18, config)
    away = database18.config(tmp_path / "s", dsn="postgresql://postgres:Hush@127.0.0.1:1/postgres")
    path = write_config(away, tmp_path / "walmere.toml")
    result = walmere("status", "--json", "-c", path)
    assert result.returncode == 1
    state = json.loads(result.stdout)
    assert walk(state) == KEYS | {"slot": None, "tables": []}
    assert state["durable_lsn"] == state["received_lsn"] == str(durable)
    assert state["applied_lsn"] is None
    assert "refused" in state["error"]
    assert "Hush" not in result.stdout + result.stderr
    positions = SinkPositions(tmp_path / "s")
    positions.join("target")
    positions.join("query-report")
    state = json.loads(walmere("status", "--json", "-c", path).stdout)
    assert state["applied_lsn"] is None, "nothing is applied yet"
    assert state["queries"] == [{"name": "report", "lsn": None}]
    positions.advance("query-report", Lsn(5))
    positions.advance("target", Lsn(7))
    state = json.loads(walmere("status", "--json", "-c", path).stdout)
    assert state["applied_lsn"] == "0/7", "of the tables, whatever a query has read"
    assert state["queries"] == [{"name": "report", "lsn": "0/5"}]


# check


def test_check_is_1_when_there_are_problems_and_0_when_not(database18: Database, config: Config, path: Path) -> None:
    fine = walmere("check", "-c", path)
    assert fine.returncode == 0, fine.stdout
    database18.execute("DROP PUBLICATION pub")
    broken = walmere("check", "--json", "-c", path)
    assert broken.returncode == 1
    report = json.loads(broken.stdout)
    assert report["ok"] is False
    assert any("CREATE PUBLICATION" in finding["fix"] for finding in report["findings"])
    assert database18.slot not in slots(database18), "looking changes nothing"


# drop


def test_drop_removes_the_slot_and_the_log(database18: Database, config: Config, path: Path) -> None:
    receive_all(database18, config)
    (config.subscription.directory / "receiver.json").write_text("{}")  # of one that was killed
    result = walmere("drop", "-c", path)
    assert result.returncode == 0, result.stderr
    assert f"dropped slot {database18.slot}" in result.stdout
    assert database18.slot not in slots(database18)
    assert not config.subscription.directory.exists()
    again = walmere("drop", "-c", path)
    assert again.returncode == 0, again.stderr
    assert "there is no slot" in again.stdout
    assert "there is no change log" in again.stdout
    database18.execute("INSERT INTO t VALUES (1)")
    receive_all(database18, config)
    assert ids(config) == [], "it begins anew"


def test_drop_leaves_alone_what_is_not_the_logs(database18: Database, config: Config, path: Path) -> None:
    receive_all(database18, config)
    (config.subscription.directory / "notes.txt").write_text("mine")
    assert walmere("drop", "-c", path).returncode == 0
    assert [each.name for each in config.subscription.directory.iterdir()] == ["notes.txt"]


def test_drop_is_refused_while_a_receiver_runs(
    database18: Database, config: Config, path: Path, tmp_path: Path
) -> None:
    with running("receive", "-c", path, output=tmp_path / "out") as process:
        eventually(database18.streaming)
        eventually((config.changelog / "manifest.jsonl").exists)
        for arguments in ((), ("--keep-slot",)):
            result = walmere("drop", "-c", path, *arguments)
            assert result.returncode == 1
            assert str(process.pid) in result.stderr
        database18.execute("INSERT INTO t VALUES (1)")
        eventually(lambda: ids(config) == [1])
    # the same slot, received into another directory
    elsewhere = database18.config(tmp_path / "other")
    receive_all(database18, config)
    with running("receive", "-c", path, output=tmp_path / "out"):
        eventually(database18.streaming)
        result = walmere("drop", "-c", write_config(elsewhere, tmp_path / "elsewhere.toml"))
        assert result.returncode == 1
        assert "is active" in result.stderr
        assert "Traceback" not in result.stderr
    assert database18.slot in slots(database18)


def test_drop_works_when_the_slot_or_the_source_is_gone(
    database18: Database, config: Config, path: Path, tmp_path: Path
) -> None:
    receive_all(database18, config)
    database18.execute(f"SELECT pg_drop_replication_slot('{database18.slot}')")
    away = database18.config(tmp_path / "s", dsn="postgresql://postgres@127.0.0.1:1/postgres")
    nowhere = write_config(away, tmp_path / "nowhere.toml")
    refused = walmere("drop", "-c", nowhere)
    assert refused.returncode == 1, "perhaps there is a slot that would hold WAL back"
    assert "Traceback" not in refused.stderr
    assert (config.changelog / "manifest.jsonl").exists()
    result = walmere("drop", "-c", path)
    assert result.returncode == 0, result.stderr
    assert not config.changelog.exists()
    receive_all(database18, config)
    kept = walmere("drop", "--keep-slot", "-c", nowhere)
    assert kept.returncode == 0, kept.stderr
    assert not config.changelog.exists()
    assert database18.slot in slots(database18)


def test_drop_does_not_take_another_plugins_slot(database18: Database, path: Path) -> None:
    database18.execute(f"SELECT pg_create_physical_replication_slot('{database18.slot}')")
    try:
        result = walmere("drop", "-c", path)
        assert result.returncode == 1
        assert database18.slot in slots(database18)
    finally:
        database18.execute(f"SELECT pg_drop_replication_slot('{database18.slot}')")


def test_a_drop_that_was_interrupted_is_finished_by_the_next(database18: Database, config: Config, path: Path) -> None:
    receive_all(database18, config)
    config.changelog.rename(config.changelog.with_suffix(".dropped"))
    assert walmere("drop", "-c", path).returncode == 0
    assert not config.changelog.with_suffix(".dropped").exists()
    assert database18.slot not in slots(database18)


def test_a_server_that_ends_while_once_asks_it_is_one_message(database18: Database, config: Config, path: Path) -> None:
    with psycopg.connect(database18.server.dsn(), autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {database18.name} ALLOW_CONNECTIONS false")
        result = walmere("receive", "--once", "-c", path)
        admin.execute(f"ALTER DATABASE {database18.name} ALLOW_CONNECTIONS true")
    assert result.returncode == 1
    assert "not currently accepting connections" in result.stderr
    assert "Traceback" not in result.stderr
