"""Upkeep of the target's tables beside the stream: join small files, purge deleted rows, delete old files.

Batches only add small files and mark rows as deleted. What they leave is rewritten here, in rounds, by tasks of their
own: at most half of the cores, at low priority, and not more bytes per hour than `[maintenance]` allows. A round looks
only at tables that batches have changed, and at their rejects. Commits are made between two batches (see
`Recorder.replace_files`); no point has rejects, so they are committed at any time.

A table that is written to is vacuumed every ten minutes, and once more when its last replaced files are old enough. The
times, and the bytes of the last hour, are in a file (`upkeep_record`).

If something fails, the run continues. A table whose files cannot be rewritten or deleted is retried by itself, less and
less often (`upkeep_retries`), and the other tables are not concerned. If tasks cannot run at all, the next round tries
again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from walmere.apply.rejects import Rejects
from walmere.config import Maintenance
from walmere.errors import SparkError
from walmere.names import TableName
from walmere.sinks.base import Sink, Upkeep, UpkeepWork
from walmere.subscription.requests import cuts
from walmere.subscription.state import TableState
from walmere.subscription.tables import Tables
from walmere.subscription.target.low_priority import LowPriority
from walmere.subscription.target.upkeep_record import BytesPerHour, UpkeepRecord
from walmere.subscription.target.upkeep_retries import Retries, describe, interval

_log = logging.getLogger(__name__)

_FIRST_ROUND: Final = 10.0
"""Seconds before the first round. The start has enough to do, and may end in a crash."""
VACUUM_INTERVAL: Final = 600.0
"""Seconds between two vacuums of a table that is written to."""


class Tasks(Protocol):
    """Runs a function over items, in tasks."""

    @property
    def parallelism(self) -> int:
        """How many tasks run at the same time."""

    @property
    def remote(self) -> bool:
        """Whether tasks run on other machines."""

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """The function's result for each item."""

    def cancel(self) -> None:
        """Cancel what is running. Its caller gets an error."""


class InThisProcess:
    """Runs everything in the process of the driver: a task would take the only core of `local[1]` from the batches."""

    parallelism = 1
    remote = False

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """The function's result for each item."""
        return [function(item) for item in items]

    def cancel(self) -> None:
        """Nothing to cancel: what is running ends by itself, and is not committed after `UpkeepScheduler.stop`."""


@dataclass(frozen=True, slots=True)
class _Item:
    """What one task rewrites."""

    known: TableState
    table: TableName  # its own, or that of its rejects
    work: UpkeepWork


class UpkeepScheduler:
    """Starts rounds of upkeep in another thread."""

    def __init__(
        self,
        directory: Path,
        tables: Tables,
        tasks: Tasks,
        settings: Maintenance,
        replace_files: Callable[[TableState, Sequence[Any]], None],
    ) -> None:
        """`replace_files` commits what was rewritten of a table."""
        self._directory = directory
        self._tables = tables
        self._spark_tasks = tasks
        self._settings = settings
        self._replace_files = replace_files
        self._record = UpkeepRecord(directory)
        self._written_before: dict[str, int] = {}  # by name: see `Extent.written`
        self._recorded: dict[str, int | None] = {}  # by name: the version in the table's state
        self._vacuumed: set[str] = set()  # names of tables that have not changed since they were vacuumed
        self._waits: dict[str, str] = {}  # by name: what rewriting waits for
        self._rewriting = Retries("rewriting files")
        self._vacuuming = Retries("deleting old files")
        self._next_round = time.monotonic() + _FIRST_ROUND
        self._round: Future[None] | None = None
        self._failures = 0  # rounds
        self._committing = threading.Lock()
        self._stopped = False

    @property
    def _tasks(self) -> Tasks:
        """Not known before there is something to do: a run that finds nothing to do starts no Spark."""
        tasks = self._spark_tasks
        return InThisProcess() if tasks.parallelism == 1 and not tasks.remote else tasks

    def poll(self, sink: Sink, executor: Executor) -> None:
        """Start a round if it is time to."""
        if self._round is not None and not self._round.done():
            return
        if self._round is not None:
            self._next_round = time.monotonic() + interval(self._failures)
            self._round = None
        if time.monotonic() >= self._next_round:
            self._round = executor.submit(self.round, sink)

    def round(self, sink: Sink, *, rewrite: bool = True) -> None:
        """Look at the tables that have changed, and do what is to be done. `rewrite`: False: only delete old files."""
        changed: set[str] = set()
        try:
            try:
                if rewrite:
                    self._rewrite_changed(sink, changed)
            finally:
                if self._vacuum(sink, changed) or changed:
                    self._write_record()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            self._recorded.clear()  # the next round looks at all tables
            if not self._stopped:
                _log.warning("upkeep of the tables has failed, and is retried: %s", describe(error))

    def stop(self) -> None:
        """Cancel what is running. Nothing is committed after this returns."""
        with self._committing:
            self._stopped = True
        self._spark_tasks.cancel()

    def resume(self) -> None:
        """Rounds may start again after `stop`."""
        self._stopped, self._failures = False, 0

    def _rewrite_changed(self, sink: Sink, changed: set[str]) -> None:
        """Rewrite files of the tables that have changed, whose names are added to `changed`."""
        work: list[_Item] = []
        failed: set[str] = set()
        for each in self._tables:
            if each.follows and not self._rewriting.waits(each.name):
                try:
                    if self._has_changed(each, sink):
                        changed.add(each.name)
                        work += self._plan(sink, each)
                except Exception as error:
                    self._rewriting_failed(each.name, error, failed, changed)
        work.sort(key=lambda item: item.work.bytes)  # small ones first: they free most files per byte
        self._waits = {}
        together = max(1, self._tasks.parallelism // 2)
        for start in range(0, len(work), together):
            self._rewrite(sink, work[start : start + together], failed)
        for name in changed - failed - self._waits.keys():
            self._rewriting.succeeded(name)

    def _rewriting_failed(self, name: str, error: Exception, *names: set[str]) -> None:
        """Let one table wait, and add its name to these sets. Raises an error that concerns all tables."""
        if self._stopped or isinstance(error, SparkError):
            raise error
        self._rewriting.failed(name, error)
        self._recorded.pop(name, None)  # look at it again, also if it does not change
        for each in names:
            each.add(name)

    def _plan(self, sink: Sink, known: TableState) -> list[_Item]:
        identity = None if known.definition is None else known.definition.key_identity
        limits = Upkeep(self._settings.deleted_share)
        return [
            _Item(known, table, work)
            for table in _with_rejects(known)
            for work in sink.plan_upkeep(table, identity if table == known.table else None, limits)
        ]

    def _has_changed(self, known: TableState, sink: Sink) -> bool:
        """Whether a batch has changed the table since the last round, or something waits. Counts what was written."""
        if (
            known.version is not None
            and self._recorded.get(known.name) == known.version
            and known.name not in self._waits
        ):
            return False
        self._recorded[known.name] = known.version
        extent = sink.extent(known.table)
        if extent is None:
            return False
        before = self._written_before.get(known.name, extent.written)
        self._written_before[known.name] = extent.written
        self._record.written.setdefault(known.name, BytesPerHour()).add(max(0, extent.written - before))
        return True

    def _rewrite(self, sink: Sink, items: Sequence[_Item], failed: set[str]) -> None:
        """Rewrite some files in tasks, and commit. Names of tables for which that fails are added to `failed`."""
        allowed = self._within_budget(items)
        if not allowed:
            return
        self._write_record()  # before anything is written: the process may be killed
        try:
            done = self._tasks.map(LowPriority(sink), [item.work for item in allowed])
        except Exception as error:
            if len(allowed) == 1:
                self._rewriting_failed(allowed[0].known.name, error, failed)
            elif self._stopped:
                raise
            else:  # the other tasks were cancelled: find out which one fails
                for item in allowed:
                    self._rewrite(sink, [item], failed)
            return
        by_table: dict[TableName, tuple[TableState, list[Any]]] = {}
        for item, result in zip(allowed, done, strict=True):
            by_table.setdefault(item.table, (item.known, []))[1].append(result)
        for table, (known, results) in by_table.items():
            try:
                self._commit(sink, table, known, results)
            except Exception as error:
                self._rewriting_failed(known.name, error, failed)

    def _within_budget(self, items: Sequence[_Item]) -> list[_Item]:
        """The items that may be rewritten now. Counts their bytes."""
        allowed: list[_Item] = []
        rewritten, limit = self._record.rewritten, self._settings.bytes_per_hour
        for item in items:
            total = rewritten.total()
            if not limit or (total and total + item.work.bytes > limit):  # what is larger than the limit is done alone
                self._waits[item.known.name] = "[maintenance] bytes_per_hour"
            else:
                rewritten.add(item.work.bytes)
                allowed.append(item)
        return allowed

    def _commit(self, sink: Sink, table: TableName, known: TableState, results: Sequence[Any]) -> None:
        with self._committing:
            if self._stopped:
                return
            if table == known.table:
                self._replace_files(known, results)
            else:
                sink.replace_files(table, results)

    def _vacuum(self, sink: Sink, changed: set[str]) -> bool:
        """Vacuum the tables for which it is time. Returns whether there were any."""
        now, vacuum_at = time.time(), self._record.vacuum_at
        self._vacuumed -= changed
        for name in changed:
            vacuum_at[name] = min(vacuum_at.get(name, math.inf), now + VACUUM_INTERVAL)
        if self._stopped or cuts.active(self._directory).at:
            return False  # versions stay readable while a table is being compared
        due = {name for name, at in vacuum_at.items() if at <= now and not self._vacuuming.waits(name)}
        if not due:
            return False
        tables = [each for each in self._tables if each.follows and each.name in due]
        self._tables.shared.check(0.0)
        done = due - self._vacuum_tables(sink, tables)
        for name in done:
            self._vacuuming.succeeded(name)
        for name in done & self._vacuumed:
            del vacuum_at[name]
        # once more, when the files that were replaced until now are old enough: the table may rest from now on
        vacuum_at |= dict.fromkeys(done - self._vacuumed, now + sink.keep_seconds + VACUUM_INTERVAL)
        self._vacuumed |= done
        return True

    def _vacuum_tables(self, sink: Sink, tables: Sequence[TableState]) -> set[str]:
        """Vacuum some tables in tasks. Returns the names of those for which that has failed."""
        try:
            self._tasks.map(sink.vacuum, [table for each in tables for table in _with_rejects(each)])
        except Exception as error:
            if self._stopped or isinstance(error, SparkError):
                raise
            if len(tables) == 1:
                self._vacuuming.failed(tables[0].name, error)
                return {tables[0].name}
            half = len(tables) // 2  # the other tasks were cancelled
            return self._vacuum_tables(sink, tables[:half]) | self._vacuum_tables(sink, tables[half:])
        return set()

    def _write_record(self) -> None:
        self._record.write({**self._vacuuming.waiting(), **self._rewriting.waiting(), **self._waits})


def _with_rejects(known: TableState) -> list[TableName]:
    """A table, and that of its rejects if it has some."""
    return [known.table, Rejects.table(known.table)] if known.rejects else [known.table]
