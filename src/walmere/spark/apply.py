"""The apply worker: a Structured Streaming query over the change log.

Its source hands out references, one partition for each table that has something to do; what a task gets is one row
with a pickled `ApplyJob`. The task opens the log itself, decodes, folds, and commits to its table. (A table with many
inserts in a batch has several tasks. They only stage their files, and one commit takes them all.) What comes back is a
row that says what was done. So Spark schedules, spreads, retries and checkpoints, and no row of a table passes through
the JVM.

A micro-batch ends on a commit boundary. When all its tables are committed, their states move on, and then the ledger
says that they belong together. A crash anywhere before that repeats the batch, and every table that had it already does
nothing. A table whose copy is committed while a batch runs takes part from the next one on, from its own position.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.query import StreamingQuery

from walmere.errors import WalmereError
from walmere.lsn import INVALID_LSN, Lsn
from walmere.pgoutput.relation import RelationVersion
from walmere.sinks.base import Sink, StagedFile, TableName
from walmere.spark import changes
from walmere.spark.fold import fold
from walmere.spark.tasks import failure
from walmere.subscription import state
from walmere.subscription.ledger import Entry, Ledger
from walmere.subscription.origin import Origins
from walmere.subscription.plan import BlockRef, Planner, divide
from walmere.subscription.rejects import Rejects
from walmere.subscription.state import Phase, TableState
from walmere.subscription.tables import Tables
from walmere.types import PgType

SOURCE: Final = "walmere_apply"
MAX_BYTES: Final = 64 << 20
"""Of the log, in one batch."""
LEAST_BYTES: Final = 8 << 20
"""Of the log, for each task of several that write one table's inserts."""
VACUUM: Final = 600.0
"""Seconds after which a table that is written to is vacuumed again."""


@dataclass(frozen=True, slots=True)
class ApplyJob:
    """What one task applies to one table."""

    directory: Path
    oid: int
    name: TableName
    refs: list[BlockRef]
    versions: dict[int, RelationVersion]
    types: dict[int, PgType]
    sink: Sink
    end_lsn: Lsn
    vacuum: bool
    alone: bool  # else it has a part of the table's inserts, to stage: one place commits all of them


@dataclass(frozen=True, slots=True)
class Applied:
    """What came of it, for one table."""

    oid: int
    changes: int = 0
    rejects: int | None = None  # that the table has by now; None: no more than before
    seconds: float = 0.0  # that its task took
    version: int | None = None  # of the table, if the task made one
    staged: Staged | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task has written that is still to be committed."""

    name: TableName
    files: list[StagedFile]
    rejects: list[StagedFile]


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch itself: every plan has one, also if no table has anything to do."""

    end_lsn: Lsn
    commit_time: int | None
    tables: tuple[int, ...]  # that take part: those whose copy was committed when it was planned


def apply_table(job: ApplyJob) -> Applied:
    """Bring one table to the end of the batch. Runs in a Spark task; doing it twice, or twice at once, does it once."""
    began = time.monotonic()
    sink, name = job.sink, job.name
    done = sink.applied(name)
    if done is not None and done >= job.end_lsn:
        return Applied(job.oid, rejects=sink.count(Rejects.table(name)))
    decoded = changes.decode(job.directory, job.refs, job.versions, job.types, done)
    if decoded is None:
        return Applied(job.oid)
    rejects: list[StagedFile] = []
    if decoded.rejects.num_rows:
        sink.create(Rejects.table(name), Rejects.SCHEMA)
        rejects = sink.stage(Rejects.table(name), [decoded.rejects])
    net = fold(decoded.changes, decoded.identity)
    version = staged = rejected = None
    if job.alone:
        rejected = _commit_rejects(sink, name, rejects, job.end_lsn)
        version = sink.tidy(name, sink.apply(name, net, job.end_lsn, decoded.identity), job.vacuum)
    else:
        staged = Staged(name, sink.stage(name, net.appends.to_batches()), rejects)
    seconds = time.monotonic() - began
    return Applied(job.oid, len(decoded.changes), rejected, seconds, version, staged)


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
    if not staged:
        return parts[0]  # the table had the batch already
    name = staged[0].name
    rejects = _commit_rejects(sink, name, [file for part in staged for file in part.rejects], end_lsn)
    version = sink.tidy(name, sink.commit(name, [file for part in staged for file in part.files], end_lsn))
    seconds = max(part.seconds for part in parts)
    return Applied(parts[0].oid, sum(part.changes for part in parts), rejects, seconds, version)


class _Partition(InputPartition):
    """A pickled ApplyJob, or the pickled Batch."""


class _References(DataSourceStreamReader):
    """Runs beside the driver, in a Python process of Spark's; what it must know is in the subscription's directory."""

    def __init__(self, directory: Path, sink: Sink, parallelism: int) -> None:
        self._directory = directory
        self._sink = sink
        self._parallelism = parallelism
        self._end: Lsn | None = None
        self._known: Planner | None = None
        self._vacuumed: dict[int, float] = {}

    @property
    def _planner(self) -> Planner:
        if self._known is None:
            self._known = Planner(self._log)
        return self._known

    @property
    def _log(self) -> Path:
        return self._directory / "changelog"

    def initialOffset(self) -> dict[str, str]:
        return {"lsn": str(self._planner.start_lsn)}

    def latestOffset(self) -> dict[str, str]:
        if self._end is None:
            last = Ledger(self._directory).last()
            self._end = last.lsn if last is not None else self._planner.start_lsn
        self._end = self._planner.end_of_batch(self._end, MAX_BYTES)
        return {"lsn": str(self._end)}

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        end_lsn = Lsn.parse(end["lsn"])
        tables = Tables(self._directory)
        taking_part = {each.oid: each.position for each in tables if each.position is not None}
        made = self._planner.plan(taking_part, end_lsn)
        parts: list[InputPartition] = [_Partition(pickle.dumps(Batch(end_lsn, made.commit_time, tuple(taking_part))))]
        for oid, refs in made.blocks.items():
            used = {ref.version for ref in refs}
            versions = {number: made.definitions[oid, number] for number in used if (oid, number) in made.definitions}
            relation = next(iter(versions.values())).relation
            name = TableName(relation.namespace, relation.name)
            divided = divide(refs, self._parallelism, LEAST_BYTES)
            vacuum, alone = self._time_to_vacuum(oid), len(divided) == 1
            for some in divided:
                job = ApplyJob(self._log, oid, name, some, versions, tables.types, self._sink, end_lsn, vacuum, alone)
                parts.append(_Partition(pickle.dumps(job)))
        return parts

    def _time_to_vacuum(self, oid: int) -> bool:
        now = time.monotonic()
        due = now - self._vacuumed.setdefault(oid, now) > VACUUM
        if due:
            self._vacuumed[oid] = now
        return due

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"reference": [partition.value]})


class ReferenceSource(DataSource):
    """`walmere_apply`: references to what is to be applied."""

    @classmethod
    def name(cls) -> str:
        return SOURCE

    def schema(self) -> str:
        return "reference binary"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        sink: Sink = pickle.loads(bytes.fromhex(self.options["sink"]))  # noqa: S301
        return _References(Path(self.options["directory"]), sink, int(self.options["parallelism"]))


def _apply(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for reference in batch.column("reference").to_pylist():
            work = pickle.loads(reference)  # noqa: S301
            result = apply_table(work) if isinstance(work, ApplyJob) else work
            yield pa.RecordBatch.from_pydict({"result": [pickle.dumps(result)]})


class Apply:
    """The query, and what is recorded after each of its batches."""

    def __init__(self, spark: SparkSession, directory: Path, sink: Sink, tables: Tables) -> None:
        self._spark = spark
        self._directory = directory
        self._sink = sink
        self._tables = tables
        self._ledger = Ledger(directory)
        self._origins = Origins(directory)
        if self._origins.applied() is None:
            self._origins.advance("target", INVALID_LSN)  # from now on the log is kept for us
        last = self._ledger.last()
        self._versions: dict[str, int] = {}  # not the ledger's: a batch may be in the tables and not in there
        self.applied: Lsn = last.lsn if last is not None else INVALID_LSN
        self.error: WalmereError | None = None
        self.on_batch: Callable[[list[Applied]], None] = lambda _: None

    def start(self) -> StreamingQuery:
        """Start the query; it goes on until stopped."""
        self._spark.dataSource.register(ReferenceSource)
        stream = (
            self._spark.readStream.format(SOURCE)
            .option("directory", str(self._directory))
            .option("sink", pickle.dumps(self._sink).hex())
            .option("parallelism", self._spark.sparkContext.defaultParallelism)
            .load()
        )
        writer = stream.writeStream.queryName("apply").foreachBatch(self._batch)
        return writer.option("checkpointLocation", str(self._directory / "checkpoint")).start()

    def _keep_log(self, applied: Lsn) -> None:
        """Retention may have what no table needs any more. A copy whose snapshot is still to come holds the line."""
        needed = state.needed_from(self._tables, applied)
        if needed:
            self._origins.advance("target", needed)

    def _take_versions(self, tables: Iterable[TableState], applied: Iterable[Applied]) -> None:
        """Where each table stands now; only those are looked at that may have moved and did not say where to."""
        made = {result.oid: result.version for result in applied}
        for each in tables:
            version = made.get(each.oid)
            if version is not None:
                self._versions[each.name] = version
            elif each.oid in made or each.phase is Phase.FINISHED_COPY or each.name not in self._versions:
                self._versions[each.name] = self._sink.version(each.table)

    def _batch(self, references: DataFrame, _: int) -> None:
        try:
            rows = references.mapInArrow(_apply, "result binary").collect()
        except Exception as error:
            # short: Spark looks through the text with a regular expression that overflows on a long one
            self.error = failure(error)
            raise self.error from None
        try:
            self._record([pickle.loads(row.result) for row in rows])  # noqa: S301
        except WalmereError as error:
            self.error = error  # Spark would bring back its text only
            raise

    def _record(self, results: list[Applied | Batch]) -> None:
        """Commit what tasks have staged, and write down where each table stands."""
        [batch] = [result for result in results if isinstance(result, Batch)]
        tasks = [result for result in results if isinstance(result, Applied)]
        applied = commit_staged(self._sink, tasks, batch.end_lsn)
        rejects = {result.oid: result.rejects for result in applied}
        before = [self._tables[oid] for oid in batch.tables]
        moved = [state.applied(each, batch.end_lsn, rejects.get(each.oid)) for each in before]
        self._tables.put(*moved)
        self._take_versions(before, applied)
        if all(each.applied_lsn <= batch.end_lsn for each in moved):  # a copy in front has more than the others
            versions = {each.name: self._versions[each.name] for each in moved}
            self._ledger.append(Entry(batch.end_lsn, batch.commit_time, versions))
        self._keep_log(batch.end_lsn)
        self.applied = batch.end_lsn
        self.on_batch(applied)
