"""Move a local change log to a store, when `[subscription] store` is set for a subscription that has one.

The objects are put below a new generation first. Creating the head makes them the log. After a crash before that, the
next start begins again, with another generation.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

from walmere.changelog.manifest import Entry, Manifest
from walmere.changelog.records import Position, Prepared, RolledBack, Transaction, render_header
from walmere.changelog.segment import damaged
from walmere.changelog.segment_entry import Segment, Stored
from walmere.changelog.store.claim import create_head, writer_name
from walmere.changelog.store.log_store import GENERATION, LogStore
from walmere.changelog.store.objects import ObjectHeader, build
from walmere.lsn import Lsn
from walmere.object_store import ObjectStore


def import_log(store: ObjectStore, subscription: str, directory: Path, max_bytes: int) -> bool:
    """Put the log in a directory into the store. Returns False if there is a log in the store already."""
    log, writer = LogStore(store, f"{GENERATION}{secrets.token_hex(8)}"), writer_name()
    known: dict[str, Stored] = {}
    with Manifest(directory) as source:
        lines = [render_header(source.header)]
        number = 1
        for number, entries in enumerate(_pieces(directory, source, max_bytes), 1):
            files = {
                segment.file: _read(directory, segment)
                for entry in entries
                for segment in getattr(entry, "segments", ())
                if segment.file not in known  # of a prepared transaction, which has committed
            }
            upload = build(ObjectHeader(number, 0, writer), entries, files, known)
            store.create(log.name(number), upload.content)
            known |= upload.places
            lines.append(upload.begin.lines)
    return create_head(log, subscription, b"".join(lines), number + 1)


def _pieces(directory: Path, source: Manifest, max_bytes: int) -> Iterator[list[Entry]]:
    """The entries of each object."""
    rolled_back = _rolled_back(directory)
    piece: list[Entry] = []
    size = 0
    for entry in source.entries():
        if isinstance(entry, RolledBack) or (isinstance(entry, Prepared) and entry.end_lsn in rolled_back):
            piece.append(Position(entry.end_lsn, entry.last_sequence))  # its segments are deleted
        else:
            piece.append(entry)
            size += sum(segment.length for segment in getattr(entry, "segments", ()))
        if size >= max_bytes:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _rolled_back(directory: Path) -> set[Lsn]:
    """The prepared transactions that were rolled back, by the LSN of their records. Another may have the same gid."""
    found: set[Lsn] = set()
    waiting: dict[str, Lsn] = {}
    with Manifest(directory) as log:
        for entry in log.entries():
            if isinstance(entry, Prepared):
                waiting[entry.gid] = entry.end_lsn
            elif isinstance(entry, RolledBack) and entry.gid in waiting:
                found.add(waiting.pop(entry.gid))
            elif isinstance(entry, Transaction) and entry.gid is not None:
                waiting.pop(entry.gid, None)
    return found


def _read(directory: Path, segment: Segment) -> bytes:
    try:
        return (directory / segment.file).read_bytes()
    except FileNotFoundError:
        raise damaged(directory / segment.file, "the file is missing") from None
