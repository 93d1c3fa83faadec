"""Blocks that several tasks of an executor read are fetched from the store once, and kept within a limit."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from changelog.stored import begin_stored_log, open_cache
from changelog.walsender import T, Walsender
from s3_proxy import S3Proxy
from walmere.changelog.plan import BlockRef, Planner, messages
from walmere.changelog.store import block_cache
from walmere.changelog.store.log_store import LogStore, store_of
from walmere.local_cache import VARIABLE
from walmere.object_store import open_store

COUNT = 20


@pytest.fixture
def log(proxy: S3Proxy, tmp_path: Path) -> tuple[LogStore, list[BlockRef]]:
    """A log in a store, and references to its blocks."""
    store = open_store(f"{proxy.bucket.url}/log", proxy.bucket.options)
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    for number in range(COUNT):
        assembly.feed(source.inserts(number))
        writer.flush()
    writer.close()
    open_cache(store, tmp_path / "b")
    planner = Planner(tmp_path / "b")
    found = store_of(tmp_path / "b")
    assert found is not None
    return replace(found, caches=True), planner.plan({T: planner.start_lsn}, planner.end_lsn).blocks[T]


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory of an executor."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "executor"))
    return tmp_path / "executor" / "blocks"


def read(log: LogStore, refs: list[BlockRef]) -> list[int]:
    """The commit LSNs of all messages, as a task on an executor reads them."""
    found = messages(Path("/nonexistent"), refs, store=log)
    return [lsn for _, batch in found for lsn in batch["commit_lsn"].to_pylist()]


def test_tasks_that_read_the_same_blocks_at_once_fetch_each_once(
    log: tuple[LogStore, list[BlockRef]], proxy: S3Proxy, executor: Path
) -> None:
    before = proxy.counts["GET"]
    found: list[list[int]] = []
    tasks = [threading.Thread(target=lambda: found.append(read(*log))) for _ in range(3)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    assert len(found) == 3
    assert len(found[0]) == COUNT
    assert found[0] == found[1] == found[2] == sorted(found[0])
    assert proxy.counts["GET"] - before == COUNT
    assert len(list(executor.iterdir())) == COUNT


def test_a_damaged_block_of_the_cache_is_fetched_again(
    log: tuple[LogStore, list[BlockRef]], proxy: S3Proxy, executor: Path
) -> None:
    whole = read(*log)
    torn, flipped, *_ = sorted(executor.iterdir())
    torn.write_bytes(torn.read_bytes()[:-1])
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    before = proxy.counts["GET"]
    assert read(*log) == read(*log) == whole
    assert proxy.counts["GET"] - before == 2


def test_the_oldest_blocks_are_deleted(
    log: tuple[LogStore, list[BlockRef]], executor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = log[1][0].block.length
    monkeypatch.setattr(block_cache, "MAX_BYTES", 4 * length)
    assert len(read(*log)) == COUNT
    assert len(list(executor.iterdir())) <= 4 + 8  # it looks after every eighth block


def test_a_block_is_read_without_a_place_for_it(
    log: tuple[LogStore, list[BlockRef]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for place in (str(tmp_path / "file"), ""):
        monkeypatch.setenv(VARIABLE, place)
        assert len(read(*log)) == COUNT
