"""The pace of batches that rewrite files: not more bytes per hour than `[target] max_rewrite_bytes_per_hour`.

Without deletion vectors, a batch rewrites the files of the rows that it changes, and ten times as many changes often
rewrite the same files. So if rewriting costs too much, batches get larger: the next one begins when the bytes of the
last ones are within the limit again. Changes wait in the change log, and the source keeps no WAL for them.

The driver writes when the next batch may begin, and the process that plans batches reads it. The file outlives the
process, so that a restart does not write more. A run that ends by itself (`--once`) does not wait: it was asked for.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.storage import write_durably

_HOUR: Final = 3600.0
_AHEAD: Final = 300.0
"""Seconds whose bytes may be written at once."""


class Pace:
    """Counts the bytes of batches, and sets when the next one may begin."""

    def __init__(self, directory: Path, bytes_per_hour: int) -> None:
        self._directory = directory
        self._rate = bytes_per_hour / _HOUR

    def batch_wrote(self, size: int) -> None:
        """Count the bytes of a batch."""
        now = time.time()
        written_until = max(now, _read(self._directory) or 0.0) + size / self._rate
        write_durably(self._directory / paths.PACE, json.dumps({"written_until": written_until}))


def reset(directory: Path) -> None:
    """Forget what was written: nothing is rewritten any more."""
    (directory / paths.PACE).unlink(missing_ok=True)


def _read(directory: Path) -> float | None:
    """When everything that was written would have been written at the rate of the limit, in seconds since the epoch."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return float(json.loads((directory / paths.PACE).read_bytes())["written_until"])
    return None


def next_batch(directory: Path) -> float | None:
    """When the next batch may begin, in seconds since the epoch; None: now."""
    written_until = _read(directory)
    if written_until is None or written_until - _AHEAD <= time.time():
        return None
    return written_until - _AHEAD
