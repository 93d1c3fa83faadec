"""The pace of batches that rewrite files: not more bytes per hour than `[target] max_rewrite_bytes_per_hour`.

Without deletion vectors, a batch rewrites the files of the rows that it changes, and ten times as many changes often
rewrite the same files. So if rewriting costs too much, batches get larger: the next one begins when the bytes of the
last ones are within the limit again. Changes wait in the change log, and the source keeps no WAL for them.

How many bytes are over the limit is in a file, which says when the next batch may begin. It outlives the process, so
that a restart does not write more. If the limit is changed, the bytes count by the new one. A run that ends by itself
(`--once`) does not wait: it was asked for.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.storage import write_durably

_HOUR: Final = 3600.0
_AHEAD: Final = 300.0
"""Seconds whose bytes may be written at once."""


@dataclass(frozen=True, slots=True)
class _Written:
    """What the file has: at a time (in seconds since the epoch), so many bytes were over the limit."""

    bytes: float
    at: float
    bytes_per_hour: float

    def left(self, now: float) -> float:
        """The bytes that are still over the limit."""
        return max(0.0, self.bytes - max(0.0, now - self.at) * self.bytes_per_hour / _HOUR)

    @property
    def until(self) -> float:
        """When all bytes would have been written at the rate of the limit."""
        return self.at + self.bytes * _HOUR / self.bytes_per_hour


class Pace:
    """Counts the bytes of batches, by which the next one may begin."""

    def __init__(self, directory: Path, bytes_per_hour: int) -> None:
        self._directory = directory
        self._bytes_per_hour = float(bytes_per_hour)
        known = _read(directory)
        if known is not None and known.bytes_per_hour != self._bytes_per_hour:
            self.batch_wrote(0)

    def batch_wrote(self, size: int) -> None:
        """Count the bytes of a batch."""
        now, known = time.time(), _read(self._directory)
        left = 0.0 if known is None else known.left(now)
        written = _Written(left + size, now, self._bytes_per_hour)
        write_durably(self._directory / paths.PACE, json.dumps(asdict(written)))


def reset(directory: Path) -> None:
    """Forget what was written: nothing is rewritten any more."""
    (directory / paths.PACE).unlink(missing_ok=True)


def _read(directory: Path) -> _Written | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((directory / paths.PACE).read_bytes())
        written = _Written(*(float(found[name]) for name in ("bytes", "at", "bytes_per_hour")))
        return written if written.bytes_per_hour > 0 else None
    return None


def next_batch(directory: Path) -> float | None:
    """When the next batch may begin, in seconds since the epoch; None: now."""
    written = _read(directory)
    if written is None or written.until - _AHEAD <= time.time():
        return None
    return written.until - _AHEAD
