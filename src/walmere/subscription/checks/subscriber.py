"""The part of `walmere check` for the subscriber: directories, Java, and whether change log and slot belong together.

`walmere.publisher.check` checks the source. It does not read the subscription's directory; `Subscriber` has what it
needs from there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.changelog.writer import header_of
from walmere.config import Config, DeltaTarget
from walmere.errors import (
    ChangeLogError,
    PublicationMissing,
    SlotLost,
    SlotMissing,
    SlotUnsuitable,
    StoreError,
    WalmereError,
)
from walmere.object_store import ObjectStore, open_store
from walmere.publisher.check import check as check_source
from walmere.publisher.check_slot import Subscriber
from walmere.publisher.finding import Finding, Level
from walmere.sinks.base import Sink
from walmere.sinks.postgres.sink import PostgresSink
from walmere.storage import Lock
from walmere.subscription import receiver
from walmere.subscription.checks.cluster import check_cluster
from walmere.subscription.checks.sections import check_sections
from walmere.subscription.checks.target import check_target
from walmere.subscription.shared.store import refresh_log, store_of_config

LEAST_FREE: Final = 5 << 30
"""Warn below this many free bytes; on a larger disk below 5 percent of it, but at most ten times as many bytes."""

_FOUND_BY_SOURCE_CHECKS: Final = (PublicationMissing, SlotLost, SlotMissing, SlotUnsuitable)
"""Errors that the checks of the source report."""


def check(
    config: Config, require_java: Callable[[], None], sink: Sink | None = None, *, on_cluster: bool = False
) -> list[Finding]:
    """Check source, subscriber and, if it is a database, the target.

    `require_java` raises if Spark cannot be started. `on_cluster`: whether tasks run on other machines.
    """
    running = Lock.holder(config.changelog)
    with contextlib.suppress(StoreError):  # `_stores` reports it
        refresh_log(config)
    try:
        has_log = header_of(config.changelog) is not None
        damaged: WalmereError | None = None
    except ChangeLogError as error:
        has_log, damaged = True, error
    own = f"walmere_{config.subscription.name}" if running is not None else None
    found = check_source(config.source, Subscriber(has_log, own))
    connected = any(each.name == "connection" and each.level is Level.OK for each in found)
    found += _directories(config)
    found += _stores(config)
    if on_cluster:
        found += check_cluster(config)
    if isinstance(sink, PostgresSink):
        found += check_target(config, sink)
    if connected and (config.table or config.types):
        found += check_sections(config)
    if damaged is not None:
        found.append(Finding("change_log", Level.PROBLEM, f"{damaged.doing}: {damaged.wrong}", damaged.hint))
    elif has_log and connected:
        found += _change_log(config)
    if config.target is not None:
        found.append(_java(require_java))
    found.append(_run(config, running))
    return found


def _change_log(config: Config) -> Iterator[Finding]:
    """Whether the log was received from this source, and the slot continues where the log ends."""
    try:
        receiver.require_matching_log(config)
    except _FOUND_BY_SOURCE_CHECKS:
        return
    except WalmereError as error:
        level = Level.WARNING if error.transient else Level.PROBLEM
        yield Finding("change_log", level, error.wrong, error.hint)
    else:
        yield Finding("change_log", Level.OK, "the change log and the slot belong together")


def _stores(config: Config) -> Iterator[Finding]:
    """Whether the object stores can be written, and respect the conditions of puts."""
    places: dict[str, ObjectStore | None] = {"store": store_of_config(config)}
    if isinstance(config.target, DeltaTarget) and isinstance(config.target.path, str):
        places["lake_store"] = open_store(config.target.path, config.storage.settings)
    for name, store in places.items():
        if store is None:
            continue
        try:
            store.probe(replaces=True)
        except WalmereError as error:
            yield Finding(name, Level.PROBLEM, f"{error.doing}: {error.wrong}", error.hint)
        else:
            yield Finding(name, Level.OK, f"{store.url} can be written, and respects the conditions of puts")


def _directories(config: Config) -> Iterator[Finding]:
    places = {"state_directory": config.subscription.directory}
    if isinstance(config.target, DeltaTarget) and isinstance(config.target.path, Path):
        places["lake_directory"] = config.target.path
    for name, path in places.items():
        there = _nearest(path)
        if not there.is_dir():
            yield Finding(name, Level.PROBLEM, f"{path}: {there} is not a directory", f"mv {there} {there}.old")
            continue
        if not os.access(there, os.W_OK | os.X_OK):
            fix = f"chown {os.geteuid()} {there}  # or chmod, or mount it writable"
            yield Finding(name, Level.PROBLEM, f"{path}: {there} is not writable by this user", fix)
            continue
        yield Finding(name, Level.OK, f"{path} can be written")
        yield _disk_space(there)


def _disk_space(place: Path) -> Finding:
    usage = shutil.disk_usage(place)
    left = f"{usage.free / (1 << 30):.1f} of {usage.total / (1 << 30):.0f} GB are free below {place}"
    if usage.free < max(LEAST_FREE, min(usage.total // 20, 10 * LEAST_FREE)):
        return Finding("disk_space", Level.WARNING, left, "-- free disk space, or use a larger disk")
    return Finding("disk_space", Level.OK, left)


def _java(require_java: Callable[[], None]) -> Finding:
    try:
        require_java()
    except WalmereError as error:
        return Finding("java", Level.PROBLEM, error.wrong, error.hint)
    return Finding("java", Level.OK, "Spark can use the installed Java")


def _run(config: Config, receiving: int | None) -> Finding:
    running = Lock.holder(config.subscription.directory / paths.RUN)
    text = (
        f"process {running} is running the subscription" if running is not None else "the subscription is not running"
    )
    if receiving is not None:
        text += f", process {receiving} is receiving"
    return Finding("run", Level.OK, text)


def _nearest(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    for place in (path, *path.parents):
        if os.path.lexists(place):
            return place
    return path
