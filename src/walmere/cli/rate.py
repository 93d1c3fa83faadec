"""How fast numbers grow, from what was seen of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from walmere.lsn import Lsn
from walmere.subscription.state import Phase

_WINDOW: Final = 5.0
"""Seconds over which a rate is measured."""


class Rate:
    """How fast a number grows."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, number: int, now: float) -> float:
        """Per second, over the last seconds. A number that falls begins anew."""
        if self._seen and number < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, number))
        while now - self._seen[0][0] > _WINDOW and len(self._seen) > 2:
            self._seen.popleft()
        since, before = self._seen[0]
        return (number - before) / (now - since) if now > since else 0.0


@dataclass(slots=True)
class Speeds:
    """How fast a subscription moves on, from its status as it is read again and again."""

    wal: dict[str, float] = field(default_factory=dict)  # bytes per second, by "received" and "applied"
    copies: dict[str, float] = field(default_factory=dict)  # rows per second, by the name of a table
    _rates: dict[str, Rate] = field(default_factory=dict)

    def add(self, state: Mapping[str, Any], now: float) -> None:
        """Take the next status."""
        for what in ("received", "applied"):
            if (position := state[f"{what}_lsn"]) is not None:
                self.wal[what] = self._rate(what).add(Lsn.parse(position), now)
        copying = [each for each in state["tables"] if each["phase"] == Phase.DATA_SYNC]
        self.copies = {each["name"]: self._rate(each["name"]).add(each["rows_copied"], now) for each in copying}

    def _rate(self, name: str) -> Rate:
        return self._rates.setdefault(name, Rate())
