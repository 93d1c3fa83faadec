"""What the driver must not lose, in the store: the states of the tables, the positions, the ledger, a skip request.

The driver reads local files, as without a store. After a batch, and after each other change of a table's
state, the driver writes all of them to one object, `<generation>/state`, by compare-and-set. So they always belong
together. A start on another machine writes them to its directory.

    epoch     raised by every start of a driver. One that was only believed to be dead fails at its next write, or at
              the check before its next batch, and raises TakenOver
    ledger    it may be long. All of it is in an object of its own, which is written from time to time; `state` has the
              points since then

The state in the store may be older than the target, by one batch. A crash before a batch is recorded has the same
effect: the batch is repeated, and tables that have it do nothing.
"""

from __future__ import annotations

import fcntl
import gzip
import itertools
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from walmere import paths
from walmere.changelog.store.claim import writer_name
from walmere.changelog.store.log_store import damaged, read_head, require_version
from walmere.config import Config
from walmere.errors import StoreError, StoreUnavailable, TakenOver
from walmere.lsn import INVALID_LSN, Lsn
from walmere.object_store import ObjectStore
from walmere.storage import Lock, write_durably
from walmere.subscription.progress import TARGET, SinkPositions
from walmere.subscription.shared.store import store_of_config

_log = logging.getLogger(__name__)

VERSION: Final = 1
_FORMAT: Final = "walmere state"
_LEDGER_BYTES: Final = 64 << 10
"""Write the ledger to its own object when it has grown by so many bytes."""
CHECK_AFTER: Final = 5.0
"""Read the epoch before a batch, if it was last known so many seconds ago."""
_RETRY_AFTER: Final = 5.0
"""Seconds before a write is repeated, if the store has not answered for a minute."""
_POSITIONS_AGE: Final = 10.0
"""The receiver reads the positions this often."""


@dataclass(frozen=True, slots=True)
class StateContent:
    """The content of the object."""

    epoch: int
    writer: str
    serial: int = 0  # counts the writes of one writer, so that no two of its contents are equal
    tables: str | None = None  # of tables.json
    positions: dict[str, str] = field(default_factory=dict)  # by sink
    ledger: str | None = None  # the name of the object with the ledger
    points: str = ""  # of the ledger, since then
    skip: str | None = None

    def render(self) -> bytes:
        """The bytes of the object."""
        content = {"format": _FORMAT, "version": VERSION, **{key: getattr(self, key) for key in self.__slots__}}
        return gzip.compress(json.dumps(content).encode(), 1, mtime=0)


def parse(where: str, data: bytes) -> StateContent:
    """The inverse of `render`. Raises ChangeLogDamaged."""
    try:
        content: dict[str, Any] = json.loads(gzip.decompress(data))
        if content.pop("format") != _FORMAT:
            raise ValueError("format")
        require_version(where, content.pop("version"), VERSION)
        return StateContent(**content)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError):
        raise damaged(where, "it is not the state of a subscription, or it is damaged") from None


def state_name(generation: str) -> str:
    """The name of the object."""
    return f"{generation}/state"


def read_state(store: ObjectStore, generation: str) -> tuple[StateContent, str] | None:
    """The state and its e-tag; None if no driver has run yet."""
    name = state_name(generation)
    found = store.get(name)
    return None if found is None else (parse(f"{store.url}/{name}", found[0]), found[1])


class SharedState:
    """The driver's state, in its directory and in the store."""

    def __init__(self, store: ObjectStore, directory: Path) -> None:
        self.store = store
        self._files = LocalState(directory)
        self._writer = writer_name()
        self._lock = threading.RLock()
        self._wanted = itertools.count(1)
        self._newest = self._done = 0  # the last call of `put`, and the last one whose changes are in the store
        self._held = 0  # depth of `together`
        self._generation: str | None = None
        self._epoch = self._serial = 0
        self._etag = ""
        self._known_at = 0.0  # when the epoch was known to be ours
        self._ledger: _StoredLedger | None = None
        self._stopping = threading.Event()

    @property
    def taken(self) -> bool:
        """Whether this driver has raised the epoch."""
        return self._generation is not None

    def take_over(self, stopping: threading.Event | None = None) -> bool:
        """Raise the epoch, and write the state to the directory. Returns False if there is no log in the store yet.

        `stopping`: set when the run is to end; a write that is repeated because the store does not answer ends then.
        """
        self._stopping = stopping or threading.Event()
        head = read_head(self.store)
        if head is None:
            return False
        generation = head[0].generation
        while True:
            found = read_state(self.store, generation)
            if found is None:
                self._files.forget_other(generation)
                self._generation, self._epoch = generation, 1
                if not self.store.create(state_name(generation), self._collect().render()):
                    continue
                found = read_state(self.store, generation)
                if found is None or found[0].writer != self._writer:
                    continue
                content, self._etag = found
                break
            before, etag = found
            self._serial += 1
            content = StateContent(
                before.epoch + 1, self._writer, self._serial, before.tables, before.positions, before.ledger,
                before.points, before.skip,
            )  # fmt: skip
            raised = self.store.replace_if(state_name(generation), content.render(), etag)
            if raised is not None:
                self._etag = raised
                self._files.write(self.store, generation, content)
                break
        self._generation, self._epoch = generation, content.epoch
        self._ledger = None  # written again with the next points
        self._known_at = time.monotonic()
        return True

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write all changes inside in one put, at the end."""
        with self._lock:
            self._held += 1
            try:
                yield
            finally:
                self._held -= 1
            self.put()

    def put(self) -> None:
        """Write the files of the directory to the store. Raises TakenOver, and then has changed nothing."""
        mine = self._newest = next(self._wanted)
        with self._lock:
            if self._held or self._generation is None or self._done >= mine:  # the put of another thread had it
                return
            newest = self._newest
            while True:
                try:
                    self._put()
                    break
                except StoreUnavailable as error:
                    _log.warning("%s: %s; retry in %.0f s", error.doing, error.wrong, _RETRY_AFTER)
                    if self._stopping.wait(_RETRY_AFTER):
                        raise
            self._done = newest

    def _put(self) -> None:
        assert self._generation is not None
        content = self._collect().render()
        while (etag := self.store.replace_if(state_name(self._generation), content, self._etag)) is None:
            self._etag = self._read_own()  # an earlier answer was lost
        self._etag = etag
        self._known_at = time.monotonic()
        if self._ledger is not None:
            self._ledger.delete_old(self.store)

    def check(self, older_than: float = CHECK_AFTER) -> None:
        """Raise TakenOver if another driver has raised the epoch. Reads it only if it was last known before that."""
        with self._lock:
            if self._generation is not None and time.monotonic() - self._known_at >= older_than:
                found = self.store.head(state_name(self._generation))
                if found is None or found.etag != self._etag:
                    self._etag = self._read_own()
                self._known_at = time.monotonic()

    def _collect(self) -> StateContent:
        self._serial += 1
        assert self._generation is not None
        self._ledger = self._files.ledger(self.store, self._generation, self._epoch, self._ledger)
        return self._files.read(self._epoch, self._writer, self._serial, self._ledger)

    def _read_own(self) -> str:
        """The e-tag of the state. Raises TakenOver if it is not ours any more."""
        assert self._generation is not None
        found = read_state(self.store, self._generation)
        if found is None or found[0].writer != self._writer:
            wrong = "it was dropped" if found is None else f"another driver has taken over: {found[0].writer}"
            raise TakenOver(
                f"running the subscription with the state in {self.store.url}",
                wrong,
                "no action needed, if that one should run; this one has changed nothing since",
            )
        return found[1]


@dataclass(slots=True)
class _StoredLedger:
    """The object that has the ledger up to some byte of the local file."""

    name: str
    inode: int
    size: int
    old: list[str]  # objects that this one replaces

    def delete_old(self, store: ObjectStore) -> None:
        if self.old:
            store.delete(self.old)
            self.old = []


class LocalState:
    """The files of the directory that are also in the store."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, epoch: int, writer: str, serial: int, ledger: _StoredLedger | None) -> StateContent:
        """What the store should have now."""
        points = b""
        if ledger is not None:
            with (self._directory / paths.LEDGER).open("rb") as file:
                file.seek(ledger.size)
                points = file.read()
        positions = {sink: str(lsn) for sink, lsn in SinkPositions(self._directory).positions().items()}
        return StateContent(
            epoch,
            writer,
            serial,
            self._text(paths.TABLES),
            positions,
            None if ledger is None else ledger.name,
            points.decode(),
            self._text(paths.SKIP),
        )

    def ledger(
        self, store: ObjectStore, generation: str, epoch: int, known: _StoredLedger | None
    ) -> _StoredLedger | None:
        """Write the ledger to an object of its own, if it has grown or was replaced. None: there is no ledger."""
        try:
            with (self._directory / paths.LEDGER).open("rb") as file:
                found = os.fstat(file.fileno())
                if (
                    known is not None
                    and known.inode == found.st_ino
                    and 0 <= found.st_size - known.size < _LEDGER_BYTES
                ):
                    return known
                content = file.read()
        except FileNotFoundError:
            return None
        content = content[: content.rfind(b"\n") + 1]
        name = f"{generation}/ledger/{epoch}-{time.time_ns()}"
        store.create(name, gzip.compress(content, 1, mtime=0))
        old = [each.name for each in store.list(f"{generation}/ledger") if _epoch_of(each.name) <= epoch]
        return _StoredLedger(name, found.st_ino, len(content), [each for each in old if each != name])

    def write(self, store: ObjectStore, generation: str, content: StateContent) -> None:
        """Replace the files of the directory with what the store has."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self.forget(readers=self._text(paths.STATE_OF) != generation)
        if content.ledger is not None:
            found = store.get(content.ledger)
            if found is None:
                raise damaged(f"{store.url}/{content.ledger}", "the object is missing")
            lines = gzip.decompress(found[0]) + content.points.encode()
            (self._directory / paths.LEDGER).write_bytes(lines)
        if content.tables is not None:
            write_durably(self._directory / paths.TABLES, content.tables)
        if content.skip is not None:
            write_durably(self._directory / paths.SKIP, content.skip)
        positions = SinkPositions(self._directory)
        known = positions.positions()  # of readers on this machine
        for sink, lsn in content.positions.items():
            if sink not in known:
                positions.advance(sink, Lsn.parse(lsn))
        (self._directory / paths.STATE_OF).write_text(generation)  # not renamed: it may be locked

    def forget_other(self, generation: str) -> None:
        """Delete files that are a copy of another state. Files that were never in a store stay, and are put there."""
        marked = self._text(paths.STATE_OF)
        if marked and marked != generation:
            self.forget(readers=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / paths.STATE_OF).write_text(generation)

    def forget(self, *, readers: bool) -> None:
        """Delete the files. `readers`: also the positions of named readers; one may have joined since the last put."""
        for name in (paths.TABLES, paths.LEDGER, paths.SKIP):
            (self._directory / name).unlink(missing_ok=True)
        for path in (self._directory / paths.POSITIONS).glob("*.json"):
            if readers or path.stem == TARGET:
                path.unlink(missing_ok=True)

    def _text(self, name: str) -> str | None:
        with suppress(FileNotFoundError):
            return (self._directory / name).read_text()
        return None


def _epoch_of(name: str) -> int:
    return int(name.rpartition("/")[2].partition("-")[0])


def refresh_state(config: Config) -> None:
    """Bring the local copy of the state up to date, unless a driver on this machine does that all the time."""
    store, directory = store_of_config(config), config.subscription.directory
    if store is None or Lock.holder(directory / paths.RUN) is not None:
        return
    head = read_head(store)
    found = None if head is None else read_state(store, head[0].generation)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / paths.STATE_OF).open("a") as file:  # several commands may do this at the same time
        fcntl.flock(file, fcntl.LOCK_EX)
        local = LocalState(directory)
        if head is not None and found is not None:
            local.write(store, head[0].generation, found[0])
        elif file.tell():
            local.forget(readers=False)  # it was dropped, or no driver has run


class SharedPositions:
    """The positions of the sinks in the store, for the receiver, which may run on another machine than the driver."""

    def __init__(self, config: Config) -> None:
        self._store = store_of_config(config)
        self._read_at = 0.0
        self._reading = threading.Lock()
        self._applied: Lsn | None = INVALID_LSN  # not known yet: everything is needed

    def read(self) -> None:
        """Read them now."""
        if self._store is not None:
            self._read(self._store)

    def applied(self) -> Lsn | None:
        """The smallest position; None if there is no sink. Another thread reads them, when they are old."""
        store = self._store
        if store is not None and time.monotonic() - self._read_at >= _POSITIONS_AGE and self._reading.acquire(False):
            self._read_at = time.monotonic()

            def read() -> None:
                try:
                    with suppress(StoreError):  # the positions of before are smaller, so they are safe
                        self._read(store)
                finally:
                    self._reading.release()

            threading.Thread(target=read, name="walmere-positions", daemon=True).start()
        return self._applied

    def _read(self, store: ObjectStore) -> None:
        head = read_head(store)
        found = None if head is None else read_state(store, head[0].generation)
        positions = {} if found is None else found[0].positions
        self._applied = min(map(Lsn.parse, positions.values()), default=None)
        self._read_at = time.monotonic()
