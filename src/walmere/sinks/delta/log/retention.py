"""How long a Delta table keeps its log: longer than its versions can be read.

A version can be read for some time after it was *replaced*. `deltalake` deletes commits by when they were *made*: if a
table has rested for days, its last version would be gone with the commit that replaces it. So they are deleted here.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from walmere.directory import Directory
from walmere.sinks.delta.log.names import LOG
from walmere.sinks.delta.log.replay import checkpoints

_HOURS: Final[Mapping[str, tuple[int, int]]] = {
    # Hours to add to `keep_hours`; and Delta's default.
    # Other readers list the log's directory, which takes 1.5 ms per thousand entries, and a table may get a commit
    # every second.
    "delta.logRetentionDuration": (5, 30 * 24),
    # A removed file, and each replaced vector, is in every checkpoint for that long. There may be some every second.
    "delta.deletedFileRetentionDuration": (1, 7 * 24),
}
_INTERVAL: Final = re.compile(r"interval (\d+) (second|minute|hour|day|week)s?\Z")
_LOG: Final = "delta.logRetentionDuration"
_ENABLED: Final = "delta.enableExpiredLogCleanup"
_NUMBERED: Final = re.compile(r"(\d{20})\.(?:json|crc|checkpoint(?:\..+)?\.parquet)\Z")
_UNITS: Final = {"second": 1 / 3600, "minute": 1 / 60, "hour": 1, "day": 24, "week": 7 * 24}


def properties(keep_hours: int) -> dict[str, str]:
    """The properties of a table whose versions can be read for so many hours."""
    return {name: f"interval {keep_hours + more} hours" for name, (more, _) in _HOURS.items()}


def too_short(found: Mapping[str, str], keep_hours: int) -> dict[str, str]:
    """The properties with an interval that is too short, with the values that they should have."""
    wanted = properties(keep_hours)
    return {name: wanted[name] for name in wanted if _hours(name, found.get(name)) < _hours(name, wanted[name])}


def _hours(name: str, interval: str | None) -> float:
    """The hours of a property; infinite for an interval in another format, so that it is never changed."""
    if interval is None:
        return _HOURS[name][1]
    match = _INTERVAL.match(interval)
    return math.inf if match is None else int(match[1]) * _UNITS[match[2]]


def clean_up(directory: Directory, found: Mapping[str, str], readable: Callable[[], Iterable[int]]) -> None:
    """Delete the commits and checkpoints that no version needs which is within the log retention, or in `readable`.

    `readable` is called if there is something to delete.
    """
    if found.get(_ENABLED, "true").strip().lower() == "false":
        return
    names = directory.files(LOG)
    oldest = time.time() - _hours(_LOG, found.get(_LOG)) * 3600
    numbers = {name: int(match[1]) for name in names if (match := _NUMBERED.match(name)) is not None}
    kept = [number for name, number in numbers.items() if name.endswith(".json") and names[name] >= oldest]
    # the version before the first one that is kept was the newest until then, and needs a checkpoint
    if kept and _before(names, numbers, min(kept) - 1):
        directory.remove(*(f"{LOG}/{name}" for name in _before(names, numbers, min([min(kept) - 1, *readable()]))))


def _before(names: Collection[str], numbers: Mapping[str, int], version: int) -> list[str]:
    """The files that are not needed to read a version, or a later one."""
    needed = checkpoints(names, version)
    return sorted(name for name, number in numbers.items() if number < needed[0][0]) if needed else []
