"""Upkeep of the target's tables beside the stream: join small files, purge deleted rows, delete old files.

Batches only add small files and mark rows as deleted. What they leave is rewritten here, in rounds, by tasks of their
own: at most half of the cores, at low priority, and not more bytes per hour than `[maintenance]` allows. A round looks
only at tables that batches have changed, and at their rejects. Commits are made between two batches (see
`Apply.replace_files`); no point has rejects, so they are committed at any time.

A table that is written to is vacuumed every ten minutes, and once more when its last replaced files are old enough. The
times, and the bytes of the last hour, are in a file, because runs may be shorter than that (`--once`).

If upkeep fails, the run continues, and the next round tries again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from walmere import paths
from walmere.apply.rejects import Rejects
from walmere.config import Maintenance
from walmere.errors import WalmereError
from walmere.names import TableName
from walmere.sinks.base import Sink, Upkeep, UpkeepWork
from walmere.storage import write_durably
from walmere.subscription.requests import cuts
from walmere.subscription.state import TableState
from walmere.subscription.tables import Tables

_log = logging.getLogger(__name__)

INTERVAL: Final = 5.0
"""Seconds between two rounds."""
_MAX_INTERVAL: Final = 300.0
"""The same, after several failures."""
VACUUM_INTERVAL: Final = 600.0
"""Seconds between two vacuums of a table that is written to."""
_LOW_PRIORITY: Final = 10
"""The nice value of the threads that rewrite files."""


class Tasks(Protocol):
    """Runs a function over items, in tasks."""

    @property
    def parallelism(self) -> int:
        """How many tasks run at the same time."""

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """The function's result for each item."""

    def cancel(self) -> None:
        """Cancel what is running. Its caller gets an error."""


@dataclass(slots=True)
class BytesPerHour:
    """Bytes that were written within the last hour, by minute."""

    by_minute: dict[int, int] = field(default_factory=dict)  # since the epoch

    def add(self, size: int) -> None:
        """Count bytes that were just written."""
        minute = int(time.time() // 60)
        self.by_minute[minute] = self.by_minute.get(minute, 0) + size

    def total(self) -> int:
        """The bytes of the last hour."""
        first = int(time.time() // 60) - 60
        self.by_minute = {minute: size for minute, size in self.by_minute.items() if minute > first and size}
        return sum(self.by_minute.values())


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
        self._tasks = tasks
        self._settings = settings
        self._replace_files = replace_files
        self._rewritten = _read_bytes(_read(directory, "rewritten"))
        self._written = {name: _read_bytes(found) for name, found in _read(directory, "written").items()}
        self._written_before: dict[str, int] = {}  # by name: see `Extent.written`
        self._recorded: dict[str, int | None] = {}  # by name: the version in the table's state
        self._vacuum_at: dict[str, float] = _read(directory, "vacuum_at")  # by name, in seconds since the epoch
        self._vacuumed: set[str] = set()  # names of tables that have not changed since they were vacuumed
        self._waits: dict[str, str] = {}
        self._next_round = 0.0
        self._round: Future[None] | None = None
        self._failures = 0
        self._committing = threading.Lock()
        self._stopped = False

    def poll(self, sink: Sink, executor: Executor) -> None:
        """Start a round if it is time to."""
        if self._round is not None and not self._round.done():
            return
        if self._round is not None:
            self._next_round = time.monotonic() + min(INTERVAL * 2**self._failures, _MAX_INTERVAL)
            self._round = None
        if time.monotonic() >= self._next_round:
            self._round = executor.submit(self.round, sink)

    def round(self, sink: Sink, *, rewrite: bool = True) -> None:
        """Look at the tables that have changed, and do what is to be done. `rewrite`: False: only delete old files."""
        try:
            if rewrite:
                self._rewrite_changed(sink)
            elif self._vacuum(sink, set()):
                self._write_status()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            self._recorded.clear()  # the next round looks at all tables
            if not self._stopped:
                wrong = f"{error.doing}: {error.wrong}" if isinstance(error, WalmereError) else repr(error)
                _log.warning("upkeep of the tables has failed, and is retried: %s", wrong)

    def stop(self) -> None:
        """Cancel what is running. Nothing is committed after this returns."""
        with self._committing:
            self._stopped = True
        self._tasks.cancel()

    def resume(self) -> None:
        """Rounds may start again after `stop`."""
        self._stopped, self._failures = False, 0

    def _rewrite_changed(self, sink: Sink) -> None:
        changed = [each for each in self._tables if each.follows and self._has_changed(each, sink)]
        work: list[_Item] = []
        limits = Upkeep(self._settings.deleted_share)
        for each in changed:
            identity = None if each.definition is None else each.definition.key_identity
            for table in _with_rejects(each):
                planned = sink.plan_upkeep(table, identity if table == each.table else None, limits)
                work += [_Item(each, table, some) for some in planned]
        work.sort(key=lambda item: item.work.bytes)  # small ones first: they free most files per byte
        self._waits = {}
        together = max(1, self._tasks.parallelism // 2)
        for start in range(0, len(work), together):
            self._rewrite(sink, work[start : start + together])
        vacuumed = self._vacuum(sink, {each.name for each in changed})
        if changed or work or vacuumed:
            self._write_status()

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
        self._written.setdefault(known.name, BytesPerHour()).add(max(0, extent.written - before))
        return True

    def _rewrite(self, sink: Sink, items: Sequence[_Item]) -> None:
        allowed: list[_Item] = []
        for item in items:
            total, limit = self._rewritten.total(), self._settings.bytes_per_hour
            if not limit or (total and total + item.work.bytes > limit):  # what is larger than the limit is done alone
                self._waits[item.known.name] = "[maintenance] bytes_per_hour"
            else:
                self._rewritten.add(item.work.bytes)
                allowed.append(item)
        done = self._tasks.map(LowPriority(sink), [item.work for item in allowed]) if allowed else []
        by_table: dict[TableName, tuple[TableState, list[Any]]] = {}
        for item, result in zip(allowed, done, strict=True):
            by_table.setdefault(item.table, (item.known, []))[1].append(result)
        for table, (known, results) in by_table.items():
            with self._committing:
                if self._stopped:
                    return
                if table == known.table:
                    self._replace_files(known, results)
                else:
                    sink.replace_files(table, results)

    def _vacuum(self, sink: Sink, changed: set[str]) -> bool:
        """Vacuum the tables for which it is time. Returns whether there were any."""
        now = time.time()
        self._vacuumed -= changed
        for name in changed:
            self._vacuum_at[name] = min(self._vacuum_at.get(name, math.inf), now + VACUUM_INTERVAL)
        if cuts.active(self._directory).at:
            return False  # versions stay readable while a table is being compared
        due = {name for name, at in self._vacuum_at.items() if at <= now}
        if not due:
            return False
        tables = [table for each in self._tables if each.follows and each.name in due for table in _with_rejects(each)]
        self._tables.shared.check(0.0)
        self._tasks.map(sink.vacuum, tables)
        for name in due & self._vacuumed:
            del self._vacuum_at[name]
        # once more, when the files that were replaced until now are old enough: the table may rest from now on
        self._vacuum_at |= dict.fromkeys(due - self._vacuumed, now + sink.keep_seconds + VACUUM_INTERVAL)
        self._vacuumed |= due
        return True

    def _write_status(self) -> None:
        content = {
            "rewritten_bytes_per_hour": self._rewritten.total(),
            "rewritten": self._rewritten.by_minute,
            "written": {name: written.by_minute for name, written in self._written.items()},
            "vacuum_at": self._vacuum_at,
            "tables": {
                name: {"written_bytes_per_hour": written.total(), "upkeep_waits_for": self._waits.get(name)}
                for name, written in self._written.items()
            },
        }
        write_durably(self._directory / paths.MAINTENANCE, json.dumps(content))


def read_status(directory: Path) -> dict[str, Any]:
    """What the last round wrote, by table; empty if there is nothing."""
    return _read(directory, "tables")


def _read(directory: Path, what: str) -> dict[str, Any]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        found: dict[str, Any] = json.loads((directory / paths.MAINTENANCE).read_bytes())[what]
        return dict(found)
    return {}


def _read_bytes(found: Any) -> BytesPerHour:
    with suppress(ValueError, TypeError, AttributeError):
        return BytesPerHour({int(minute): int(size) for minute, size in found.items()})
    return BytesPerHour()


def _with_rejects(known: TableState) -> list[TableName]:
    """A table, and that of its rejects if it has some."""
    return [known.table, Rejects.table(known.table)] if known.rejects else [known.table]


@dataclass(frozen=True, slots=True)
class LowPriority:
    """Rewrites files in a thread of low priority. The thread ends with the task, which cannot raise its own again."""

    sink: Sink

    def __call__(self, work: Any) -> Any:
        results: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with suppress(OSError, AttributeError):  # only Linux has priorities of threads
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
                results.append(self.sink.rewrite_files(work))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]
