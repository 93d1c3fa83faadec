"""What is recorded of the target: the states of its tables, its position in the log, and the ledger.

After a batch, the states of the tables are updated, then the ledger gets a point. A crash before that repeats the
batch, and tables that already have it do nothing. A table whose copy was committed during a batch takes part in the
next one, from its own position.

`committing` is held by a batch from its plan until it is recorded, and by a commit of upkeep.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from walmere import paths
from walmere.apply.jobs import Batch
from walmere.apply.standing import Behind
from walmere.apply.worker import Applied, commit_staged
from walmere.definition import MESSAGES_OID
from walmere.errors import ChangeLogDamaged, SinkMismatch
from walmere.ledger.entry import Entry, now
from walmere.ledger.file import Ledger
from walmere.lsn import INVALID_LSN, Lsn
from walmere.owner import Owner
from walmere.sinks.base import LedgerWriter, Sink, is_lake
from walmere.subscription import state
from walmere.subscription.progress import TARGET, SinkPositions
from walmere.subscription.requests import skipping
from walmere.subscription.state import Phase, TableState
from walmere.subscription.tables import Tables
from walmere.subscription.target import pace, prepare
from walmere.subscription.target.pace import Pace

_log = logging.getLogger(__name__)

_MAX_LSN: Final = Lsn((1 << 64) - 1)
_NOT_IN_LOG: Final = "the change log does not have the next changes of the table any more"


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


class Recorder:
    """Records what batches, copies and upkeep have committed."""

    def __init__(
        self, directory: Path, sink: Sink, tables: Tables, subscription: str, *, rewrite_limit: int | None = None
    ) -> None:
        """`rewrite_limit`: batches may write at most this many bytes per hour; None: there is no limit."""
        self.sink = sink
        self.applied: Lsn = INVALID_LSN
        """The end of the last batch."""
        self.has_changed_tables = False
        """Whether a batch has changed a table."""
        self.committing = threading.Lock()
        self._directory = directory
        self._tables = tables
        self._subscription = subscription
        self._ledger = Ledger(directory, sink.keep_seconds)
        self._lake_ledger: LedgerWriter | None = None
        self._positions = SinkPositions(directory)
        self._versions: dict[str, int] = {}  # not from the ledger, which may lack a batch that the tables have
        self._counted: dict[str, tuple[int | None, int]] = {}  # by name: a version, and the bytes written up to it
        self._furthest = INVALID_LSN  # the greatest LSN of any table
        self._pace = None if rewrite_limit is None else Pace(directory, rewrite_limit)
        if rewrite_limit is None:
            pace.reset(directory)

    def claim(self, owner: Owner, published: Sequence[TableState], *, take_over: bool = False) -> Sink:
        """Check that the target's tables belong to the owner, before anything is written. Returns the sink to use."""
        self.sink = self.sink.owned_by(owner, take_over=take_over)
        prepare.claim(self.sink, self._subscription, self._tables, published, take_over=take_over)
        self.sink = self.sink.owned_by(owner)  # without take_over: tables that others take over later are theirs
        return self.sink

    def prepare(self, log_start: Lsn) -> None:
        """Compare state and target, and repair them. Call it under the run's lock, before anything is received."""
        last = self._read_ledger()
        self.applied = last.lsn if last is not None else INVALID_LSN
        needed = state.needed_from(self._tables, self.applied)
        if self._positions.repair(TARGET, needed) and needed:
            _log.warning(
                "the position in %s/%s.json was missing or damaged; it was derived from the states of the tables",
                paths.POSITIONS,
                TARGET,
            )
        behind = prepare.check(self.sink, self._tables, log_start)
        if behind:
            self._positions.advance(TARGET, state.needed_from(self._tables, self.applied))
        self._remove_from_points((each.name, found) for each, found in behind)
        self._tables.shared.put()

    def _read_ledger(self) -> Entry | None:
        """The newest point. A damaged ledger is replaced by the lake's copy."""
        try:
            entries = self._ledger.open()
        except ChangeLogDamaged as error:
            entries = list(self.sink.points(self._subscription))
            _log.warning("%s: %s; it was restored from the ledger in the lake", error.doing, error.wrong)
            self._ledger.restart(entries)
        return entries[-1] if entries else None

    def open_ledger(self) -> None:
        """Open the ledger in the lake, before points are recorded. Not earlier: another process may be running."""
        with self.committing:  # upkeep may be adding a point
            entries = self._ledger.open()
            self._lake_ledger = self._open_in_lake(entries)
            if entries:  # the last one may be of a batch that was not added to the lake's ledger
                self.applied = max(self.applied, entries[-1].lsn)

    def _open_in_lake(self, entries: Iterable[Entry]) -> LedgerWriter:
        self._tables.shared.check(0.0)  # it replaces what another driver has written
        return self.sink.open_ledger(self._subscription, entries)

    def _remove_from_points(self, behind: Iterable[tuple[str, Behind]]) -> None:
        """Remove tables that have lost commits from the points that name these commits."""
        changed = False
        for name, lost in behind:
            lsn, version = (INVALID_LSN, -1) if lost.found is None else (lost.found.lsn, lost.found.version)
            if lost.found is None or lost.apply_from is not None:
                changed |= self._ledger.remove_table(name, lsn or INVALID_LSN, version)
            else:  # the newest version has no known LSN, but older versions are valid
                changed |= self._ledger.remove_table(name, _MAX_LSN, version)
            self._versions.pop(name, None)
        if changed:
            self._lake_ledger = self._open_in_lake(self._ledger.entries())

    def skip_written(self) -> None:
        """Before a batch: do not count what copies and upkeep have written since the last one."""
        if self._pace is not None:
            for each in self._tables:
                if each.follows and (each.name not in self._counted or self._counted[each.name][0] != each.version):
                    self._written(each)

    def record(self, batch: Batch, results: Sequence[Applied], began: int) -> list[Applied]:
        """Commit what tasks have staged, then update the states of the tables and the ledger. Returns what was applied.

        `began`: the time at which the batch began, in microseconds.
        """
        applied = commit_staged(self.sink, results, batch.end_lsn) if is_lake(self.sink) else list(results)
        self.has_changed_tables |= bool(applied)
        with self._tables.shared.together():
            changed, point = self._record_states(batch, applied, began)
            self._keep_log(batch.end_lsn)
            skipping.passed(self._directory, batch.end_lsn)
        if point is not None and self._lake_ledger is not None:  # after the ledger is in the store, if there is one
            self._lake_ledger.append(point)
        self.applied = batch.end_lsn
        if self._pace is not None:
            written = {result.oid for result in applied}
            self._pace.batch_wrote(sum(self._written(each) for each in changed if each.oid in written))
        return applied

    def record_copies(self) -> None:
        """In a run that applied no batch: write to the ledger that all tables were copied at one LSN."""
        following = [each for each in self._tables if each.follows]
        positions = {each.applied_lsn for each in following}
        if len(positions) == 1 and (lsn := positions.pop()) > self.applied:
            if any((self.sink.applied(each.table) or INVALID_LSN) > lsn for each in following):
                return  # a crash has left a table ahead
            versions = {each.name: self.sink.version(each.table) for each in following}
            lake_ledger = self._open_in_lake(self._ledger.open())
            # the commit time of the newest transaction is not known: it is before now
            point = self._ledger.append(Entry(lsn, now(), versions, now()))
            self._tables.shared.put()
            lake_ledger.append(point)
            self.applied = lsn

    def replace_files(self, known: TableState, done: Sequence[Any]) -> None:
        """Commit what upkeep has rewritten of a table, between two batches. The newest point gets the new version."""
        with self.committing:
            self._tables.shared.check()
            recorded = self._tables.get(known.oid)
            version = self.sink.replace_files(known.table, done)
            last = self._ledger.last()
            if version is None or recorded is None or recorded.version_lsn != self.sink.applied(known.table):
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

    def _keep_log(self, applied: Lsn) -> None:
        """Record the position up to which no table needs the log any more. Not while a copy has no snapshot yet."""
        needed = state.needed_from(self._tables, applied)
        if needed:
            self._positions.advance(TARGET, needed)

    def _record_states(
        self, batch: Batch, applied: Sequence[Applied], began: int
    ) -> tuple[list[TableState], Entry | None]:
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
            prepare.move_back(self._tables, self.sink, behind, batch.log_start)
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
            return changed, self._ledger.append(Entry(batch.end_lsn, batch.commit_time, versions, began))
        return changed, None

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
                    self._versions[each.name] = self.sink.version(each.table)
                    self._furthest = max(self._furthest, self.sink.applied(each.table) or INVALID_LSN)
                except SinkMismatch as error:
                    lost[each.oid] = str(error)
        return lost

    def _written(self, known: TableState) -> int:
        """The bytes that were written to a table since the last call; 0 at the first one."""
        found = self.sink.extent(known.table)
        if found is None:
            return 0
        _, before = self._counted.get(known.name, (None, found.written))
        self._counted[known.name] = known.version, found.written
        return max(0, found.written - before)
