"""What the running tasks of a copy have read is asked in a thread, and the copy may end meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from pydantic import SecretStr

from conftest import Database
from proxy import Proxy
from walmere.config import Source
from walmere.lsn import Lsn
from walmere.publisher.snapshot import Snapshot
from walmere.subscription import copy_progress
from walmere.subscription.copy_progress import RunningCopies

ASKING = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'walmere launcher' AND datname = current_database()"
)


def test_the_end_of_a_copy_does_not_close_a_connection_that_is_in_use(
    database18: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose thread waits for a connection of libpq crashes if another thread closes it."""
    monkeypatch.setattr(copy_progress, "INTERVAL", 0.0)
    with Proxy(database18.server.port) as proxy:
        source = Source(dsn=SecretStr(proxy.dsn(database18.dsn)), publications=("pub",), slot="slot")
        with RunningCopies(tmp_path, source).watched(1, Snapshot("1", Lsn(1)), None) as on_tasks:
            on_tasks(0, 1)
            assert database18.value(ASKING) == 1
            proxy.freeze()
            asking = threading.Thread(target=on_tasks, args=(0, 1))
            asking.start()
            asking.join(0.2)
        asking.join(0.2)
        assert asking.is_alive(), "it still waits for the answer"
        proxy.thaw()
        asking.join(10)
        assert not asking.is_alive()
        deadline = time.monotonic() + 10  # a backend notices a moment later that its client has left
        while (left := database18.value(ASKING)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left == 0, "the thread that used the connection has closed it"
