"""The launcher: starts the receiver, the copies and the apply worker, supervises them, and stops them together.

The receiver is a separate process. It does not share the interpreter lock with Spark's driver, and it continues if the
driver is killed, so that the source does not have to keep its WAL. The next launcher stops it and starts a new one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from walmere import paths
from walmere.changelog import manifest, manifest_file
from walmere.config import Config
from walmere.definition import MESSAGES_OID
from walmere.errors import (
    ChangeLogInUse,
    Paused,
    SinkFull,
    SinkUnavailable,
    SlotInUse,
    SourceUnavailable,
    StoreUnavailable,
    TableLocked,
    WalmereError,
)
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.storage import Lock
from walmere.subscription import receiver
from walmere.subscription.backoff import Backoff
from walmere.subscription.copies import CopyScheduler
from walmere.subscription.executor import DaemonExecutor
from walmere.subscription.receiver_process import ReceiverProcess
from walmere.subscription.requests import pausing, resync
from walmere.subscription.requests.position import PositionRequests
from walmere.subscription.shared.follower import Follower
from walmere.subscription.shared.requests import POLL_INTERVAL, SharedRequests
from walmere.subscription.shared.standby import has_log, wait_for_slot
from walmere.subscription.shared.state import SharedState
from walmere.subscription.shared.store import probe, refresh_log, require_own
from walmere.subscription.state import Phase, TableState
from walmere.subscription.tables import Tables
from walmere.subscription.tablesync import TableSync
from walmere.subscription.target import ownership
from walmere.subscription.target.recorder import Recorder
from walmere.subscription.target.upkeep import UpkeepScheduler

_log = logging.getLogger(__name__)

OnRetry: TypeAlias = Callable[[WalmereError], None]

CONCURRENT_COPIES: Final = 2
"""Tables that are copied at the same time. Each copy uses all cores."""
MAX_STARTS: Final = 6
"""The run fails after this many starts of the apply worker in a row that applied nothing."""
STOP_TIMEOUT: Final = 6.0
"""Wait this many seconds for the apply worker and the copies to stop, then exit: both may be interrupted anywhere."""
_BACKOFF: Final = (0.1, 30.0)
"""Seconds before the apply worker is started again: the first pause and the longest."""
_POLL: Final = 0.05
_STORE_RETRY: Final = 5.0
"""Seconds before the store is asked again, if it does not answer at the start."""
_JVM_EXIT_TIMEOUT: Final = 2.0
"""Seconds between the loss of the connections to the JVM and the end of its process, at most."""


class ApplyWorker(Protocol):
    """Applies the change log to the tables, in a thread."""

    def stop(self) -> None:
        """End it."""

    def finish(self, seconds: float) -> None:
        """Let a batch that is being applied end, if it does so within some seconds, and begin no other one."""

    def error(self) -> WalmereError | None:
        """The error that has ended it."""


class StartApply(Protocol):
    """Starts the apply worker."""

    def __call__(self, *, interval: float, until: Lsn | None) -> ApplyWorker:
        """Batches begin at least `interval` seconds after each other. `until`: where the run ends."""


class Launcher:
    """One run of a subscription."""

    def __init__(  # noqa: PLR0913  the parts of a run, and its callbacks
        self,
        config: Config,
        config_file: Path,
        tables: Tables,
        sync: TableSync,
        recorder: Recorder,
        start_apply: StartApply,
        *,
        upkeep: Callable[[Callable[[TableState, Sequence[Any]], None]], UpkeepScheduler] | None = None,
        require_spark: Callable[[float], None] = lambda _: None,
        on_poll: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        on_retry: OnRetry = lambda *_: None,
        take_over: bool = False,
        shared: SharedState | None = None,
        receives: bool = True,
    ) -> None:
        """Start nothing yet.

        `upkeep` makes the scheduler of upkeep, from the function that commits its results.
        `require_spark(seconds)` raises if Spark has ended, or ends within this time. `on_poll` is called often,
        `on_end` at the end, `on_retry` with the error when applying has failed and is retried. `take_over`: take tables
        of the target from other owners. `shared`: the state, if it is in a store. `receives`: False if a receiver on
        another machine writes to that store.
        """
        self._config = config
        self._config_file = config_file
        self._tables = tables
        self._sync = sync
        self._recorder = recorder
        self._start_apply = start_apply
        self._upkeep = None if upkeep is None else upkeep(recorder.replace_files)
        self._stopping = threading.Event()
        self._claimed = self._paused = False
        self._takes_tables = take_over
        self._shared = shared
        self._requests = None if shared is None else SharedRequests(shared.store)
        self._requests_at = 0.0
        self._positions = None if shared is None else PositionRequests(config.source)
        self._receives = receives
        self._backoff = Backoff(*_BACKOFF)
        self._applied_at_start = recorder.applied
        self._start_at = 0.0
        self._process: ReceiverProcess | Follower | None = None
        self._worker: ApplyWorker | None = None
        self._require_spark = require_spark
        self._on_poll = on_poll
        self._on_end = on_end
        self._on_retry = on_retry

    def stop(self) -> None:
        """Request the end of the run. Safe in a signal handler."""
        self._stopping.set()

    def run(self, until: Lsn | None = None) -> None:
        """Copy tables that have no copy yet, then apply changes, until stopped or until the LSN is applied.

        The snapshot of a table that is copied during the run may be after `until`. The run then continues until all
        tables have reached that LSN, so that they end at one point.
        """
        try:
            with closing(lock_run(self._config.subscription.directory)):
                self._run(until)
        finally:
            self._on_end()

    def abandon(self) -> None:
        """Kill the receiver: the process is about to exit, whatever is still running."""
        if self._process is not None:
            self._process.kill()

    def _run(self, until: Lsn | None) -> None:
        self._worker = None
        with (
            contextlib.ExitStack() as receiving,
            DaemonExecutor(CONCURRENT_COPIES, "copying") as copying,
            DaemonExecutor(CONCURRENT_COPIES, "catalogs") as catalog_reads,
            DaemonExecutor(1, "upkeep") as upkeep,
        ):
            first = self._receive_first(receiving, until)
            self._take_over_state(until)
            self._prepare(creates=self._receives and first is None)
            prepared = self._prepare_target(until)
            process = first or self._receive(receiving, until)
            while not (self._config.changelog / manifest_file.NAME).exists() and not self._stopping.is_set():
                process.check()
                time.sleep(_POLL)
            if self._stopping.is_set():
                return
            if not prepared:
                self._prepare_target(until)
            with manifest.Manifest(self._config.changelog) as log:
                self._sync.follow_messages(self._messages_table(), log.header.start_lsn)
            copies = CopyScheduler(self._sync, self._tables, copying, catalog_reads, once=until is not None)
            try:
                self._supervise(process, copies, upkeep, until)
                self._finish_batch()
                self._last_upkeep()
            except (WalmereError, KeyboardInterrupt):
                raise
            except Exception as error:
                self._require_spark_after(error)
                raise
            finally:
                self._stop_all(process, copies)
            if self._worker is None and not self._stopping.is_set():
                self._recorder.record_copies()
            if copies.failed and until is not None:
                raise next(iter(copies.failed.values()))

    def _receive_first(self, receiving: contextlib.ExitStack, until: Lsn | None) -> ReceiverProcess | None:
        """With a log in a store: start the receiver before anything else, and wait until it has the slot."""
        if not self._receives or not self._ask_store(has_log, until):
            return None
        process = self._receive(receiving, until)
        assert isinstance(process, ReceiverProcess)
        wait_for_slot(process, self._config, self._stopping, ends=until is not None)
        return process

    def _receive(self, receiving: contextlib.ExitStack, until: Lsn | None) -> ReceiverProcess | Follower:
        """Start what writes the local log: a receiver, or a copy of what one on another machine writes."""
        if self._receives:
            process: ReceiverProcess | Follower = ReceiverProcess(self._config_file, self._config, until)
        else:
            process = Follower(self._config)
        self._process = process
        receiving.push(process)
        return process

    def _take_over_state(self, until: Lsn | None) -> None:
        """With a store: become its driver, and continue from the state that is there, if there is a log."""
        if self._shared is not None and not self._shared.taken and self._ask_store(self._take_over, until):
            self._tables.reload()

    def _take_over(self, config: Config) -> bool:
        assert self._shared is not None
        probe(self._shared.store)
        require_own(config)
        return self._shared.take_over(self._stopping)

    def _ask_store(self, ask: Callable[[Config], bool], until: Lsn | None) -> bool:
        """What the store answers; waits for it in a run without an end. False if the run is stopped meanwhile."""
        while self._shared is not None and not self._stopping.is_set():
            try:
                return ask(self._config)
            except StoreUnavailable as error:
                if until is not None:
                    raise
                _log.warning("%s: %s; retrying", error.doing, error.wrong)
                self._stopping.wait(_STORE_RETRY)
        return False

    def _supervise(
        self, process: ReceiverProcess | Follower, copies: CopyScheduler, upkeep: DaemonExecutor, until: Lsn | None
    ) -> None:
        """Keep receiver, copies and apply worker running until the run is stopped or everything is applied."""
        end = until
        while not self._stopping.is_set() and not (copies.done() and self._has_applied(end, copies)):
            process.until = end = self._end(until)
            self._request_position(end)
            self._require_spark(0.0)
            process.check()
            with contextlib.suppress(StoreUnavailable):  # writing the state will tell
                self._tables.shared.check()
            for oid in self._requested():
                copies.retry_now(oid)
            self._pause_or_resume(copies, until)
            copies.poll(start=not self._paused)
            if self._worker is not None:
                self._worker = self._checked(self._worker, until)
                if self._upkeep is not None and until is None and not self._paused:
                    self._upkeep.poll(self._recorder.sink, upkeep)
            elif not self._paused and time.monotonic() >= self._start_at and self._needs_worker(end, copies):
                self._worker = self._start(until, end)
            self._on_poll()
            time.sleep(_POLL)

    def _pause_or_resume(self, copies: CopyScheduler, until: Lsn | None) -> None:
        """Do what `walmere pause` and `walmere resume` have requested. The apply worker does its own part."""
        paused = pausing.is_paused(self._config.subscription.directory)
        if paused and until is not None:
            raise Paused("running the subscription up to an LSN", "it is paused", "`walmere resume` first")
        if paused and not self._paused:
            _log.warning("paused: changes are received, and not applied; `walmere resume` continues")
            if self._upkeep is not None:
                self._upkeep.stop()
        if paused and copies.working:
            self._sync.stop()  # repeated: a copy may be between two jobs
        if self._paused and not paused:
            _log.warning("resumed")
            self._sync.resume()
            if self._upkeep is not None:
                self._upkeep.resume()
        self._paused = paused

    def _request_position(self, end: Lsn | None) -> None:
        """With a store: have the log reach the LSN that is needed next, also if the source is idle."""
        if self._positions is None or self._worker is None or self._paused:
            return
        waits = not self._receives and end is not None and self._recorder.applied < end
        if waits or any(each.phase in (Phase.FINISHED_COPY, Phase.SYNC_DONE) and each.follows for each in self._tables):
            self._positions.add(self._recorder.applied)

    def _requested(self) -> set[int]:
        """Take requests: the OIDs of tables that are to be copied again."""
        directory = self._config.subscription.directory
        wanted = resync.take(directory, self._tables)
        if self._requests is not None and time.monotonic() >= self._requests_at:
            self._requests_at = time.monotonic() + POLL_INTERVAL
            with contextlib.suppress(StoreUnavailable):
                wanted |= resync.take_shared(directory, self._tables, self._requests)
        return wanted

    def _finish_batch(self) -> None:
        """Before a run ends by itself: let a batch end that has begun since, so that all tables are at one point."""
        if self._worker is not None and not self._stopping.is_set():
            self._worker.finish(STOP_TIMEOUT)

    def _last_upkeep(self) -> None:
        """Do a round of upkeep before a run ends by itself: it may be the only one for hours.

        If nothing was applied, old files are deleted, and none is rewritten: after a first copy, that can take minutes.
        """
        if self._upkeep is not None and not self._stopping.is_set():
            self._upkeep.round(self._recorder.sink, rewrite=self._recorder.has_changed_tables)

    def _claim(self) -> None:
        """Check that the target's tables belong to this subscription."""
        owner, published = ownership.find(self._config)
        ownership.require_target(self._config, self._recorder.sink)
        if (messages := self._messages_table()) is not None:
            published = [*published, TableState(messages, MESSAGES_OID)]
        self._sync.use(self._recorder.claim(owner, published, take_over=self._takes_tables))
        self._claimed = True

    def _prepare_target(self, until: Lsn | None) -> bool:
        """Compare target and state. Returns False if there is no change log yet, so nothing to compare."""
        if self._stopping.is_set() or not (self._config.changelog / manifest_file.NAME).exists():
            return False
        self._take_over_state(until)
        if not self._claimed:
            self._claim()
        with manifest.Manifest(self._config.changelog) as log:
            self._recorder.prepare(log.header.start_lsn)
        return True

    def _stop_all(self, process: ReceiverProcess | Follower, copies: CopyScheduler) -> None:
        """Stop everything at the same time. What does not stop in time remains in daemon threads."""
        deadline = time.monotonic() + STOP_TIMEOUT

        def stop_copies() -> None:
            while copies.cancel() and time.monotonic() < deadline:  # repeated: a copy may be between two jobs
                self._sync.stop()
                time.sleep(_POLL)

        process.terminate()
        work = {"the copies": stop_copies} | ({} if self._worker is None else {"the apply worker": self._worker.stop})
        work |= {} if self._upkeep is None else {"upkeep": self._upkeep.stop}
        threads = {
            what: threading.Thread(target=_ignore_errors, args=(stop,), daemon=True) for what, stop in work.items()
        }
        for thread in threads.values():
            thread.start()
        for what, thread in threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("%s did not stop within %.0f s", what, STOP_TIMEOUT)

    def _messages_table(self) -> TableName | None:
        wanted = self._config.target.messages if self._config.target is not None else None
        return None if wanted is None else TableName(*wanted.split(".", 1))

    def _prepare(self, *, creates: bool) -> None:
        """Create slot and log, or check that they belong to the source, before anything is copied.

        The receiver does this too, but it has to start first, and it retries where the run should fail. A thread does
        it because a new slot waits for every open transaction, and the run can be stopped during that time.
        """
        done: Future[None] = Future()
        cancel: list[Callable[[], None]] = []

        def prepare() -> None:
            try:
                # before the slot: a refused run must not leave one
                self._sync.require_free_messages_name(self._messages_table())
                refresh_log(self._config)
                if self._receives:
                    self._claim()
                if creates:
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
            with contextlib.suppress(SourceUnavailable, TableLocked, ChangeLogInUse, SlotInUse, StoreUnavailable):
                done.result()

    def _end(self, until: Lsn | None) -> Lsn | None:
        """The LSN at which the run ends: the position of the most advanced table, if that is after `until`."""
        if until is None:
            return None
        altered = self._sync.discovery.altered_lsn
        positions = [position for table in self._tables if (position := table.position) is not None]
        return max([until, *positions, *([] if altered is None else [altered])])

    def _needs_worker(self, until: Lsn | None, copies: CopyScheduler) -> bool:
        """Whether there is something to apply, or the log's end to record."""
        positions = [position for table in self._tables if (position := table.position) is not None]
        if not positions:
            return copies.done()
        return until is None or any(each < until for each in positions)

    def _has_applied(self, until: Lsn | None, copies: CopyScheduler) -> bool:
        if until is None or (self._worker is not None and self._recorder.applied < until):
            return False
        tables = [each for each in self._tables if each.published and each.oid not in copies.failed]
        return all(each.follows and each.applied_lsn >= until for each in tables) and bool(
            tables or self._worker is not None
        )

    def _require_spark_after(self, error: BaseException) -> None:
        """Raise SparkEnded if the JVM was killed. Its connections are lost somewhat before its process has ended."""
        disconnected = isinstance(error, OSError) or type(error).__module__.startswith("py4j")
        self._require_spark(_JVM_EXIT_TIMEOUT if disconnected else 0.0)

    def _start(self, until: Lsn | None, end: Lsn | None) -> ApplyWorker:
        """Start the apply worker, in a run that ends at `end`."""
        self._applied_at_start = self._recorder.applied
        return self._start_apply(interval=self._recorder.sink.batch_interval if until is None else 0.0, until=end)

    def _checked(self, worker: ApplyWorker, until: Lsn | None) -> ApplyWorker | None:
        """Returns the apply worker if it is running, and None if it has to be started again.

        Raises the error that ended it, unless a new start may help, as after a kill of Spark's Python processes. The
        number of starts is counted until one of them applies changes. If the target is full, or it or the store does
        not answer, a run without `until` retries without limit: the receiver continues, and no change is lost.
        """
        if (error := worker.error()) is None:
            return worker
        self._require_spark_after(error.__cause__ or error)
        patient = isinstance(error, SinkFull | SinkUnavailable | StoreUnavailable)
        if not (patient or error.transient or type(error) is WalmereError):
            raise error
        if self._recorder.applied > self._applied_at_start:
            self._backoff.reset()
        pause = self._backoff.next(None if patient and until is None else MAX_STARTS)
        if pause is None:
            raise error
        _log.warning("%s: %s; starting to apply changes again in %.1f s", error.doing, error.wrong, pause)
        self._start_at = time.monotonic() + pause
        self._on_retry(error)
        return None


def lock_run(directory: Path) -> Lock:
    """Lock the subscription: only one process may run it."""
    try:
        return Lock(directory / paths.RUN)
    except ChangeLogInUse as error:
        raise ChangeLogInUse(
            f"running the subscription in {directory}", error.wrong, "end that process first"
        ) from None


def _ignore_errors(stop: Callable[[], None]) -> None:
    """Stop something. It may fail because the JVM or the source is gone, and that does not matter then."""
    with contextlib.suppress(Exception):
        stop()
