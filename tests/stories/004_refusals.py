"""Story 4: what may pass is waited for; what does not is refused, with an error that says what to do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path

import psycopg
import pytest

from conftest import Database
from processes import Background, eventually, running, walmere, write_config
from receiving import changes, logged, receive_all, summary
from walmere.config import Config
from walmere.errors import (
    ChangeLogInUse,
    ChangeLogMismatch,
    PublicationMissing,
    SlotLost,
    SlotMissing,
    SlotUnsuitable,
    WrongSystem,
)
from walmere.lsn import Lsn
from walmere.publisher.connect import Connection
from walmere.publisher.stream import Stream, System, identify_system
from walmere.subscription import heartbeat, receiver
from walmere.testing.server import Server
from workload import log_says, source_says

TABLE = ("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION pub FOR TABLE t")


def contents(directory: Path) -> dict[str, bytes]:
    """All that is in the log but the lock, which says who looked at it last."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}


def ids(config: Config) -> list[int]:
    return [int(change[2]["id"]) for change in changes(config)]


# Another source


def test_another_system_behind_the_address_is_refused(
    database18: Database, private_server: Server, tmp_path: Path
) -> None:
    database18.execute(*TABLE, "INSERT INTO t VALUES (1)")
    config = database18.config(tmp_path / "s")
    receive_all(database18, config)
    before = contents(config.changelog)
    with psycopg.connect(private_server.dsn(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {database18.name}")
    with psycopg.connect(private_server.dsn(database18.name), autocommit=True) as other:
        for statement in TABLE:
            other.execute(statement)
        moved = database18.config(tmp_path / "s", dsn=private_server.dsn(database18.name))
        with pytest.raises(WrongSystem, match="drop"):
            receive_all(database18, moved)
        said = walmere("receive", "--once", "-c", write_config(moved, tmp_path / "walmere.toml"))
        assert said.returncode == 1
        assert "received from system" in said.stderr
        assert "Traceback" not in said.stderr
        assert other.execute("SELECT count(*) FROM pg_replication_slots").fetchone() == (0,)
    assert contents(config.changelog) == before


def test_another_database_of_the_same_system_is_refused(database18: Database, tmp_path: Path) -> None:
    database18.execute(*TABLE)
    config = database18.config(tmp_path)
    receive_all(database18, config)
    other = Database(database18.server)
    try:
        other.execute(*TABLE)
        with pytest.raises(ChangeLogMismatch, match=f"from database {database18.name}, not {other.name}"):
            receive_all(database18, database18.config(tmp_path, dsn=other.dsn))
        with pytest.raises(ChangeLogMismatch, match="from slot"):
            receive_all(database18, database18.config(tmp_path, slot="another"))
    finally:
        other.drop()


def test_a_source_restored_to_the_past_is_refused(private_server: Server, tmp_path: Path) -> None:
    database = Database(private_server)
    database.execute(*TABLE)
    config = database.config(tmp_path / "s")
    receive_all(database, config)
    database.connection.close()
    private_server.stop()
    subprocess.run(["cp", "-a", private_server.data, private_server.directory / "backup"], check=True)
    private_server.start()
    database.connection = psycopg.connect(database.dsn, autocommit=True)
    database.execute("INSERT INTO t SELECT generate_series(1, 1000)", "SELECT pg_switch_wal()")
    receive_all(database, config)
    before = contents(config.changelog)
    database.connection.close()
    private_server.stop()
    private_server.data.rename(private_server.directory / "lost")
    (private_server.directory / "backup").rename(private_server.data)
    private_server.start()
    with pytest.raises(ChangeLogMismatch, match="restored from a backup") as caught:
        receiver.Receiver(config).run()
    assert str(summary(config).end_lsn) in caught.value.wrong
    assert contents(config.changelog) == before


# The slot


def test_a_slot_dropped_while_nobody_receives_is_not_made_again(database: Database, tmp_path: Path) -> None:
    database.execute(*TABLE)
    config = database.config(tmp_path)
    receive_all(database, config)
    database.execute("INSERT INTO t VALUES (1)", f"SELECT pg_drop_replication_slot('{database.slot}')")
    with pytest.raises(SlotMissing, match="walmere drop"):
        receive_all(database, config)
    assert database.rows("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", database.slot) == []


def test_a_slot_dropped_under_a_receiver_ends_it(database: Database, tmp_path: Path) -> None:
    database.execute(*TABLE)
    config = database.config(tmp_path)
    with Background(config) as background:
        eventually(database.streaming)

        def dropped() -> bool:
            database.execute(
                "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots"
                f" WHERE slot_name = '{database.slot}' AND active"
            )
            try:
                database.execute(f"SELECT pg_drop_replication_slot('{database.slot}')")
            except psycopg.errors.ObjectInUse:
                return False  # it was quicker
            return True

        eventually(dropped)
        assert isinstance(background.join(), SlotMissing)


@pytest.mark.server(every_version=True, settings={"fsync": "off", "max_wal_size": "32MB"})
def test_a_slot_whose_wal_is_gone_is_lost(private_server: Server, tmp_path: Path) -> None:
    database = Database(private_server)
    database.execute(*TABLE)
    config = database.config(tmp_path / "s")
    receive_all(database, config)
    before = contents(config.changelog)
    database.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'", "SELECT pg_reload_conf()")
    status = "SELECT wal_status FROM pg_replication_slots"

    def lost() -> bool:
        database.execute("SELECT pg_logical_emit_message(true, 'wal', 'x')", "SELECT pg_switch_wal()", "CHECKPOINT")
        return bool(database.value(status) == "lost")

    eventually(lost)
    with pytest.raises(SlotLost, match="max_slot_wal_keep_size"):
        receive_all(database, config)
    said = walmere("receive", "-c", write_config(config, tmp_path / "walmere.toml"))
    assert said.returncode == 1
    assert "max_slot_wal_keep_size" in said.stderr
    assert contents(config.changelog) == before
    database.connection.close()


def test_a_slot_that_somebody_else_advanced_leaves_a_gap(database: Database, tmp_path: Path) -> None:
    database.execute(*TABLE)
    config = database.config(tmp_path)
    receive_all(database, config)
    end = summary(config).end_lsn
    database.execute("INSERT INTO t VALUES (1)")
    moved = database.value(
        f"SELECT end_lsn::text FROM pg_replication_slot_advance('{database.slot}', pg_current_wal_lsn())"
    )
    before = contents(config.changelog)
    with pytest.raises(ChangeLogMismatch) as caught:
        receive_all(database, config)
    assert moved in caught.value.wrong
    assert str(end) in caught.value.wrong
    assert contents(config.changelog) == before


def test_a_slot_that_moves_between_looking_at_it_and_having_it_leaves_a_gap(
    database18: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another receiver's last confirmation: START_REPLICATION would begin there, without a word."""
    database = database18
    database.execute(*TABLE)
    config = database.config(tmp_path)
    receive_all(database, config)

    def late(*arguments: object) -> Stream:
        database.execute(
            "INSERT INTO t VALUES (1)",
            f"SELECT pg_replication_slot_advance('{database.slot}', pg_current_wal_lsn())",
            "INSERT INTO t VALUES (2)",
        )
        return Stream(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(receiver, "Stream", late)
    with pytest.raises(ChangeLogMismatch, match="gap"):
        receive_all(database, config)
    assert ids(config) == []


def test_a_slot_that_is_not_logical_or_of_another_database_is_refused(database: Database, tmp_path: Path) -> None:
    database.execute(*TABLE, f"SELECT pg_create_physical_replication_slot('phys_{database.name}')")
    other = Database(database.server)
    try:
        other.execute(f"SELECT pg_create_logical_replication_slot('{other.slot}', 'pgoutput')")
        for slot, wrong in ((f"phys_{database.name}", "physical"), (other.slot, f"belongs to database {other.name}")):
            config = database.config(tmp_path, slot=slot)
            with pytest.raises(SlotUnsuitable, match=wrong):
                receive_all(database, config)
            assert not (config.changelog / "manifest.jsonl").exists()
    finally:
        other.drop()
        database.execute(f"SELECT pg_drop_replication_slot('phys_{database.name}')")


# The publication


def test_without_its_publication_nothing_is_created(database: Database, tmp_path: Path) -> None:
    config = database.config(tmp_path)
    with pytest.raises(PublicationMissing, match="CREATE PUBLICATION"):
        receive_all(database, config)
    assert database.rows("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", database.slot) == []
    assert not (config.changelog / "manifest.jsonl").exists()


@pytest.mark.parametrize("seconds", [0.0, 0.4], ids=["no_heartbeat", "heartbeat"])
def test_a_publication_dropped_under_a_receiver_ends_it(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """PostgreSQL 18 only warns in its own log, and sends nothing."""
    monkeypatch.setattr(heartbeat, "CHECK_INTERVAL", 0.1)
    database.execute(*TABLE)
    config = database.config(tmp_path, heartbeat=seconds)
    with Background(config) as background:
        eventually(database.streaming)
        database.execute("INSERT INTO t VALUES (1)")
        eventually(lambda: ids(config) == [1])
        database.execute("DROP PUBLICATION pub", "INSERT INTO t VALUES (2)")
        assert isinstance(background.join(), PublicationMissing)
    with pytest.raises(PublicationMissing):
        receive_all(database, config)


# Two receivers


def test_a_second_receiver_of_the_directory_is_told_who_is_there(database18: Database, tmp_path: Path) -> None:
    database18.execute(*TABLE)
    config = database18.config(tmp_path / "s")
    path = write_config(config, tmp_path / "walmere.toml")
    with running("receive", "-c", path, output=tmp_path / "out") as first:
        eventually(database18.streaming, why=(tmp_path / "out").read_text)
        for _ in range(2):
            said = walmere("receive", "-c", path)
            assert said.returncode == 1
            assert f"process {first.pid} holds the lock" in said.stderr
            with pytest.raises(ChangeLogInUse, match=str(first.pid)):
                receive_all(database18, config)
        database18.execute("INSERT INTO t VALUES (1)")
        eventually(lambda: ids(config) == [1])
        assert first.poll() is None
        first.terminate()
        assert first.wait(30) == 0


def test_a_second_receiver_of_the_slot_takes_over_when_the_first_ends(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database.execute(*TABLE)
    first, second = database.config(tmp_path / "1"), database.config(tmp_path / "2")
    receive_all(database, first)
    path = write_config(first, tmp_path / "walmere.toml")
    with running("receive", "-c", path, output=tmp_path / "out") as process:
        eventually(database.streaming, why=(tmp_path / "out").read_text)
        with Background(second):
            eventually(lambda: "is active for PID" in caplog.text)
            pid = database.value("SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", database.slot)
            process.kill()
            eventually(lambda: not database.rows("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid))
            eventually(database.streaming)
            database.execute("INSERT INTO t VALUES (1)")
            eventually(lambda: ids(second) == [1])
    assert ids(first) == []


def test_a_second_receiver_of_the_slot_gives_up_when_the_first_has_gone_on(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database.execute(*TABLE)
    first, second = database.config(tmp_path / "1"), database.config(tmp_path / "2")
    receive_all(database, first)
    with Background(first):
        eventually(database.streaming)
        with Background(second) as waiting:
            eventually(lambda: "is active for PID" in caplog.text)
            database.execute("INSERT INTO t VALUES (1)")
            error = waiting.join()
            assert isinstance(error, ChangeLogMismatch)
            assert "gap" in error.wrong
    assert (ids(first), ids(second)) == ([1], [])


# What may pass


class Writer:
    """Writes on and on, whatever the server does."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stopping.wait(0.05):
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self._dsn) as connection:
                while not self._stopping.wait(0.01):
                    with connection.transaction():
                        connection.execute("INSERT INTO t SELECT max(id) + 1, 'x' FROM t")
                        connection.execute("UPDATE t SET v = 'y' WHERE id = (SELECT max(id) FROM t)")

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(30)


def test_a_server_that_is_restarted_and_crashes_under_load_is_received_on(
    private_server: Server, tmp_path: Path
) -> None:
    database = Database(private_server)
    database.execute(*TABLE, "INSERT INTO t VALUES (0)")
    config = database.config(tmp_path / "s")
    receive_all(database, config)
    database.execute(f"SELECT pg_copy_logical_replication_slot('{database.slot}', 'truth')")
    output = tmp_path / "out"
    path = write_config(config, tmp_path / "walmere.toml", heartbeat="0.5")
    with running("receive", "-c", path, output=output) as process:
        with Writer(database.dsn):
            for how in (signal.SIGINT, signal.SIGKILL, signal.SIGQUIT):
                seen = summary(config).commit_lsn
                eventually(lambda seen=seen: summary(config).commit_lsn > seen or process.poll(), why=output.read_text)  # type: ignore[misc]
                assert process.poll() is None, output.read_text()
                database.connection.close()
                private_server.stop(how)
                private_server.start()
            seen = summary(config).commit_lsn
            eventually(lambda: summary(config).commit_lsn > seen or process.poll(), why=output.read_text)
        process.terminate()
        assert process.wait(30) == 0, output.read_text()
    assert "Traceback" not in output.read_text()
    database.connection = psycopg.connect(database.dsn, autocommit=True)
    receive_all(database, config)
    truth = source_says(database, "truth")
    assert log_says(config) == truth
    assert len(truth) > 10
    database.connection.close()


def test_a_server_that_goes_away_before_it_is_asked_is_tried_again(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(*TABLE)
    config = database.config(tmp_path)
    cut = iter([True, False])

    def identify(connection: Connection) -> System:
        if next(cut, False):
            database.execute(f"SELECT pg_terminate_backend({connection.info.backend_pid}, 5000)")
        return identify_system(connection)

    monkeypatch.setattr(receiver, "identify_system", identify)
    receive_all(database, config)
    assert list(cut) == [], "it was asked again"


def test_a_source_that_is_not_there_is_waited_for_until_somebody_ends_that(
    database18: Database, tmp_path: Path
) -> None:
    nobody = "postgresql://postgres@127.0.0.1:1/postgres?connect_timeout=2"
    config = database18.config(tmp_path / "s", dsn=nobody)
    output = tmp_path / "out"
    with running("receive", "-c", write_config(config, tmp_path / "walmere.toml"), output=output) as process:
        eventually(lambda: output.read_text().count("retry in") >= 2, why=output.read_text)
        process.terminate()
        assert process.wait(30) == 0
    assert "Traceback" not in output.read_text()


# Secrets


def test_a_wrong_password_ends_it_and_is_written_nowhere(private_server: Server, tmp_path: Path) -> None:
    secret = "Hush-4711-é"
    with psycopg.connect(private_server.dsn(), autocommit=True) as admin:
        admin.execute("CREATE ROLE app LOGIN REPLICATION PASSWORD 'right'")
        admin.execute(TABLE[0])
        admin.execute(TABLE[1])
    (private_server.data / "pg_hba.conf").write_text(
        "host all app 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n"
    )
    private_server.reload()
    address = f"127.0.0.1:{private_server.port}/postgres"
    path = tmp_path / "walmere.toml"
    rest = f"publications = ['pub']\nslot = 's'\n[subscription]\nname = 'n'\ndirectory = '{tmp_path}/s'\n"
    in_uri = f"[source]\ndsn = 'postgresql://app:Hush-4711-%C3%A9@{address}'\n{rest}"
    in_environment = f"[source]\ndsn = 'postgresql://app@{address}'\n{rest}"

    def said(command: str, content: str, **more: str) -> subprocess.CompletedProcess[str]:
        path.write_text(content)
        return walmere(command, "-c", path, env={**os.environ, **more})

    with psycopg.connect(private_server.dsn(), autocommit=True) as admin:  # the reload is noticed in its own time
        eventually(lambda: admin.execute("SELECT count(*) FROM pg_hba_file_rules").fetchone() == (2,))
    for command, content, more in (
        ("receive", in_uri, {}),
        ("receive", in_environment, {"WALMERE_SOURCE__PASSWORD": secret}),
        ("receive", in_environment, {"PGPASSWORD": secret}),
        ("check", in_uri, {}),
        ("drop", in_uri, {}),
        ("status", in_uri, {}),
    ):
        result = said(command, content, **more)
        assert result.returncode == 1, result.stderr
        shown = result.stdout + result.stderr
        assert "password authentication failed" in shown
        assert "Hush" not in shown
        assert "Traceback" not in shown
    path.unlink()
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or b"Hush" not in file.read_bytes()


def test_a_right_password_is_written_nowhere_either(private_server: Server, tmp_path: Path) -> None:
    with psycopg.connect(private_server.dsn(), autocommit=True) as admin:
        admin.execute("CREATE ROLE app LOGIN REPLICATION PASSWORD 'Hush-4711'")
        admin.execute(TABLE[0])
        admin.execute(TABLE[1])
        (private_server.data / "pg_hba.conf").write_text(
            "host all app 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n"
        )
        private_server.reload()
        eventually(lambda: admin.execute("SELECT count(*) FROM pg_hba_file_rules").fetchone() == (2,))
        path, output = tmp_path / "walmere.toml", tmp_path / "out"
        path.write_text(
            f"[source]\ndsn = 'postgresql://app:Hush-4711@127.0.0.1:{private_server.port}/postgres'\n"
            f"publications = ['pub']\nslot = 's'\n[subscription]\nname = 'n'\ndirectory = '{tmp_path}/s'\n"
        )
        with running("receive", "-c", path, output=output) as process:
            eventually(
                lambda: admin.execute("SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'").fetchone(),
                why=output.read_text,
            )
            admin.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
            admin.execute("INSERT INTO t VALUES (1)")
            manifest = tmp_path / "s" / "changelog" / "manifest.jsonl"
            eventually(lambda: manifest.exists() and b"transactions" in manifest.read_bytes(), why=output.read_text)
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            process.terminate()
            assert process.wait(30) == 0
        assert b"Hush" not in command
        path.unlink()
        for file in tmp_path.rglob("*"):
            assert file.is_dir() or b"Hush" not in file.read_bytes()
        assert admin.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%Hu' || 'sh-4711%'"
        ).fetchone() == (0,)


def test_the_logs_last_transaction_is_still_there_after_every_refusal(database18: Database, tmp_path: Path) -> None:
    """A receiver that refuses has changed nothing: with the cause removed, it goes on."""
    database = database18
    database.execute(*TABLE)
    config = database.config(tmp_path)
    receive_all(database, config)
    database.execute("INSERT INTO t VALUES (1)")
    receive_all(database, config)
    database.execute("ALTER PUBLICATION pub RENAME TO away")
    with pytest.raises(PublicationMissing):
        receive_all(database, config)
    database.execute("ALTER PUBLICATION away RENAME TO pub", "INSERT INTO t VALUES (2)")
    receive_all(database, config)
    assert ids(config) == [1, 2]
    assert [t.commit_lsn for t in logged(config)] == sorted({t.commit_lsn for t in logged(config)})
    assert summary(config).end_lsn > Lsn(0)


def test_what_changed_while_the_publication_was_missing_is_passed_over_or_ends_the_slot(
    database: Database, tmp_path: Path
) -> None:
    """It depends on the server: decoding looks into the catalogs as they were then."""
    database.execute(*TABLE)
    config = database.config(tmp_path)
    receive_all(database, config)
    database.execute(
        "INSERT INTO t VALUES (1)",
        "ALTER PUBLICATION pub RENAME TO away",
        "INSERT INTO t VALUES (2)",
        "ALTER PUBLICATION away RENAME TO pub",
        "INSERT INTO t VALUES (3)",
    )
    if database.connection.info.server_version >= 180_000:
        receive_all(database, config)
        assert ids(config) == [1, 3]
    else:
        with pytest.raises(PublicationMissing, match="walmere drop"):
            receive_all(database, config)
