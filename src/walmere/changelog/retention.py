"""Retention: remove segments that every sink has applied, when they are older than `keep_seconds`.

Only the oldest records are removed, so the log has no gaps. First a new manifest without them replaces the old one
atomically, then their files are deleted. After a crash in between, the next start deletes the files. Definitions of
relations stay: they are small, and later blocks refer to them. So do prepared transactions that are not yet committed.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Final

from walmere.changelog.manifest import Entry, Manifest
from walmere.changelog.records import Position, Prepared, Record, RolledBack, Transaction, Transactions
from walmere.changelog.writer import Flusher, Writer
from walmere.lsn import Lsn
from walmere.pgoutput.relation import RelationVersion

_MIN_POSITIONS: Final = 1000
"""Write a new manifest to remove this many `position` records: an idle source makes some every minute."""


def submit(writer: Writer, applied: Lsn | None, keep_seconds: float) -> None:
    """Trim the log in the flusher's thread. `applied`: by every sink; None if there is no sink."""
    writer.trim(partial(_trim, applied, time.time() - keep_seconds))


def _trim(applied: Lsn | None, before: float, flusher: Flusher) -> None:
    flusher.settle()
    kept: list[Entry] = []
    waiting: dict[str, Prepared] = {}
    removed: list[str] = []
    with Manifest(flusher.directory) as source:
        header = source.header
        start, sequence = header.start_lsn, header.first_sequence
        removing, positions = True, 0
        for entry in source.entries():
            if isinstance(entry, RelationVersion):
                kept.append(entry)
                continue
            removing = removing and _may_remove(entry, applied, before)
            if not removing:
                kept.append(entry)
                continue
            start, sequence = max(start, entry.end_lsn), max(sequence, entry.last_sequence + 1)
            positions += isinstance(entry, Position)
            match entry:
                case Prepared():
                    waiting[entry.gid] = entry
                case RolledBack():
                    if (found := waiting.pop(entry.gid, None)) is not None:
                        # they are still there if both were put into the store in one object
                        removed.extend(segment.file for segment in found.segments)
                case Transactions() | Transaction():
                    removed.extend(segment.file for segment in entry.segments)
                    if isinstance(entry, Transaction) and entry.gid is not None:
                        waiting.pop(entry.gid, None)
    if not removed and positions < _MIN_POSITIONS:
        return
    trimmed = replace(header, start_lsn=start, first_sequence=sequence)
    flusher.replace_manifest(trimmed, [*waiting.values(), *kept], removed)


def _may_remove(entry: Record, applied: Lsn | None, before: float) -> bool:
    if applied is not None and entry.end_lsn > applied:
        return False
    return not isinstance(entry, Transactions | Transaction) or entry.commit_time < before * 1e6
