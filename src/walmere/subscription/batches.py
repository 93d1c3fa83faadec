"""The batches of the apply worker: where each ends, and what is applied to each table in it.

A plan has references to blocks of the change log, not rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.apply.jobs import ApplyJob, Batch
from walmere.apply.parts import Part
from walmere.changelog.plan import BlockRef, Blocks, Plan, Planner, divide
from walmere.changelog.store.log_store import store_of
from walmere.definition import Definition, Shape
from walmere.ledger.file import Ledger
from walmere.lsn import Lsn
from walmere.subscription.requests import cuts, pausing, skipping
from walmere.subscription.state import TableState
from walmere.subscription.tables import Tables
from walmere.subscription.target.pace import next_batch
from walmere.types import PgType

MAX_BATCH_BYTES: Final = 64 << 20
"""Bytes of the log in one batch, at most, divided over all tasks; or as many as the tasks of a large cluster need."""
MIN_TASK_BYTES: Final = 8 << 20
"""Bytes of the log per task, at least, if several tasks write one table."""
MIN_PART_BYTES: Final = 4 << 20
"""The same, if they divide a batch by key, which costs more than to append."""
_JOB_BYTES: Final = 256 << 10
"""A job costs as much as so many more bytes of the log."""


def _weight(job: ApplyJob) -> int:
    """What a job costs, about, in bytes of the log."""
    return _JOB_BYTES + sum(ref.block.length for ref in job.blocks.refs)


def _is_partial(definition: Definition | None) -> bool:
    """Whether an inserted key may already exist: not all changes are published, or deleted rows stay."""
    if definition is None:
        return False
    return definition.partial or (definition.shaping is not None and definition.shaping.soft_deletes is not None)


class Batches:
    """Plans one batch after the other."""

    def __init__(
        self,
        directory: Path,
        tables: Tables,
        parallelism: Callable[[], int],
        *,
        spread: bool = False,
        transactional: bool = False,
        two_phase: bool = False,
        until: Lsn | None = None,
    ) -> None:
        """`parallelism`: how many tasks run at the same time. It is called when a batch has changes, and not before.

        `spread`: the sink can apply the parts of a batch of one table in several tasks. `transactional`: one task
        applies a batch of all tables. `two_phase`: the target prepares transactions. `until`: the LSN at which the run
        ends.
        """
        self._transactional = transactional
        self._max_bytes = MAX_BATCH_BYTES
        self._spread = spread
        self._directory = directory
        self._tables = tables
        self._ask_parallelism = parallelism
        self._ends = until is not None
        self._tasks_at_once = 1
        last = Ledger(directory).last()
        # a transaction rewrites no files, so larger batches save little; and it is applied while more is received
        self._planner = Planner(self._log, wait_for_more=not transactional, two_phase=two_phase, until=until)
        self._end = self._planner.start_lsn if last is None else last.lsn
        self._is_first = last is None
        self._looked_at = -1

    def close(self) -> None:
        """Close the change log."""
        self._planner.close()

    @property
    def _log(self) -> Path:
        return self._directory / paths.CHANGELOG

    def _read_parallelism(self) -> None:
        """Once for a batch: on a cluster, Spark is asked, which takes milliseconds."""
        self._tasks_at_once = self._ask_parallelism()
        if not self._transactional:
            self._max_bytes = max(MAX_BATCH_BYTES, self._tasks_at_once * MIN_TASK_BYTES)

    def next_end(self) -> Lsn | None:
        """The end of the next batch; None: there is nothing to apply now. Called often."""
        waits = not self._ends and next_batch(self._directory) is not None and not cuts.active(self._directory).at
        if waits or pausing.is_paused(self._directory):
            return None
        before = self._end
        self._end = self._planner.end_of_batch(before, self._max_bytes, self._cut)
        if self._end == before and not self._is_first and not self._tables_are_behind():
            return None
        self._is_first = False  # it records where the log begins, also if nothing follows
        return self._end

    def _cut(self, start: Lsn, log_end: Lsn) -> Lsn | None:
        """Where a cut ends the batch. Read after the log, whose end is before the snapshot of any later cut."""
        return cuts.active(self._directory).end(start, log_end)

    def _tables_are_behind(self) -> bool:
        """Whether a table could catch up with the others. Called often, so it looks only if the states have changed."""
        if self._tables.changes == self._looked_at:
            return False
        self._looked_at = self._tables.changes
        return any(each.follows and each.applied_lsn < self._end for each in self._tables)

    def plan(self, end: Lsn) -> tuple[Batch, list[list[ApplyJob]]]:
        """The batch that ends here, and the jobs of its tasks. There are no tasks if nothing is to be applied."""
        behind, log_start = [each for each in self._tables if each.follows], self._log_start()
        not_in_log = [each.oid for each in behind if not each.of_messages and each.applied_lsn < log_start]
        following = {each.oid: each for each in behind if each.oid not in not_in_log}
        owners = {relation: each.oid for each in following.values() for relation in each.relations}
        positions = {
            # the table of messages has no copy: it begins where the log does, and retention may have moved that
            relation: max(each.applied_lsn, log_start) if each.of_messages else each.applied_lsn
            for each in following.values()
            for relation in each.relations
        }
        plan = self._planner.plan(positions, end, owners)
        taking_part = tuple(each.oid for each in behind)
        skip = skipping.requested(self._directory) if self._transactional else None
        batch = Batch(end, plan.commit_time, taking_part, log_start, tuple(not_in_log), skip, plan.two_phase)
        types = dict(self._tables.types)  # a copy, because a new table may add some meanwhile
        if plan.blocks or plan.two_phase_blocks:
            self._read_parallelism()
        jobs = [
            job
            for blocks, in_two_phase in ((plan.blocks, False), (plan.two_phase_blocks, True))
            for oid, refs in blocks.items()
            for job in self._jobs(following[oid], refs, plan, types, in_two_phase=in_two_phase)
        ]
        return batch, self._tasks(jobs) if jobs or batch.two_phase is not None else []

    def _jobs(
        self, known: TableState, refs: list[BlockRef], plan: Plan, types: dict[int, PgType], *, in_two_phase: bool
    ) -> Iterator[ApplyJob]:
        """The jobs of a table: one, or several that stage parts of the batch."""
        used = {(ref.block.relation, ref.version) for ref in refs}
        versions = {number: plan.definitions[number] for number in used if number in plan.definitions}
        definition = known.definition
        source = known.source_table
        shape = Shape(source, ()) if definition is None else definition.shape(source)
        shaping = None if definition is None else definition.shaping
        partial = _is_partial(definition)
        identity = None if definition is None else definition.identity
        is_keyed = definition is not None and definition.key_identity is not None
        gathered = len(definition.leaves) if definition is not None and definition.gathered else 0
        divided = [refs]
        if len(versions) == 1 and not partial and not self._transactional:
            # a transaction may have more bytes than a batch: then its tasks take several parts, one after the other
            rounds = -(-sum(ref.block.length for ref in refs) // self._max_bytes)
            divided = divide(refs, rounds * self._tasks_at_once, MIN_TASK_BYTES)
        parts: list[Part | None] = [None] * len(divided)
        if len(divided) == 1 and len(versions) == 1 and self._spread and is_keyed:
            parts = _parts(refs, self._tasks_at_once)
            divided *= len(parts)
        store = store_of(self._log)
        if store is not None:  # several tasks read the same blocks, or one reads them twice
            store = replace(store, caches=parts[0] is not None or len(versions) > 1)
        for job_refs, part in zip(divided, parts, strict=True):
            yield ApplyJob(
                known.oid,
                known.table,
                shape,
                Blocks(self._log, job_refs, versions, gathered, store),
                types,
                plan.end_lsn,
                partial,
                identity,
                commits=len(divided) == 1,
                part=part,
                version=known.version,
                version_lsn=known.version_lsn,
                two_phase=in_two_phase,
                shaping=shaping,
            )

    def _tasks(self, jobs: Sequence[ApplyJob]) -> list[list[ApplyJob]]:
        """The jobs of each task. A task takes several small jobs: to start it costs more than they do.

        A batch that rewrites files costs what the table has, not the change, so its jobs stay apart.
        """
        if self._transactional:
            return [list(jobs)]
        if not self._spread:
            return [[job] for job in jobs]
        groups: list[tuple[int, list[ApplyJob]]] = [(0, []) for _ in range(self._tasks_at_once)]
        for job in sorted(jobs, key=_weight, reverse=True):
            least = min(range(len(groups)), key=lambda number: groups[number][0])
            size, task = groups[least]
            groups[least] = (size + _weight(job), [*task, job])
        return [task for _, task in groups if task]

    @property
    def log_end(self) -> Lsn:
        """Where the log ends now."""
        return self._planner.end_lsn

    def _log_start(self) -> Lsn:
        _ = self.log_end  # reads what is new
        return self._planner.start_lsn


def _parts(refs: Sequence[BlockRef], parallelism: int) -> list[Part | None]:
    """The parts by key in which several tasks apply these changes; one None if one task is enough."""
    count = min(parallelism, sum(ref.block.length for ref in refs) // MIN_PART_BYTES)
    return [Part(number, count) for number in range(count)] if count > 1 else [None]
