"""How old the lake is, measured as PostgreSQL measures `replay_lag`: not by what the subscriber says of its own clock.

The source's position is noted with the time, again and again. What is applied now was the source's position at some
time before; since then something has been missing. Between two notes the older one counts, so it is never made to look
less than it is.
"""

from __future__ import annotations

from collections import deque

from walmere.lsn import Lsn


class Lag:
    """Notes of the source's position."""

    def __init__(self) -> None:
        self._notes: deque[tuple[float, Lsn]] = deque()
        self._last_applied = 0.0

    def note(self, now: float, position: Lsn) -> None:
        """The source is here now."""
        self._notes.append((now, position))

    def seconds(self, now: float, applied: Lsn) -> float:
        """For how long something has been missing; 0 if nothing is."""
        while self._notes and self._notes[0][1] <= applied:
            self._last_applied, _ = self._notes.popleft()
        if not self._notes:
            return 0.0
        return now - (self._last_applied or self._notes[0][0])
