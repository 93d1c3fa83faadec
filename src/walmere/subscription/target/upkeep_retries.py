"""When upkeep of a table is retried after an error. Each table waits for itself: the others continue."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Final

from walmere.errors import WalmereError

_log = logging.getLogger(__name__)

INTERVAL: Final = 5.0
"""Seconds between two rounds of upkeep."""
_MAX_DOUBLINGS: Final = 6


def interval(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return INTERVAL * float(2 ** min(failures, _MAX_DOUBLINGS))


@dataclass(frozen=True, slots=True)
class _Failed:
    wrong: str
    times: int
    retry_at: float  # by the monotonic clock


class Retries:
    """The tables for which something has failed."""

    def __init__(self, doing: str) -> None:
        """`doing` says what, for the log."""
        self._doing = doing
        self._failed: dict[str, _Failed] = {}

    def failed(self, name: str, error: Exception) -> None:
        """It has failed for a table. The first time in a row, that is a warning."""
        wrong = describe(error)
        known = self._failed.get(name)
        if known is None:
            _log.warning("%s of table %s has failed, and is retried: %s", self._doing, name, wrong)
        times = 1 if known is None else known.times + 1
        self._failed[name] = _Failed(wrong, times, time.monotonic() + interval(times))

    def succeeded(self, name: str) -> None:
        """It has succeeded for a table."""
        self._failed.pop(name, None)

    def waits(self, name: str) -> bool:
        """Whether it is not yet time to retry."""
        known = self._failed.get(name)
        return known is not None and time.monotonic() < known.retry_at

    def waiting(self) -> dict[str, str]:
        """For each table for which it has failed, what it waits for."""
        return {name: f"a retry after an error: {known.wrong}" for name, known in self._failed.items()}


def describe(error: Exception) -> str:
    """An error in one line."""
    return f"{error.doing}: {error.wrong}" if isinstance(error, WalmereError) else repr(error)
