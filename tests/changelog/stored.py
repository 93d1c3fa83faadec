"""A log in a store, written by hand-made messages: for tests about the log alone, where no server is needed."""

from __future__ import annotations

from pathlib import Path

from changelog.walsender import START, read
from walmere.changelog.assembly import Assembly
from walmere.changelog.records import Header, render_header
from walmere.changelog.store.cache import Cache
from walmere.changelog.store.claim import Claim, create_log
from walmere.changelog.store.log_store import LogStore, read_head
from walmere.changelog.store.objects import numbers_before
from walmere.changelog.store.upload import Uploader
from walmere.changelog.writer import Writer
from walmere.object_store import ObjectStore

HEADER = Header("7000000000000000000", "db", "slot", START)


def open_cache(store: ObjectStore, directory: Path) -> Cache:
    """A local copy of the log, which is created if there is none."""
    cache = Cache(store, directory)
    if not cache.fill():
        create_log(store, "shop", render_header(HEADER))
        assert cache.fill()
    return cache


def begin_stored_log(
    store: ObjectStore,
    directory: Path,
    *,
    seconds: float = 0.0,
    max_bytes: int = 1 << 20,
    segment_bytes: int = 1 << 20,
    cache_bytes: int = 1 << 30,
) -> tuple[Writer, Assembly]:
    """Take over the log, as a receiver does."""
    cache = open_cache(store, directory)
    claim = Claim(store, cache.head.generation)
    uploader = Uploader(cache, claim, seconds=seconds, max_bytes=max_bytes, cache_bytes=cache_bytes)
    writer = Writer(directory, START, segment_bytes=segment_bytes, uploader=uploader)
    return writer, Assembly(writer)


def elsewhere(store: ObjectStore, directory: Path) -> list[list[str]]:
    """The transactions of the log, as a machine with an empty directory reads them."""
    open_cache(store, directory)
    assert not list(directory.glob("*.arrow"))
    return read(directory)


def numbers(store: ObjectStore) -> list[int]:
    """The numbers of the objects of the log."""
    found = read_head(store)
    assert found is not None
    return numbers_before(LogStore(store, found[0].generation), 1 << 60)
