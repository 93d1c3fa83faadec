"""Cuts: somebody wants to see all tables as of one LSN, so a batch has to end exactly there.

The LSN is that of a snapshot which the source gives, and by the time it is known the run may have gone past it. So it
takes two steps. A **hold** keeps a run from planning another batch; what was planned before ends before the snapshot,
because the snapshot is made later. Once there is one, the hold becomes a **cut**: batches go on, and one of them ends
at its LSN. Receiving goes on all the time.

Each is a file in the subscription's directory, locked by who made it for as long as it is needed. If that process ends,
however it ends, the lock is gone and the file means nothing any more. A hold also expires by itself: a snapshot waits
for every transaction that is open on the source, and tables should not wait that long. While there is a cut, nothing is
vacuumed that its versions are made of.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from walmere import paths
from walmere.lsn import Lsn


class Cut:
    """A hold that becomes a cut."""

    def __init__(self, directory: Path, hold_seconds: float) -> None:
        place = directory / paths.CUTS
        place.mkdir(parents=True, exist_ok=True)
        self._path = place / uuid.uuid4().hex
        temporary = self._path.with_suffix(".tmp")
        self._file = os.open(temporary, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.pwrite(self._file, f"hold {time.time() + hold_seconds}\n".encode(), 0)
        temporary.rename(self._path)

    def at(self, lsn: Lsn) -> None:
        """End the hold, and have a batch end here."""
        os.pwrite(self._file, f"{lsn}\n".ljust(40).encode(), 0)

    def close(self) -> None:
        """Nobody needs it any more."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of a run now."""

    hold: bool = False
    at: tuple[Lsn, ...] = ()

    def end(self, start: Lsn, log_end: Lsn) -> Lsn | None:
        """Where a batch from `start` on has to end, if that is in the log; None: wherever it likes."""
        if self.hold:
            return start
        return min((lsn for lsn in self.at if start < lsn <= log_end), default=None)


def wanted(directory: Path) -> Wanted:
    """All holds and cuts whose makers are alive."""
    hold = False
    at: list[Lsn] = []
    for path in (directory / paths.CUTS).glob("*"):
        if path.suffix:
            continue  # it is being made
        with suppress(FileNotFoundError, ValueError):  # it is over by now, or has just begun
            text = _held(path)
            if text.startswith("hold "):
                hold |= time.time() < float(text.removeprefix("hold "))
            elif text:
                at.append(Lsn.parse(text))
    return Wanted(hold, tuple(at))


def _held(path: Path) -> str:
    """What it says, if somebody holds it; else it is removed."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip()
    path.unlink()
    return ""
