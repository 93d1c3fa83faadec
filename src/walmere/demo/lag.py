"""The lag of the lake in seconds, measured as PostgreSQL measures `replay_lag`.

The position of the source is recorded with the time, at short intervals. The lag is the time since the source was at
the position that is applied now. Between two records the older one counts, so the lag is never reported too small.
"""

from __future__ import annotations

from collections import deque

from walmere.lsn import Lsn


class Lag:
    """Records of the source's position."""

    def __init__(self) -> None:
        self._notes: deque[tuple[float, Lsn]] = deque()
        self._last_applied = 0.0

    def note(self, now: float, position: Lsn) -> None:
        """Record the position of the source."""
        self._notes.append((now, position))

    def seconds(self, now: float, applied: Lsn) -> float:
        """The lag; 0 if everything is applied."""
        while self._notes and self._notes[0][1] <= applied:
            self._last_applied, _ = self._notes.popleft()
        if not self._notes:
            return 0.0
        return now - (self._last_applied or self._notes[0][0])
