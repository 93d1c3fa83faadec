"""Reads the progress of the subscription and the position of the source ten times a second, for the display."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from walmere.demo.display import Display, View
from walmere.demo.lag import Lag
from walmere.demo.report import Measured
from walmere.demo.subscriber import MirrorProcess, RunReport
from walmere.demo.workload import Writers
from walmere.errors import WalmereError
from walmere.lsn import Lsn
from walmere.publisher import catalog
from walmere.publisher.connect import Connection
from walmere.subscription.state import Phase

_TICK: Final = 0.1
_WINDOW: Final = 5.0
"""Seconds over which a rate on the display is measured."""
_STUCK_AFTER: Final = 120.0
"""Seconds without progress after which the demo fails."""


class Watch:
    """Watches the subscription until a condition is met, and records times."""

    def __init__(
        self, subscriber: MirrorProcess, connection: Connection, display: Display, measured: Measured, began: float
    ) -> None:
        self.writers: Writers | None = None
        self._subscriber = subscriber
        self._connection = connection
        self._display = display
        self._measured = measured
        self._began = began
        self._lag = Lag()
        self._rates: deque[tuple[float, int, int]] = deque()  # time, transactions, changes
        self._seen = (RunReport(), time.monotonic())
        self._ready: float | None = None
        self._finishing = False

    def until(self, doing: str, happened: Callable[[RunReport], bool]) -> None:
        """Watch until `happened` is true of the progress."""
        while not happened(self._look(doing)):
            time.sleep(_TICK)

    def writers_may_stop(self, written: float, seconds: float) -> bool:
        """Whether the writers may stop. On a slow machine they run longer, so that changes are applied meanwhile."""
        following = 0.0 if self._ready is None else time.monotonic() - self._ready
        return written >= seconds and (following >= seconds / 4 or written >= 2 * seconds)

    def end_of_writing(self) -> Lsn:
        """The LSN after everything that was written. A message after it lets the applied LSN get past it."""
        self._finishing = True
        end = catalog.insert_position(self._connection)
        self._connection.execute("SELECT pg_catalog.pg_logical_emit_message(true, 'walmere demo', 'that was all')")
        return end

    def _look(self, doing: str) -> RunReport:
        self._subscriber.check()
        if self.writers is not None:
            self.writers.check()
        now, progress = time.monotonic(), self._subscriber.progress
        source = catalog.wal_position(self._connection)
        self._lag.note(now, source)
        lag = self._lag.seconds(now, progress.applied)
        self._note(progress, lag)
        self._stuck(doing, progress, now)
        transactions = self.writers.done.total() if self.writers is not None else 0
        changes = progress.changes or {}
        self._rates.append((now, transactions, progress.changes_applied))
        while now - self._rates[0][0] > _WINDOW:
            self._rates.popleft()
        before, written, applied = self._rates[0]
        span = max(_TICK, now - before)
        self._display.show(
            View(
                doing,
                now - self._began,
                tuple((table, changes.get(table.name, 0)) for table in progress.tables),
                transactions,
                0.0 if self._finishing else (transactions - written) / span,
                source,
                progress.applied or None,
                lag if progress.copied else None,
                progress.rows_copied / self._measured.copy if self._measured.copy else None,
                (progress.changes_applied - applied) / span if progress.copied else None,
            )
        )
        if self._measured.first_result is None and any(table.phase.copied for table in progress.tables):
            self._measured.first_result = time.time() - self._subscriber.began  # set after it was shown
        return progress

    def _note(self, progress: RunReport, lag: float) -> None:
        seen = self._measured
        if seen.spark_start is None and progress.started:
            seen.spark_start = progress.time - self._subscriber.began
        if seen.copy_began is None and any(table.phase is not Phase.INIT for table in progress.tables):
            seen.copy_began = progress.time
        if seen.copy_ended is None and progress.copied:
            seen.copy_ended = progress.time
        if progress.ready and not self._finishing:
            self._ready = self._ready or time.monotonic()
            seen.lags.append(lag)

    def _stuck(self, doing: str, progress: RunReport, now: float) -> None:
        before, since = self._seen
        if progress != before:
            self._seen = (progress, now)
        elif now - since > _STUCK_AFTER:
            raise WalmereError(
                doing, f"there was no progress for {_STUCK_AFTER:.0f} s", "see run.log in the demo's directory"
            )
