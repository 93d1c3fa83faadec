"""What upkeep has done, in a file: for `walmere status`, and for the next run.

The file has the bytes of the last hour and the times of the next vacuums, because runs may be shorter than that
(`--once`). Bytes are recorded before they are written, so that the limit also holds for a process that is killed again
and again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from walmere import paths
from walmere.storage import write_durably


@dataclass(slots=True)
class BytesPerHour:
    """Bytes that were written within the last hour, by minute."""

    by_minute: dict[int, int] = field(default_factory=dict)  # since the epoch

    def add(self, size: int) -> None:
        """Count bytes that were just written."""
        minute = int(time.time() // 60)
        self.by_minute[minute] = self.by_minute.get(minute, 0) + size

    def total(self) -> int:
        """The bytes of the last hour."""
        first = int(time.time() // 60) - 60
        self.by_minute = {minute: size for minute, size in self.by_minute.items() if minute > first and size}
        return sum(self.by_minute.values())


class UpkeepRecord:
    """The file, and what is in it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.rewritten = _read_bytes(_read(directory, "rewritten"))
        self.written = {name: _read_bytes(found) for name, found in _read(directory, "written").items()}
        self.vacuum_at: dict[str, float] = _read(directory, "vacuum_at")  # by name, in seconds since the epoch

    def write(self, waits: Mapping[str, str]) -> None:
        """Write the file. `waits` says, by name of a table, what its upkeep waits for."""
        content = {
            "rewritten_bytes_per_hour": self.rewritten.total(),
            "rewritten": self.rewritten.by_minute,
            "written": {name: written.by_minute for name, written in self.written.items()},
            "vacuum_at": self.vacuum_at,
            "tables": {name: self._status(name, waits) for name in _sorted(self.written, waits)},
        }
        write_durably(self._directory / paths.MAINTENANCE, json.dumps(content))

    def _status(self, name: str, waits: Mapping[str, str]) -> dict[str, Any]:
        written = self.written.get(name, BytesPerHour())
        return {"written_bytes_per_hour": written.total(), "upkeep_waits_for": waits.get(name)}


def _sorted(*names: Iterable[str]) -> list[str]:
    return sorted({name for group in names for name in group})


def read_status(directory: Path) -> dict[str, Any]:
    """What the last round wrote, by table; empty if there is nothing."""
    return _read(directory, "tables")


def _read(directory: Path, what: str) -> dict[str, Any]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        found: dict[str, Any] = json.loads((directory / paths.MAINTENANCE).read_bytes())[what]
        return dict(found)
    return {}


def _read_bytes(found: Any) -> BytesPerHour:
    with suppress(ValueError, TypeError, AttributeError):
        return BytesPerHour({int(minute): int(size) for minute, size in found.items()})
    return BytesPerHour()
