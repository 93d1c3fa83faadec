"""Retention: a segment goes when every sink has applied it and its keep time is over.

The oldest records go, never one from the middle, so the log stays one piece. A new manifest without them replaces the
old in one step, then their files are deleted; after a crash in between, the files are merely left-overs. Definitions of
relations stay: they are small, and later blocks refer to them. So does a prepared transaction that is still waiting.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Final

from walmere.changelog import manifest
from walmere.changelog.manifest import (
    Entry,
    Manifest,
    Position,
    Prepared,
    RolledBack,
    Transaction,
    Transactions,
)
from walmere.changelog.writer import Flusher, Writer
from walmere.lsn import Lsn
from walmere.pgoutput.relation import RelationVersion

_IDLE: Final = 1000
"""Records of a mere position that are worth a new manifest: an idle source makes some every minute."""


def submit(writer: Writer, applied: Lsn | None, keep_seconds: float) -> None:
    """Let the writer's flusher trim the log in its turn. `applied`: by every sink; None if there is none."""
    writer.trim(partial(_trim, applied, time.time() - keep_seconds))


def _trim(applied: Lsn | None, before: float, flusher: Flusher) -> None:
    directory = flusher.directory
    kept: list[Entry] = []
    waiting: dict[str, Prepared] = {}
    gone: list[str] = []
    with Manifest(directory) as source:
        header = source.header
        start, sequence = header.start_lsn, header.first_sequence
        removing, idle = True, 0
        for entry in source.entries():
            if isinstance(entry, RelationVersion):
                kept.append(entry)
                continue
            removing = removing and _may_go(entry, applied, before)
            if not removing:
                kept.append(entry)
                continue
            start, sequence = max(start, entry.end_lsn), max(sequence, entry.last_sequence + 1)
            idle += isinstance(entry, Position)
            match entry:
                case Prepared():
                    waiting[entry.gid] = entry
                case RolledBack():
                    waiting.pop(entry.gid, None)
                case Transactions() | Transaction():
                    gone.extend(segment.file for segment in entry.segments)
                    if isinstance(entry, Transaction) and entry.gid is not None:
                        waiting.pop(entry.gid, None)
    if not gone and idle < _IDLE:
        return
    trimmed = replace(header, start_lsn=start, first_sequence=sequence)
    manifest.create(directory, trimmed, [*waiting.values(), *kept])
    flusher.reopen()
    for file in gone:
        (directory / file).unlink(missing_ok=True)


def _may_go(entry: manifest.Record, applied: Lsn | None, before: float) -> bool:
    if applied is not None and entry.end_lsn > applied:
        return False
    return not isinstance(entry, Transactions | Transaction) or entry.commit_time < before * 1e6
