"""How far each sink has applied the source's WAL: the progress of PostgreSQL's replication origins.

A sink, which is the target or a query, writes its position here after its commit is durable. The receiver reads all of
them: the smallest is the *applied* position in its feedback, and no segment goes before every sink has it. A
subscription without a sink has no applied position, and its log is kept by time alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.errors import StateDamaged
from walmere.lsn import INVALID_LSN, Lsn
from walmere.storage import read_json, sync_directory, write_durably

TARGET: Final = "target"
"""The sink that a subscription's tables are in; any other is a query."""


class SinkPositions:
    """The positions of all sinks of one subscription."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / paths.POSITIONS

    def advance(self, sink: str, lsn: Lsn) -> None:
        """Record durably that this sink has applied everything before the LSN."""
        self._directory.mkdir(parents=True, exist_ok=True)
        write_durably(self._directory / f"{sink}.json", json.dumps({"lsn": str(lsn)}))
        sync_directory(self._directory.parent)

    def join(self, sink: str) -> None:
        """Have the log kept for this sink from now on; all of it, if it is new."""
        if not (self._directory / f"{sink}.json").exists():
            self.advance(sink, INVALID_LSN)

    def repair(self, sink: str, lsn: Lsn) -> bool:
        """If the position of a sink is lost or cannot be read, write this one. Returns whether that was so."""
        path = self._directory / f"{sink}.json"
        try:
            _read(path)
        except (FileNotFoundError, StateDamaged):
            self.advance(sink, lsn)
            return True
        return False

    def positions(self) -> dict[str, Lsn]:
        """Of all sinks. Raises StateDamaged."""
        return {path.stem: _read(path) for path in sorted(self._directory.glob("*.json"))}

    def applied(self) -> Lsn | None:
        """What every sink has applied; None if there is no sink."""
        return min(self.positions().values(), default=None)


def _read(path: Path) -> Lsn:
    way_out = (
        "`walmere run` writes it anew"
        if path.stem == TARGET
        else "start its query again, which writes it anew; or delete it, if that query is not needed any more"
    )
    return read_json(path, lambda content: Lsn.parse(content["lsn"]), way_out)
