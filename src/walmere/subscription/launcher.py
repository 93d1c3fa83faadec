"""The launcher: starts the receiver, the copies and the apply query, looks after them, and ends them together.

The receiver is a process of its own, so that it shares neither interpreter lock nor fate with Spark's driver: if we are
killed, it goes on receiving, and the source's WAL does not pile up. The next launcher ends it and finds the log longer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from walmere.changelog import manifest
from walmere.changelog.writer import Lock
from walmere.config import Config
from walmere.errors import ChangeLogInUse, NotMirrored, SlotInUse, SourceError, SourceUnavailable, WalmereError
from walmere.lsn import Lsn
from walmere.sinks.base import Sink, TableName
from walmere.sinks.owner import Owner
from walmere.subscription import ownership, receiver, requests
from walmere.subscription.state import TableState
from walmere.subscription.tables import Tables
from walmere.subscription.tablesync import TableSync

_log = logging.getLogger(__name__)

COPIES: Final = 2
"""Tables that are copied at the same time; each by as many tasks as there are hands."""
RETRY: Final = 5.0
"""Seconds until a copy that was cut off is begun anew: PostgreSQL's `wal_retrieve_retry_interval`."""
LONGEST: Final = 4 * 3600.0
"""Seconds until one that was refused again and again is tried again; sooner, if the table is altered."""
REFRESH: Final = 5.0
"""Seconds after which the publications are looked at again, for tables that came or went."""
REFRESH_ALTERED: Final = 0.5
"""The same, while a table waits to take on columns that were altered."""
STARTS: Final = 5
"""Times that the query is started if Spark's patience with its Python process ends before that is up."""
_SLOW: Final = "Python worker failed to connect back"
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

    def claim(self, owner: Owner, published: Sequence[TableState], *, take_over: bool = False) -> Sink:
        """See that the target's tables are the owner's, before anything is written. Returns the sink to write to."""

    def prepare(self, log_start: Lsn) -> None:
        """Under the run's lock, before anything is received or copied: put right what does not fit together."""

    def start(self) -> Any:
        """Start the query."""

    def enter_copies(self) -> None:
        """Without a query: enter into the ledger that the tables stand at one LSN, all of them just copied."""


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
        self.until = until
        """None: until it is ended. May be moved on: more was wanted than at first."""
        self._ended_at: float | None = None
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._end_orphan()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._runs_until = self.until
        command = [*self._command, *(["--until", str(self.until)] if self.until is not None else [])]
        with self._log.open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
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
        if self._process.poll() == 0 and self._runs_until != self.until:
            self._process = self._start()
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
    """What tables wait for: their copies, and a look at what has become of those that changed. Also, which there are.

    A copy that was cut off is begun anew after a while. So is one that was refused, for somebody may mend what was
    wrong, but after a longer while each time. With `once` it is not, and stands in `failed`.
    """

    def __init__(self, sync: TableSync, tables: Tables, copying: Executor, looking: Executor, *, once: bool) -> None:
        self._sync = sync
        self._tables = tables
        self._copying = copying
        self._looking = looking
        self._once = once
        self._running: dict[int, Future[None]] = {}
        self._due: dict[int, float] = {}
        self._delay: dict[int, float] = {}
        self._discovery: Future[None] = looking.submit(sync.discovery.look)
        self._discovered = False
        self._look_again = 0.0
        self.failed: dict[int, WalmereError] = {}

    def poll(self) -> None:
        """See what has come of it, and begin what can begin. Raises what concerns more than one table."""
        now = time.monotonic()
        if self._discovery.done() and not self._look_again:
            with contextlib.suppress(SourceUnavailable):
                self._discovery.result()
                self._discovered = True
            altered = self._sync.discovery.altered_lsn is not None
            self._look_again = now + (REFRESH_ALTERED if altered else REFRESH)
        if self._look_again and now >= self._look_again and not (self._once and self._settled()):
            self._discovery, self._look_again = self._looking.submit(self._sync.discovery.look), 0.0
        while self._sync.discovery.changed:
            oid = self._sync.discovery.changed.pop()
            self._due.pop(oid, None)
            self._delay.pop(oid, None)
        for oid, work in [each for each in self._running.items() if each[1].done()]:
            del self._running[oid]
            self._ended(oid, work, now)
        for table in self._waiting():
            oid = table.oid
            if oid in self._running or now < self._due.get(oid, 0.0):
                continue
            if table.retry_at > time.time():
                if self._once:
                    self.failed[oid] = NotMirrored(f"mirroring {table.name}", table.error or "", _setbacks(table))
                continue
            if table.waits_for_copy:
                self._due[oid] = now + RETRY if table.error is not None else 0.0
                self._running[oid] = self._copying.submit(self._sync.copy, oid)
            else:
                self._running[oid] = self._looking.submit(self._sync.redefine, oid)

    def done(self) -> bool:
        """Whether no table waits for anything."""
        return self._settled() and not self._running and not self._waiting()

    def _settled(self) -> bool:
        """Whether all that the catalogs show is taken in."""
        return self._discovered and self._sync.discovery.altered_lsn is None

    def cancel(self) -> bool:
        """Begin no more of them. Returns whether some are under way."""
        work = [*self._running.values(), self._discovery]
        return any([not each.cancel() and not each.done() for each in work])  # noqa: C419  all are to be cancelled

    def _waiting(self) -> list[TableState]:
        given_up = self.failed if self._once else ()
        return [each for each in self._tables if (each.waits_for_copy or each.awaits) and each.oid not in given_up]

    def _ended(self, oid: int, work: Future[None], now: float) -> None:
        try:
            work.result()
            known = self._tables.get(oid)
            if known is not None and known.error is not None:
                self._due[oid] = now + RETRY
            self.failed.pop(oid, None)
            self._delay.pop(oid, None)
        except WalmereError as error:
            self._due[oid] = now + RETRY
            if error.transient:
                return
            name = (
                known.name if (known := self._tables.get(oid)) is not None else "a table that has left the publication"
            )
            self.failed[oid] = type(error)(f"mirroring {name}, {error.doing}", error.wrong, error.hint)
            self._delay[oid] = min(2 * self._delay.get(oid, RETRY), LONGEST)
            self._due[oid] = now + self._delay[oid]
            _log.warning("%s", self.failed[oid])


def _setbacks(table: TableState) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(table.retry_at))
    return (
        f"copying it again did not help, {table.setbacks} times; it is copied again at {at}, when it is altered, or by"
        f" `walmere resync {table.name}`"
    )


class Launcher:
    """One run of a subscription."""

    def __init__(self, config: Config, config_file: Path, tables: Tables, sync: TableSync, apply: ApplyWorker) -> None:
        self._config = config
        self._config_file = config_file
        self._tables = tables
        self._sync = sync
        self.apply = apply
        self._stopping = threading.Event()
        self._starts = 0
        self._claimed = False
        self.take_over = False
        """Take tables of the target from other owners."""
        self.on_poll: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None

    def stop(self) -> None:
        """End soon. Safe in a signal handler."""
        self._stopping.set()

    def run(self, until: Lsn | None = None) -> None:
        """Copy what is not copied yet, then follow; until stopped, or until everything before the LSN is applied.

        Tables that are copied meanwhile have what their snapshots saw, which may be more. Then it goes on until the
        others have that, too: a run leaves all tables at one point.
        """
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
        prepared = self._prepare_target()
        with (
            ReceiverProcess(self._config_file, self._config, until) as process,
            ThreadPoolExecutor(COPIES) as copying,
            ThreadPoolExecutor(COPIES) as looking,
        ):
            while not log.exists() and not self._stopping.is_set():
                process.check()
                time.sleep(_POLL)
            if self._stopping.is_set():
                return
            if not prepared:
                self._prepare_target()
            with manifest.Manifest(log.parent) as made:
                self._sync.follow_messages(self._messages(), made.header.start_lsn)
            copies = Copies(self._sync, self._tables, copying, looking, once=until is not None)
            query: Query | None = None
            end = until
            try:
                while not self._stopping.is_set() and not (copies.done() and self._applied(end, query, copies)):
                    process.until = end = self._end(until)
                    process.check()
                    requests.take(self._config.subscription.directory, self._tables)
                    copies.poll()
                    if query is not None:
                        query = self._checked(query)
                    elif self._has_something_to_apply(end, copies):
                        self._starts += 1
                        query = self.apply.start()
                    self.on_poll()
                    time.sleep(_POLL)
            finally:
                if query is not None:
                    query.stop()
                while copies.cancel():  # again: one may have been between two things that can be cancelled
                    self._sync.stop()
                    time.sleep(_POLL)
            if query is None and not self._stopping.is_set():
                self.apply.enter_copies()
            if copies.failed and until is not None:
                raise next(iter(copies.failed.values()))

    def _claim(self) -> None:
        """Refuse tables of another owner."""
        owner, published = ownership.find(self._config)
        if (messages := self._messages()) is not None:
            published = [*published, TableState(messages, 0)]
        self._sync.use(self.apply.claim(owner, published, take_over=self.take_over))
        self._claimed = True

    def _prepare_target(self) -> bool:
        """Compare target and state. False: there is no change log yet, so there is nothing to compare."""
        if self._stopping.is_set() or not (self._config.changelog / manifest.NAME).exists():
            return False
        if not self._claimed:
            self._claim()
        with manifest.Manifest(self._config.changelog) as log:
            self.apply.prepare(log.header.start_lsn)
        return True

    def _messages(self) -> TableName | None:
        wanted = self._config.target.messages if self._config.target is not None else None
        return None if wanted is None else TableName(*wanted.split(".", 1))

    def _prepare(self) -> None:
        """Make slot and log, or see that they and the source belong together, before anything is copied.

        The receiver does it, too, but has to start first; and it goes on trying where we would not. In a thread,
        because a new slot waits for every transaction that is running, and we may be told to end meanwhile.
        """
        done: Future[None] = Future()
        cancel: list[Callable[[], None]] = []

        def prepare() -> None:
            try:
                # first: what is refused leaves no slot
                self._sync.require_no_table(self._messages())
                self._claim()
                receiver.prepare(self._config, cancel.append)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=prepare, daemon=True).start()
        while not done.done() and not self._stopping.is_set():
            time.sleep(_POLL / 10)
        if not done.done():
            for each in cancel:
                each()
        if done.done():
            with contextlib.suppress(SourceUnavailable, ChangeLogInUse, SlotInUse):
                done.result()

    def _end(self, until: Lsn | None) -> Lsn | None:
        """How far to go: to where the first of the tables are."""
        if until is None:
            return None
        altered = self._sync.discovery.altered_lsn
        positions = [position for table in self._tables if (position := table.position) is not None]
        return max([until, *positions, *([] if altered is None else [altered])])

    def _has_something_to_apply(self, until: Lsn | None, copies: Copies) -> bool:
        """A table that was just copied has all there was before its snapshot; and the query's start takes seconds."""
        positions = [position for table in self._tables if (position := table.position) is not None]
        return any(until is None or position < until for position in positions) or (not positions and copies.done())

    def _applied(self, until: Lsn | None, query: Query | None, copies: Copies) -> bool:
        if until is None or (query is not None and self.apply.applied < until):
            return False
        tables = [each for each in self._tables if each.published and each.oid not in copies.failed]
        return all(each.follows and each.applied_lsn >= until for each in tables) and bool(tables or query is not None)

    def _checked(self, query: Query) -> Query | None:
        """Raise what ended the query, if something did. None: it is to be started again.

        Spark gives the process that runs the query's source ten seconds to come up, which is no setting. On a machine
        that has too much to do it may take longer, and nothing has happened yet.
        """
        if (ended := query.exception()) is None:
            return query
        said = str(ended).strip() or repr(ended)
        if self.apply.error is None and _SLOW in said and self._starts < STARTS:
            _log.warning("starting to apply changes took too long for Spark; once more")
            return None
        raise self.apply.error or WalmereError("applying changes", said)
