"""A run waits while its subscription is running on another machine."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from conftest import Database
from object_stores import Bucket
from processes import Background, eventually
from walmere.changelog.store.log_store import read_head
from walmere.config import Config, Storage
from walmere.object_store import open_store
from walmere.subscription.shared import standby
from walmere.subscription.shared.standby import wait_until_free
from walmere.subscription.shared.state import SharedState


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
        self._thread = threading.Thread(target=wait_until_free, args=(config, self.stopping))
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
    wait_until_free(second, threading.Event())  # nothing is running
    with Background(first) as receiver:
        eventually(database18.streaming)
        wait_until_free(first, threading.Event())  # it is running on this machine
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
    wait_until_free(gone, threading.Event())  # no driver has run yet
    state = SharedState(open_store(f"{bucket.url}/walmere/shop", bucket.options), tmp_path / "first")
    assert state.take_over()
    wait_until_free(gone, threading.Event())
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    waiting = Waiting(gone)
    eventually(lambda: "was last running on" in caplog.text)
    assert waiting.waits
    waiting.stop()
