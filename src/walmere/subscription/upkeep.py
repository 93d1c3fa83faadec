"""Upkeep of the target's tables beside the stream: join small files, purge deleted rows, delete old files.

Batches only add small files and mark rows as deleted. What they leave is rewritten here, in rounds, by tasks of their
own: at most half of the cores, at low priority, and not more bytes per hour than `[maintenance]` allows. A round looks
only at tables that batches have changed. Commits are made between two batches (see `Apply.replace_files`).

If upkeep fails, the run continues, and the next round tries again.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from walmere import paths
from walmere.config import Maintenance
from walmere.errors import WalmereError
from walmere.sinks.base import Sink, Upkeep, UpkeepWork
from walmere.storage import write_durably
from walmere.subscription import cuts
from walmere.subscription.state import TableState
from walmere.subscription.tables import Tables

_log = logging.getLogger(__name__)

INTERVAL: Final = 5.0
"""Seconds between two rounds."""
_MAX_INTERVAL: Final = 300.0
"""The same, after several failures."""
VACUUM_INTERVAL: Final = 600.0
"""Seconds between two vacuums of a table that is written to."""
_HOUR: Final = 3600.0
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
    """Bytes that were written within the last hour."""

    _written: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, size: int) -> None:
        """Count bytes that were just written."""
        if size:
            self._written.append((time.monotonic(), size))

    def total(self) -> int:
        """The bytes of the last hour."""
        while self._written and self._written[0][0] < time.monotonic() - _HOUR:
            self._written.popleft()
        return sum(size for _, size in self._written)


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
        self._rewritten = BytesPerHour()
        self._written: dict[str, BytesPerHour] = {}
        self._written_before: dict[str, int] = {}  # by name: see `Extent.written`
        self._recorded: dict[str, int | None] = {}  # by name: the version in the table's state
        self._vacuumed: dict[str, float] = {}
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

    def round(self, sink: Sink) -> None:
        """Look at the tables that have changed, and do what is to be done."""
        try:
            self._do_round(sink)
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

    def _do_round(self, sink: Sink) -> None:
        changed = [each for each in self._tables if each.follows and self._has_changed(each, sink)]
        work: list[tuple[TableState, UpkeepWork]] = []
        limits = Upkeep(self._settings.deleted_share)
        for each in changed:
            identity = None if each.definition is None else each.definition.key_identity
            work += [(each, item) for item in sink.plan_upkeep(each.table, identity, limits)]
        work.sort(key=lambda pair: pair[1].bytes)  # small ones first: they free most files per byte
        self._waits = {}
        together = max(1, self._tasks.parallelism // 2)
        for start in range(0, len(work), together):
            self._rewrite(sink, work[start : start + together])
        self._vacuum(sink, changed)
        if changed or work:
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

    def _rewrite(self, sink: Sink, work: Sequence[tuple[TableState, UpkeepWork]]) -> None:
        allowed = []
        for known, item in work:
            if self._rewritten.total() + item.bytes > self._settings.bytes_per_hour:
                self._waits[known.name] = "[maintenance] bytes_per_hour"
            else:
                self._rewritten.add(item.bytes)
                allowed.append((known, item))
        done = self._tasks.map(LowPriority(sink), [item for _, item in allowed]) if allowed else []
        by_table: dict[str, tuple[TableState, list[Any]]] = {}
        for (known, _), result in zip(allowed, done, strict=True):
            by_table.setdefault(known.name, (known, []))[1].append(result)
        for known, results in by_table.values():
            with self._committing:
                if not self._stopped:
                    self._replace_files(known, results)

    def _vacuum(self, sink: Sink, changed: Iterable[TableState]) -> None:
        if cuts.active(self._directory).at:
            return  # versions stay readable while a table is being compared
        now = time.monotonic()
        for each in changed:
            self._vacuumed.setdefault(each.name, now)
        due = [each for each in changed if now - self._vacuumed[each.name] > VACUUM_INTERVAL]
        if due:
            self._tasks.map(sink.vacuum, [each.table for each in due])
        self._vacuumed |= {each.name: now for each in due}

    def _write_status(self) -> None:
        content = {
            "rewritten_bytes_per_hour": self._rewritten.total(),
            "tables": {
                name: {"written_bytes_per_hour": written.total(), "upkeep_waits_for": self._waits.get(name)}
                for name, written in self._written.items()
            },
        }
        write_durably(self._directory / paths.MAINTENANCE, json.dumps(content))


def read_status(directory: Path) -> dict[str, Any]:
    """What the last round wrote, by table; empty if there is nothing."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found: dict[str, Any] = json.loads((directory / paths.MAINTENANCE).read_bytes())["tables"]
        return found
    return {}


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
