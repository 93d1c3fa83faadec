"""A run waits while its subscription is running on another machine."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from conftest import Database
from mirror import Mirror
from object_stores import Bucket
from processes import Background, eventually
from walmere import Subscription
from walmere.changelog.store.log_store import read_head
from walmere.config import Config, Storage
from walmere.errors import SlotInUse, StoreUnavailable
from walmere.object_store import open_store
from walmere.storage import Lock
from walmere.subscription.shared import standby
from walmere.subscription.shared.orphan import end_with
from walmere.subscription.shared.standby import wait_for_slot, wait_until_free
from walmere.subscription.shared.state import SharedState
from walmere.subscription.shared.store import slot_user


def on_machine(database: Database, directory: Path, bucket: Bucket, **source: object) -> Config:
    config = database.config(directory, **source)
    settings = {"store": f"{bucket.url}/walmere/shop", "upload_seconds": 0.1}
    return config.model_copy(
        update={
            "subscription": config.subscription.model_copy(update=settings),
            "storage": Storage.model_validate(bucket.options),
        }
    )


def epoch(bucket: Bucket) -> int:
    """Of the log's writer."""
    found = read_head(open_store(f"{bucket.url}/walmere/shop", bucket.options))
    assert found is not None
    return found[0].epoch


class Waiting:
    """`wait_until_free` in a thread."""

    def __init__(self, config: Config) -> None:
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=wait_until_free, args=(config, self.stopping), kwargs={"ends": False})
        self._thread.start()

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join(10)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "_POLL", 0.05)


@pytest.mark.usefixtures("quick")
def test_a_second_machine_waits_until_the_first_one_has_ended(
    database18: Database, tmp_path: Path, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    first, second = (on_machine(database18, tmp_path / name, bucket) for name in ("first", "second"))
    wait_until_free(second, threading.Event(), ends=False)  # nothing is running
    with Background(first) as receiver:
        eventually(database18.streaming)
        wait_until_free(first, threading.Event(), ends=False)  # it is running on this machine
        eventually(lambda: epoch(bucket) == 1)
        waiting = Waiting(second)
        eventually(lambda: "is running on another machine" in caplog.text)
        assert waiting.waits
        assert epoch(bucket) == 1
        receiver.receiver.stop()
        assert receiver.join() is None
        eventually(lambda: not waiting.waits)
        assert caplog.text.count("waiting until it has ended") == 1
    with Background(first):
        eventually(database18.streaming)
        stopped = Waiting(second)
        stopped.stop()
        assert not stopped.waits


@pytest.mark.usefixtures("quick")
def test_without_the_source_only_the_machine_that_was_the_last_one_goes_on(
    database18: Database,
    tmp_path: Path,
    bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    with Background(on_machine(database18, tmp_path / "first", bucket)):
        eventually(database18.streaming)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    gone = on_machine(database18, tmp_path / "first", bucket, dsn=f"postgresql://127.0.0.1:{port}/gone")
    wait_until_free(gone, threading.Event(), ends=False)  # no driver has run yet
    state = SharedState(open_store(f"{bucket.url}/walmere/shop", bucket.options), tmp_path / "first")
    assert state.take_over()
    wait_until_free(gone, threading.Event(), ends=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    waiting = Waiting(gone)
    eventually(lambda: "was last running on" in caplog.text)
    assert waiting.waits
    waiting.stop()


class WithoutSlot:
    """A receiver that cannot connect."""

    def check(self) -> None:
        pass

    def has_slot(self) -> bool:
        return False


@pytest.mark.usefixtures("quick")
def test_without_the_source_a_receiver_that_is_running_already_is_not_waited_for(
    database18: Database, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    here = on_machine(database18, tmp_path, bucket)
    with Background(here):
        eventually(database18.streaming)
    assert SharedState(open_store(f"{bucket.url}/walmere/shop", bucket.options), tmp_path).take_over()
    gone = on_machine(database18, tmp_path, bucket, dsn="postgresql://127.0.0.1:1/gone")
    with closing(Lock(gone.changelog)):  # its receiver has it
        wait_for_slot(WithoutSlot(), gone, threading.Event(), ends=False)
        monkeypatch.setattr(socket, "gethostname", lambda: "other")
        stopping = threading.Event()
        waiting = threading.Thread(target=wait_for_slot, args=(WithoutSlot(), gone, stopping), kwargs={"ends": False})
        waiting.start()
        waiting.join(1)
        assert waiting.is_alive(), "the other machine may be running"
        stopping.set()
        waiting.join(10)


@pytest.mark.usefixtures("quick")
def test_a_run_with_an_end_does_not_wait_for_ever_and_one_that_is_stopped_does_not_start_spark(
    database18: Database, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database18, tmp_path / "second")
    mirror.set("subscription", store=f"{bucket.url}/walmere/shop", upload_seconds=0.1)
    mirror.file.write_text(mirror.file.read_text() + bucket.section)
    second = Subscription(mirror.file)
    monkeypatch.setattr(Subscription, "launcher", lambda *_, **__: pytest.fail("it starts Spark"))
    first = on_machine(database18, tmp_path / "first", bucket)
    first = first.model_copy(update={"subscription": first.subscription.model_copy(update={"name": database18.name})})
    with Background(first):
        eventually(lambda: database18.streaming() and epoch(bucket) == 1)
        monkeypatch.setattr(standby, "PATIENCE", 0.2)
        with pytest.raises(SlotInUse, match="is running on another machine") as refused:
            second.run(once=True)
        assert refused.value.hint
        stopped = threading.Thread(target=second.run)
        stopped.start()
        time.sleep(1)
        assert stopped.is_alive()
        second.stop()
        stopped.join(10)
        assert not stopped.is_alive()


@pytest.mark.usefixtures("quick")
def test_a_store_that_does_not_answer_once_does_not_end_the_wait(
    database18: Database, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    first, second = (on_machine(database18, tmp_path / name, bucket) for name in ("first", "second"))
    looks = 0

    def unavailable_once(config: Config) -> str | None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise StoreUnavailable("reading the head", "it does not answer")
        return slot_user(config)

    monkeypatch.setattr(standby, "slot_user", unavailable_once)
    with Background(first):
        eventually(lambda: database18.streaming() and epoch(bucket) == 1)
        waiting = Waiting(second)
        eventually(lambda: looks > 3)
        assert waiting.waits
        waiting.stop()


def test_a_receiver_ends_some_time_after_its_launcher_was_killed() -> None:
    ended = threading.Event()
    end_with(os.getppid(), lambda: pytest.fail("it is there"), grace=0)
    end_with(os.getpid(), ended.set, grace=0.1)  # not the parent of this process, as after a kill
    assert ended.wait(10)
