"""Put what the receiver writes into a store: the flusher of a log whose directory is a cache.

The receiver's thread passes segments and records, as to any flusher. They are collected until the oldest of them is
`seconds` old, or all of them have `max_bytes`; then they become one object. Up to `WINDOW` objects are put at the same
time, each by a thread. When an object, and all before it, are in the store, this is done for it:

    1. its lines are appended to the local manifest, so that readers on this machine see it;
    2. `durable` advances, the LSN that may be confirmed to PostgreSQL.

If the store does not answer, the put is repeated without end. `create` makes that harmless: if the first one took place
after all, the next one finds the object, and that it is ours. Meanwhile jobs wait, and the receiver stops reading when
too many do.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from walmere.changelog import manifest, manifest_file, records
from walmere.changelog.manifest import Entry, Manifest, Summary, summarise
from walmere.changelog.records import Header, Prepared, RolledBack
from walmere.changelog.recovery import data_files
from walmere.changelog.segment import SegmentWriter
from walmere.changelog.segment_entry import Segment, Stored
from walmere.changelog.store.cache import Cache
from walmere.changelog.store.claim import WINDOW, Claim
from walmere.changelog.store.objects import LogObject, Upload, build
from walmere.changelog.writer import Flusher, write_all
from walmere.errors import ChangeLogError, StoreUnavailable
from walmere.lsn import Lsn

_log = logging.getLogger(__name__)

MANIFEST_EVERY: Final = 1000
"""Put a manifest after this many objects, so that a start reads few of them."""
_PAUSES: Final = (0.2, 10.0)
"""Seconds before a put is repeated: the first pause and the longest."""
_POLL: Final = 0.1
_STORED: Final = re.compile(rb'"stored":\[(\d+),')
"""In a line of the manifest: the number of the object that has a segment."""


@dataclass(slots=True)
class _Collected:
    """What the next object will have."""

    files: dict[str, int] = field(default_factory=dict)  # segment files, with their lengths
    entries: list[Entry] = field(default_factory=list)
    end_lsn: Lsn | None = None
    since: float | None = None  # when the oldest of it was begun; None: there is nothing

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True, slots=True)
class _Put:
    """An object that is being put."""

    begin: LogObject
    files: Mapping[str, int]  # its segment files, with their lengths
    end_lsn: Lsn | None
    done: Future[None]


class Uploader(Flusher):
    """Makes what is written durable in a store."""

    def __init__(
        self, cache: Cache, claim: Claim, *, seconds: float, max_bytes: int, cache_bytes: int = 1 << 30
    ) -> None:
        """The cache is filled. Fences off the writers before, and adopts what they have put last."""
        if cache.head.manifest != claim.head.manifest:  # published since: its writer may delete the objects before it
            cache.fill()
        self.directory = cache.directory
        self._cache_bytes = cache_bytes
        self._cached = deque(_cached(cache.directory))
        self._cached_bytes = sum(length for _, length in self._cached)
        self._claim = claim
        self._seconds = seconds
        self._max_bytes = max_bytes
        while claim.fence(cache.number) is not None:
            cache.follow()
        self._number = claim.fence_rest(cache.number)
        with Manifest(cache.directory) as log:
            self.summary: Summary = summarise(log)
        self._collected = _Collected()
        self._puts: deque[_Put] = deque()
        self._spooled: dict[str, Stored] = {}  # where segments are that no record has named yet, or that are prepared
        self._prepared: dict[str, set[str]] = {}  # their segments, by gid
        self._closing = threading.Event()
        if self._number - claim.head.number >= MANIFEST_EVERY:  # also of a receiver that never has anything to put
            self._publish(self._number)
        super().__init__(cache.directory, self.summary.end_lsn)

    def check(self) -> None:
        """Raise TakenOver if another receiver has taken over."""
        self._claim.check()

    def store(self, writers: list[SegmentWriter], entries: list[Entry], end_lsn: Lsn | None) -> None:
        now = time.monotonic()
        collected = self._collected
        for writer in writers:
            writer.finish_cached()
            self.log_bytes += writer.length
            collected.files[writer.path.name] = writer.length
        collected.entries += entries
        collected.end_lsn = end_lsn or collected.end_lsn
        collected.since = min([collected.since or now, *(writer.opened for writer in writers)])

    def remove(self, files: Iterable[str]) -> None:
        # a transaction may be prepared and rolled back within one object: its record needs its segments
        needed = {segment.file for entry in self._collected.entries for segment in segments_of(entry)}
        unused = [file for file in files if file not in needed]
        for file in unused:
            self._spooled.pop(file, None)
            self._collected.files.pop(file, None)
        super().remove(unused)

    def drain(self) -> None:
        self.submit(self.settle)
        super().drain()

    def close(self) -> None:
        """Stop. What is not in the store by now is received again."""
        self._closing.set()
        super().close()

    def hurry(self) -> None:
        self._upload()

    def settle(self) -> None:
        self._upload()
        while self._puts:
            self._finish_first()

    def replace_manifest(self, header: Header, entries: list[Entry], removed: list[str]) -> None:
        # the manifest in the store first: the objects of what it does not have can be deleted after that
        needed = {stored.number for stored in self._spooled.values()}
        needed |= {segment.stored.number for entry in entries for segment in segments_of(entry) if segment.stored}
        lines = [records.render_header(header), *map(manifest.render, entries)]
        try:
            self._claim.publish(self._number, b"".join(lines), min(needed, default=self._number))
            super().replace_manifest(header, entries, removed)
            self._claim.delete_objects(needed)
        except StoreUnavailable as error:
            _log.warning("%s: %s; retried later", error.doing, error.wrong)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._due_in())
            except queue.Empty:
                job = self._upload
            if job is None:
                return
            if self.failure is None:
                try:
                    job()
                    if self._due_in() == 0 or self._collected.bytes >= self._max_bytes:
                        self._upload()
                except Exception as error:  # Writer.check raises it in the receiver's thread
                    self.failure = error

    def _due_in(self) -> float | None:
        """Seconds until what is collected has to be put; None: there is nothing."""
        since = self._collected.since
        return None if since is None else max(0.0, since + self._seconds - time.monotonic())

    def _upload(self) -> None:
        """Begin to put what is collected."""
        collected = self._collected
        if collected.since is None:
            return
        while len(self._puts) >= WINDOW:
            self._finish_first()
        self._collected = _Collected()
        files = {file: (self.directory / file).read_bytes() for file in collected.files}
        upload = build(self._claim.header(self._number), collected.entries, files, self._spooled)
        self._number += 1
        self._remember(collected.entries, upload)
        put = _Put(upload.begin, collected.files, collected.end_lsn, Future())
        self._puts.append(put)
        threading.Thread(target=self._put, args=(put, upload.content), name="walmere-upload", daemon=True).start()

    def _remember(self, entries: Iterable[Entry], upload: Upload) -> None:
        """Remember where segments are that a later record will name."""
        self._spooled |= upload.places
        for entry in entries:
            named = {segment.file for segment in segments_of(entry)}
            if isinstance(entry, Prepared):  # its COMMIT PREPARED will name them again
                self._prepared[entry.gid] = named
                continue
            if isinstance(entry, RolledBack):
                named = self._prepared.pop(entry.gid, named)
            for file in named:
                self._spooled.pop(file, None)

    def _put(self, put: _Put, content: bytes) -> None:
        """Put an object; repeats it while the store does not answer."""
        pause, longest = _PAUSES
        try:
            while True:
                try:
                    self._claim.put(put.begin.header.number, content)
                    break
                except StoreUnavailable as error:
                    _log.warning("%s: %s; retry in %.1f s", error.doing, error.wrong, pause)
                    if self._closing.wait(pause):
                        raise
                    pause = min(2 * pause, longest)
            put.done.set_result(None)
        except BaseException as error:  # `_finish` raises it in the flusher's thread
            put.done.set_exception(error)
        self.submit(self._finish_done)

    def _finish_first(self) -> None:
        """Wait for the oldest put."""
        while not self._closing.is_set():
            try:
                self._puts[0].done.exception(_POLL)
            except NotDone:
                continue
            return self._finish_done()
        raise ChangeLogError("writing the change log to the store", "the receiver is stopping")

    def _finish_done(self) -> None:
        """Do what follows a put, for all that are done, in order."""
        while self._puts and self._puts[0].done.done():
            self._puts[0].done.result()
            put = self._puts.popleft()
            write_all(self._manifest, put.begin.lines)
            if put.end_lsn is not None:
                self.durable = max(self.durable, put.end_lsn)
            self._trim_cache(put.files)
            number = put.begin.header.number + 1
            if number - self._claim.head.number >= MANIFEST_EVERY:
                self._publish(number)

    def _trim_cache(self, files: Mapping[str, int]) -> None:
        """Delete the oldest segment files, if there are too many: they are in the store."""
        self._cached.extend(files.items())
        self._cached_bytes += sum(files.values())
        while self._cached and self._cached_bytes > self._cache_bytes:
            file, length = self._cached.popleft()
            super().remove([file])
            self._cached_bytes -= length

    def _publish(self, number: int) -> None:
        """Put the manifest of everything before a number. If the store does not answer, the next object tries again."""
        lines = (self.directory / manifest_file.NAME).read_bytes()
        needed = {stored.number for stored in self._spooled.values()}
        for text in (lines, *(put.begin.lines for put in self._puts)):  # what is being put may need older objects, too
            needed.update(map(int, _STORED.findall(text)))
        try:
            self._claim.publish(number, lines, min(needed, default=number))
            self._claim.delete_objects(needed)  # fences, and what was rolled back
        except StoreUnavailable as error:
            _log.warning("%s: %s; retried later", error.doing, error.wrong)


def _cached(directory: Path) -> list[tuple[str, int]]:
    """The segment files that are there, oldest first, with their lengths."""
    return [(file, (directory / file).stat().st_size) for file in sorted(data_files(directory))]


def segments_of(entry: Entry) -> Iterable[Segment]:
    """The segments that an entry names."""
    return getattr(entry, "segments", ())
