"""The file of points. It has one writer, and any number of readers.

In a subscription's directory it is the ledger, and in the lake its copy for readers. The writer reads the file once,
then appends. From time to time it writes a new file without the points that can no longer be read. It replaces the old
one atomically. Readers never change the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.directory import Directory
from walmere.ledger import entry as points
from walmere.ledger.entry import Entry, Points
from walmere.ledger.lines import lines
from walmere.lsn import Lsn

KEEP_SECONDS: Final = 3600.0
TRIM_AFTER: Final = 1000
"""Write a new file when this many points can no longer be read, and they are half of the file."""


class History:
    """A file of points, to read or to write."""

    def __init__(self, directory: Directory, keep_seconds: float = KEEP_SECONDS) -> None:
        self._directory = directory
        self._lines = lines(directory, paths.LEDGER)
        self._keep_seconds = keep_seconds
        self._began: list[int] | None = None  # of each point in the file; None: this is not its writer
        self._last: Entry | None = None

    def points(self) -> Points:
        """All points, as the file has them now."""
        content = self._lines.read()
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
        found = self.points()
        return found[len(found) - 1] if len(found) else None

    def at(self, lsn: Lsn) -> Entry | None:
        """The point of exactly this LSN; of several, the newest. A copied table makes a second one."""
        found = self.points()
        index = points.newest(found.lsns, lsn)
        return found[index] if index >= 0 and found.lsns[index] == lsn else None

    def open(self) -> list[Entry]:
        """Become the writer. Repairs the file after a crash, and removes points that can no longer be read."""
        found = self.points()
        expired = found.first_readable(points.now())
        kept = list(found)[expired:]
        # a longer `keep_seconds` holds from now on; points that were removed stay removed
        if expired or found.torn or (kept and found.keep_seconds != self._keep_seconds):
            self._write(kept)
        self._remember(kept)
        return kept

    def restart(self, entries: Iterable[Entry]) -> None:
        """Become the writer, and replace the points in the file with these."""
        known = list(entries)
        self._write(known)
        self._remember(known)

    def begin(self, entries: Iterable[Entry]) -> None:
        """Become the writer, and replace the points in the file with these. If there are none, the file stays."""
        known = list(entries)
        if known:
            self._write(known)
        self._remember(known)

    def remove_table(self, table: str, lsn: Lsn, version: int) -> bool:
        """Remove a table from points after an LSN, and from those with a later version. Returns whether any had it.

        For a table that has lost versions: their numbers will be used again. Only the writer may call this.
        """
        before = list(self.entries())
        after = [
            replace(entry, versions={name: kept for name, kept in entry.versions.items() if name != table})
            if entry.versions.get(table, -1) > version or (table in entry.versions and entry.lsn > lsn)
            else entry
            for entry in before
        ]
        changed = any(one.versions != other.versions for one, other in zip(before, after, strict=True))
        if changed:
            self._write(after)
            self._remember(after)
        return changed

    def append(self, entry: Entry) -> Entry:
        """Append a point, durably. Returns it as written: without a commit time, it has that of the point before."""
        if self._began is None:
            self.open()
        began, self._began = self._began or [], None  # if this fails, the next call repairs the file
        if self._last is None:
            self._write([entry])
        else:
            if entry.commit_time is None:
                entry = replace(entry, commit_time=self._last.commit_time)
            self._lines.append(points.render(entry, self._last))
        began.append(entry.began)
        expired = points.expired(began, points.now(), self._keep_seconds)
        if expired >= TRIM_AFTER and 2 * expired >= len(began):
            self._write(list(self.entries())[expired:])
            del began[:expired]
        self._began, self._last = began, entry
        return entry

    def _remember(self, entries: list[Entry]) -> None:
        self._began = [entry.began for entry in entries]
        self._last = entries[-1] if entries else None

    def _write(self, entries: Iterable[Entry]) -> None:
        self._lines.replace(points.render_all(entries, self._keep_seconds))


class Ledger(History):
    """The ledger in a subscription's directory."""

    def __init__(self, directory: Path, keep_seconds: float = KEEP_SECONDS) -> None:
        super().__init__(Directory(str(directory)), keep_seconds)
