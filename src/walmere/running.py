"""Builds a run from source, Spark and target. Importing this module imports Spark."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from walmere import paths
from walmere.apply.worker import Applied
from walmere.config import Config, DeltaTarget
from walmere.lsn import Lsn
from walmere.shaping.rules import TableRules
from walmere.spark.apply import ApplyWorker, OnBatch, OnBatchEnd
from walmere.spark.executors import require_suitable
from walmere.spark.interpreters import is_local
from walmere.spark.jvm import require_alive, require_java
from walmere.spark.late_session import LateSession
from walmere.spark.session import master_of, session, stopped_after_error
from walmere.spark.tasks import SparkTasks
from walmere.subscription.checks.cluster import require_shared
from walmere.subscription.copy_progress import CopyProgress, RunningCopies
from walmere.subscription.launcher import Launcher, OnRetry
from walmere.subscription.shared.state import SharedState
from walmere.subscription.shared.store import store_of_config
from walmere.subscription.state import TableState, to_json
from walmere.subscription.tables import Tables
from walmere.subscription.tablesync import TableSync
from walmere.subscription.target.recorder import Recorder
from walmere.subscription.target.sink import sink_of
from walmere.subscription.target.upkeep import UpkeepScheduler

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

OnProgress = Callable[[Mapping[str, Any]], None]

_POLL: Final = 0.05


class RunProgress:
    """What `walmere run --json` prints: the state of every table, whenever it has changed.

    It polls in its own thread, because tables may be copied before the apply worker has started.
    """

    def __init__(self, tables: Tables, copies: RunningCopies, on_progress: OnProgress) -> None:
        self._tables = tables
        self._copies = copies
        self._on_progress = on_progress
        self._applied: str | None = None
        self._changes: Counter[int] = Counter()
        self._reported: Mapping[str, Any] = {}
        self._polled: object = None
        self._polling = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):  # stdout is closed; the launcher reports that
            while not self._ended.wait(_POLL):
                self.poll()

    def end(self) -> None:
        """Report the last batch, then stop."""
        self._ended.set()
        self.poll()

    def batch_applied(self, applied: Sequence[Applied], lsn: Lsn) -> None:
        """Count the changes of a batch."""
        for table in applied:
            self._changes[table.oid] += table.changes
        self._applied = str(lsn)  # set after the changes, so that a report with this LSN includes them

    def poll(self) -> None:
        """Report the state of the tables if it has changed."""
        with self._polling:
            applied = self._applied
            copies = self._copies.by_table
            if (seen := (self._tables.changes, applied, copies)) == self._polled:
                return
            self._polled = seen
            now = {"applied_lsn": applied, "tables": [self._table(each, copies) for each in self._tables]}
            if now != self._reported:
                self._on_progress(now)
                self._reported = now

    def _table(self, known: TableState, copies: Mapping[int, CopyProgress]) -> dict[str, Any]:
        shown = {"name": known.name, **to_json(known), "changes": self._changes[known.oid]}
        copying = copies.get(known.oid)
        if copying is None:
            return shown
        return {**shown, "rows_copied": copying.rows, "rows_estimated": copying.estimated, "copy_began": copying.began}


def spark(config: Config) -> SparkSession:
    """The Spark session of the configuration: the active one of this process, or a new one."""
    log = config.subscription.directory / paths.SPARK_LOG
    if not is_local(master_of(config.spark.master)):
        require_shared(config)
    with stopped_after_error():
        started = session(config.subscription.name, config.spark.master, config.spark.settings, log)
        require_suitable(started.sparkContext)
    if (address := started.sparkContext.uiWebUrl) is not None:
        _log.warning("Spark's UI is at %s", address)
    return started


def _all_follow(tables: Tables) -> bool:
    """Whether there are tables, and each has its copy."""
    published = [each for each in tables if each.published]
    return bool(published) and all(each.follows for each in published)


def _nothing() -> None:
    """Nobody wants to know the progress."""


def launcher(  # noqa: PLR0913  what `walmere run` can be told, and its callbacks
    config: Config,
    file: Path,
    *,
    on_progress: OnProgress | None = None,
    on_batch: OnBatch = lambda *_: None,
    on_batch_end: OnBatchEnd = lambda *_: None,
    on_retry: OnRetry = lambda *_: None,
    take_over: bool = False,
    receives: bool = True,
    ends: bool = False,
) -> Launcher:
    """Start Spark and create a launcher that is ready to run.

    `on_progress` is called when a table has a new position or phase, `on_batch` after each batch, `on_batch_end` with
    the seconds that it took, `on_retry` with the error if applying has failed and is retried. `receives`: False if
    another machine receives into the store. `ends`: the run has an end, so it may find nothing to do, and Spark is
    started only when it is needed. On a cluster, or if there are tables to copy, it is started at once: what is wrong
    with it is known before anything else is done.
    """
    rules = TableRules.of(config)
    rules.require_key()
    target = sink_of(config, file)
    directory, name = config.subscription.directory, config.subscription.name
    store = store_of_config(config)
    shared = None if store is None else SharedState(store, directory)
    tables = Tables(directory, shared)  # before Spark starts, which takes seconds: a damaged file is refused here
    late = LateSession(functools.partial(spark, config))
    remote = not is_local(master_of(config.spark.master))
    if remote or not ends or not _all_follow(tables):
        late.get()
    else:
        require_java()
    gather = config.target is not None and config.target.gather_partitions
    copies = SparkTasks(late, "copy")
    if remote:
        target = target.portable()
    running = RunningCopies(directory, config.source)
    sync = TableSync(config.source, name, tables, target, copies, running, rules, gather=gather)
    limit = None
    if isinstance(config.target, DeltaTarget) and not target.spreads:
        limit = config.target.max_rewrite_bytes_per_hour
    recorder = Recorder(directory, target, tables, name, rewrite_limit=limit)
    progress = None if on_progress is None else RunProgress(tables, running, on_progress)

    def batch_applied(applied: list[Applied], lsn: Lsn) -> None:
        if progress is not None:
            progress.batch_applied(applied, lsn)
        on_batch(applied, lsn)

    start_apply = functools.partial(
        ApplyWorker,
        late,
        directory,
        tables,
        recorder,
        hash_key=config.hash_key,
        on_batch=batch_applied,
        on_batch_end=on_batch_end,
    )
    return Launcher(
        config,
        file,
        tables,
        sync,
        recorder,
        start_apply,
        upkeep=functools.partial(UpkeepScheduler, directory, tables, SparkTasks(late, "upkeep"), config.maintenance),
        require_spark=functools.partial(require_alive, directory / paths.SPARK_LOG),
        on_poll=_nothing if progress is None else progress.poll,
        on_end=_nothing if progress is None else progress.end,
        on_retry=on_retry,
        take_over=take_over,
        shared=shared,
        receives=receives,
    )
