"""The batches of the apply query: where each ends, and what is applied to each table in it.

This runs beside the driver, in a Python process that Spark starts. It reads everything from the subscription's
directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.apply.jobs import ApplyJob, Batch
from walmere.apply.parts import Part
from walmere.changelog.plan import BlockRef, Blocks, Planner, divide
from walmere.changelog.store.log_store import store_of
from walmere.definition import Definition, Shape
from walmere.ledger.file import Ledger
from walmere.lsn import Lsn
from walmere.subscription.requests import cuts, pausing, skipping
from walmere.subscription.tables import Tables
from walmere.subscription.target.pace import next_batch

MAX_BATCH_BYTES: Final = 64 << 20
"""Bytes of the log in one batch, at most, divided over all tasks; or as many as the tasks of a large cluster need."""
MIN_TASK_BYTES: Final = 8 << 20
"""Bytes of the log per task, at least, if several tasks write one table."""
MIN_PART_BYTES: Final = 4 << 20
"""The same, if they divide a batch by key, which costs more than to append."""
_JOB_BYTES: Final = 256 << 10
"""A job without changes costs as much as so many bytes of the log."""


def _weight(work: ApplyJob | Batch) -> int:
    """What a job costs, about, in bytes of the log."""
    return 0 if isinstance(work, Batch) else _JOB_BYTES + sum(ref.block.length for ref in work.blocks.refs)


def _is_partial(definition: Definition | None) -> bool:
    """Whether an inserted key may already exist: not all changes are published, or deleted rows stay."""
    if definition is None:
        return False
    return definition.partial or (definition.shaping is not None and definition.shaping.soft_deletes is not None)


class Batches:
    """Plans the batches of one query."""

    def __init__(
        self,
        directory: Path,
        parallelism: int,
        *,
        spread: bool = False,
        transactional: bool = False,
        two_phase: bool = False,
        until: Lsn | None = None,
    ) -> None:
        """`spread`: the sink can apply the parts of a batch of one table in several tasks.

        `transactional`: one task applies a batch of all tables. `two_phase`: the target prepares transactions.
        `until`: the LSN at which the run ends.
        """
        self._transactional = transactional
        self._max_bytes = MAX_BATCH_BYTES if transactional else max(MAX_BATCH_BYTES, parallelism * MIN_TASK_BYTES)
        self._spread = spread
        self._directory = directory
        self._parallelism = parallelism
        self._ends = until is not None
        self._end: Lsn | None = None
        # a transaction rewrites no files, so larger batches save little; and it is applied while more is received
        self._planner = Planner(self._log, wait_for_more=not transactional, two_phase=two_phase, until=until)
        self._turn = 0
        self._last_change: object = None

    @property
    def _log(self) -> Path:
        return self._directory / paths.CHANGELOG

    def first(self) -> dict[str, str]:
        """The offset at which a query without a checkpoint begins."""
        return {"lsn": str(self._planner.start_lsn), "turn": "0"}

    def latest(self) -> dict[str, str]:
        """The end of the next batch."""
        if self._end is None:
            last = Ledger(self._directory).last()
            self._end = last.lsn if last is not None else self._planner.start_lsn
        waits = not self._ends and next_batch(self._directory) is not None and not cuts.active(self._directory).at
        if waits or pausing.is_paused(self._directory):
            return {"lsn": str(self._end), "turn": str(self._turn)}
        before = self._end
        self._end = self._planner.end_of_batch(before, self._max_bytes, self._cut)
        if before == self._end and self._tables_are_behind():
            self._turn += 1  # another offset makes Spark run another batch, for these tables only
        return {"lsn": str(self._end), "turn": str(self._turn)}

    def _cut(self, start: Lsn, log_end: Lsn) -> Lsn | None:
        """Where a cut ends the batch. Read after the log, whose end is before the snapshot of any later cut."""
        return cuts.active(self._directory).end(start, log_end)

    def _tables_are_behind(self) -> bool:
        """Whether a table could catch up with the others. Called often, so it reads the states only if they changed."""
        with contextlib.suppress(FileNotFoundError):
            changed = Tables.changed(self._directory)
            if changed != self._last_change:
                self._last_change = changed
                return any(each.follows and each.applied_lsn < (self._end or 0) for each in Tables(self._directory))
        return False

    def plan(self, end: dict[str, str]) -> list[ApplyJob | Batch]:
        """The jobs of the batch that ends at this offset."""
        end_lsn = Lsn.parse(end["lsn"])
        tables = Tables(self._directory)
        behind, log_start = [each for each in tables if each.follows], self._log_start()
        not_in_log = [each.oid for each in behind if not each.of_messages and each.applied_lsn < log_start]
        following = [each for each in behind if each.oid not in not_in_log]
        owners = {relation: each.oid for each in following for relation in each.relations}
        positions = {
            # the table of messages has no copy: it begins where the log does, and retention may have moved that
            relation: max(each.applied_lsn, log_start) if each.of_messages else each.applied_lsn
            for each in following
            for relation in each.relations
        }
        plan = self._planner.plan(positions, end_lsn, owners)
        taking_part = tuple(each.oid for each in behind)
        skip = skipping.requested(self._directory) if self._transactional else None
        batch = Batch(end_lsn, plan.commit_time, taking_part, log_start, tuple(not_in_log), skip, plan.two_phase)
        work: list[ApplyJob | Batch] = [batch]
        store = store_of(self._log)
        for oid, refs, in_two_phase in [
            *((*each, False) for each in plan.blocks.items()),
            *((*each, True) for each in plan.two_phase_blocks.items()),
        ]:
            used = {(ref.block.relation, ref.version) for ref in refs}
            versions = {number: plan.definitions[number] for number in used if number in plan.definitions}
            known = tables[oid]
            definition = known.definition
            source = known.source_table
            shape = Shape(source, ()) if definition is None else definition.shape(source)
            shaping = None if definition is None else definition.shaping
            partial = _is_partial(definition)
            identity = None if definition is None else definition.identity
            is_keyed = definition is not None and definition.key_identity is not None
            gathered = len(definition.leaves) if definition is not None and definition.gathered else 0
            whole = len(versions) == 1 and not partial
            whole &= not self._transactional
            # a transaction may have more bytes than a batch: then its tasks take several parts, one after the other
            rounds = -(-sum(ref.block.length for ref in refs) // self._max_bytes)
            divided = divide(refs, rounds * self._parallelism, MIN_TASK_BYTES) if whole else [refs]
            parts: list[Part | None] = [None] * len(divided)
            if len(divided) == 1 and len(versions) == 1 and self._spread and is_keyed:
                parts = self._parts(refs)
                divided *= len(parts)
            commits = len(divided) == 1
            if store is not None:  # several tasks read the same blocks, or one reads them twice
                store = replace(store, caches=parts[0] is not None or len(versions) > 1)
            for job_refs, part in zip(divided, parts, strict=True):
                blocks = Blocks(self._log, job_refs, versions, gathered, store)
                job = ApplyJob(
                    oid,
                    known.table,
                    shape,
                    blocks,
                    tables.types,
                    end_lsn,
                    partial,
                    identity,
                    commits,
                    part,
                    known.version,
                    known.version_lsn,
                    in_two_phase,
                    shaping,
                )
                work.append(job)
        return work

    def _parts(self, refs: Sequence[BlockRef]) -> list[Part | None]:
        """The parts by key in which several tasks apply these changes; one None if one task is enough."""
        count = min(self._parallelism, sum(ref.block.length for ref in refs) // MIN_PART_BYTES)
        return [Part(number, count) for number in range(count)] if count > 1 else [None]

    def together(self, work: Sequence[ApplyJob | Batch]) -> list[list[ApplyJob | Batch]]:
        """The work of each task. A task takes several small jobs: to start it costs more than they do.

        A batch that rewrites files costs what the table has, not the change, so its jobs stay apart.
        """
        if self._transactional:
            return [list(work)]
        if not self._spread:
            return [[each] for each in work]
        groups: list[tuple[int, list[ApplyJob | Batch]]] = [(0, []) for _ in range(self._parallelism)]
        for each in sorted(work, key=_weight, reverse=True):
            least = min(range(len(groups)), key=lambda number: groups[number][0])
            size, task = groups[least]
            groups[least] = (size + _weight(each), [*task, each])
        return [task for _, task in groups if task]

    @property
    def log_end(self) -> Lsn:
        """Where the log ends now."""
        return self._planner.end_lsn

    def _log_start(self) -> Lsn:
        _ = self.log_end  # reads what is new
        return self._planner.start_lsn
