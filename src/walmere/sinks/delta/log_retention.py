"""The table properties that set how long a Delta table keeps its log: longer than its versions can be read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

_HOURS: Final[Mapping[str, tuple[int, int]]] = {
    # Hours to add to `keep_hours`; and Delta's default.
    # Other readers list the log's directory, which takes 1.5 ms per thousand entries, and a table may get a commit
    # every second.
    "delta.logRetentionDuration": (5, 30 * 24),
    # A removed file, and each replaced vector, is in every checkpoint for that long. There may be some every second.
    "delta.deletedFileRetentionDuration": (1, 7 * 24),
}
_INTERVAL: Final = re.compile(r"interval (\d+) (second|minute|hour|day|week)s?\Z")
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
