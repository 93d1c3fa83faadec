"""The launcher: starts the receiver, the copies and the apply query, looks after them, and ends them together.

The receiver is a process of its own, so that it shares neither interpreter lock nor fate with Spark's driver: if we are
killed, it goes on receiving, and the source's WAL does not pile up. The next launcher ends it and finds the log longer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from walmere.changelog import manifest
from walmere.changelog.writer import Lock
from walmere.config import Config
from walmere.errors import ChangeLogInUse, SlotInUse, SourceError, SourceUnavailable, WalmereError
from walmere.lsn import Lsn
from walmere.subscription import receiver
from walmere.subscription.state import TableState
from walmere.subscription.tables import Tables
from walmere.subscription.tablesync import TableSync

COPIES: Final = 2
"""Tables that are copied at the same time; each by as many tasks as there are hands."""
RETRY: Final = 5.0
"""Seconds until a copy that was cut off is begun anew: PostgreSQL's `wal_retrieve_retry_interval`."""
_POLL: Final = 0.05
_PATIENCE: Final = 30.0


class Query(Protocol):
    """A running apply query."""

    def stop(self) -> None:
        """End it."""

    def exception(self) -> Exception | None:
        """What ended it, if something did."""


class ApplyWorker(Protocol):
    """What applies the log to the tables."""

    applied: Lsn
    error: WalmereError | None

    def start(self) -> Any:
        """Start the query."""


class ReceiverProcess:
    """`walmere receive` as a child.

    If another process is writing the log already, that is as good: it is left alone, and ours waits for its turn. But
    one that an earlier launcher has left behind is ended, since nobody else would.
    """

    def __init__(self, config_file: Path, config: Config, until: Lsn | None) -> None:
        self._changelog = config.changelog
        self._log = config.subscription.directory / "receiver.log"
        self._pids = config.subscription.directory / "receiver.pids"
        self._command = [sys.executable, "-m", "walmere", "receive", "-c", str(config_file)]
        self._command += ["--until", str(until)] if until is not None else []
        self._ended_at: float | None = None
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._end_orphan()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._pids.write_text(f"{process.pid} {os.getpid()}")
        return process

    def _end_orphan(self) -> None:
        holder = Lock.holder(self._changelog)
        if holder is None or not self._pids.exists():
            return
        pids = self._pids.read_text().split()
        receiver, launcher = map(int, pids) if len(pids) == 2 else (0, 0)  # torn by a crash
        if receiver == holder and not _is_alive(launcher):  # who has the lock cannot be another with its number
            os.kill(receiver, signal.SIGTERM)
            deadline = time.monotonic() + _PATIENCE
            while Lock.holder(self._changelog) == receiver and time.monotonic() < deadline:
                time.sleep(_POLL)

    def __enter__(self) -> ReceiverProcess:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def check(self) -> None:
        """Raise what ended it, if it did not end well."""
        if self._process.poll() in (None, 0):
            return
        now = time.monotonic()
        if self._ended_at is None and Lock.holder(self._changelog) is None:
            said = self._log.read_text(errors="replace")
            _, found, last = said.rpartition("walmere: ")
            wrong, _, hint = (last if found else said[-2000:]).strip().partition("\n  hint: ")
            raise SourceError("receiving", wrong, hint)
        self._ended_at = self._ended_at or now
        if now - self._ended_at > RETRY:
            self._ended_at = None
            self._process = self._start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Copies:
    """The copies of all tables that wait for theirs. One that was cut off is begun anew after a while."""

    def __init__(self, sync: TableSync, pool: ThreadPoolExecutor) -> None:
        self._sync = sync
        self._pool = pool
        self._running = [self._submit(table.oid) for table in sync.discover()]
        self._again: list[tuple[float, int]] = []

    def done(self) -> bool:
        """Whether nothing is left to copy. Raises what a copy ended with that will not get better by waiting."""
        now = time.monotonic()
        for copy in [each for each in self._running if each.done()]:
            self._running.remove(copy)
            state = copy.result()
            if not state.phase.copied:
                self._again.append((now + RETRY, state.oid))
        for due in [each for each in self._again if each[0] <= now]:
            self._again.remove(due)
            self._running.append(self._submit(due[1]))
        return not self._running and not self._again

    def cancel(self) -> bool:
        """Begin no more of them. Returns whether some are under way."""
        under_way = [copy for copy in self._running if not copy.cancel() and not copy.done()]
        return bool(under_way)

    def _submit(self, oid: int) -> Future[TableState]:
        return self._pool.submit(self._sync.copy, oid)


class Launcher:
    """One run of a subscription."""

    def __init__(self, config: Config, config_file: Path, tables: Tables, sync: TableSync, apply: ApplyWorker) -> None:
        self._config = config
        self._config_file = config_file
        self._tables = tables
        self._sync = sync
        self.apply = apply
        self._stopping = threading.Event()
        self.on_poll: Callable[[], None] = lambda: None

    def stop(self) -> None:
        """End soon. Safe in a signal handler."""
        self._stopping.set()

    def run(self, until: Lsn | None = None) -> None:
        """Copy what is not copied yet, then follow; until stopped, or until everything before the LSN is applied."""
        directory = self._config.subscription.directory
        try:
            lock = Lock(directory / "run")
        except ChangeLogInUse as error:
            raise ChangeLogInUse(f"running the subscription in {directory}", error.wrong, "one is enough") from None
        try:
            self._run(until)
        finally:
            lock.release()

    def _run(self, until: Lsn | None) -> None:
        log = self._config.changelog / manifest.NAME
        self._prepare()
        with (
            ReceiverProcess(self._config_file, self._config, until) as process,
            ThreadPoolExecutor(COPIES) as pool,
        ):
            while not log.exists() and not self._stopping.is_set():
                process.check()
                time.sleep(_POLL)
            if self._stopping.is_set():
                return
            copies = Copies(self._sync, pool)
            query: Query | None = None
            try:
                while not self._stopping.is_set() and not (copies.done() and self._applied(until, query)):
                    process.check()
                    if query is not None:
                        self._check(query)
                    elif self._has_something_to_apply(until, copies):
                        query = self.apply.start()
                    self.on_poll()
                    time.sleep(_POLL)
            finally:
                if query is not None:
                    query.stop()
                while copies.cancel():  # again: one may have been between two things that can be cancelled
                    self._sync.stop()
                    time.sleep(_POLL)

    def _prepare(self) -> None:
        """Make slot and log, or see that they and the source belong together, before anything is copied.

        The receiver does it, too, but has to start first; and it goes on trying where we would not. In a thread,
        because a new slot waits for every transaction that is running, and we may be told to end meanwhile.
        """
        done: Future[None] = Future()

        def prepare() -> None:
            try:
                receiver.prepare(self._config)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=prepare, daemon=True).start()
        while not done.done() and not self._stopping.is_set():
            time.sleep(_POLL / 10)
        if done.done():
            with contextlib.suppress(SourceUnavailable, ChangeLogInUse, SlotInUse):
                done.result()

    def _has_something_to_apply(self, until: Lsn | None, copies: Copies) -> bool:
        """A table that was just copied has all there was before its snapshot; and the query's start takes seconds."""
        positions = [position for table in self._tables if (position := table.position) is not None]
        return any(until is None or position < until for position in positions) or (not positions and copies.done())

    def _applied(self, until: Lsn | None, query: Query | None) -> bool:
        if until is None or (query is not None and self.apply.applied < until):
            return False
        positions = [position for table in self._tables if (position := table.position) is not None]
        return all(position >= until for position in positions) and (bool(positions) or query is not None)

    def _check(self, query: Query) -> None:
        """Raise what ended the query, if something did."""
        if (ended := query.exception()) is not None:
            raise self.apply.error or WalmereError("applying changes", str(ended).strip() or repr(ended))
