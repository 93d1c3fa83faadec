"""A short history of rate and lag for the charts, in memory: every reading of the last quarter of an hour.

It starts anew with the process. For longer times there is Prometheus.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import astuple, dataclass
from typing import Final

KEPT_SECONDS: Final = 900.0
"""How far back the charts go."""
_RATE_SECONDS: Final = 3.0
"""Rates are means over at least this many seconds: batches end in steps."""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """What the charts show at one time."""

    time: float  # Unix time
    lag_seconds: float | None
    lag_bytes: int | None
    received_per_second: float | None  # changes that arrived in the change log
    applied_per_second: float | None  # changes that were applied
    wal_bytes_per_second: float | None  # that the source has written


@dataclass(frozen=True, slots=True)
class _Counted:
    time: float
    received: int | None
    applied: int | None
    wal: int | None


class History:
    """The points of one subscription."""

    def __init__(self) -> None:
        self._points: deque[HistoryPoint] = deque()
        self._counted: deque[_Counted] = deque()
        self._changing = threading.Lock()  # a page may ask for it meanwhile

    def add(
        self,
        time: float,
        *,
        lag_seconds: float | None,
        lag_bytes: int | None,
        received: int | None,
        applied: int | None,
        wal: int | None,
    ) -> HistoryPoint:
        """Add a reading. `received`, `applied`, `wal`: totals, of which the rates are made; None: not known."""
        now = _Counted(time, received, applied, wal)
        while len(self._counted) > 1 and self._counted[1].time <= time - _RATE_SECONDS:
            self._counted.popleft()
        before = self._counted[0] if self._counted else now
        self._counted.append(now)
        seconds = time - before.time
        point = HistoryPoint(
            time,
            lag_seconds,
            lag_bytes,
            _rate(before.received, received, seconds),
            _rate(before.applied, applied, seconds),
            _rate(before.wal, wal, seconds),
        )
        with self._changing:
            self._points.append(point)
            while self._points[0].time < time - KEPT_SECONDS:
                self._points.popleft()
        return point

    def rows(self) -> list[tuple[float | None, ...]]:
        """All points, as JSON arrays in the order of the fields of HistoryPoint."""
        with self._changing:
            return [row(point) for point in self._points]


def row(point: HistoryPoint) -> tuple[float | None, ...]:
    """A point as a JSON array."""
    return tuple(round(each, 3) if isinstance(each, float) else each for each in astuple(point))


def _rate(before: int | None, now: int | None, seconds: float) -> float | None:
    if before is None or now is None or seconds <= 0 or now < before:
        return None
    return (now - before) / seconds
