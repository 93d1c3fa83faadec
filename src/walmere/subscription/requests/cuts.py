"""Cuts: requests that a batch ends exactly at an LSN, so that all tables can be read as of it.

The LSN is that of a snapshot of the source. When it is known, the run may already have passed it, so there are two
steps. A **hold** keeps the run from planning another batch; earlier batches end before the snapshot, because the
snapshot is made later. Then the hold becomes a **cut**: batches continue, and one of them ends at its LSN. Receiving
continues all the time. A target without old versions is read while nothing is applied: at a cut that **stays**, no
batch follows until it is replaced by a cut.

Each is a file in the subscription's directory, locked by the process that created it. If that process ends, the lock is
released and the file is ignored. A hold also expires: a snapshot waits for every open transaction on the source, and
the tables should not wait that long. While there is a cut, no table is vacuumed, so that its versions stay readable.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.lsn import Lsn

_STAY: Final = "stay "


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
        """Replace the hold by a cut at this LSN."""
        os.pwrite(self._file, f"{lsn}\n".ljust(40).encode(), 0)

    def stay_at(self, lsn: Lsn) -> None:
        """Replace the hold by a cut at this LSN, after which no batch follows."""
        os.pwrite(self._file, f"{_STAY}{lsn}\n".ljust(40).encode(), 0)

    def close(self) -> None:
        """Remove the hold or cut."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class ActiveCuts:
    """The holds and cuts that a run has to respect now."""

    hold: bool = False
    at: tuple[Lsn, ...] = ()
    stays: tuple[Lsn, ...] = ()  # those of `at` after which no batch follows

    def end(self, start: Lsn, log_end: Lsn) -> Lsn | None:
        """The LSN at which a batch from `start` has to end. None: no cut is in this part of the log."""
        if self.hold or start in self.stays:
            return start
        return min((lsn for lsn in self.at if start < lsn <= log_end), default=None)


def active(directory: Path) -> ActiveCuts:
    """All holds and cuts whose processes are running."""
    hold = False
    at: list[Lsn] = []
    stays: list[Lsn] = []
    for path in (directory / paths.CUTS).glob("*"):
        if path.suffix:
            continue  # it is being created
        with suppress(FileNotFoundError, ValueError):  # removed meanwhile, or being written
            text = _read_locked(path)
            if text.startswith("hold "):
                hold |= time.time() < float(text.removeprefix("hold "))
            elif text.startswith(_STAY):
                stays.append(Lsn.parse(text.removeprefix(_STAY)))
            elif text:
                at.append(Lsn.parse(text))
    return ActiveCuts(hold, (*at, *stays), tuple(stays))


def _read_locked(path: Path) -> str:
    """The content, if a process holds the lock; else the file is removed."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip()
    path.unlink()
    return ""
