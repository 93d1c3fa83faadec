"""How many rows the running copies have read: for `walmere status` in a file, and for `walmere run`.

Rows of finished tasks are counted by Spark. What the running ones have read is asked of the source, once a second. The
file is not fsynced: it says nothing after a crash, and the copies start again then.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.config import Source
from walmere.errors import SourceError
from walmere.publisher import catalog
from walmere.publisher.connect import Connection, connect, translate_errors
from walmere.publisher.copy_progress import rows_being_copied
from walmere.publisher.snapshot import Snapshot

INTERVAL: Final = 1.0
"""Seconds between two questions to the source."""

OnTasks = Callable[[int, int], None]
"""Called with the number of rows that finished tasks have read, and with the number of all tasks."""


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """A running copy."""

    began: float  # in seconds of Unix time
    rows: int = 0  # read so far
    estimated: int | None = None  # of all rows; None: not known


class _RunningTasks:
    """Asks the source how many rows the running tasks of a copy have read. Another thread may close it meanwhile.

    That thread must not close a connection in use: libpq would crash the process. Then the one that uses it does.
    """

    def __init__(self, source: Source, snapshot: Snapshot) -> None:
        self._source = source
        self._snapshot = snapshot
        self._connection: Connection | None = None
        self._closed = False
        self._asking = threading.Lock()

    def rows(self) -> int:
        """The rows; 0 if the source does not answer."""
        rows = 0
        with self._asking, suppress(SourceError):
            if not self._closed:
                rows = self._ask()
        if self._closed:  # meanwhile
            self.close()
        return rows

    def _ask(self) -> int:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._source, "walmere launcher")
            catalog.set_timeouts(self._connection)
        with translate_errors(self._source, "reading the progress of a copy"):
            return rows_being_copied(self._connection, self._snapshot)

    def close(self) -> None:
        self._closed = True
        if self._asking.acquire(blocking=False):
            try:
                if self._connection is not None:
                    self._connection.close()
            finally:
                self._asking.release()


class RunningCopies:
    """The running copies of a subscription."""

    def __init__(self, directory: Path, source: Source) -> None:
        self._path = directory / paths.COPIES
        self._source = source
        self._copies: dict[int, CopyProgress] = {}
        self._lock = threading.Lock()

    @property
    def by_table(self) -> Mapping[int, CopyProgress]:
        """By the OID of the table."""
        return dict(self._copies)

    @contextmanager
    def watched(self, oid: int, snapshot: Snapshot, estimated: int | None) -> Iterator[OnTasks]:
        """Watch a copy while the context is open. Pass the function to the tasks, which call it regularly."""
        self._set(oid, CopyProgress(time.time(), estimated=estimated))
        tasks = _RunningTasks(self._source, snapshot)
        asked = 0.0

        def on_tasks(finished: int, _: int) -> None:
            nonlocal asked
            known = self._copies.get(oid)
            if known is None or time.monotonic() - asked < INTERVAL:
                return
            asked = time.monotonic()
            rows = finished + tasks.rows()
            if rows > known.rows:  # a task that has just ended is in neither number for a moment
                self._set(oid, replace(known, rows=rows))

        try:
            yield on_tasks
        finally:
            self._set(oid, None)
            tasks.close()

    def _set(self, oid: int, progress: CopyProgress | None) -> None:
        with self._lock, suppress(OSError):
            if progress is None:
                self._copies.pop(oid, None)
            else:
                self._copies[oid] = progress
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps({number: asdict(each) for number, each in self._copies.items()}))
            temporary.rename(self._path)


def read(directory: Path) -> dict[int, CopyProgress]:
    """The copies of the running process, by the OID of the table."""
    with suppress(OSError, ValueError, TypeError, AttributeError):  # missing, or of another version
        content = json.loads((directory / paths.COPIES).read_text())
        return {int(oid): CopyProgress(**each) for oid, each in content.items()}
    return {}
