"""How long a Delta table keeps its log, by the table's own properties: for longer than its versions can be read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

_HOURS: Final[Mapping[str, tuple[int, int]]] = {
    # Beyond what readers are promised; and what Delta does without the property.
    # The log's directory is listed whenever the table is opened, 1.5 ms per thousand entries, and a table may get a
    # commit every second.
    "delta.logRetentionDuration": (23, 30 * 24),
    # Every removed file stays in every checkpoint for that long, and there may be some every second. Once it is in
    # none, `vacuum` does not know it any more.
    "delta.deletedFileRetentionDuration": (5, 7 * 24),
}
_INTERVAL: Final = re.compile(r"interval (\d+) (second|minute|hour|day|week)s?\Z")
_UNITS: Final = {"second": 1 / 3600, "minute": 1 / 60, "hour": 1, "day": 24, "week": 7 * 24}


def properties(keep_hours: int) -> dict[str, str]:
    """Of a table whose versions can be read for so long."""
    return {name: f"interval {keep_hours + more} hours" for name, (more, _) in _HOURS.items()}


def too_short(there: Mapping[str, str], keep_hours: int) -> dict[str, str]:
    """The properties that keep less than they should, as they should be."""
    wanted = properties(keep_hours)
    return {name: wanted[name] for name in wanted if _hours(name, there.get(name)) < _hours(name, wanted[name])}


def _hours(name: str, interval: str | None) -> float:
    """What a property comes to; one that is written in a way of its own is nobody's but its writer's."""
    if interval is None:
        return _HOURS[name][1]
    found = _INTERVAL.match(interval)
    return math.inf if found is None else int(found[1]) * _UNITS[found[2]]
