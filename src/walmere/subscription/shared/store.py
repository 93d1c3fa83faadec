"""The store of a subscription, if its configuration has one: `[subscription] store`. And the local copy of what it has.

Commands such as `walmere status` read the directory. If no process on this machine keeps it up to date, they bring it
up to date first. So they work on any machine.
"""

from __future__ import annotations

import functools
from contextlib import closing
from typing import Any

from walmere.changelog.store.cache import Cache
from walmere.changelog.store.log_store import GENERATION, HEAD, read_head
from walmere.config import Config
from walmere.errors import ChangeLogInUse, ChangeLogMismatch
from walmere.object_store import ObjectStore, open_store
from walmere.storage import Lock
from walmere.subscription.requests import pausing
from walmere.subscription.shared.requests import SharedRequests


def store_of_config(config: Config) -> ObjectStore | None:
    """The store that has the change log and the state; None: they are local."""
    url = config.subscription.store
    return None if url is None else open_store(url, config.storage.settings)


def cache_of(config: Config) -> Cache | None:
    """The local copy of the log in the store; None: the log is local."""
    store = store_of_config(config)
    return None if store is None else Cache(store, config.changelog)


def require_own(config: Config) -> None:
    """Refuse a store that another subscription uses. Call it before anything there is changed."""
    store = store_of_config(config)
    head = None if store is None else read_head(store)
    if store is not None and head is not None and head[0].subscription != config.subscription.name:
        raise ChangeLogMismatch(
            f"opening the change log in {store.url}",
            f"it belongs to subscription {head[0].subscription}, not to {config.subscription.name}",
            "set subscription.store to another URL",
        )


def refresh_log(config: Config) -> None:
    """Bring the local copy of the log up to date, unless a process on this machine does that all the time."""
    cache = cache_of(config)
    if cache is None:
        return
    require_own(config)
    try:
        with closing(Lock(config.changelog)):
            cache.fill()
    except ChangeLogInUse:
        return


@functools.lru_cache(maxsize=16)
def probe(store: ObjectStore) -> None:
    """Refuse a store that ignores conditions. Once in a process: it takes some puts."""
    store.probe(replaces=True)


def describe(config: Config) -> dict[str, Any] | None:
    """What `walmere status` shows about the store; None: there is none. Raises StoreError."""
    store = store_of_config(config)
    if store is None:
        return None
    found = read_head(store)
    if found is None:
        return {"url": store.url, "epoch": None, "receiver": None, "oldest_object": None}
    head = found[0]
    return {"url": store.url, "epoch": head.epoch, "receiver": head.writer or None, "oldest_object": head.oldest}


def is_paused(config: Config) -> bool:
    """Whether the subscription is paused. Raises StoreError."""
    store = store_of_config(config)
    if store is None:
        return pausing.is_paused(config.subscription.directory)
    requests = SharedRequests(store)
    requests.read()
    return requests.paused


def set_paused(config: Config, paused: bool) -> None:
    """Pause the subscription, or resume it. Raises StoreError."""
    store = store_of_config(config)
    if store is None:
        pausing.set_paused(config.subscription.directory, paused)
    else:
        SharedRequests(store).set_paused(paused)


def running_elsewhere(config: Config) -> str | None:
    """The name of the receiver that uses the slot, if it is not on this machine; None: there is none."""
    if config.subscription.store is None or Lock.holder(config.changelog) is not None:
        return None
    return slot_user(config)


def slot_user(config: Config) -> str | None:
    """The name of the receiver that was the last one, if the slot of a log in a store is in use; None: it is free.

    Raises SourceUnavailable and StoreError.
    """
    from walmere.publisher import slot  # noqa: PLC0415  others need no database driver
    from walmere.publisher.connect import connect, translate_errors  # noqa: PLC0415

    store = store_of_config(config)
    with (
        closing(connect(config.source, "walmere")) as connection,
        translate_errors(config.source, f"reading replication slot {config.source.slot}"),
    ):
        found = slot.read(connection, config.source.slot)
    head = None if store is None else read_head(store)
    return None if found is None or not found.active or head is None else head[0].writer


def delete_all(store: ObjectStore) -> int:
    """Delete all objects of a subscription, the head first: without it, the others are not a log. Returns how many."""
    store.delete([HEAD])
    _, prefixes = store.list_directory()
    generations = [each for each in prefixes if each.startswith(GENERATION)]  # other things may be there, too
    names = [each.name for generation in generations for each in store.list(generation)]
    store.delete(names)
    return len(names) + 1
