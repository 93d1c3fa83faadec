"""Growing pauses between retries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Each pause is twice as long as the one before, up to the longest."""

    first: float
    longest: float
    tries: int = 0

    def next(self, most: int | None = None) -> float | None:
        """Seconds to wait before the next try. None after `most` tries."""
        self.tries += 1
        if most is not None and self.tries >= most:
            return None
        return float(min(self.first * 2 ** min(self.tries - 1, 30), self.longest))

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self.tries = 0
