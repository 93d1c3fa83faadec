"""The launcher: starts the receiver, the copies and the apply query, looks after them, and ends them together.

The receiver is a process of its own, so that it shares neither interpreter lock nor fate with Spark's driver: if we are
killed, it goes on receiving, and the source's WAL does not pile up. The next launcher ends it and finds the log longer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Protocol

from walmere import paths
from walmere.changelog import manifest
from walmere.config import Config
from walmere.definition import MESSAGES_OID
from walmere.errors import (
    ChangeLogInUse,
    NotMirrored,
    SinkFull,
    SlotInUse,
    SourceUnavailable,
    TableLocked,
    WalmereError,
)
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.owner import Owner
from walmere.sinks.base import Sink, full_or
from walmere.storage import Lock
from walmere.subscription import ownership, receiver, requests
from walmere.subscription.backoff import Backoff
from walmere.subscription.executor import DaemonExecutor
from walmere.subscription.receiver_process import ReceiverProcess
from walmere.subscription.state import TableState
from walmere.subscription.tables import Tables
from walmere.subscription.tablesync import TableSync

_log = logging.getLogger(__name__)

COPIES: Final = 2
"""Tables that are copied at the same time; each by as many tasks as there are hands."""
RETRY: Final = 5.0
"""Seconds until a copy that was cut off is begun anew: PostgreSQL's `wal_retrieve_retry_interval`."""
LONGEST: Final = 300.0
"""Seconds until one that was refused again and again is tried again, at most; sooner, if the table is altered."""
LONGEST_READ: Final = 4 * 3600.0
"""The same, if it was refused only after rows were read: a large table must not be read again and again for nothing."""
LONGEST_TRANSIENT: Final = 60.0
"""The same, if the error may pass by itself."""
REFRESH: Final = 5.0
"""Seconds after which the publications are looked at again, for tables that came or went."""
REFRESH_ALTERED: Final = 0.5
"""The same, while a table waits to take on columns that were altered."""
STARTS: Final = 6
"""Times in a row that the query is started without having applied anything, before its error ends the run."""
ENDING: Final = 6.0
"""Seconds that the query and the copies have to end. Then they are left: either can be cut off at any point."""
_BACKOFF: Final = (0.1, 30.0)
"""Seconds before the query is started again, at first and at most."""
_POLL: Final = 0.05
_DYING: Final = 2.0
"""Seconds from the end of the JVM's connections to its own."""


class Query(Protocol):
    """A running apply query."""

    def stop(self) -> None:
        """End it."""

    def exception(self) -> Exception | None:
        """What ended it, if something did."""


class ApplyWorker(Protocol):
    """What applies the log to the tables."""

    applied: Lsn

    @property
    def error(self) -> WalmereError | None:
        """What ended the query that was started last; None: only Spark knows."""

    def claim(self, owner: Owner, published: Sequence[TableState], *, take_over: bool = False) -> Sink:
        """See that the target's tables are the owner's, before anything is written. Returns the sink to write to."""

    def prepare(self, log_start: Lsn) -> None:
        """Under the run's lock, before anything is received or copied: put right what does not fit together."""

    def start(self) -> Any:
        """Start the query."""

    def enter_copies(self) -> None:
        """Without a query: enter into the ledger that the tables stand at one LSN, all of them just copied."""


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
            try:
                self._discovery.result()
                self._discovered = True
            except WalmereError as error:
                if not error.transient:
                    raise
            altered = self._sync.discovery.altered_lsn is not None
            self._look_again = now + (REFRESH_ALTERED if altered else REFRESH)
        if self._look_again and now >= self._look_again and not (self._once and self._settled()):
            self._discovery, self._look_again = self._looking.submit(self._sync.discovery.look), 0.0
        while self._sync.discovery.changed:
            oid = self._sync.discovery.changed.pop()
            self.forget(oid)
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

    def forget(self, oid: int) -> None:
        """Copy the table as soon as possible, whatever went wrong before."""
        self._due.pop(oid, None)
        self._delay.pop(oid, None)
        self.failed.pop(oid, None)

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
            if known is not None and known.waits_for_copy and known.error is not None:
                self._wait(oid, now, LONGEST_TRANSIENT)
                _log.warning("%s; trying again in %.0f s", _first_line(known.error), self._due[oid] - now)
            else:
                self.forget(oid)
        except WalmereError as error:
            if error.transient:
                self._due[oid] = now + RETRY
                return
            name = (
                known.name if (known := self._tables.get(oid)) is not None else "a table that has left the publication"
            )
            self.failed[oid] = type(error)(f"mirroring {name}, {error.doing}", error.wrong, error.hint)
            full = isinstance(error, SinkFull)
            self._wait(oid, now, LONGEST_READ if oid in self._sync.read_rows and not full else LONGEST)
            _log.warning("%s", self.failed[oid])

    def _wait(self, oid: int, now: float, longest: float) -> None:
        self._delay[oid] = min(2 * self._delay[oid] if oid in self._delay else RETRY, longest)
        self._due[oid] = now + self._delay[oid]


def _setbacks(table: TableState) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(table.retry_at))
    return (
        f"copying it again did not help, {table.setbacks} times; it is copied again at {at}, when it is altered, or by"
        f" `walmere resync {table.name}`"
    )


class Launcher:
    """One run of a subscription."""

    def __init__(
        self,
        config: Config,
        config_file: Path,
        tables: Tables,
        sync: TableSync,
        apply: ApplyWorker,
        *,
        require_spark: Callable[[float], None] = lambda _: None,
        on_poll: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        take_over: bool = False,
    ) -> None:
        """Nothing is started yet.

        `require_spark` raises if Spark has ended, or ends within these seconds. `on_poll` is called often, `on_end` at
        the end. `take_over`: take tables of the target from other owners.
        """
        self._config = config
        self._config_file = config_file
        self._tables = tables
        self._sync = sync
        self.apply = apply
        self._stopping = threading.Event()
        self._claimed = False
        self._take_over = take_over
        self._backoff = Backoff(*_BACKOFF)
        self._began_at = apply.applied
        self._start_at = 0.0
        self._process: ReceiverProcess | None = None
        self._require_spark = require_spark
        self._on_poll = on_poll
        self._on_end = on_end

    def stop(self) -> None:
        """End soon. Safe in a signal handler."""
        self._stopping.set()

    def run(self, until: Lsn | None = None) -> None:
        """Copy what is not copied yet, then follow; until stopped, or until everything before the LSN is applied.

        Tables that are copied meanwhile have what their snapshots saw, which may be more. Then it goes on until the
        others have that, too: a run leaves all tables at one point.
        """
        try:
            with closing(lock_run(self._config.subscription.directory)):
                self._run(until)
        finally:
            self._on_end()

    def abandon(self) -> None:
        """The process is about to end, whatever is still under way: leave no receiver behind."""
        if self._process is not None:
            self._process.kill()

    def _run(self, until: Lsn | None) -> None:
        log = self._config.changelog / manifest.NAME
        self._prepare()
        prepared = self._prepare_target()
        with (
            ReceiverProcess(self._config_file, self._config, until) as process,
            DaemonExecutor(COPIES, "copying") as copying,
            DaemonExecutor(COPIES, "looking") as looking,
        ):
            self._process = process
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
                    self._require_spark(0.0)
                    process.check()
                    for oid in requests.take(self._config.subscription.directory, self._tables):
                        copies.forget(oid)
                    copies.poll()
                    if query is not None:
                        query = self._checked(query, until)
                    elif time.monotonic() >= self._start_at and self._has_something_to_apply(end, copies):
                        query = self._start(until)
                    self._on_poll()
                    time.sleep(_POLL)
            except (WalmereError, KeyboardInterrupt):
                raise
            except Exception as error:
                self._require_spark_after(error)
                raise
            finally:
                self._wind_up(process, query, copies)
            if query is None and not self._stopping.is_set():
                self.apply.enter_copies()
            if copies.failed and until is not None:
                raise next(iter(copies.failed.values()))

    def _claim(self) -> None:
        """Refuse tables of another owner."""
        owner, published = ownership.find(self._config)
        if (messages := self._messages()) is not None:
            published = [*published, TableState(messages, MESSAGES_OID)]
        self._sync.use(self.apply.claim(owner, published, take_over=self._take_over))
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

    def _wind_up(self, process: ReceiverProcess, query: Query | None, copies: Copies) -> None:
        """End everything, all at the same time. What does not end is left to itself, in threads of its own."""
        deadline = time.monotonic() + ENDING

        def end_copies() -> None:
            while copies.cancel() and time.monotonic() < deadline:  # again: one may have been between two things
                self._sync.stop()
                time.sleep(_POLL)

        process.terminate()
        work = {"the copies": end_copies} | ({} if query is None else {"the apply query": query.stop})
        threads = {what: threading.Thread(target=_quietly, args=(end,), daemon=True) for what, end in work.items()}
        for thread in threads.values():
            thread.start()
        for what, thread in threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("%s did not end within %.0f s", what, ENDING)

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
            with contextlib.suppress(SourceUnavailable, TableLocked, ChangeLogInUse, SlotInUse):
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

    def _require_spark_after(self, error: Exception) -> None:
        """Connections to a JVM that was killed are cut somewhat before it has ended."""
        cut = isinstance(error, OSError) or type(error).__module__.startswith("py4j")
        self._require_spark(_DYING if cut else 0.0)

    def _start(self, until: Lsn | None) -> Query | None:
        """Start the query. None: it is to be tried again."""
        self._began_at = self.apply.applied
        try:
            query: Query = self.apply.start()
        except Exception as error:  # Spark asks its Python processes already here
            self._try_again(error, until)
            return None
        return query

    def _checked(self, query: Query, until: Lsn | None) -> Query | None:
        """The query, if it runs. None: it is to be started again."""
        if (ended := query.exception()) is None:
            return query
        self._try_again(ended, until)
        return None

    def _try_again(self, ended: Exception, until: Lsn | None) -> None:
        """Raise what ended the query, unless it may help to start it again.

        That helps if Spark's Python processes were killed; or if the one that runs the query's source was not up within
        the ten seconds that Spark gives it, which is no setting. Whether it did help shows in what is applied. A full
        target is waited for, unless the run ends by itself: the receiver goes on, and the log has the changes.
        """
        self._require_spark_after(ended)
        said = WalmereError("applying changes", _first_line(str(ended)) or repr(ended))
        error = full_or(ended if isinstance(ended, WalmereError) else self.apply.error or said)
        full = isinstance(error, SinkFull)
        if not (full or error.transient or type(error) is WalmereError):
            raise error
        if self.apply.applied > self._began_at:
            self._backoff.reset()
        pause = self._backoff.next(None if full and until is None else STARTS)
        if pause is None:
            raise error
        _log.warning("%s: %s; starting to apply changes again in %.1f s", error.doing, error.wrong, pause)
        self._start_at = time.monotonic() + pause


def lock_run(directory: Path) -> Lock:
    """The right to run the subscription; only one process may."""
    try:
        return Lock(directory / paths.RUN)
    except ChangeLogInUse as error:
        raise ChangeLogInUse(
            f"running the subscription in {directory}", error.wrong, "end that process first"
        ) from None


def _quietly(end: Callable[[], None]) -> None:
    """What goes wrong while something ends, because the JVM or the source is gone, is for nobody."""
    with contextlib.suppress(Exception):
        end()


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
