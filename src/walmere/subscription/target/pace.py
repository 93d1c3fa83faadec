"""The pace of batches that rewrite files: not more bytes per hour than `[target] max_rewrite_bytes_per_hour`.

Without deletion vectors, a batch rewrites the files of the rows that it changes, and ten times as many changes often
rewrite the same files. So if rewriting costs too much, batches get larger: the next one begins when the bytes of the
last ones are within the limit again. Changes wait in the change log, and the source keeps no WAL for them.

The driver writes when the next batch may begin, and the process that plans batches reads it.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from walmere import paths
from walmere.storage import write_durably

_HOUR: Final = 3600.0
_AHEAD: Final = 300.0
"""Seconds whose bytes may be written at once."""


class Pace:
    """Counts the bytes of batches, and sets when the next one may begin."""

    def __init__(self, directory: Path, bytes_per_hour: int) -> None:
        self._path = directory / paths.PACE
        self._rate = bytes_per_hour / _HOUR
        self._debt = 0.0  # bytes that were written and not yet allowed
        self._since = time.monotonic()
        self._path.unlink(missing_ok=True)

    def batch_wrote(self, size: int) -> None:
        """Count the bytes of a batch."""
        now = time.monotonic()
        self._debt = max(0.0, self._debt - (now - self._since) * self._rate) + size
        self._since = now
        wait = self._debt / self._rate - _AHEAD
        if wait > 0:
            write_durably(self._path, json.dumps({"next_batch": time.time() + wait}))
        else:
            self._path.unlink(missing_ok=True)


def next_batch(directory: Path) -> float | None:
    """When the next batch may begin, in seconds since the epoch; None: now."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found: Any = json.loads((directory / paths.PACE).read_bytes())["next_batch"]
        if time.time() < float(found):
            return float(found)
    return None
