"""Schedules the work on single tables: copies, changed definitions, and the regular read of the catalogs.

A copy that was interrupted is retried after `RETRY_INTERVAL`. A copy that was refused is retried too, because a person
may fix the cause, but each time after a longer pause. In a run that ends at an LSN (`once`) a refused copy is not
retried: its error is in `failed`.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Executor, Future
from typing import Final

from walmere.errors import ColumnMissing, NotMirrored, SinkFull, WalmereError
from walmere.subscription.state import TableState
from walmere.subscription.tables import Tables
from walmere.subscription.tablesync import TableSync
from walmere.units import span

_log = logging.getLogger(__name__)

RETRY_INTERVAL: Final = 5.0
"""Seconds before an interrupted copy is retried, as PostgreSQL's `wal_retrieve_retry_interval`."""
MAX_RETRY_INTERVAL: Final = 300.0
"""Longest pause in seconds between retries of a refused copy. Altering the table ends the pause."""
MAX_RETRY_INTERVAL_AFTER_READ: Final = 4 * 3600.0
"""The same, if rows were read before the copy was refused: reading a large table again and again costs too much."""
MAX_RETRY_INTERVAL_TRANSIENT: Final = 60.0
"""The same, for a transient error."""
REFRESH_INTERVAL: Final = 5.0
"""Seconds between two reads of the publications, which find tables that were added or removed."""
REFRESH_INTERVAL_ALTERED: Final = 0.5
"""The same, while the target of a table waits for altered columns."""


class CopyScheduler:
    """Starts copies and redefinitions, and retries them."""

    def __init__(
        self, sync: TableSync, tables: Tables, copying: Executor, catalog_reads: Executor, *, once: bool
    ) -> None:
        self._sync = sync
        self._tables = tables
        self._copying = copying
        self._catalog_reads = catalog_reads
        self._once = once
        self._running: dict[int, Future[None]] = {}
        self._retry_at: dict[int, float] = {}
        self._delay: dict[int, float] = {}
        self._discovery: Future[None] = catalog_reads.submit(sync.discovery.refresh)
        self._discovered = False
        self._next_discovery: float | None = None  # None: one is running
        self.failed: dict[int, WalmereError] = {}

    @property
    def working(self) -> bool:
        """Whether something is being copied or redefined."""
        return bool(self._running)

    def poll(self, *, start: bool = True) -> None:
        """Handle what has finished, then start what can start. Raises errors that concern more than one table.

        `start`: False: start nothing, because the subscription is paused.
        """
        now = time.monotonic()
        self._poll_discovery(now)
        for oid, work in [each for each in self._running.items() if each[1].done()]:
            del self._running[oid]
            self._finished(oid, work, now)
        for table in self._waiting() if start else ():
            if table.oid not in self._running and now >= self._retry_at.get(table.oid, 0.0):
                self._start(table, now)

    def retry_now(self, oid: int) -> None:
        """Copy the table as soon as possible: forget its failures and pauses."""
        self._retry_at.pop(oid, None)
        self._delay.pop(oid, None)
        self.failed.pop(oid, None)

    def done(self) -> bool:
        """Whether no table waits for anything."""
        return self._is_up_to_date() and not self._running and not self._waiting()

    def cancel(self) -> bool:
        """Cancel work that has not started. Returns whether some is still running."""
        work = [*self._running.values(), self._discovery]
        return any([not each.cancel() and not each.done() for each in work])  # noqa: C419  all are to be cancelled

    def _poll_discovery(self, now: float) -> None:
        discovery = self._sync.discovery
        if self._next_discovery is None and self._discovery.done():
            try:
                self._discovery.result()
                self._discovered = True
            except WalmereError as error:
                if not error.transient:
                    raise
            interval = REFRESH_INTERVAL if discovery.altered_lsn is None else REFRESH_INTERVAL_ALTERED
            self._next_discovery = now + interval
        is_due = self._next_discovery is not None and now >= self._next_discovery
        if is_due and not (self._once and self._is_up_to_date()):
            self._discovery, self._next_discovery = self._catalog_reads.submit(discovery.refresh), None
        while discovery.changed:
            self.retry_now(discovery.changed.pop())

    def _start(self, table: TableState, now: float) -> None:
        oid = table.oid
        if table.retry_at > time.time():
            if self._once:
                self.failed[oid] = NotMirrored(f"mirroring {table.name}", table.error or "", _next_copy_hint(table))
        elif table.waits_for_copy:
            self._retry_at[oid] = now + RETRY_INTERVAL if table.error is not None else 0.0
            self._running[oid] = self._copying.submit(self._sync.copy, oid)
        else:
            self._running[oid] = self._catalog_reads.submit(self._sync.redefine, oid)

    def _is_up_to_date(self) -> bool:
        """Whether the tables have everything that the catalogs show."""
        return self._discovered and self._sync.discovery.altered_lsn is None

    def _waiting(self) -> list[TableState]:
        given_up = self.failed if self._once else ()
        return [each for each in self._tables if (each.waits_for_copy or each.awaits) and each.oid not in given_up]

    def _finished(self, oid: int, work: Future[None], now: float) -> None:
        try:
            work.result()
        except WalmereError as error:
            if error.transient:
                self._retry_at[oid] = now + RETRY_INTERVAL
            else:
                self._refused(oid, error, now)
            return
        known = self._tables.get(oid)
        if known is not None and known.waits_for_copy and known.error is not None:
            self._delay_retry(oid, now, MAX_RETRY_INTERVAL_TRANSIENT)
            _log.warning("%s; retry in %.0f s", first_line(known.error), self._retry_at[oid] - now)
        else:
            self.retry_now(oid)

    def _refused(self, oid: int, error: WalmereError, now: float) -> None:
        known = self._tables.get(oid)
        name = known.name if known is not None else "a table that was removed from the publication"
        self.failed[oid] = error.with_doing(f"mirroring {name}, {error.doing}")
        read_rows = oid in self._sync.read_rows and not isinstance(error, SinkFull)
        longest = MAX_RETRY_INTERVAL_AFTER_READ if read_rows else MAX_RETRY_INTERVAL
        self._delay_retry(oid, now, RETRY_INTERVAL if isinstance(error, ColumnMissing) else longest)
        _log.warning("%s%s", self.failed[oid], "" if self._once else self._next_attempt(oid, error, now))

    def _next_attempt(self, oid: int, error: WalmereError, now: float) -> str:
        """When the next attempt starts, as the end of the hint of a refused one."""
        pause = span(self._retry_at[oid] - now)
        known = self._tables.get(oid)
        text = f"the next attempt starts in {pause}"
        if known is not None and known.waits_for_copy:
            text = f"the next copy starts in {pause}, or now with `walmere resync {known.name}`"
        return ("; " if error.hint else "\n  hint: ") + text

    def _delay_retry(self, oid: int, now: float, longest: float) -> None:
        self._delay[oid] = min(2 * self._delay[oid] if oid in self._delay else RETRY_INTERVAL, longest)
        self._retry_at[oid] = now + self._delay[oid]


def _next_copy_hint(table: TableState) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(table.retry_at))
    copies = "1 copy" if table.setbacks == 1 else f"{table.setbacks} copies"
    return (
        f"{copies} did not help; the next copy starts at {at}, or when the table is altered, or with"
        f" `walmere resync {table.name}`"
    )


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
