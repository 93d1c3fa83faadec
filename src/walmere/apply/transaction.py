"""The apply worker in a task, for a target that is a database: a batch of all tables is one transaction. No PySpark.

Values stay PostgreSQL's text. For each table, the changes are folded to a net effect, which is applied by sets of rows;
or they are applied row by row, in the order of the source. See `walmere.sinks.postgres.transaction`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from walmere.apply.chunks import (
    ChangesInLog,
    Truncated,
    apply_in_chunks,
    apply_pieces,
    by_sets,
    is_large,
    read_changes,
)
from walmere.apply.decode import Span, TextChanges, Truncation, next_span, only_span
from walmere.apply.fold_rows import fold_rows
from walmere.apply.jobs import ApplyJob, Batch
from walmere.apply.row_changes import row_changes
from walmere.apply.standing import compare
from walmere.apply.worker import Applied, Stopped
from walmere.changelog.plan import TwoPhase
from walmere.errors import ChangeLogDamaged, NotMirrored, SinkMismatch, TypeMismatch, WalmereError
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import Standing
from walmere.sinks.postgres import prepared
from walmere.sinks.postgres.relation import missing_table
from walmere.sinks.postgres.rows.changes import TruncateRows
from walmere.sinks.postgres.sink import PostgresSink
from walmere.sinks.postgres.statements import row_set
from walmere.sinks.postgres.transaction import TargetTransaction

_DOING = "applying changes to the target"


@dataclass(frozen=True, slots=True)
class TableChanges:
    """The changes of one table, up to an LSN."""

    table: TableName
    identity: Identity
    changes: TextChanges | ChangesInLog
    end: Lsn


def apply_batch(jobs: Sequence[ApplyJob], batch: Batch, sink: PostgresSink) -> list[Applied]:
    """Apply the jobs of a batch in one transaction. May run several times, also at once.

    A batch may end with a prepared transaction, or with what became of one: see `walmere.sinks.postgres.prepared`.
    """
    ends_with = batch.two_phase
    results: dict[int, Applied] = {}
    usual = [job for job in jobs if not job.two_phase]
    if ends_with is not None:  # what comes before it must not have its LSN
        usual = [replace(job, end_lsn=ends_with.lsn) for job in usual]
    _merge(results, _apply_jobs(usual, batch, sink) if usual else [])
    if ends_with is not None:
        own = [job for job in jobs if job.two_phase]
        _merge(results, _two_phase(own, batch, ends_with, sink))
    return list(results.values())


def _merge(results: dict[int, Applied], more: Sequence[Applied]) -> None:
    """Join the results of both parts of a batch, by table."""
    for each in more:
        before = results.get(each.oid)
        if before is None or before.stopped is not None:
            results[each.oid] = before or each
        else:
            results[each.oid] = replace(
                each, changes=before.changes + each.changes, seconds=before.seconds + each.seconds
            )


def _two_phase(jobs: Sequence[ApplyJob], batch: Batch, ends_with: TwoPhase, sink: PostgresSink) -> list[Applied]:
    gid = prepared.gid_of(sink.state, ends_with.gid)
    if ends_with.kind == "rollback":
        sink.finish_prepared(gid, commit=False, end_lsn=batch.end_lsn)
        return []
    if ends_with.kind == "prepare":
        _prepare(jobs, batch, gid, sink)
        return []
    done = sink.finish_prepared(gid, commit=True, end_lsn=batch.end_lsn)
    # tables that were not prepared here get their changes now; the others get the LSN
    return _apply_jobs(jobs, batch, sink, gid, set(done or ()))


def _prepare(jobs: Sequence[ApplyJob], batch: Batch, gid: str, sink: PostgresSink) -> None:
    """Apply a transaction that the source has prepared, and prepare it."""
    with sink.transaction([job.target for job in jobs], prepares=True) as transaction:
        if prepared.is_prepared(transaction.connection, gid):
            return  # by an earlier attempt
        work: list[TableChanges] = []
        for job in jobs:
            # a table that cannot take them, or whose segments are deleted after a rollback, waits for COMMIT PREPARED
            with suppress(NotMirrored, SinkMismatch, TypeMismatch, ChangeLogDamaged):
                result, changes = _read(job, transaction, batch.skip)
                work += changes if result.stopped is None else []
        try:
            with transaction.connection.transaction():
                apply_changes(transaction, work)
        except ChangeLogDamaged:  # large changes are read again while they are applied, so it may be deleted only now
            work = []
        is_skipped = batch.skip == batch.end_lsn
        tables = [job.target for job in jobs] if is_skipped else [each.table for each in work]
        sink.prepare_transaction(transaction, gid, tables, batch.end_lsn)


def _apply_jobs(
    jobs: Sequence[ApplyJob],
    batch: Batch,
    sink: PostgresSink,
    gid: str | None = None,
    applied: Set[TableName] = frozenset(),
) -> list[Applied]:
    """Apply jobs in one transaction. `gid`: of a prepared transaction that has done this for the tables `applied`."""
    began = time.monotonic()
    with sink.transaction([job.target for job in jobs]) as transaction:
        done = [job for job in jobs if job.target in applied and job.target in transaction.stored]
        transaction.reached |= {job.target: job.end_lsn for job in done}
        results = {job.oid: Applied(job.oid) for job in done}
        others = [job for job in jobs if job.oid not in results]
        large = _large(others, transaction) if gid is None else {}
        work = _read_all([job for job in others if job.oid not in large], transaction, batch.skip, results)
        truncated = any(each.changes.truncations for each in work)  # perhaps together with large ones
        if large and (truncated or not _apply_large(large, transaction, batch.skip, results)):
            work += _read_all([job for job, _ in large.values()], transaction, batch.skip, results)
        apply_changes(transaction, work)
        for each in work:
            transaction.reached[each.table] = each.end
        if gid is not None:
            prepared.forget(transaction.connection, transaction.state, gid)
            if not transaction.reached:  # it has changed no table that is mirrored
                transaction.execute("COMMIT")
        versions = sink.commit_transaction(transaction, batch.end_lsn, _time(batch))
    names = {job.oid: job.target for job in jobs}
    seconds = time.monotonic() - began
    return [
        replace(
            each,
            seconds=seconds,
            version=versions.get(names[oid], each.version),
            lsn=transaction.reached.get(names[oid], each.lsn),
        )
        for oid, each in results.items()
    ]


def _time(batch: Batch) -> str | None:
    return None if batch.commit_time is None else datetime.fromtimestamp(batch.commit_time / 1e6, UTC).isoformat()


def _large(jobs: Sequence[ApplyJob], transaction: TargetTransaction) -> dict[int, tuple[ApplyJob, Span]]:
    """The jobs that are applied in chunks, and what they apply."""
    found: dict[int, tuple[ApplyJob, Span]] = {}
    for job in filter(is_large, jobs):
        with suppress(NotMirrored, SinkMismatch, TypeMismatch):  # `_read` raises it again
            standing = _standing(job, transaction)
            if standing.stopped is not None or (standing.lsn or INVALID_LSN) >= job.end_lsn:
                continue
            span = only_span(job.blocks, job.shape, standing.lsn, job.identity)
            if span is not None and by_sets(job, span, transaction):
                found[job.oid] = (job, span)
    return found


def _apply_large(
    large: Mapping[int, tuple[ApplyJob, Span]],
    transaction: TargetTransaction,
    skip: Lsn | None,
    results: dict[int, Applied],
) -> bool:
    """Apply jobs in chunks. Returns False if they cannot be applied so: nothing was changed then."""
    done: dict[int, Applied] = {}
    try:
        with transaction.connection.transaction():
            for oid, (job, span) in large.items():
                before = _standing(job, transaction)
                try:
                    count = apply_in_chunks(transaction, job, span, before.lsn, skip)
                    done[oid] = replace(before, changes=count)
                except (NotMirrored, SinkMismatch, TypeMismatch) as error:
                    done[oid] = _stopped(job, error)
    except Truncated:
        return False
    results |= done
    for oid, (job, _) in large.items():
        if done[oid].stopped is None:
            transaction.reached[job.target] = job.end_lsn
    return True


def _stopped(job: ApplyJob, error: WalmereError) -> Applied:
    return Applied(job.oid, stopped=Stopped(job.blocks.refs[0].position, error=str(error)))


def _read_all(
    jobs: Sequence[ApplyJob], transaction: TargetTransaction, skip: Lsn | None, results: dict[int, Applied]
) -> list[TableChanges]:
    work: list[TableChanges] = []
    for job in jobs:
        try:
            results[job.oid], changes = _read(job, transaction, skip)
            work += changes
        except (NotMirrored, SinkMismatch, TypeMismatch) as error:
            results[job.oid] = _stopped(job, error)
    return work


def _standing(job: ApplyJob, transaction: TargetTransaction) -> Applied:
    """The table as it is: its version and LSN, or why nothing can be applied to it."""
    table = job.target
    stored, relation = transaction.stored.get(table), transaction.relations.get(table)
    standing = None if stored is None or relation is None else Standing(stored.version, stored.lsn, stored.owner, ())
    behind = compare(job.version, job.version_lsn, standing, lambda _, __: None)
    if behind is not None:
        return Applied(job.oid, stopped=Stopped(job.blocks.refs[0].position, error=behind.why, behind=behind))
    assert stored is not None
    if relation is None:
        raise missing_table(table, _DOING)
    if stored.lsn is None or stored.lsn < job.end_lsn:
        relation.require([name for name, *_ in job.shape.columns], _DOING)
    return Applied(job.oid, version=stored.version, lsn=stored.lsn)


def _read(job: ApplyJob, transaction: TargetTransaction, skip: Lsn | None) -> tuple[Applied, list[TableChanges]]:
    """Read the changes of a table up to the first that it cannot take, such as a new definition."""
    table = job.target
    result = _standing(job, transaction)
    if result.stopped is not None or (result.lsn is not None and result.lsn >= job.end_lsn):
        return result, []
    found: list[TableChanges] = []
    reached = result.lsn
    while (span := next_span(job.blocks, job.shape, reached, job.identity)) is not None:
        if span.shape != job.shape or span.empty:
            awaits = span.shape if span.shape != job.shape else None
            return replace(result, stopped=Stopped(span.start, awaits)), found
        read = read_changes(job, span, reached, skip)
        end = span.end or job.end_lsn
        if read is not None:
            changes, count = read
            result = replace(result, changes=result.changes + count)
            found.append(TableChanges(table, span.identity, changes, end))
        if span.end is None:
            break
        reached = span.end
    return result, found


def apply_changes(transaction: TargetTransaction, work: Sequence[TableChanges]) -> None:
    """Apply changes of several tables: by sets of rows, or row by row where that is needed."""
    truncated: dict[Truncation, list[TableChanges]] = {}
    for each in work:
        for truncation in each.changes.truncations:
            truncated.setdefault(truncation, []).append(each)
    one_by_one = _one_by_one(transaction, work, truncated)
    events = sorted(truncated.items(), key=lambda event: (event[0].commit_lsn, event[0].sequence))
    truncates: list[TruncateRows] = []
    by_rows = [id(each) for each in one_by_one]
    for event, truncated_tables in events:
        tables = [each.table for each in truncated_tables]
        statement = transaction.truncation(tables, cascade=event.cascade, restart_identity=event.restart_identity)
        truncate = TruncateRows([*map(str, tables)], statement, event.commit_lsn, event.sequence)
        if id(truncated_tables[0]) in by_rows:
            truncates.append(truncate)
        else:
            transaction.truncate(tables, truncate)
    for each in work:
        if id(each) in by_rows:
            continue
        later = each.changes.after_truncation()  # the TRUNCATE is done
        if isinstance(later, ChangesInLog):
            apply_pieces(transaction, each.table, each.identity, later)
        elif not _apply_sets(transaction, each, later):
            one_by_one.append(replace(each, changes=later))
    transaction.apply_rows(
        [row_changes(transaction.relations[each.table], each.identity, each.changes) for each in one_by_one], truncates
    )


def _apply_sets(transaction: TargetTransaction, work: TableChanges, changes: TextChanges) -> bool:
    """Apply changes by sets of rows. Returns False if that is not possible."""
    if (count := changes.rows_without_columns()) is not None:
        return transaction.insert_defaults(work.table, count)
    net = fold_rows(changes.changes, work.identity)
    return transaction.apply_set(row_set(transaction.relations[work.table], net))


def _one_by_one(
    transaction: TargetTransaction, work: Sequence[TableChanges], truncated: dict[Truncation, list[TableChanges]]
) -> list[TableChanges]:
    """Tables whose changes are applied row by row, and tables that are truncated together with them."""
    several = {each.table for each in work if sum(other.table == each.table for other in work) > 1}
    chosen = [
        each
        for each in work
        if each.table in several or transaction.one_by_one(each.table, each.identity, each.changes.names)
    ]
    while True:
        ids = {id(each) for each in chosen}
        more = [
            each
            for together in truncated.values()
            if any(id(one) in ids for one in together)
            for each in together
            if id(each) not in ids
        ]
        if not more:
            return chosen
        chosen += list({id(each): each for each in more}.values())
