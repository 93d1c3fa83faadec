"""The part of `walmere check` that looks at this side: the state directory, the lake, and whether log and slot fit.

The source is checked by `walmere.publisher.check`, which knows nothing of our directories; it is told what it needs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.changelog.writer import header_of
from walmere.config import Config
from walmere.errors import ChangeLogError, PublicationMissing, SlotLost, SlotMissing, SlotUnsuitable, WalmereError
from walmere.publisher.check import check as check_source
from walmere.publisher.check_slot import Subscriber
from walmere.publisher.finding import Finding, Level
from walmere.storage import Lock
from walmere.subscription import receiver

LEAST_FREE: Final = 5 << 30
"""Free bytes below which a disk is worth a warning; or a twentieth of a larger disk, up to ten times as much."""

_SAID_BY_SOURCE: Final = (PublicationMissing, SlotLost, SlotMissing, SlotUnsuitable)
"""What the checks of the source have found already."""


def check(config: Config, require_java: Callable[[], None]) -> list[Finding]:
    """Look at the source and at this side. `require_java` raises if Spark could not be started."""
    running = Lock.holder(config.changelog)
    try:
        has_log = header_of(config.changelog) is not None
        damaged: WalmereError | None = None
    except ChangeLogError as error:
        has_log, damaged = True, error
    own = f"walmere_{config.subscription.name}" if running is not None else None
    found = check_source(config.source, Subscriber(has_log, own))
    connected = any(each.name == "connection" and each.level is Level.OK for each in found)
    found += _directories(config)
    if damaged is not None:
        found.append(Finding("change_log", Level.PROBLEM, f"{damaged.doing}: {damaged.wrong}", damaged.hint))
    elif has_log and connected:
        found += _change_log(config)
    if config.target is not None:
        found.append(_java(require_java))
    found.append(_run(config, running))
    return found


def _change_log(config: Config) -> Iterator[Finding]:
    """Whether the log is of this source, and the slot is where the log ends."""
    try:
        receiver.require_fit(config)
    except _SAID_BY_SOURCE:
        return
    except WalmereError as error:
        level = Level.WARNING if error.transient else Level.PROBLEM
        yield Finding("change_log", level, error.wrong, error.hint)
    else:
        yield Finding("change_log", Level.OK, "the change log and the slot belong together")


def _directories(config: Config) -> Iterator[Finding]:
    places = {"state_directory": config.subscription.directory}
    if config.target is not None:
        places["lake_directory"] = config.target.path
    for name, path in places.items():
        there = _nearest(path)
        if not there.is_dir():
            yield Finding(name, Level.PROBLEM, f"{path}: {there} is not a directory", f"mv {there} {there}.old")
            continue
        if not os.access(there, os.W_OK | os.X_OK):
            fix = f"chown {os.geteuid()} {there}  # or chmod, or mount it writable"
            yield Finding(name, Level.PROBLEM, f"{path}: {there} is not writable for this user", fix)
            continue
        yield Finding(name, Level.OK, f"{path} can be written")
        yield _disk_space(there)


def _disk_space(place: Path) -> Finding:
    usage = shutil.disk_usage(place)
    left = f"{usage.free / (1 << 30):.1f} of {usage.total / (1 << 30):.0f} GB are free below {place}"
    if usage.free < max(LEAST_FREE, min(usage.total // 20, 10 * LEAST_FREE)):
        return Finding("disk_space", Level.WARNING, left, "-- make room, or choose a larger disk")
    return Finding("disk_space", Level.OK, left)


def _java(require_java: Callable[[], None]) -> Finding:
    try:
        require_java()
    except WalmereError as error:
        return Finding("java", Level.PROBLEM, error.wrong, error.hint)
    return Finding("java", Level.OK, "there is a Java that Spark can run on")


def _run(config: Config, receiving: int | None) -> Finding:
    running = Lock.holder(config.subscription.directory / paths.RUN)
    said = [f"process {running} runs the subscription" if running is not None else "nothing runs the subscription"]
    if receiving is not None:
        said.append(f"process {receiving} receives")
    return Finding("run", Level.OK, ", ".join(said))


def _nearest(path: Path) -> Path:
    """The path itself, or what is there of it."""
    for place in (path, *path.parents):
        if os.path.lexists(place):
            return place
    return path
