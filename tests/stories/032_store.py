"""Story 32: log and state in an object store. A machine that is lost loses nothing; a zombie changes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from changelog.stored import open_cache
from conftest import Database
from mirror import Mirror
from object_stores import EVERY_STORE, Bucket
from processes import Background, Here, eventually, running, walmere
from receiving import changes, receive_all, summary
from s3_proxy import Asked, S3Proxy, lose_every, refuse_every, slow
from walmere.changelog.store.log_store import read_head
from walmere.config import Config, Storage
from walmere.errors import StoreUnsuitable
from walmere.lsn import Lsn
from walmere.object_store import open_store
from walmere.running import launcher
from walmere.subscription import receiver
from workload import MixedLoad, log_says, source_says


def stored(config: Config, bucket: Bucket, **settings: object) -> Config:
    """The configuration, with a store."""
    with_store = {"store": f"{bucket.url}/walmere/shop", "upload_seconds": 0.1, **settings}
    return config.model_copy(
        update={
            "subscription": config.subscription.model_copy(update=with_store),
            "storage": Storage.model_validate(bucket.options),
        }
    )


def elsewhere(config: Config, directory: Path) -> Config:
    """The same subscription, on another machine."""
    return config.model_copy(update={"subscription": config.subscription.model_copy(update={"directory": directory})})


def confirmed(database: Database) -> Lsn:
    query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    return Lsn.parse(database.value(query, database.slot))


def end_in_store(bucket: Bucket, directory: Path) -> Lsn:
    """Where the log in the store ends, as a machine with an empty directory reads it."""
    shutil.rmtree(directory, ignore_errors=True)
    return open_cache(open_store(f"{bucket.url}/walmere/shop", bucket.options), directory).end_lsn


# Receiving


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(slow(0.1), id="slow"),
        pytest.param(refuse_every(10), id="refused", marks=pytest.mark.long),
        pytest.param(lose_every(10), id="lost", marks=pytest.mark.long),
    ],
)
def test_what_is_confirmed_is_in_the_store_always_and_nothing_is_lost_or_doubled(
    database18: Database, tmp_path: Path, bucket: Bucket, proxy: S3Proxy, rule: Callable[[Asked], None]
) -> None:
    database = database18
    MixedLoad.create(database)
    database.rows("SELECT pg_create_logical_replication_slot('oracle', 'pgoutput')")
    proxy.rule = rule
    config = stored(database.config(tmp_path / "a"), proxy.bucket)
    seen: set[Lsn] = set()
    with Background(config) as background:
        eventually(database.streaming)
        with MixedLoad(database, 5, writers=1, pause=0.3):
            deadline = time.monotonic() + 60
            while len(seen) < 3:
                at = confirmed(database)
                assert at <= end_in_store(bucket, tmp_path / "looking")
                seen.add(at)
                assert time.monotonic() < deadline, "the slot moves on"
        assert background.error is None
    receive_all(database, config)
    assert log_says(config) == source_says(database, "oracle")
    other = elsewhere(config, tmp_path / "b")
    receive_all(database, other)
    assert log_says(other) == source_says(database, "oracle")
    assert not list(other.changelog.glob("*.arrow")), "read from the store"


@pytest.mark.parametrize("bucket", EVERY_STORE, indirect=True)
def test_a_receiver_that_was_stopped_while_another_took_over_changes_nothing(
    database18: Database, tmp_path: Path, bucket: Bucket
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    file = write_stored_config(database, tmp_path, bucket)
    config = stored(database.config(tmp_path / "b"), bucket)
    with running("receive", "-c", file, output=tmp_path / "zombie.log") as zombie:
        eventually(database.streaming)
        database.execute("INSERT INTO t VALUES (1)")
        eventually(lambda: end_in_store(bucket, tmp_path / "looking") >= confirmed(database) > Lsn(0))
        zombie.send_signal(signal.SIGSTOP)
        database.execute("INSERT INTO t VALUES (2)")
        # what wal_sender_timeout does after a minute
        database.rows("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
        eventually(lambda: not database.streaming())
        with Background(config) as background:
            eventually(database.streaming)
            eventually(lambda: len(changes(config)) == 2)
            zombie.send_signal(signal.SIGCONT)
            assert zombie.wait(30) == 1
            database.execute("INSERT INTO t VALUES (3)")
            eventually(lambda: len(changes(config)) == 3)
            assert background.error is None
    assert "another receiver has taken over" in (tmp_path / "zombie.log").read_text()
    third = elsewhere(config, tmp_path / "c")
    receive_all(database, third)
    assert [row["id"] for _, _, row in changes(third) if row] == ["1", "2", "3"]


def write_stored_config(database: Database, tmp_path: Path, bucket: Bucket, directory: str = "zombie") -> Path:
    """A configuration as a file."""
    file = tmp_path / f"{directory}.toml"
    file.write_text(
        f"[source]\ndsn = '{database.dsn}'\npublications = ['pub']\nslot = '{database.slot}'\n"
        f"[subscription]\nname = 'test'\ndirectory = '{tmp_path / directory}'\n"
        f"store = '{bucket.url}/walmere/shop'\nupload_seconds = 0.1\n"
        f"{bucket.section}"
    )
    return file


def test_a_running_receiver_is_not_disturbed_by_a_second_one(
    database18: Database, tmp_path: Path, bucket: Bucket
) -> None:
    """The slot is the first fence: the second waits for it, and does not raise the epoch."""
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = stored(database.config(tmp_path / "a"), bucket)
    with Background(config) as first:
        eventually(database.streaming)
        with Background(elsewhere(config, tmp_path / "b")) as second:
            eventually(lambda: second.receiver.retried_error is not None)
            database.execute("INSERT INTO t VALUES (1)")
            eventually(lambda: len(changes(config)) == 1)
            first.receiver.stop()
            assert first.join() is None
            database.execute("INSERT INTO t VALUES (2)")
            eventually(lambda: len(changes(elsewhere(config, tmp_path / "b"))) == 2)


def test_an_idle_source_causes_no_puts_and_the_log_ends_where_the_source_does(
    database18: Database, tmp_path: Path, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    monkeypatch.setattr(receiver, "AT_REST", 1.0)
    monkeypatch.setattr(receiver, "MAX_FEEDBACK_INTERVAL", 0.2)
    config = stored(database.config(tmp_path / "a", heartbeat=0.2), proxy.bucket)
    with Background(config):
        eventually(database.streaming)
        database.execute("INSERT INTO t VALUES (1)")
        database.execute("CREATE TABLE other AS SELECT generate_series(1, 10)")  # WAL without published changes
        flushed = Lsn.parse(database.value("SELECT pg_current_wal_flush_lsn()::text"))
        eventually(lambda: summary(config).end_lsn >= flushed)
        before = proxy.changing
        time.sleep(3)  # of idleness: there is nothing to wait for
        assert proxy.changing == before
        assert confirmed(database) >= flushed


def test_wal_without_changes_is_confirmed_in_large_steps(
    database18: Database, tmp_path: Path, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    database.execute("CREATE TABLE other (id int, v text)")
    monkeypatch.setattr(receiver, "MAX_FEEDBACK_INTERVAL", 0.1)
    monkeypatch.setattr(receiver, "UNCONFIRMED_BYTES", 1 << 20)
    config = stored(database.config(tmp_path / "a", heartbeat=0.2), proxy.bucket)
    with Background(config):
        eventually(database.streaming)
        eventually(lambda: proxy.changing >= 4)
        before, puts, at = confirmed(database), proxy.changing, time.monotonic()
        while confirmed(database) - before < 4 << 20:
            database.execute("INSERT INTO other SELECT i, repeat('x', 500) FROM generate_series(1, 200) i")
            assert time.monotonic() - at < 60
        assert 3 <= proxy.changing - puts <= 8


def test_a_store_that_ignores_conditions_is_refused(
    database18: Database, tmp_path: Path, bucket: Bucket, proxy: S3Proxy, here: Here
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    proxy.forget = ("If-None-Match", "If-Match")
    config = stored(database.config(tmp_path / "a"), proxy.bucket)
    with pytest.raises(StoreUnsuitable, match="second put"):
        receive_all(database, config)
    assert database.rows("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", database.slot) == []
    code, out, _ = here("check", "-c", write_stored_config(database, tmp_path, proxy.bucket), "--json")
    assert code == 1
    [found] = [each for each in json.loads(out)["findings"] if each["name"] == "store"]
    assert (found["level"], "second put" in found["what"]) == ("problem", True)
    proxy.forget = ()
    code, out, _ = here("check", "-c", write_stored_config(database, tmp_path, proxy.bucket), "--json")
    [found] = [each for each in json.loads(out)["findings"] if each["name"] == "store"]
    assert found["level"] == "ok"


# The mirror


class StoredMirror(Mirror):
    """A mirror whose log and state are in a store, on one of several machines."""

    def __init__(self, database: Database, directory: Path, bucket: Bucket, machine: str = "one") -> None:
        super().__init__(database, directory)
        self.file = directory / f"{machine}.toml"
        text = (directory / "walmere.toml").read_text()
        text = text.replace('directory = "subscription"', f'directory = "{machine}"')
        self.file.write_text(text + bucket.section)
        self.set("subscription", store=f"{bucket.url}/walmere/shop", upload_seconds=0.2)

    @property
    def place(self) -> Path:
        return self.config.subscription.directory


def burn(process_group: int, directory: Path) -> None:
    """The machine is lost with its disk."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_group, signal.SIGKILL)
    shutil.rmtree(directory)


def copies(mirror: Mirror) -> dict[str, tuple[Lsn, float]]:
    return {each.name: (each.snapshot_lsn, each.copied_at) for each in mirror.tables()}


@pytest.mark.long
@pytest.mark.parametrize("bucket", ["s3", "gs", "az"], indirect=True)
def test_a_zombie_changes_nothing_after_another_machine_took_over(
    database18: Database, tmp_path: Path, bucket: Bucket
) -> None:
    """All of the first machine stops, in the middle of its work; it goes on when the second one has its place."""
    database = database18
    MixedLoad.create(database, "numeric(20, 2)")
    first, second = (StoredMirror(database, tmp_path, bucket, machine) for machine in ("one", "two"))
    with running("run", "-c", first.file, output=tmp_path / "zombie.log") as zombie:
        with MixedLoad(database, 7, writers=2):
            eventually(lambda: all(first.phase(table) == "r" for table in MixedLoad.TABLES), 90)
            os.killpg(zombie.pid, signal.SIGSTOP)
            database.rows("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
            copied = copies(first)
            with second.following():
                second.becomes(lambda: len(copies(second)) == 3 and all(each.follows for each in second.tables()))
                os.killpg(zombie.pid, signal.SIGCONT)
                assert zombie.wait(60) == 1
        said = (tmp_path / "zombie.log").read_text()
        assert re.search("another (driver|receiver) has taken over", said), said
    second.run_once()
    second.assert_equal(*MixedLoad.TABLES)
    assert copies(second) == copied, "no table was copied again"


@pytest.mark.long
def test_machines_that_burn_one_after_the_other_lose_and_double_nothing(
    database18: Database, tmp_path: Path, bucket: Bucket
) -> None:
    database = database18
    MixedLoad.create(database, "numeric(20, 2)")
    copied = None
    with MixedLoad(database, 9, writers=2):
        for number in range(4):
            mirror = StoredMirror(database, tmp_path, bucket, f"machine{number}")
            with running("run", "-c", mirror.file, output=tmp_path / f"{number}.log") as process:
                before = copied
                eventually(lambda: all(mirror.phase(table) == "r" for table in MixedLoad.TABLES), 90)  # noqa: B023
                reached = min(each.applied_lsn for each in mirror.tables())
                eventually(lambda: min(each.applied_lsn for each in mirror.tables()) > reached, 60)  # noqa: B023
                copied = copies(mirror)
                assert before in (None, copied), "no table was copied again"
                burn(process.pid, mirror.place)
    last = StoredMirror(database, tmp_path, bucket, "last")
    last.run_once()
    last.assert_equal(*MixedLoad.TABLES)
    done = walmere("verify", "-c", last.file)
    assert done.returncode == 0, done.stderr


def test_a_driver_follows_a_receiver_on_another_machine(
    database18: Database, tmp_path: Path, bucket: Bucket, here: Here
) -> None:
    database = database18
    MixedLoad.create(database, "numeric(20, 2)")
    near, far = (StoredMirror(database, tmp_path, bucket, machine) for machine in ("near", "far"))
    third = StoredMirror(database, tmp_path, bucket, "third")
    with running("receive", "-c", near.file, output=tmp_path / "receive.log"):
        eventually(database.streaming)
        with MixedLoad(database, 11, writers=2, pause=0.3):  # a TRUNCATE during a copy makes it start again
            made = launcher(far.config, far.file, receives=False)
            failures: list[BaseException] = []

            def follow() -> None:
                try:
                    made.run()
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=follow)
            thread.start()
            try:
                far.becomes(lambda: bool(failures) or all(far.phase(each) == "r" for each in MixedLoad.TABLES))
                code, out, _ = here("status", "-c", third.file, "--json")
                state = json.loads(out)
                assert (code, state["error"]) == (0, None)
                assert {each["name"]: each["phase"] for each in state["tables"]} == {
                    f"public.{table}": "r" for table in MixedLoad.TABLES
                }
                assert state["store"]["url"] == f"{bucket.url}/walmere/shop"
                assert Lsn.parse(state["durable_lsn"]) >= Lsn.parse(state["applied_lsn"]) > Lsn(0)
                code, _, error = here("resync", "-c", third.file, "notes")
                assert (code, "running on another machine" in error) == (1, True)
                copied = copies(far)["public.notes"]
                code, _, _ = here("resync", "-c", third.file, "notes", "--no-wait")
                assert code == 0
                far.becomes(lambda: far.phase("notes") == "r" and copies(far)["public.notes"] != copied)
            finally:
                made.stop()
                thread.join(60)
        assert failures == []
    far.run_once()
    far.assert_equal(*MixedLoad.TABLES)


def test_a_failing_store_loses_and_doubles_nothing_in_the_target(
    database18: Database, tmp_path: Path, proxy: S3Proxy
) -> None:
    database = database18
    MixedLoad.create(database, "numeric(20, 2)")
    mirror = StoredMirror(database, tmp_path, proxy.bucket)

    def rule(asked: Asked) -> None:
        refuse_every(10)(asked)
        lose_every(7)(asked)

    proxy.rule = rule
    with mirror.following(), MixedLoad(database, 13, writers=2):
        mirror.becomes(lambda: all(mirror.phase(each) == "r" for each in MixedLoad.TABLES))
        reached = min(each.applied_lsn for each in mirror.tables())
        mirror.becomes(lambda: min(each.applied_lsn for each in mirror.tables()) > reached)
    mirror.run_once()
    mirror.assert_equal(*MixedLoad.TABLES)
    assert proxy.counts["PUT"] > 30


def test_a_subscription_moves_to_a_store_and_causes_no_puts_when_the_source_is_idle(
    database18: Database, tmp_path: Path, bucket: Bucket, proxy: S3Proxy
) -> None:
    database = database18
    MixedLoad.create(database, "numeric(20, 2)")
    local = Mirror(database, tmp_path)
    local.run_once()
    database.execute("UPDATE accounts SET balance = balance + 1")
    copied = copies(local)
    mirror = StoredMirror(database, tmp_path, proxy.bucket, "subscription")
    with mirror.following():
        mirror.becomes_equal("accounts")
        mirror.becomes(lambda: all(mirror.phase(each) == "r" for each in MixedLoad.TABLES))
        assert copies(mirror) == copied, "no table was copied again"
        eventually(lambda: not changed_within(proxy, 2.0), 60)
        before = proxy.changing
        time.sleep(5)  # of idleness: there is nothing to wait for
        assert proxy.changing == before
    other = StoredMirror(database, tmp_path, bucket, "other")
    database.execute("UPDATE accounts SET balance = balance + 1")
    other.run_once()
    other.assert_equal(*MixedLoad.TABLES)
    assert copies(other) == copied


def changed_within(proxy: S3Proxy, seconds: float) -> bool:
    before = proxy.changing
    time.sleep(seconds)
    return proxy.changing != before


@pytest.mark.parametrize("bucket", EVERY_STORE, indirect=True)
def test_drop_deletes_the_objects_and_a_new_start_begins_anew(
    database18: Database, tmp_path: Path, bucket: Bucket, here: Here
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    file = write_stored_config(database, tmp_path, bucket, "a")
    other = write_stored_config(database, tmp_path, bucket, "b")
    database.execute("INSERT INTO t VALUES (1)")
    assert here("receive", "-c", file, "--once")[0] == 0
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(other.read_text().replace("'test'", "'somebody'"))
    for command in ("receive", "drop"):
        code, _, error = here(command, "-c", wrong)
        assert (code, "it belongs to subscription test, not to somebody" in error) == (1, True)
    store = open_store(f"{bucket.url}/walmere/shop", bucket.options)
    store.put("beside", b"of somebody else")
    assert read_head(store) is not None
    code, out, _ = here("drop", "-c", other)
    assert (code, f"objects in {bucket.url}" in out) == (0, True)
    assert [each.name for each in store.list()] == ["beside"]
    database.execute("INSERT INTO t VALUES (2)")
    assert here("receive", "-c", file, "--once")[0] == 0
    database.execute("INSERT INTO t VALUES (3)")
    assert here("receive", "-c", file, "--once")[0] == 0
    code, out, _ = here("log", "-c", other, "--json", "--values")
    assert [json.loads(line)["changes"][0]["new"]["id"] for line in out.splitlines()] == ["3"]
