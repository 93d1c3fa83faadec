"""How far each sink has applied the source's WAL: the progress of PostgreSQL's replication origins.

A sink, which is the target or a query, writes its position here after its commit is durable. The receiver reads all of
them: the smallest is the *applied* position in its feedback, and a segment is removed only after every sink has it. A
subscription without a sink has no applied position, and its log is kept by time alone.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.errors import StateDamaged
from walmere.lsn import INVALID_LSN, Lsn
from walmere.storage import read_json, sync_directory, write_durably

TARGET: Final = "target"
"""The sink of the subscription's tables. All others are queries."""


class SinkPositions:
    """The positions of all sinks of one subscription."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / paths.POSITIONS
        earlier = directory / paths.POSITIONS_OF_EARLIER_VERSIONS
        if earlier.is_dir() and not self._directory.exists():
            with suppress(OSError):  # another process was faster
                earlier.rename(self._directory)

    def advance(self, sink: str, lsn: Lsn) -> None:
        """Record durably that the sink has applied everything before the LSN."""
        self._directory.mkdir(parents=True, exist_ok=True)
        write_durably(self._directory / f"{sink}.json", json.dumps({"lsn": str(lsn)}))
        sync_directory(self._directory.parent)

    def join(self, sink: str) -> None:
        """Keep the log for this sink from now on; a new sink needs all of it."""
        if not (self._directory / f"{sink}.json").exists():
            self.advance(sink, INVALID_LSN)

    def repair(self, sink: str, lsn: Lsn) -> bool:
        """Write this position if the sink's own is missing or damaged. Returns whether it was."""
        path = self._directory / f"{sink}.json"
        try:
            _read(path)
        except (FileNotFoundError, StateDamaged):
            self.advance(sink, lsn)
            return True
        return False

    def positions(self) -> dict[str, Lsn]:
        """The positions by sink. Raises StateDamaged."""
        return {path.stem: _read(path) for path in sorted(self._directory.glob("*.json"))}

    def applied(self) -> Lsn | None:
        """The smallest position; None if there is no sink."""
        return min(self.positions().values(), default=None)


def _read(path: Path) -> Lsn:
    hint = (
        "`walmere run` writes it again"
        if path.stem == TARGET
        else "start its query again, which writes it again; or delete it, if the query is not needed any more"
    )
    return read_json(path, lambda content: Lsn.parse(content["lsn"]), hint)
