"""The writing end of the change log. There is exactly one writer to a log, held by a lock on its directory.

Writing and making durable are two steps, and two threads. The receiver's thread writes blocks into files that have
no name yet. When it cuts a segment, the file goes to the *flusher*, which, strictly in order,

    1. fsyncs the file, gives it its name, fsyncs the directory;
    2. appends the manifest's lines and fsyncs the manifest;
    3. moves `durable`, the LSN that may be confirmed to PostgreSQL.

So a slow disk never stops the conversation with the walsender, and nothing is confirmed before step 2 is over. A crash
between any two instructions leaves files that the manifest does not name (removed at the next start), or a torn last
line (cut off). Both were never confirmed, so PostgreSQL sends them again.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from walmere.changelog import manifest
from walmere.changelog.manifest import (
    Entry,
    Header,
    Manifest,
    Position,
    Prepared,
    Record,
    RolledBack,
    Summary,
    Transaction,
    Transactions,
)
from walmere.changelog.segment import SUFFIX, TEMPORARY, Chunk, Segment, SegmentWriter, open_segment, read_block
from walmere.errors import ChangeLogDamaged, ChangeLogError
from walmere.lsn import Lsn
from walmere.storage import sync_directory

_log = logging.getLogger(__name__)

QUEUE: Final = 4
"""Segments that may wait for the disk before reading from the source pauses."""


class Writer:
    """Appends whole transactions. The caller holds the Lock."""

    def __init__(self, directory: Path, confirmed: Lsn, *, segment_bytes: int = 64 << 20) -> None:
        """Open an existing log; what is damaged after `confirmed` is cut off, to be received again."""
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.summary = _recover(directory, confirmed)
        self._current: SegmentWriter | None = None
        self._pending: Transactions | None = None  # what the current segment will be
        self._opened = 0.0
        self._definitions: list[Entry] = []
        self._submitted = self.summary.end_lsn
        self._flusher = Flusher(directory, self.summary.end_lsn)

    def flush(self) -> None:
        """End the current segment and wait until everything is durable."""
        self.cut()
        self._flusher.drain()
        self.check()

    def close(self) -> None:
        """End. What was not cut is forgotten; it was never confirmed."""
        if self._current is not None:
            self._current.discard()
        self._flusher.close()

    @property
    def durable(self) -> Lsn:
        """Everything that was committed before this is on disk."""
        return self._flusher.durable

    @property
    def busy(self) -> bool:
        """The disk is behind: read no more from the source for now."""
        return self._flusher.waiting >= QUEUE

    @property
    def settled(self) -> bool:
        """All that was appended is durable."""
        return self._pending is None and self.durable >= self._submitted

    def check(self) -> None:
        """Raise what went wrong in the flusher, if anything did."""
        if (failure := self._flusher.failure) is not None:
            raise ChangeLogError(
                f"writing the change log in {self.directory}",
                f"{failure}",
                "make room or repair the disk, then start again; nothing was confirmed that is not durable",
            ) from failure

    def define(self, definition: Entry) -> None:
        """Remember a relation's definition, to be written with the next records."""
        self._definitions.append(definition)

    def append(self, chunk: Chunk, *, count: int, commit_lsn: Lsn, end_lsn: Lsn, commit_time: int) -> None:
        """Add whole transactions to the current segment."""
        if self._current is None:
            self._current = SegmentWriter(self.directory, name(chunk.first_sequence))
            self._opened = time.monotonic()
        self._current.append(chunk)
        before = self._pending.count if self._pending else 0
        last_sequence = chunk.first_sequence + len(chunk.relation) - 1
        nothing = Segment("", 0, streamed=False, blocks=())
        self._pending = Transactions(nothing, before + count, commit_lsn, end_lsn, commit_time, last_sequence)
        if self._current.length >= self.segment_bytes:
            self.cut()

    def cut_if_older(self, seconds: float) -> None:
        """End the current segment if it was begun so long ago."""
        if self._current is not None and time.monotonic() - self._opened >= seconds:
            self.cut()

    def cut(self) -> None:
        """End the current segment and hand it to the flusher."""
        if self._current is None or self._pending is None:
            return
        p = self._pending
        segment = self._current.seal()
        record = Transactions(segment, p.count, p.commit_lsn, p.end_lsn, p.commit_time, p.last_sequence)
        writer, self._current, self._pending = self._current, None, None
        self._submit(record, writer)

    def append_record(self, record: Record) -> None:
        """Append a record about segments that are already on their way, in its turn."""
        self.cut()
        self._submit(record)

    def spool(self, writer: SegmentWriter) -> Segment:
        """Make a segment of a transaction in progress durable. Nobody sees it before its record is in the manifest."""
        segment = writer.seal()
        self._flusher.submit(partial(self._flusher.store, [writer], [], None))
        return segment

    def advance(self, lsn: Lsn, last_sequence: int) -> None:
        """Everything before this LSN has been received, although there was nothing to store."""
        self.cut()
        if lsn > self._submitted:
            self._submit(Position(lsn, last_sequence))

    def remove(self, segments: Iterable[Segment]) -> None:
        """Delete files that no record names, after what was submitted before."""
        paths = [self.directory / segment.file for segment in segments]
        self._flusher.submit(partial(_unlink, paths))

    def trim(self, task: Callable[[Flusher], None]) -> None:
        """Let retention work on the manifest, between two of the flusher's jobs."""
        self._flusher.submit(partial(task, self._flusher))

    def _submit(self, record: Record, *writers: SegmentWriter) -> None:
        entries: list[Entry] = [*self._definitions, record]
        self._definitions = []
        self._submitted = record.end_lsn
        self.summary.add(record)
        self._flusher.submit(partial(self._flusher.store, list(writers), entries, record.end_lsn))


class Flusher:
    """The thread that makes things durable, one after the other."""

    def __init__(self, directory: Path, durable: Lsn) -> None:
        self.directory = directory
        self.durable = durable
        self.failure: Exception | None = None
        self.open()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="walmere-flusher", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._jobs.qsize()

    def open(self) -> None:
        """Open the manifest; again after retention has replaced it."""
        self._manifest = os.open(self.directory / manifest.NAME, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def store(self, writers: list[SegmentWriter], entries: list[Entry], end_lsn: Lsn | None) -> None:
        for writer in writers:
            writer.finish()
        if writers:
            sync_directory(self.directory)
        if entries:
            _write_all(self._manifest, b"".join(map(manifest.render, entries)))
            os.fsync(self._manifest)
        if end_lsn is not None:
            self.durable = max(self.durable, end_lsn)

    def drain(self) -> None:
        """Wait until everything submitted so far is done."""
        done = threading.Event()
        self._jobs.put(done.set)
        while not done.wait(0.1) and self.failure is None:
            pass

    def reopen(self) -> None:
        os.close(self._manifest)
        self.open()

    def close(self) -> None:
        """Finish what was submitted, and end."""
        self._jobs.put(None)
        self._thread.join()
        os.close(self._manifest)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self.failure is None:
                try:
                    job()
                except Exception as error:  # handed to the receiver by Writer.check
                    self.failure = error


def name(first_sequence: int) -> str:
    """The file of the segment that begins with this message."""
    return f"{first_sequence:020d}{SUFFIX}"


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _unlink(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _recover(directory: Path, confirmed: Lsn) -> Summary:
    """Find what can be trusted, cut off the rest, and remove files that no record names.

    PostgreSQL sends again what was not confirmed. So a damaged record that begins at or after the confirmed position
    is dropped, with all that follow it; one before is an error, because nobody has its contents any more. Nothing is
    changed on disk then.
    """
    path = directory / manifest.NAME
    orphans = _data_files(directory)
    firm: set[str] = set()  # prepared transactions whose contents the server does not send again
    with Manifest(directory) as source:
        summary = Summary(source.header, source.header.start_lsn, last_sequence=source.header.first_sequence - 1)
        trusted = source.position
        for entry in source.entries():
            segments = _segments(entry)
            again = summary.end_lsn >= confirmed and getattr(entry, "gid", None) not in firm
            if isinstance(entry, Prepared) and not (again and entry.end_lsn > confirmed):
                again = False
                firm.add(entry.gid)
            try:
                for segment in segments:
                    _verify(directory, segment, thoroughly=summary.end_lsn >= confirmed)
            except ChangeLogDamaged as error:
                if isinstance(entry, Prepared) and _is_rolled_back(directory, source.position, entry.gid):
                    pass  # ROLLBACK PREPARED has deleted them
                elif not again:
                    raise
                else:
                    wrong = f"{error.doing}: {error.wrong}"
                    _log.warning("%s; receiving everything after %s again", wrong, summary.end_lsn)
                    break
            orphans.difference_update(segment.file for segment in segments)
            if isinstance(entry, RolledBack) and entry.gid in summary.prepared:
                orphans.update(segment.file for segment in summary.prepared[entry.gid].segments)
            if isinstance(entry, RolledBack | Transaction) and entry.gid is not None:
                firm.discard(entry.gid)
            summary.add(entry)
            trusted = source.position
    torn = trusted < path.stat().st_size
    if summary.end_lsn < confirmed:
        if torn:
            raise ChangeLogDamaged(
                f"reading the manifest {path}",
                f"it is damaged after {summary.end_lsn}, but the slot has been confirmed to {confirmed}",
                "run `walmere drop`, then start the subscription again",
            )
        return summary  # the receiver refuses to go on
    if torn:
        with path.open("r+b") as file:
            file.truncate(trusted)
            os.fsync(file.fileno())
    _unlink([directory / orphan for orphan in orphans])
    return summary


def _data_files(directory: Path) -> set[str]:
    """The files of segments, whole or being written, and of a manifest being written."""
    return {path.name for path in directory.iterdir() if path.suffix in (SUFFIX, TEMPORARY)}


def _is_rolled_back(directory: Path, position: int, gid: str) -> bool:
    """Whether what follows in the manifest says so of the transaction that was prepared before."""
    with Manifest(directory) as ahead:
        ahead.position = position
        for entry in ahead.entries():
            if isinstance(entry, RolledBack | Transaction) and entry.gid == gid:
                return isinstance(entry, RolledBack)
    return False


def _segments(entry: Entry) -> tuple[Segment, ...]:
    return getattr(entry, "segments", ())


def _verify(directory: Path, segment: Segment, *, thoroughly: bool) -> None:
    with open_segment(directory, segment):
        pass
    if thoroughly:
        for index in range(len(segment.blocks)):
            read_block(directory, segment, index)


def create(directory: Path, header: Header) -> None:
    """Begin a log."""
    directory.mkdir(parents=True, exist_ok=True)
    manifest.create(directory, header)
    sync_directory(directory.parent)


def header_of(directory: Path) -> Header | None:
    """The header of the log in this directory, if there is one."""
    if not (directory / manifest.NAME).exists():
        if directory.exists() and any(name.endswith(SUFFIX) for name in _data_files(directory)):
            raise ChangeLogDamaged(
                f"opening the change log in {directory}",
                f"there are segments, but no {manifest.NAME} that describes them",
                f"restore {manifest.NAME}; or run `walmere drop`, then start the subscription again",
            )
        return None
    with Manifest(directory) as source:
        return source.header
