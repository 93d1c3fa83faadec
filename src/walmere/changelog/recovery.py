"""Open a log after a crash: keep its undamaged part, remove the rest, and delete files that no record names.

PostgreSQL sends again what was not confirmed. So a damaged record that begins at or after the confirmed LSN is removed,
with everything after it. Damage before that LSN is an error, and nothing is changed on disk: PostgreSQL no longer has
those changes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from walmere.changelog import manifest_file
from walmere.changelog.manifest import Entry, Manifest, Summary
from walmere.changelog.records import Prepared, RolledBack, Transaction
from walmere.changelog.segment import open_segment, read_block
from walmere.changelog.segment_entry import SUFFIX, TEMPORARY, Segment
from walmere.errors import ChangeLogDamaged
from walmere.lsn import Lsn

_log = logging.getLogger(__name__)


def recover(directory: Path, confirmed: Lsn) -> Summary:
    """Remove damage after the confirmed LSN, and files that no record names. Returns what a writer needs to know."""
    path = directory / manifest_file.NAME
    with Manifest(directory) as source:
        recovery = _Recovery(directory, confirmed, source)
        recovery.read()
    summary = recovery.summary
    damaged = recovery.good_bytes < path.stat().st_size
    if summary.end_lsn < confirmed:
        if damaged:
            raise ChangeLogDamaged(
                f"reading the manifest {path}",
                f"it is damaged after {summary.end_lsn}, but the slot has been confirmed to {confirmed}",
                "run `walmere drop`, then start the subscription again",
            )
        return summary  # the receiver refuses to continue
    if damaged:
        with path.open("r+b") as file:
            file.truncate(recovery.good_bytes)
            os.fsync(file.fileno())
    for orphan in recovery.orphans:
        (directory / orphan).unlink(missing_ok=True)
    return summary


class _Recovery:
    """Reads a log up to the first damage that PostgreSQL can send again."""

    def __init__(self, directory: Path, confirmed: Lsn, source: Manifest) -> None:
        self._directory = directory
        self._confirmed = confirmed
        self._source = source
        self._not_sent_again: set[str] = set()  # prepared transactions, by gid
        header = source.header
        self.summary = Summary(header, header.start_lsn, last_sequence=header.first_sequence - 1)
        self.orphans = data_files(directory)  # files that no record names
        self.good_bytes = source.position  # length of the manifest up to the damage

    def read(self) -> None:
        for entry in self._source.entries():
            if self._is_damaged(entry):
                break
            self._add(entry)
            self.good_bytes = self._source.position

    def _is_damaged(self, entry: Entry) -> bool:
        """Check the segments of an entry. Raises ChangeLogDamaged if PostgreSQL does not send it again."""
        unconfirmed = self.summary.end_lsn >= self._confirmed
        sent_again = unconfirmed and getattr(entry, "gid", None) not in self._not_sent_again
        if isinstance(entry, Prepared) and not (sent_again and entry.end_lsn > self._confirmed):
            sent_again = False
            self._not_sent_again.add(entry.gid)
        try:
            for segment in _segments(entry):
                _verify(self._directory, segment, checksums=unconfirmed)
        except ChangeLogDamaged as error:
            if isinstance(entry, Prepared) and _is_rolled_back(self._directory, self._source.position, entry.gid):
                return False  # ROLLBACK PREPARED has deleted its segments
            if not sent_again:
                raise
            wrong = f"{error.doing}: {error.wrong}"
            _log.warning("%s; receiving everything after %s again", wrong, self.summary.end_lsn)
            return True
        return False

    def _add(self, entry: Entry) -> None:
        self.orphans.difference_update(segment.file for segment in _segments(entry))
        if isinstance(entry, RolledBack) and entry.gid in self.summary.prepared:
            self.orphans.update(segment.file for segment in self.summary.prepared[entry.gid].segments)
        if isinstance(entry, RolledBack | Transaction) and entry.gid is not None:
            self._not_sent_again.discard(entry.gid)
        self.summary.add(entry)


def _is_rolled_back(directory: Path, position: int, gid: str) -> bool:
    """Whether the manifest has ROLLBACK PREPARED of this transaction after a position."""
    with Manifest(directory) as ahead:
        ahead.position = position
        for entry in ahead.entries():
            if isinstance(entry, RolledBack | Transaction) and entry.gid == gid:
                return isinstance(entry, RolledBack)
    return False


def _segments(entry: Entry) -> tuple[Segment, ...]:
    return getattr(entry, "segments", ())


def _verify(directory: Path, segment: Segment, *, checksums: bool) -> None:
    with open_segment(directory, segment):
        pass
    if checksums:
        for index in range(len(segment.blocks)):
            read_block(directory, segment, index)


def data_files(directory: Path) -> set[str]:
    """The files of segments, and temporary files."""
    return {path.name for path in directory.iterdir() if path.suffix in (SUFFIX, TEMPORARY)}
