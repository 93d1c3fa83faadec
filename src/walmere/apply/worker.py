"""The apply worker in a task: bring one table to the end of a batch, in one commit. Without PySpark."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pydantic import SecretStr

from walmere.apply import decode as changes
from walmere.apply import logical_messages
from walmere.apply.decode import Span
from walmere.apply.fold import fold
from walmere.apply.jobs import ApplyJob
from walmere.apply.logical_messages import MESSAGES
from walmere.apply.rejects import Rejects
from walmere.apply.standing import Behind, compare
from walmere.definition import Shape
from walmere.errors import NotMirrored, SinkMismatch, TypeMismatch
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import TableName
from walmere.shaping.columns import TargetColumns, target_columns
from walmere.sinks.base import LakeSink, StagedFile


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of a batch for one table."""

    oid: int
    changes: int = 0
    rejects: int | None = None  # rows of the rejects table; None: no new ones
    seconds: float = 0.0  # duration of the task
    version: int | None = None  # of the table, if the task made one
    lsn: Lsn | None = None  # in that version
    staged: Staged | None = None
    stopped: Stopped | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """Why a table did not reach the end of the batch."""

    reached: Lsn
    awaits: Shape | None = None  # the next definition; None: the table has to be copied again
    error: str | None = None
    behind: Behind | None = None  # the target's table does not have what was committed to it


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task has written, to be committed by the driver."""

    name: TableName
    changes: Any  # see Sink.stage_changes
    rejects: StagedRejects
    found: int = 0  # version of the table when the task began


@dataclass(frozen=True, slots=True)
class StagedRejects:
    """Rejects that a task has written."""

    files: Sequence[StagedFile] = ()
    after: Lsn = INVALID_LSN  # of the rejects table, when they were chosen


def apply_table(job: ApplyJob, sink: LakeSink, hash_key: SecretStr | None = None) -> Applied:
    """Bring one table to the end of the batch. Runs in a Spark task, and may run several times, also at once.

    `hash_key`: for columns that are hashed.
    """
    began = time.monotonic()
    try:
        result = _apply_job(job, sink, hash_key)
    except (NotMirrored, SinkMismatch, TypeMismatch) as error:
        result = Applied(job.oid, stopped=Stopped(job.blocks.refs[0].position, error=str(error)))
    return replace(result, seconds=time.monotonic() - began)


def _apply_job(job: ApplyJob, sink: LakeSink, hash_key: SecretStr | None) -> Applied:
    name = job.target
    found = sink.standing(name)

    def changed_by_others(after: int, upto: int) -> str | None:
        return sink.changed_by_others(name, after, upto)

    behind = compare(job.version, job.version_lsn, found, changed_by_others)
    if behind is not None and (found or not job.of_messages):
        return Applied(job.oid, stopped=Stopped(job.blocks.refs[0].position, error=behind.why, behind=behind))
    reached = None if found is None else found.lsn
    if found is not None and reached is not None and reached >= job.end_lsn:
        rejects = sink.count(Rejects.table(name))
        return Applied(job.oid, rejects=rejects, version=found.version, lsn=reached)
    if found is None or job.of_messages:
        rows = logical_messages.read(job.blocks, reached)
        sink.create(name, MESSAGES)  # also if it was removed: it cannot be copied again
        version = None
        if len(rows):
            staged = sink.stage(name, rows.to_batches())
            version = sink.commit(name, staged, job.end_lsn, after=reached or INVALID_LSN)
        return Applied(job.oid, len(rows), version=version, lsn=job.end_lsn)
    columns = target_columns(job.shape.columns, job.types, job.shaping, hash_key)
    result = _apply_spans(job, sink, columns, Applied(job.oid, lsn=reached))
    if result.staged is not None:
        result = replace(result, staged=replace(result.staged, found=found.version))
    if result.version is not None and result.version > found.version + 1:  # others may have committed in between
        what = changed_by_others(found.version, result.version)
        if what is not None:
            behind = Behind(f"another program has changed rows of the target's table ({what})", found)
            return replace(result, stopped=Stopped(job.blocks.refs[0].position, error=behind.why, behind=behind))
    return result


def _apply_spans(job: ApplyJob, sink: LakeSink, columns: TargetColumns, result: Applied) -> Applied:
    reached = result.lsn
    while (span := changes.next_span(job.blocks, job.shape, reached, job.identity)) is not None:
        if span.shape != job.shape or span.empty:
            awaits = span.shape if span.shape != job.shape else None
            return replace(result, stopped=Stopped(span.start, awaits))
        result = _apply_span(job, sink, columns, span, reached, result)
        if span.end is None:
            break
        reached = span.end
    return result


def _apply_span(
    job: ApplyJob, sink: LakeSink, columns: TargetColumns, span: Span, reached: Lsn | None, before: Applied
) -> Applied:
    name = job.target
    decoded = changes.decode(job.blocks, span, columns, reached, job.part)
    if decoded is None:
        return before
    rejects = _stage_rejects(job, sink, columns, span, reached, decoded.rejects)
    net = fold(decoded.changes, span.identity, may_exist=job.partial)
    count = before.changes + len(decoded.changes)
    if not job.commits and not (job.part is not None and decoded.whole):
        staged = sink.stage_changes(name, net, span.identity, after=before.lsn or INVALID_LSN)
        return replace(before, changes=count, staged=Staged(name, staged, rejects))
    end = span.end or job.end_lsn
    rejected = _commit_rejects(sink, name, [rejects], end)
    after = before.lsn or INVALID_LSN
    if net.empty:  # its LSN is committed, so that no earlier attempt with a shorter batch is applied after it
        version = sink.commit(name, [], end, after=after)
    else:
        version = sink.apply(name, net, end, span.identity, after=after)
    return replace(
        before,
        changes=count,
        version=version,
        lsn=end,
        rejects=before.rejects if rejected is None else rejected,
    )


def _stage_rejects(
    job: ApplyJob, sink: LakeSink, columns: TargetColumns, span: Span, reached: Lsn | None, rejects: pa.RecordBatch
) -> StagedRejects:
    """Stage the rejects that are new. The rejects table is committed first, so it may be ahead of the table."""
    if not rejects.num_rows:
        return StagedRejects()
    name = Rejects.table(job.target)
    sink.create(name, Rejects.SCHEMA)
    there = sink.applied(name)
    if there is not None and there > max(reached or INVALID_LSN, job.blocks.refs[0].position):
        again = changes.decode(job.blocks, span, columns, there, job.part)
        if again is None or not again.rejects.num_rows:
            return StagedRejects()
        rejects = again.rejects
    return StagedRejects(sink.stage(name, [rejects]), there or INVALID_LSN)


def _commit_rejects(sink: LakeSink, name: TableName, parts: Sequence[StagedRejects], lsn: Lsn) -> int | None:
    """Returns the number of rows in the rejects table; None if none were added."""
    parts = [part for part in parts if part.files]
    if not parts:
        return None
    files = [file for part in parts for file in part.files]
    sink.commit(Rejects.table(name), files, lsn, after=min(part.after for part in parts))
    return sink.count(Rejects.table(name))


def commit_staged(sink: LakeSink, results: Sequence[Applied], end_lsn: Lsn) -> list[Applied]:
    """Commit what several tasks have staged for a table, in one commit. Returns one result per table."""
    parts: dict[int, list[Applied]] = {}
    for result in results:
        parts.setdefault(result.oid, []).append(result)
    return [
        results_of_table[0] if len(results_of_table) == 1 else _commit_parts(sink, results_of_table, end_lsn)
        for results_of_table in parts.values()
    ]


def _commit_parts(sink: LakeSink, parts: Sequence[Applied], end_lsn: Lsn) -> Applied:
    staged = [part.staged for part in parts if part.staged is not None]
    refused = [part for part in parts if part.stopped is not None]
    if refused or not staged:
        # not staged: the table already had the batch, or one task has applied all of it
        return (refused or [part for part in parts if part.version is not None] or parts)[0]
    name = staged[0].name
    rejects = _commit_rejects(sink, name, [part.rejects for part in staged], end_lsn)
    version = sink.commit_changes(name, [part.changes for part in staged], end_lsn)
    seconds = max(part.seconds for part in parts)
    done = Applied(parts[0].oid, sum(part.changes for part in parts), rejects, seconds, version, end_lsn)
    found = min(part.found for part in staged)
    if version > found + 1 and (what := sink.changed_by_others(name, found, version)) is not None:
        behind = Behind(f"another program has changed rows of the target's table ({what})", sink.standing(name))
        return replace(done, stopped=Stopped(end_lsn, error=behind.why, behind=behind))
    return done
