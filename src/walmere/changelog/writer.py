"""Write the change log. A lock on the directory makes sure that a log has only one writer.

Two threads write. The receiver's thread writes blocks into files with temporary names. When it ends a segment, the file
goes to the *flusher*, which does for one segment after the other:

    1. fsync the file, rename it, fsync the directory;
    2. append the lines to the manifest, and fsync the manifest;
    3. advance `durable`, the LSN that may be confirmed to PostgreSQL.

So a slow disk does not block the replies to the walsender, and nothing is confirmed before step 2 is done. A crash at
any point leaves files that the manifest does not name (removed at the next start), or a torn last line (cut off). Both
were never confirmed, so PostgreSQL sends them again.

With a store, `walmere.changelog.store.upload` has another flusher.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from walmere.changelog import manifest, manifest_file
from walmere.changelog.manifest import Entry, Manifest
from walmere.changelog.records import Header, Position, Record, Transaction, Transactions
from walmere.changelog.recovery import data_files, recover
from walmere.changelog.segment import Chunk, SegmentWriter
from walmere.changelog.segment_entry import SUFFIX, Segment, segment_bytes_in
from walmere.errors import ChangeLogDamaged, ChangeLogError, WalmereError
from walmere.lsn import Lsn
from walmere.storage import sync_directory

if TYPE_CHECKING:
    from walmere.changelog.store.upload import Uploader

MAX_WAITING: Final = 4
"""Reading from the source pauses while this many jobs wait for the disk."""


class Writer:
    """Appends transactions to the log. The caller holds the Lock."""

    def __init__(
        self, directory: Path, confirmed: Lsn, *, segment_bytes: int = 64 << 20, uploader: Uploader | None = None
    ) -> None:
        """Open an existing log. What is damaged after `confirmed` is removed, and will be received again.

        `uploader`: puts what is written into a store; the directory is a cache then.
        """
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.summary = recover(directory, confirmed) if uploader is None else uploader.summary
        self._current: SegmentWriter | None = None
        self._pending: Transactions | None = None  # the record of the current segment, without the segment
        self._definitions: list[Entry] = []
        self.transactions = 0
        self.written_bytes = 0
        """Transactions and bytes that this writer has written, for metrics."""
        self._submitted = self.summary.end_lsn
        self._flusher: Flusher = uploader or Flusher(directory, self.summary.end_lsn)

    def flush(self) -> None:
        """End the current segment and wait until everything is durable."""
        self.cut()
        self._flusher.drain()
        self.check()

    def hurry(self) -> None:
        """End the current segment, and do not wait for more before it is made durable."""
        self.cut()
        self._flusher.submit(self._flusher.hurry)

    def close(self) -> None:
        """Stop the flusher. The current segment is deleted: it was never confirmed."""
        if self._current is not None:
            self._current.discard()
        self._flusher.close()

    @property
    def durable(self) -> Lsn:
        """Everything that committed before this LSN is on disk; with a store, there."""
        return self._flusher.durable

    @property
    def log_bytes(self) -> int:
        """The size of the segments in the directory."""
        return self._flusher.log_bytes

    @property
    def busy(self) -> bool:
        """Whether too much waits for the disk, so that reading from the source should pause."""
        return self._flusher.waiting >= MAX_WAITING

    @property
    def settled(self) -> bool:
        """Whether everything that was appended is durable."""
        return self._pending is None and self.durable >= self._submitted

    def check(self) -> None:
        """Raise the error of the flusher, if it failed."""
        if isinstance(failure := self._flusher.failure, WalmereError):
            raise failure
        if failure is not None:
            raise ChangeLogError(
                f"writing the change log in {self.directory}",
                f"{failure}",
                "make room or repair the disk, then start again; nothing was confirmed that is not durable",
            ) from failure

    def define(self, definition: Entry) -> None:
        """Add a relation's definition. It is written with the next record."""
        self._definitions.append(definition)

    def append(self, chunk: Chunk, *, count: int, commit_lsn: Lsn, end_lsn: Lsn, commit_time: int) -> None:
        """Append transactions to the current segment."""
        if self._current is None:
            self._current = SegmentWriter(self.directory, segment_name(chunk.first_sequence))
        self._current.append(chunk)
        before = self._pending.count if self._pending else 0
        last_sequence = chunk.first_sequence + len(chunk.relation) - 1
        nothing = Segment("", 0, streamed=False, blocks=())
        self._pending = Transactions(nothing, before + count, commit_lsn, end_lsn, commit_time, last_sequence)
        if self._current.length >= self.segment_bytes:
            self.cut()

    def cut_if_older(self, seconds: float) -> None:
        """End the current segment if it was begun at least so many seconds ago."""
        if self._current is not None and time.monotonic() - self._current.opened >= seconds:
            self.cut()

    def cut(self) -> None:
        """End the current segment and pass it to the flusher."""
        if self._current is None or self._pending is None:
            return
        p = self._pending
        segment = self._current.seal()
        record = Transactions(segment, p.count, p.commit_lsn, p.end_lsn, p.commit_time, p.last_sequence)
        writer, self._current, self._pending = self._current, None, None
        self.written_bytes += segment.length
        self._submit(record, writer)

    def append_record(self, record: Record) -> None:
        """Append a record whose segments were passed to `spool` before."""
        self.cut()
        self._submit(record)

    def spool(self, writer: SegmentWriter) -> Segment:
        """Make a segment of a transaction in progress durable. Its record in the manifest will make it visible."""
        segment = writer.seal()
        self.written_bytes += segment.length
        self._flusher.submit(partial(self._flusher.store, [writer], [], None))
        return segment

    def advance(self, lsn: Lsn, last_sequence: int) -> None:
        """Record that everything before this LSN has been received, although there was nothing to store."""
        self.cut()
        if lsn > self._submitted:
            self._submit(Position(lsn, last_sequence))

    def remove(self, segments: Iterable[Segment]) -> None:
        """Delete files that no record names, after the jobs that were submitted before."""
        self._flusher.submit(partial(self._flusher.remove, [segment.file for segment in segments]))

    def trim(self, task: Callable[[Flusher], None]) -> None:
        """Run retention in the flusher's thread, between two jobs."""
        self._flusher.submit(partial(task, self._flusher))

    def _submit(self, record: Record, *writers: SegmentWriter) -> None:
        entries: list[Entry] = [*self._definitions, record]
        self._definitions = []
        self._submitted = record.end_lsn
        self.summary.add(record)
        self.transactions += record.count if isinstance(record, Transactions) else isinstance(record, Transaction)
        self._flusher.submit(partial(self._flusher.store, list(writers), entries, record.end_lsn))


class Flusher:
    """The thread that makes segments and manifest durable, one job after the other."""

    def __init__(self, directory: Path, durable: Lsn) -> None:
        self.directory = directory
        self.durable = durable
        self.log_bytes = segment_bytes_in(directory)
        self.failure: Exception | None = None
        self._manifest = self._open()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="walmere-flusher", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._jobs.qsize()

    def _open(self) -> int:
        """Open the manifest; again after retention has replaced it."""
        return os.open(self.directory / manifest_file.NAME, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def store(self, writers: list[SegmentWriter], entries: list[Entry], end_lsn: Lsn | None) -> None:
        for writer in writers:
            writer.finish()
            self.log_bytes += writer.length
        if writers:
            sync_directory(self.directory)
        if entries:
            write_all(self._manifest, b"".join(map(manifest.render, entries)))
            os.fsync(self._manifest)
        if end_lsn is not None:
            self.durable = max(self.durable, end_lsn)

    def remove(self, files: Iterable[str]) -> None:
        """Delete segment files."""
        for file in files:
            with suppress(FileNotFoundError):
                size = (self.directory / file).stat().st_size
                (self.directory / file).unlink()
                self.log_bytes -= size

    def hurry(self) -> None:
        """Begin to make durable what the jobs before have stored."""

    def settle(self) -> None:
        """Wait until everything is durable that the jobs before have stored."""

    def replace_manifest(self, header: Header, entries: list[Entry], removed: list[str]) -> None:
        """Write a new manifest, then delete the files that it does not need any more."""
        manifest.create(self.directory, header, entries)
        self.reopen()
        self.remove(removed)

    def drain(self) -> None:
        """Wait until everything submitted so far is done."""
        done = threading.Event()
        self._jobs.put(done.set)
        while not done.wait(0.1) and self.failure is None:
            pass

    def reopen(self) -> None:
        os.close(self._manifest)
        self._manifest = self._open()

    def close(self) -> None:
        """Do all submitted jobs, then stop the thread."""
        self._jobs.put(None)
        self._thread.join()
        os.close(self._manifest)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self.failure is None:
                try:
                    job()
                except Exception as error:  # Writer.check raises it in the receiver's thread
                    self.failure = error


def segment_name(first_sequence: int) -> str:
    """The file name of the segment that begins with this message."""
    return f"{first_sequence:020d}{SUFFIX}"


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def create(directory: Path, header: Header) -> None:
    """Create an empty log."""
    directory.mkdir(parents=True, exist_ok=True)
    manifest.create(directory, header)
    sync_directory(directory.parent)


def header_of(directory: Path) -> Header | None:
    """The header of the log in this directory, if there is one."""
    if not (directory / manifest_file.NAME).exists():
        if directory.exists() and any(name.endswith(SUFFIX) for name in data_files(directory)):
            raise ChangeLogDamaged(
                f"opening the change log in {directory}",
                f"there are segments, but no {manifest_file.NAME} that describes them",
                f"restore {manifest_file.NAME}; or run `walmere drop`, then start the subscription again",
            )
        return None
    with Manifest(directory) as source:
        return source.header
