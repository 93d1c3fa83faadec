"""The apply worker: a Structured Streaming query over the change log.

Its source returns references, one partition for each table with changes. A task gets the pickled `ApplyJob` of a
partition. It opens the log, decodes, folds, and commits to its table. (If a table has many changes in a batch, several
tasks stage them, and one commit has them all. Tables with few changes share a task.) It returns the result. So Spark
schedules, distributes, retries and checkpoints, and no row of a table passes through the JVM or the driver.

A micro-batch ends on a commit boundary. When all its tables are committed, their states are updated, then the ledger
gets a point. A crash before that repeats the batch, and tables that already have it do nothing. A table whose copy is
committed during a batch takes part in the next one, from its own position.

A table whose stream has a definition that its target does not have is applied up to there, and waits. A table that
cannot be applied is set aside with the error. The other tables continue.
"""

from __future__ import annotations

import functools
import logging
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from py4j.protocol import Py4JJavaError
from pydantic import SecretStr
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from walmere import paths
from walmere.apply.jobs import ApplyJob, Batch
from walmere.apply.standing import Behind
from walmere.apply.worker import Applied, apply_table, commit_staged
from walmere.definition import MESSAGES_OID
from walmere.errors import (
    ChangeLogDamaged,
    ChangeLogError,
    SinkError,
    SinkMismatch,
    WalmereError,
)
from walmere.ledger.entry import Entry, now
from walmere.ledger.file import Ledger
from walmere.lsn import INVALID_LSN, Lsn
from walmere.owner import Owner
from walmere.sinks.base import LedgerWriter, Sink, full_or, is_lake
from walmere.spark.executors import Versions, require_same
from walmere.spark.failures import Failure, attempts, from_spark, raise_first, result_or_failure
from walmere.spark.interpreters import register
from walmere.spark.late_session import LateSession
from walmere.spark.placement import Placement, parallelism, tagged
from walmere.spark.reference_source import SOURCE, ReferenceSource, planned
from walmere.storage import read_error, reserve_error
from walmere.subscription import state
from walmere.subscription.batches import Batches
from walmere.subscription.progress import TARGET, SinkPositions
from walmere.subscription.requests import cuts, skipping
from walmere.subscription.state import Phase, TableState
from walmere.subscription.tables import Tables
from walmere.subscription.target import pace, prepare
from walmere.subscription.target.pace import Pace

_log = logging.getLogger(__name__)

OnBatch: TypeAlias = Callable[[list[Applied], Lsn], None]
OnBatchEnd: TypeAlias = Callable[[float], None]
MAX_LSN: Final = Lsn((1 << 64) - 1)
_NOT_IN_LOG: Final = "the change log does not have the next changes of the table any more"
_FULL_BELOW: Final = 1 << 20
"""A disk with fewer free bytes is full."""


def _apply(
    references: Sequence[bytes], sink: Sink, hash_key: SecretStr | None, tries: int, driver: Versions
) -> Iterator[Any]:
    """Apply the jobs of a task. Returns their results."""
    unsuitable = result_or_failure(tries, require_same, driver)  # first: other versions may have other classes
    if unsuitable is not None:
        yield unsuitable
        return
    work = [pickle.loads(reference) for reference in references]  # noqa: S301
    if not is_lake(sink):
        yield from _apply_together(work, sink, tries)
        return
    for each in work:
        yield result_or_failure(tries, apply_table, each, sink, hash_key) if isinstance(each, ApplyJob) else each


def _apply_together(work: Sequence[ApplyJob | Batch], sink: Sink, tries: int) -> Iterator[Any]:
    """Apply a whole batch in one transaction."""
    # here, because it imports the driver of a database, which other targets do not need
    from walmere.apply.transaction import apply_batch  # noqa: PLC0415

    jobs = [each for each in work if isinstance(each, ApplyJob)]
    [batch] = [each for each in work if isinstance(each, Batch)]
    yield batch
    done = result_or_failure(tries, apply_batch, jobs, batch, sink)
    yield from [done] if isinstance(done, Failure) else done


def _state_after(known: TableState, result: Applied | None, end_lsn: Lsn) -> TableState:
    """A table's state after a batch."""
    if not known.follows:
        return known  # it was set aside during the batch
    if result is not None and (result.stopped is None or result.stopped.awaits is not None):
        known = state.committed(known, result.version, result.lsn)
    if result is None or result.stopped is None:
        return state.applied(known, end_lsn, None if result is None else result.rejects)
    if result.stopped.behind is not None:
        return known  # `move_back` changes its state
    if result.stopped.awaits is None:
        return state.set_aside(known, result.stopped.error, time.time())
    return state.redefined(known, result.stopped.awaits, result.stopped.reached, result.rejects)


class Apply:
    """Runs the query, and records the result of each batch."""

    def __init__(  # noqa: PLR0913  the parts of a query, its limits and its callback
        self,
        spark: SparkSession | LateSession,
        directory: Path,
        sink: Sink,
        tables: Tables,
        subscription: str,
        *,
        rewrite_limit: int | None = None,
        hash_key: SecretStr | None = None,
        on_batch: OnBatch = lambda *_: None,
        on_batch_end: OnBatchEnd = lambda *_: None,
    ) -> None:
        """`on_batch` is called after each batch, with the results by table and the LSN of the batch's end.

        `on_batch_end` is called after each micro-batch that was applied, with the seconds it took.
        `rewrite_limit`: batches may write at most this many bytes per hour; None: there is no limit. `hash_key`: for
        columns that are hashed.
        """
        self._hash_key = hash_key
        self._late_spark = spark
        self._directory = directory
        self._sink = sink
        self._tables = tables
        self._subscription = subscription
        self._ledger = Ledger(directory, sink.keep_seconds)
        self._lake_ledger: LedgerWriter | None = None
        self._positions = SinkPositions(directory)
        self._versions: dict[str, int] = {}  # not from the ledger, which may lack a batch that the tables have
        self._counted: dict[str, tuple[int | None, int]] = {}  # by name: a version, and the bytes written up to it
        self._furthest = INVALID_LSN  # the greatest LSN of any table
        self._began = 0
        self.applied: Lsn = INVALID_LSN
        self._error: WalmereError | None = None
        self._planner_error = directory / paths.PLANNER_ERROR
        self._on_batch = on_batch
        self._on_batch_end = on_batch_end
        self._pace = None if rewrite_limit is None else Pace(directory, rewrite_limit)
        if rewrite_limit is None:
            pace.reset(directory)
        self._committing = threading.Lock()  # held by a batch, or by a commit of upkeep
        self._finished = False
        self._planner: Batches | None = None  # of `needs_query`; the query has its own
        self._nothing_at: object = None  # end of the log, and states of the tables, at which there was nothing to apply

    @property
    def _spark(self) -> SparkSession:
        return self._late_spark.get() if isinstance(self._late_spark, LateSession) else self._late_spark

    @property
    def sink(self) -> Sink:
        """The target."""
        return self._sink

    @property
    def error(self) -> WalmereError | None:
        """The error that ended the query or its planner (another process). None: there is only Spark's exception."""
        return self._error or read_error(self._planner_error)

    def claim(self, owner: Owner, published: Sequence[TableState], *, take_over: bool = False) -> Sink:
        """Check that the target's tables belong to the owner, before anything is written. Returns the sink to use."""
        self._sink = self._sink.owned_by(owner, take_over=take_over)
        prepare.claim(self._sink, self._subscription, self._tables, published, take_over=take_over)
        self._sink = self._sink.owned_by(owner)  # without take_over: tables that others take over later are theirs
        return self._sink

    def prepare(self, log_start: Lsn) -> None:
        """Compare state and target, and repair them. Call it under the run's lock, before anything is received."""
        last = self._open_ledger()
        self.applied = last.lsn if last is not None else INVALID_LSN
        needed = state.needed_from(self._tables, self.applied)
        if self._positions.repair(TARGET, needed) and needed:
            _log.warning(
                "the position in %s/%s.json was missing or damaged; it was derived from the states of the tables",
                paths.POSITIONS,
                TARGET,
            )
        behind = prepare.check(self._sink, self._tables, log_start)
        if behind:
            self._positions.advance(TARGET, state.needed_from(self._tables, self.applied))
        self._remove_from_points((each.name, found) for each, found in behind)
        self._tables.shared.put()

    def _open_ledger(self) -> Entry | None:
        """The newest point. A damaged ledger is replaced by the lake's copy."""
        try:
            entries = self._ledger.open()
        except ChangeLogDamaged as error:
            entries = list(self._sink.points(self._subscription))
            _log.warning("%s: %s; it was restored from the ledger in the lake", error.doing, error.wrong)
            self._ledger.restart(entries)
        return entries[-1] if entries else None

    def _remove_from_points(self, behind: Iterable[tuple[str, Behind]]) -> None:
        """Remove tables that have lost commits from the points that name these commits."""
        changed = False
        for name, lost in behind:
            lsn, version = (INVALID_LSN, -1) if lost.found is None else (lost.found.lsn, lost.found.version)
            if lost.found is None or lost.apply_from is not None:
                changed |= self._ledger.remove_table(name, lsn or INVALID_LSN, version)
            else:  # the newest version has no known LSN, but older versions are valid
                changed |= self._ledger.remove_table(name, MAX_LSN, version)
            self._versions.pop(name, None)
        if changed:
            self._lake_ledger = self._sink.open_ledger(self._subscription, self._ledger.entries())

    def start(self, interval: float = 0.0, until: Lsn | None = None) -> StreamingQuery:
        """Start the query. It runs until stopped. Batches begin at least `interval` seconds after each other.

        `until`: the LSN at which the run ends, so that its last batch does not wait for more.

        Each start has a new checkpoint, because the positions of the tables say where to continue. Spark does not fsync
        a checkpoint, and one that was damaged by a crash would make the start fail.
        """
        # only now, because another process may have been running before
        self._lake_ledger = self._sink.open_ledger(self._subscription, self._ledger.open())
        self._error = None
        self._finished = False
        reserve_error(self._planner_error)
        try:
            return self._start(interval, until)
        except Py4JJavaError as error:
            raise self.error or from_spark(error) from None

    def _start(self, interval: float, until: Lsn | None) -> StreamingQuery:
        self._placement = Placement(self._spark.sparkContext)
        checkpoint = self._directory / paths.CHECKPOINT
        if checkpoint.is_dir() and not checkpoint.is_symlink():
            shutil.rmtree(checkpoint)
        else:
            checkpoint.unlink(missing_ok=True)
        register(self._spark, ReferenceSource)
        stream = (
            self._spark.readStream.format(SOURCE)
            .option("directory", str(self._directory))
            .option("parallelism", parallelism(self._spark.sparkContext))
            .option("spread", self._sink.spreads)
            .option("transactional", self._sink.transactional)
            .option("two_phase", self._sink.two_phase)
            .options(**({} if until is None else {"until": str(until)}))
            .load()
        )
        writer = stream.writeStream.queryName("apply").foreachBatch(self._batch)
        writer = writer.trigger(processingTime=f"{round(interval * 1000)} milliseconds")
        return writer.option("checkpointLocation", str(checkpoint)).start()

    def needs_query(self, until: Lsn) -> bool:
        """Whether the log has changes for the tables, in a run that ends at this LSN.

        If it has none up to there, the positions are recorded here: the start of a query takes seconds.
        """
        if self._sink.two_phase or cuts.active(self._directory).at:
            return True
        planner = self._planner = self._planner or Batches(self._directory, 1)
        end = min(until, planner.log_end)
        looked_at = (end, Tables.changed(self._directory))
        if looked_at == self._nothing_at:
            return False
        [batch, *jobs] = planner.plan({"lsn": str(end)})
        assert isinstance(batch, Batch)
        if jobs or batch.not_in_log or not batch.tables:
            return True
        if end == until:
            with self._committing:
                self._lake_ledger = self._sink.open_ledger(self._subscription, self._ledger.open())
                self._began = now()
                self._record([batch])
        self._nothing_at = looked_at
        return False

    def record_copies(self) -> None:
        """In a run that needed no query: write to the ledger that all tables were copied at one LSN."""
        following = [each for each in self._tables if each.follows]
        positions = {each.applied_lsn for each in following}
        if len(positions) == 1 and (lsn := positions.pop()) > self.applied:
            if any((self._sink.applied(each.table) or INVALID_LSN) > lsn for each in following):
                return  # a crash has left a table ahead
            versions = {each.name: self._sink.version(each.table) for each in following}
            self._lake_ledger = self._sink.open_ledger(self._subscription, self._ledger.open())
            # the commit time of the newest transaction is not known: it is before now
            point = self._ledger.append(Entry(lsn, now(), versions, now()))
            self._tables.shared.put()
            self._lake_ledger.append(point)
            self.applied = lsn

    def _keep_log(self, applied: Lsn) -> None:
        """Record the position up to which no table needs the log any more. Not while a copy has no snapshot yet."""
        needed = state.needed_from(self._tables, applied)
        if needed:
            self._positions.advance(TARGET, needed)

    def _update_versions(self, tables: Iterable[TableState], applied: Iterable[Applied]) -> dict[int, str]:
        """Update the version and LSN of each table. Reads the target only if a result does not have them.

        Returns the errors of tables that do not exist any more, by OID.
        """
        lost: dict[int, str] = {}
        committed = {result.oid: (result.version, result.lsn) for result in applied}
        for each in tables:
            version, lsn = committed.get(each.oid, (None, None))
            if version is not None:
                self._versions[each.name] = version
                self._furthest = max(self._furthest, lsn or INVALID_LSN)
            elif each.oid in committed or each.phase is Phase.FINISHED_COPY or each.name not in self._versions:
                try:
                    self._versions[each.name] = self._sink.version(each.table)
                    self._furthest = max(self._furthest, self._sink.applied(each.table) or INVALID_LSN)
                except SinkMismatch as error:
                    lost[each.oid] = str(error)
        return lost

    def replace_files(self, known: TableState, done: Sequence[Any]) -> None:
        """Commit what upkeep has rewritten of a table, between two batches. The newest point gets the new version."""
        with self._committing:
            self._tables.shared.check()
            recorded = self._tables.get(known.oid)
            version = self._sink.replace_files(known.table, done)
            last = self._ledger.last()
            if version is None or recorded is None or recorded.version_lsn != self._sink.applied(known.table):
                return  # a task that was given up may have applied a batch: the next one records the version
            self._tables.change(
                {known.oid: functools.partial(state.committed, version=version, lsn=recorded.version_lsn)}
            )
            if last is None or last.versions.get(known.name) != self._versions.get(known.name, -1):
                return
            self._versions[known.name] = version
            point = Entry(last.lsn, last.commit_time, {**last.versions, known.name: version}, now())
            point = self._ledger.append(point)
            self._tables.shared.put()
            if self._lake_ledger is not None:
                self._lake_ledger.append(point)

    def finish(self, seconds: float) -> None:
        """Let a batch that is being applied end, if it does so within some seconds, and begin no other one."""
        if self._committing.acquire(timeout=seconds):
            self._finished = True
            self._committing.release()

    def _batch(self, references: DataFrame, _: int) -> None:
        with self._committing:
            if self._finished:
                return  # the next run begins at the LSN of the tables
            began = time.monotonic()
            try:
                self._tables.shared.check()
            except WalmereError as error:
                self._error = error  # Spark would return only its text
                raise
            self._skip_written()
            self._do_batch(references)
            self._on_batch_end(time.monotonic() - began)

    def _do_batch(self, references: DataFrame) -> None:
        self._began = now()
        context, sink, driver = self._spark.sparkContext, self._sink, Versions.here()
        tries, hash_key = attempts(context), self._hash_key

        def apply(work: Sequence[bytes]) -> Iterator[Any]:
            return _apply(work, sink, hash_key, tries, driver)

        try:
            with tagged(context, "apply"):
                results = self._placement.items(planned(references)).flatMap(apply).collect()
        except Exception as error:
            # one line only: Spark applies a regular expression to the text that overflows on long texts
            self._error = error if isinstance(error, WalmereError) else from_spark(error)
            raise self._error from None
        try:
            raise_first(each for each in results if isinstance(each, Failure))
            self._record(results)
        except WalmereError as error:
            self._error = full_or(error)  # Spark would return only its text
            raise self._error from None
        except OSError as error:
            self._error = self._disk_error(error)
            raise self._error from None

    def _disk_error(self, error: OSError) -> WalmereError:
        """The error of a full disk: that of the state directory, or else that of the target."""
        if shutil.disk_usage(self._directory).free < _FULL_BELOW:
            return ChangeLogError(f"writing below {self._directory}", str(error), "make room or repair the disk")
        return full_or(SinkError("writing to the target", str(error), "make the target writable"))

    def _record(self, results: list[Applied | Batch]) -> None:
        """Commit staged files, then update the states of the tables and the ledger."""
        [batch] = [result for result in results if isinstance(result, Batch)]
        tasks = [result for result in results if isinstance(result, Applied)]
        applied = commit_staged(self._sink, tasks, batch.end_lsn) if is_lake(self._sink) else tasks
        with self._tables.shared.together():
            changed, point = self._record_states(batch, applied)
            self._keep_log(batch.end_lsn)
            skipping.passed(self._directory, batch.end_lsn)
        if point is not None and self._lake_ledger is not None:  # after the ledger is in the store, if there is one
            self._lake_ledger.append(point)
        self.applied = batch.end_lsn
        if self._pace is not None:
            written = {result.oid for result in applied}
            self._pace.batch_wrote(sum(self._written(each) for each in changed if each.oid in written))
        self._on_batch(applied, batch.end_lsn)

    def _record_states(self, batch: Batch, applied: list[Applied]) -> tuple[list[TableState], Entry | None]:
        """Update the states of the tables and the ledger. Returns the changed states, and the new point."""
        results_of = {result.oid: result for result in applied}
        before = {oid: known for oid in batch.tables if (known := self._tables.get(oid)) is not None}
        changed = self._tables.change(
            {oid: functools.partial(_state_after, result=results_of.get(oid), end_lsn=batch.end_lsn) for oid in before}
        )
        behind = [
            (before[result.oid], result.stopped.behind)
            for result in applied
            if result.stopped is not None and result.stopped.behind is not None and result.oid in before
        ]
        behind += [(before[oid], Behind(_NOT_IN_LOG, None)) for oid in batch.not_in_log if oid in before]
        if behind:
            prepare.move_back(self._tables, self._sink, behind, batch.log_start)
            self._remove_from_points((each.name, found) for each, found in behind if found.why != _NOT_IN_LOG)
        moved_back = {each.oid for each, _ in behind}
        changed = [each for each in changed if each.oid not in moved_back]
        lost = self._update_versions([before[each.oid] for each in changed if each.follows], applied)
        changed += self._tables.change(
            {
                oid: functools.partial(state.copy_again, error=error)
                for oid, error in lost.items()
                if oid != MESSAGES_OID
            }
        )
        self._remove_from_points((before[oid].name, Behind(error, None)) for oid, error in lost.items())
        for each in changed:
            if each.error is not None:
                _log.warning("table %s is set aside and will be copied again: %s", each.name, each.error)
        applied_tables = [each for each in changed if each.follows and each.oid not in lost]
        # a table can be ahead of the batch: after its copy, or after a crash if batches now end at other LSNs
        if max([self._furthest, *(each.applied_lsn for each in applied_tables)]) <= batch.end_lsn:
            versions = {each.name: self._versions[each.name] for each in applied_tables}
            return changed, self._ledger.append(Entry(batch.end_lsn, batch.commit_time, versions, self._began))
        return changed, None

    def _skip_written(self) -> None:
        """Before a batch: do not count what copies and upkeep have written since the last one."""
        if self._pace is not None:
            for each in self._tables:
                if each.follows and (each.name not in self._counted or self._counted[each.name][0] != each.version):
                    self._written(each)

    def _written(self, known: TableState) -> int:
        """The bytes that were written to a table since the last call; 0 at the first one."""
        found = self._sink.extent(known.table)
        if found is None:
            return 0
        _, before = self._counted.get(known.name, (None, found.written))
        self._counted[known.name] = known.version, found.written
        return max(0, found.written - before)
