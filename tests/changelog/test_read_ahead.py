"""Blocks of a store are fetched ahead, and come in the order of the log, on a machine that has none of the files."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from changelog.stored import begin_stored_log, open_cache
from changelog.walsender import T, Walsender
from s3_proxy import Asked, S3Proxy
from walmere.changelog.plan import Planner, messages
from walmere.changelog.store.log_store import store_of
from walmere.errors import ChangeLogDamaged
from walmere.object_store import open_store

COUNT = 24


@pytest.fixture
def planner(proxy: S3Proxy, tmp_path: Path) -> Planner:
    """Of a log of so many blocks, in a cache without any of them."""
    store = open_store(f"{proxy.bucket.url}/log", proxy.bucket.options)
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    for number in range(COUNT):
        assembly.feed(source.inserts(number))
        writer.flush()
    writer.close()
    open_cache(store, tmp_path / "b")
    return Planner(tmp_path / "b")


def test_several_blocks_are_fetched_at_once_and_come_in_order(planner: Planner, proxy: S3Proxy, tmp_path: Path) -> None:
    refs = planner.plan({T: planner.start_lsn}, planner.end_lsn).blocks[T]
    assert len(refs) == COUNT
    at_once: list[int] = []
    asking = threading.Semaphore(100)

    def rule(asked: Asked) -> None:
        if asked.method == "GET":
            with asking:
                at_once.append(100 - asking._value)
                time.sleep(0.05 if asked.number % 2 else 0.1)  # answers come in another order

    proxy.rule = rule
    directory = tmp_path / "on an executor"
    found = [batch for _, batch in messages(directory, refs, store=store_of(tmp_path / "b"))]
    commits = [lsn for batch in found for lsn in batch["commit_lsn"].to_pylist()]
    assert len(commits) == COUNT
    assert commits == sorted(commits)
    assert 3 < max(at_once) <= 8


def test_whoever_stops_reading_does_not_wait_for_all_blocks(planner: Planner, proxy: S3Proxy, tmp_path: Path) -> None:
    refs = planner.plan({T: planner.start_lsn}, planner.end_lsn).blocks[T]
    log = store_of(tmp_path / "b")
    assert log is not None
    before = proxy.counts["GET"]
    reading = messages(tmp_path / "nowhere", refs, store=log)
    next(iter(reading))
    reading.close()  # type: ignore[attr-defined]
    assert proxy.counts["GET"] - before < COUNT
    log.store.delete([log.name(number) for number in range(100)])
    with pytest.raises(ChangeLogDamaged, match="is missing"):
        list(messages(tmp_path / "nowhere", refs, store=log))
