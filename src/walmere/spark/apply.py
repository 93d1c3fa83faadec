"""The apply worker: a Structured Streaming query over the change log.

Its source hands out references, one partition for each table that has something to do; what a task gets is one row
with a pickled `ApplyJob`. The task opens the log itself, decodes, folds, and commits to its table. (A table with many
inserts in a batch has several tasks. They only stage their files, and one commit takes them all.) What comes back is a
row that says what was done. So Spark schedules, spreads, retries and checkpoints, and no row of a table passes through
the JVM.

A micro-batch ends on a commit boundary. When all its tables are committed, their states move on, and then the ledger
says that they belong together. A crash anywhere before that repeats the batch, and every table that had it already does
nothing. A table whose copy is committed while a batch runs takes part from the next one on, from its own position.

A table whose stream comes to a definition that its target does not have is applied up to there, and waits. One that
cannot be applied at all is set aside, with the error. The others do not notice.
"""

from __future__ import annotations

import functools
import logging
import pickle
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from walmere.errors import (
    ChangeLogDamaged,
    ChangeLogError,
    NotMirrored,
    SinkError,
    SinkMismatch,
    TypeMismatch,
    WalmereError,
)
from walmere.lsn import INVALID_LSN, Lsn
from walmere.sinks.base import Publisher, Sink, StagedFile, TableName, full_or
from walmere.sinks.owner import Owner
from walmere.sinks.points import now
from walmere.spark import changes, messages
from walmere.spark.batches import ApplyJob, Batch
from walmere.spark.changes import Stretch
from walmere.spark.fold import fold
from walmere.spark.source import SOURCE, ReferenceSource
from walmere.spark.tasks import failure
from walmere.subscription import state, target
from walmere.subscription.ledger import Entry, Ledger
from walmere.subscription.origin import TARGET, Origins
from walmere.subscription.rejects import Rejects
from walmere.subscription.state import Phase, Shape, TableState
from walmere.subscription.tables import Tables
from walmere.subscription.tablesync import MESSAGES
from walmere.subscription.target import Behind, compare

_log = logging.getLogger(__name__)

MAX_LSN: Final = Lsn((1 << 64) - 1)
_NOT_IN_LOG: Final = "the change log does not have any more what is still to be applied to it"
_LITTLE: Final = 1 << 20
"""Bytes: a disk with less is full."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What came of it, for one table."""

    oid: int
    changes: int = 0
    rejects: int | None = None  # that the table has by now; None: no more than before
    seconds: float = 0.0  # that its task took
    version: int | None = None  # of the table, if the task made one
    lsn: Lsn | None = None  # that stands in that version
    staged: Staged | None = None
    stopped: Stopped | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """Why a table did not come to the end of the batch."""

    reached: Lsn
    awaits: Shape | None = None  # the definition that comes next; None: it has to be copied again
    error: str | None = None
    behind: Behind | None = None  # the target's table has not what was committed to it


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task has written that is still to be committed."""

    name: TableName
    files: list[StagedFile]
    rejects: list[StagedFile]
    found: int = 0  # the table's version when it was looked at


def apply_table(job: ApplyJob) -> Applied:
    """Bring one table to the end of the batch. Runs in a Spark task; doing it twice, or twice at once, does it once."""
    began = time.monotonic()
    try:
        result = _apply_job(job)
    except (NotMirrored, SinkMismatch, TypeMismatch) as error:
        result = Applied(job.oid, stopped=Stopped(job.blocks.refs[0].position, error=str(error)))
    return replace(result, seconds=time.monotonic() - began)


def _apply_job(job: ApplyJob) -> Applied:
    sink: Sink = pickle.loads(job.sink)  # noqa: S301
    name = job.shape.table
    found = sink.standing(name)

    def changed_by_others(after: int, upto: int) -> str | None:
        return sink.changed_by_others(name, after, upto)

    if (behind := compare(job.version, job.version_lsn, found, changed_by_others)) is not None and (job.oid or found):
        return Applied(job.oid, stopped=Stopped(job.blocks.refs[0].position, error=behind.why, behind=behind))
    reached = None if found is None else found.lsn
    if found is not None and reached is not None and reached >= job.end_lsn:
        rejects = sink.count(Rejects.table(name))
        return Applied(job.oid, rejects=rejects, version=found.version, lsn=reached)
    if found is None or not job.oid:
        rows = messages.read(job.blocks.directory, job.blocks.refs, reached)
        sink.create(name, MESSAGES)  # again, if somebody has taken it away: there is nothing to copy it from
        version = sink.commit(name, sink.stage(name, rows.to_batches()), job.end_lsn) if len(rows) else None
        return Applied(0, len(rows), version=version, lsn=job.end_lsn)
    result = _apply_stretches(job, sink, Applied(job.oid, lsn=reached))
    if result.staged is not None:
        result = replace(result, staged=replace(result.staged, found=found.version))
    if result.version is not None and result.version > found.version + 1:  # others may have committed in between
        what = changed_by_others(found.version, result.version)
        if what is not None:
            behind = Behind(f"another program has changed rows of its Delta table ({what})", found)
            return replace(result, stopped=Stopped(job.blocks.refs[0].position, error=behind.why, behind=behind))
    return result


def _apply_stretches(job: ApplyJob, sink: Sink, result: Applied) -> Applied:
    reached = result.lsn
    while (stretch := changes.next_stretch(job.blocks, job.shape, reached, job.identity)) is not None:
        if stretch.shape != job.shape or stretch.empty:
            awaits = stretch.shape if stretch.shape != job.shape else None
            return replace(result, stopped=Stopped(stretch.start, awaits))
        result = _apply_stretch(job, sink, stretch, reached, result)
        if stretch.end is None:
            break
        reached = stretch.end
    return result


def _apply_stretch(job: ApplyJob, sink: Sink, stretch: Stretch, reached: Lsn | None, before: Applied) -> Applied:
    name = job.shape.table
    decoded = changes.decode(job.blocks, stretch, job.types, reached)
    if decoded is None:
        return before
    rejects = _stage_rejects(job, sink, stretch, reached, decoded.rejects)
    net = fold(decoded.changes, stretch.identity, maybe_there=job.partial)
    count = before.changes + len(decoded.changes)
    if not job.alone:
        return replace(before, changes=count, staged=Staged(name, sink.stage(name, net.appends.to_batches()), rejects))
    end = stretch.end or job.end_lsn
    rejected = _commit_rejects(sink, name, rejects, end)
    version = sink.tidy(name, sink.apply(name, net, end, stretch.identity), job.vacuum)
    return replace(
        before,
        changes=count,
        version=version,
        lsn=before.lsn if net.empty else end,
        rejects=before.rejects if rejected is None else rejected,
    )


def _stage_rejects(
    job: ApplyJob, sink: Sink, stretch: Stretch, reached: Lsn | None, rejects: pa.RecordBatch
) -> list[StagedFile]:
    """Those that the rejects' table does not have yet: it is committed first, and the table may have gone back."""
    if not rejects.num_rows:
        return []
    name = Rejects.table(job.shape.table)
    sink.create(name, Rejects.SCHEMA)
    there = sink.applied(name)
    if there is not None and there > max(reached or INVALID_LSN, job.blocks.refs[0].position):
        again = changes.decode(job.blocks, stretch, job.types, there)
        if again is None or not again.rejects.num_rows:
            return []
        rejects = again.rejects
    return sink.stage(name, [rejects])


def _commit_rejects(sink: Sink, name: TableName, rejects: list[StagedFile], lsn: Lsn) -> int | None:
    """Returns how many there are by now; None if none were added."""
    if not rejects:
        return None
    sink.commit(Rejects.table(name), rejects, lsn)
    return sink.count(Rejects.table(name))


def commit_staged(sink: Sink, results: Sequence[Applied], end_lsn: Lsn) -> list[Applied]:
    """Commit what several tasks have staged of a table, once. Returns one result per table."""
    parts: dict[int, list[Applied]] = {}
    for result in results:
        parts.setdefault(result.oid, []).append(result)
    return [some[0] if len(some) == 1 else _commit_parts(sink, some, end_lsn) for some in parts.values()]


def _commit_parts(sink: Sink, parts: Sequence[Applied], end_lsn: Lsn) -> Applied:
    staged = [part.staged for part in parts if part.staged is not None]
    refused = [part for part in parts if part.stopped is not None]
    if refused or not staged:
        return (refused or parts)[0]  # or the table had the batch already
    name = staged[0].name
    rejects = _commit_rejects(sink, name, [file for part in staged for file in part.rejects], end_lsn)
    version = sink.tidy(name, sink.commit(name, [file for part in staged for file in part.files], end_lsn))
    seconds = max(part.seconds for part in parts)
    done = Applied(parts[0].oid, sum(part.changes for part in parts), rejects, seconds, version, end_lsn)
    found = min(part.found for part in staged)
    if version > found + 1 and (what := sink.changed_by_others(name, found, version)) is not None:
        behind = Behind(f"another program has changed rows of its Delta table ({what})", sink.standing(name))
        return replace(done, stopped=Stopped(end_lsn, error=behind.why, behind=behind))
    return done


def _apply(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for reference in batch.column("reference").to_pylist():
            work = pickle.loads(reference)  # noqa: S301
            result = apply_table(work) if isinstance(work, ApplyJob) else work
            yield pa.RecordBatch.from_pydict({"result": [pickle.dumps(result)]})


def _moved(known: TableState, result: Applied | None, end_lsn: Lsn) -> TableState:
    """A table's state after a batch."""
    if not known.follows:
        return known  # it was set aside while the batch ran
    if result is not None and (result.stopped is None or result.stopped.awaits is not None):
        known = state.committed(known, result.version, result.lsn)
    if result is None or result.stopped is None:
        return state.applied(known, end_lsn, None if result is None else result.rejects)
    if result.stopped.behind is not None:
        return known  # `move_back` does what has to be done
    if result.stopped.awaits is None:
        return state.set_aside(known, result.stopped.error, time.time())
    return state.redefined(known, result.stopped.awaits, result.stopped.reached, result.rejects)


class Apply:
    """The query, and what is recorded after each of its batches."""

    def __init__(self, spark: SparkSession, directory: Path, sink: Sink, tables: Tables, subscription: str) -> None:
        self._spark = spark
        self._directory = directory
        self._sink = sink
        self._tables = tables
        self._subscription = subscription
        self._ledger = Ledger(directory, sink.keep_seconds)
        self._publisher: Publisher | None = None
        self._origins = Origins(directory)
        self._versions: dict[str, int] = {}  # not the ledger's: a batch may be in the tables and not in there
        self._furthest = INVALID_LSN  # that a table was found at when it was looked at
        self._began = 0
        self.applied: Lsn = INVALID_LSN
        self.error: WalmereError | None = None
        self.on_batch: Callable[[list[Applied]], None] = lambda _: None

    def claim(self, owner: Owner, published: Sequence[TableState], *, take_over: bool = False) -> Sink:
        """See that the target's tables are the owner's, before anything is written. Returns the sink to write to."""
        self._sink = self._sink.owned_by(owner, take_over=take_over)
        target.claim(self._sink, self._subscription, self._tables, published, take_over=take_over)
        self._sink = self._sink.owned_by(owner)  # once: what others take over later is theirs
        return self._sink

    def prepare(self, log_start: Lsn) -> None:
        """Under the run's lock, before anything is received or copied: put right what does not fit together."""
        last = self._open_ledger()
        self.applied = last.lsn if last is not None else INVALID_LSN
        needed = state.needed_from(self._tables, self.applied)
        if self._origins.repair(TARGET, needed) and needed:
            _log.warning("the position in origins/%s.json was lost or damaged; it is derived from the tables", TARGET)
        behind = target.check(self._sink, self._tables, log_start)
        if behind:
            self._origins.advance(TARGET, state.needed_from(self._tables, self.applied))
        self._take_out((each.name, found) for each, found in behind)

    def _open_ledger(self) -> Entry | None:
        """The newest point. A ledger that cannot be read is replaced by what the lake has published of it."""
        try:
            entries = self._ledger.open()
        except ChangeLogDamaged as error:
            entries = list(self._sink.published_points(self._subscription))
            _log.warning("%s: %s; it has been made again from what the lake has published", error.doing, error.wrong)
            self._ledger.restart(entries)
        return entries[-1] if entries else None

    def _take_out(self, behind: Iterable[tuple[str, Behind]]) -> None:
        """Take tables that have lost commits out of the points that have them."""
        changed = False
        for name, its in behind:
            lsn, version = (INVALID_LSN, -1) if its.found is None else (its.found.lsn, its.found.version)
            if its.found is None or its.apply_from is not None:
                changed |= self._ledger.take_out(name, lsn or INVALID_LSN, version)
            else:  # what it has may be of any LSN, but its older versions are still there
                changed |= self._ledger.take_out(name, MAX_LSN, version)
            self._versions.pop(name, None)
        if changed:
            self._publisher = self._sink.publisher(self._subscription, self._ledger.entries())

    def start(self) -> StreamingQuery:
        """Start the query; it goes on until stopped.

        Each start has a new checkpoint. The positions of the tables say where to go on, and Spark does not write a
        checkpoint durably: one that a crash has damaged would only be in the way.
        """
        # not before: until now somebody else may have been running
        self._publisher = self._sink.publisher(self._subscription, self._ledger.open())
        try:
            return self._start()
        except Py4JJavaError as error:
            raise failure(error) from None

    def _start(self) -> StreamingQuery:
        checkpoint = self._directory / "checkpoint"
        if checkpoint.is_dir() and not checkpoint.is_symlink():
            shutil.rmtree(checkpoint)
        else:
            checkpoint.unlink(missing_ok=True)
        self._spark.dataSource.register(ReferenceSource)
        stream = (
            self._spark.readStream.format(SOURCE)
            .option("directory", str(self._directory))
            .option("sink", pickle.dumps(self._sink).hex())
            .option("parallelism", self._spark.sparkContext.defaultParallelism)
            .load()
        )
        writer = stream.writeStream.queryName("apply").foreachBatch(self._batch)
        return writer.option("checkpointLocation", str(checkpoint)).start()

    def enter_copies(self) -> None:
        """Without a query: enter into the ledger that the tables stand at one LSN, all of them just copied."""
        following = [each for each in self._tables if each.follows]
        positions = {each.applied_lsn for each in following}
        if len(positions) == 1 and (lsn := positions.pop()) > self.applied:
            if any((self._sink.applied(each.table) or INVALID_LSN) > lsn for each in following):
                return  # a crash has left it in front
            versions = {each.name: self._sink.version(each.table) for each in following}
            self._publisher = self._sink.publisher(self._subscription, self._ledger.open())
            # when the newest of their transactions committed nobody has told: by now at the latest
            self._publisher.publish(self._ledger.append(Entry(lsn, now(), versions, now())))
            self.applied = lsn

    def _keep_log(self, applied: Lsn) -> None:
        """Retention may have what no table needs any more. A copy whose snapshot is still to come holds the line."""
        needed = state.needed_from(self._tables, applied)
        if needed:
            self._origins.advance(TARGET, needed)

    def _take_versions(self, tables: Iterable[TableState], applied: Iterable[Applied]) -> dict[int, str]:
        """Where each table stands now; only those are looked at that may have moved and did not say where to.

        Returns what is wrong with those that are not there any more.
        """
        lost: dict[int, str] = {}
        made = {result.oid: (result.version, result.lsn) for result in applied}
        for each in tables:
            version, lsn = made.get(each.oid, (None, None))
            if version is not None:
                self._versions[each.name] = version
                self._furthest = max(self._furthest, lsn or INVALID_LSN)
            elif each.oid in made or each.phase is Phase.FINISHED_COPY or each.name not in self._versions:
                try:
                    self._versions[each.name] = self._sink.version(each.table)
                    self._furthest = max(self._furthest, self._sink.applied(each.table) or INVALID_LSN)
                except SinkMismatch as error:
                    lost[each.oid] = str(error)
        return lost

    def _batch(self, references: DataFrame, _: int) -> None:
        self._began = now()
        try:
            rows = references.mapInArrow(_apply, "result binary").collect()
        except Exception as error:
            # short: Spark looks through the text with a regular expression that overflows on a long one
            self.error = failure(error)
            raise self.error from None
        try:
            self._record([pickle.loads(row.result) for row in rows])  # noqa: S301
        except WalmereError as error:
            self.error = full_or(error)  # Spark would bring back its text only
            raise self.error from None
        except OSError as error:
            self.error = self._disk_error(error)
            raise self.error from None

    def _disk_error(self, error: OSError) -> WalmereError:
        """Of the state's disk, or else of the target's; they may be one."""
        if shutil.disk_usage(self._directory).free < _LITTLE:
            return ChangeLogError(f"writing below {self._directory}", str(error), "make room or repair the disk")
        return full_or(SinkError("writing to the target", str(error), "see that it can be written"))

    def _record(self, results: list[Applied | Batch]) -> None:
        """Commit what tasks have staged, and write down where each table stands."""
        [batch] = [result for result in results if isinstance(result, Batch)]
        tasks = [result for result in results if isinstance(result, Applied)]
        applied = commit_staged(self._sink, tasks, batch.end_lsn)
        results_of = {result.oid: result for result in applied}
        before = {oid: known for oid in batch.tables if (known := self._tables.get(oid)) is not None}
        changed = self._tables.change(
            {oid: functools.partial(_moved, result=results_of.get(oid), end_lsn=batch.end_lsn) for oid in before}
        )
        behind = [
            (before[result.oid], result.stopped.behind)
            for result in applied
            if result.stopped is not None and result.stopped.behind is not None and result.oid in before
        ]
        behind += [(before[oid], Behind(_NOT_IN_LOG, None)) for oid in batch.not_in_log if oid in before]
        if behind:
            target.move_back(self._tables, self._sink, behind, batch.log_start)
            self._take_out((each.name, found) for each, found in behind if found.why != _NOT_IN_LOG)
        passed_over = {each.oid for each, _ in behind}
        changed = [each for each in changed if each.oid not in passed_over]
        lost = self._take_versions([before[each.oid] for each in changed if each.follows], applied)
        changed += self._tables.change(
            {oid: functools.partial(state.copy_again, error=error) for oid, error in lost.items() if oid}
        )
        self._take_out((before[oid].name, Behind(error, None)) for oid, error in lost.items())
        for each in changed:
            if each.error is not None:
                _log.warning("table %s is set aside, to be copied again: %s", each.name, each.error)
        moved = [each for each in changed if each.follows and each.oid not in lost]
        # a copy in front has more than the others; so may a table after a crash, if batches do not end where they did
        if max([self._furthest, *(each.applied_lsn for each in moved)]) <= batch.end_lsn:
            versions = {each.name: self._versions[each.name] for each in moved}
            entry = self._ledger.append(Entry(batch.end_lsn, batch.commit_time, versions, self._began))
            if self._publisher is not None:
                self._publisher.publish(entry)
        self._keep_log(batch.end_lsn)
        self.applied = batch.end_lsn
        self.on_batch(applied)
