"""The batches of the apply query: where each ends, and what each table has to do in it.

This runs beside the driver, in a Python process of Spark's. All it knows is in the subscription's directory.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.apply.jobs import ApplyJob, Batch
from walmere.changelog.plan import Blocks, Planner, divide
from walmere.definition import Shape
from walmere.ledger.file import Ledger
from walmere.lsn import Lsn
from walmere.subscription import cuts
from walmere.subscription.tables import Tables

MAX_BYTES: Final = 64 << 20
"""Of the log, in one batch."""
LEAST_BYTES: Final = 8 << 20
"""Of the log, for each task of several that write one table's inserts."""
VACUUM: Final = 600.0
"""Seconds after which a table that is written to is vacuumed again."""


class Batches:
    """Plans batch after batch."""

    def __init__(self, directory: Path, sink: bytes, parallelism: int) -> None:
        self._directory = directory
        self._sink = sink
        self._parallelism = parallelism
        self._end: Lsn | None = None
        self._planner = Planner(self._log)
        self._vacuumed: dict[int, float] = {}
        self._turn = 0
        self._looked_at: object = None

    @property
    def _log(self) -> Path:
        return self._directory / paths.CHANGELOG

    def first(self) -> dict[str, str]:
        """Where a query begins that has no checkpoint."""
        return {"lsn": str(self._planner.start_lsn), "turn": "0"}

    def latest(self) -> dict[str, str]:
        """How far the next batch should go."""
        if self._end is None:
            last = Ledger(self._directory).last()
            self._end = last.lsn if last is not None else self._planner.start_lsn
        before, self._end = self._end, self._planner.end_of_batch(self._end, MAX_BYTES, self._cut)
        if before == self._end and self._tables_are_behind():
            self._turn += 1  # for them alone: another offset makes another batch
        return {"lsn": str(self._end), "turn": str(self._turn)}

    def _cut(self, start: Lsn, log_end: Lsn) -> Lsn | None:
        """Looked at after the log: what is in there by now is before any snapshot that a later hold is for."""
        return cuts.wanted(self._directory).end(start, log_end)

    def _tables_are_behind(self) -> bool:
        """Whether a table could catch up with the others. Spark asks often, so it looks only at what is new."""
        with contextlib.suppress(FileNotFoundError):
            changed = Tables.changed(self._directory)
            if changed != self._looked_at:
                self._looked_at = changed
                return any(each.follows and each.applied_lsn < (self._end or 0) for each in Tables(self._directory))
        return False

    def plan(self, end: dict[str, str]) -> list[ApplyJob | Batch]:
        """The work of the batch that goes so far."""
        end_lsn = Lsn.parse(end["lsn"])
        tables = Tables(self._directory)
        behind, begins = [each for each in tables if each.follows], self._log_start()
        not_in_log = [each.oid for each in behind if not each.of_messages and each.applied_lsn < begins]
        following = [each for each in behind if each.oid not in not_in_log]
        owners = {relation: each.oid for each in following for relation in each.relations}
        positions = {
            # a new table of messages begins where the log does, and that may have moved on
            relation: max(each.applied_lsn, begins) if each.of_messages else each.applied_lsn
            for each in following
            for relation in each.relations
        }
        made = self._planner.plan(positions, end_lsn, owners)
        batch = Batch(end_lsn, made.commit_time, tuple(each.oid for each in behind), begins, tuple(not_in_log))
        work: list[ApplyJob | Batch] = [batch]
        for oid, refs in made.blocks.items():
            used = {(ref.block.relation, ref.version) for ref in refs}
            versions = {number: made.definitions[number] for number in used if number in made.definitions}
            known = tables[oid]
            definition = known.definition
            shape = Shape(known.table, ()) if definition is None else definition.shape(known.table)
            partial = definition is not None and definition.partial
            identity = None if definition is None else definition.identity
            gathered = len(definition.leaves) if definition is not None and definition.gathered else 0
            whole = len(versions) == 1 and not partial
            divided = divide(refs, self._parallelism, LEAST_BYTES) if whole else [refs]
            vacuum, commits = self._time_to_vacuum(oid), len(divided) == 1
            for some in divided:
                blocks = Blocks(self._log, some, versions, gathered)
                job = ApplyJob(
                    oid,
                    shape,
                    blocks,
                    tables.types,
                    self._sink,
                    end_lsn,
                    partial,
                    vacuum,
                    identity,
                    commits,
                    known.version,
                    known.version_lsn,
                )
                work.append(job)
        return work

    def _log_start(self) -> Lsn:
        """Where the log begins now."""
        _ = self._planner.end_lsn  # reads what is new
        return self._planner.start_lsn

    def _time_to_vacuum(self, oid: int) -> bool:
        now = time.monotonic()
        due = now - self._vacuumed.setdefault(oid, now) > VACUUM and not cuts.wanted(self._directory).at
        if due:
            self._vacuumed[oid] = now
        return due
