"""A file of points that grows, for as long as they can be read. There is one writer, and any number of readers.

In a subscription's directory it is the ledger, in a lake what readers see of it. The writer reads it once, and appends.
Every now and then it writes the file anew, without the points that cannot be read any more, and puts it in the old
one's place: a reader has one or the other. Readers change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.ledger import entry as points
from walmere.ledger.entry import Entry, Points
from walmere.lsn import Lsn
from walmere.storage import Directory

KEEP_SECONDS: Final = 3600.0
TRIM: Final = 1000
"""Points that nobody can read any more: so many are worth a new file, if they are half of the old one."""


class History:
    """See above."""

    def __init__(self, directory: Directory, keep_seconds: float = KEEP_SECONDS) -> None:
        self._directory = directory
        self._keep_seconds = keep_seconds
        self._began: list[int] | None = None  # of every point in the file; None: we are not its writer
        self._last: Entry | None = None

    def points(self) -> Points:
        """All points, as the file has them now."""
        content = self._directory.read(paths.LEDGER)
        if not content:
            return Points([], self._keep_seconds, torn=False)
        return points.parse(content, f"{self._directory.location}/{paths.LEDGER}")

    def entries(self) -> Iterator[Entry]:
        """All points, oldest first."""
        return iter(self.points())

    def last(self) -> Entry | None:
        """The newest point."""
        if self._began is not None:
            return self._last
        there = self.points()
        return there[len(there) - 1] if len(there) else None

    def at(self, lsn: Lsn) -> Entry | None:
        """The point of exactly this LSN; of several, the newest: tables that were copied have joined the others."""
        there = self.points()
        place = points.newest(there.lsns, lsn)
        return there[place] if place >= 0 and there.lsns[place] == lsn else None

    def open(self) -> list[Entry]:
        """Become the writer: mend what a crash has left, and forget what cannot be read any more. Returns the rest."""
        there = self.points()
        gone = there.first_readable(points.now())
        kept = list(there)[gone:]
        # a longer time to keep is kept to from now on, and brings back nothing
        if gone or there.torn or (kept and there.keep_seconds != self._keep_seconds):
            self._write(kept)
        self._took(kept)
        return kept

    def restart(self, entries: Iterable[Entry]) -> None:
        """Become the writer, with these points instead of those in the file; also if there are none."""
        known = list(entries)
        self._write(known)
        self._took(known)

    def begin(self, entries: Iterable[Entry]) -> None:
        """Become the writer, with these points instead of those in the file. If there are none, they stay for now."""
        known = list(entries)
        if known:
            self._write(known)
        self._took(known)

    def take_out(self, table: str, lsn: Lsn, version: int) -> bool:
        """Take a table out of all points after an LSN, and of those with a later version of it. Returns if any had it.

        Only the writer may: its versions after this one are lost, and their numbers will be used again.
        """
        before = list(self.entries())
        after = [
            replace(entry, versions={name: its for name, its in entry.versions.items() if name != table})
            if entry.versions.get(table, -1) > version or (table in entry.versions and entry.lsn > lsn)
            else entry
            for entry in before
        ]
        changed = any(one.versions != other.versions for one, other in zip(before, after, strict=True))
        if changed:
            self._write(after)
            self._took(after)
        return changed

    def append(self, entry: Entry) -> Entry:
        """Add a point, durably. Returns it as written: where nothing was committed, with the commit time before."""
        if self._began is None:
            self.open()
        began, self._began = self._began or [], None  # if this fails, the next one has to mend it
        if self._last is None:
            self._write([entry])
        else:
            if entry.commit_time is None:
                entry = replace(entry, commit_time=self._last.commit_time)
            self._directory.append(paths.LEDGER, points.render(entry, self._last))
        began.append(entry.began)
        gone = points.expired(began, points.now(), self._keep_seconds)
        if gone >= TRIM and 2 * gone >= len(began):
            self._write(list(self.entries())[gone:])
            del began[:gone]
        self._began, self._last = began, entry
        return entry

    def _took(self, entries: list[Entry]) -> None:
        self._began = [entry.began for entry in entries]
        self._last = entries[-1] if entries else None

    def _write(self, entries: Iterable[Entry]) -> None:
        self._directory.replace(paths.LEDGER, points.render_all(entries, self._keep_seconds))


class Ledger(History):
    """A file of entries. Whoever appends first becomes its writer, and is to be the only one."""

    def __init__(self, directory: Path, keep_seconds: float = KEEP_SECONDS) -> None:
        super().__init__(Directory(str(directory)), keep_seconds)
