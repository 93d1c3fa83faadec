"""One point at which source and target can be compared: a snapshot of the source, and the target's versions at its LSN.

    1. A hold keeps the run, if there is one, from planning another batch.
    2. A temporary slot gives a snapshot and its LSN; the hold becomes a cut there.
    3. The run goes on; one of its batches ends exactly at that LSN, and the ledger says which versions that made. If no
       process runs the subscription, `verify` applies up to that LSN itself.

The snapshot and the cut are kept until all tables are compared. Changes are received and applied meanwhile. The slot is
dropped: an ordinary session imports the snapshot and exports it again. So the source keeps no WAL for us. The cost is
that of any long query: rows that are deleted or updated meanwhile cannot be vacuumed.

The slot waits for the transactions that are open on the source. If they take longer than some seconds, a snapshot is
taken without a slot (see `open_transactions`). If tables are past the LSN when it is known, because the hold has ended,
it is tried again, with a longer hold. Every wait has a timeout: after `wait` seconds verify gives up, and names the
transactions that block it.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.changelog.assembly import HEARTBEAT
from walmere.config import Source
from walmere.errors import ChangeLogInUse, NotCompared, SourceError, WalmereError
from walmere.ledger.entry import Entry
from walmere.ledger.file import Ledger
from walmere.lsn import Lsn
from walmere.publisher import catalog, snapshot, transactions
from walmere.publisher.connect import Connection, connect, translate_errors
from walmere.publisher.snapshot import Snapshot
from walmere.sinks.base import Sink, is_lake
from walmere.storage import Lock
from walmere.subscription.requests.cuts import Cut
from walmere.verify.open_transactions import snapshot_beside_open_transactions

HOLD: Final = 10.0
"""Seconds for which batches wait for the snapshot, in the first attempt."""
_ATTEMPTS: Final = 4
SLOT_WAIT: Final = 3.0
"""Seconds for which a slot may wait for open transactions; then the snapshot is taken without one."""
_POLL: Final = 0.05
APPLICATION: Final = "walmere verify"
LOCK_TIMEOUT: Final = 10.0
"""Seconds to wait for a table that another session has locked; then it is not compared."""
_DOING: Final = "looking for a point to compare at"


@dataclass(frozen=True, slots=True)
class ConsistentPoint:
    """A snapshot of the source, and the versions of the tables at its LSN."""

    snapshot: Snapshot
    entry: Entry
    sink: Sink  # to read the versions with

    @property
    def lsn(self) -> Lsn:
        return self.snapshot.lsn


@contextmanager
def consistent_point(
    source: Source,
    subscription: str,
    directory: Path,
    sink: Sink,
    *,
    catch_up: Callable[[Lsn], None],
    receive: Callable[[Lsn], object],
    wait: float,
) -> Iterator[ConsistentPoint]:
    """A point that lasts as long as the context is open.

    `catch_up` runs the subscription up to an LSN, `receive` receives up to an LSN.

    Raises NotCompared if there is no progress for `wait` seconds.
    """
    for attempt in range(_ATTEMPTS):
        # a new name each time: the server may drop a temporary slot with a delay
        slot = snapshot.slot_name(subscription, os.getpid(), f"verify_{secrets.token_hex(4)}")
        taking = functools.partial(_snapshot, source, slot, directory / paths.CHANGELOG, receive)
        with closing(Cut(directory, HOLD * 2**attempt)) as cut, taking(wait) as made:
            if made is None:
                continue
            stay = not is_lake(sink)  # a database has no old versions
            (cut.stay_at if stay else cut.at)(made.lsn)
            entry = _reach(source, directory, made.lsn, catch_up, wait)
            if entry is not None:
                with sink.pinned() as pinned:
                    cut.at(made.lsn)
                    yield ConsistentPoint(made, entry, pinned)
                return
    raise NotCompared(
        _DOING,
        f"in {_ATTEMPTS} attempts the tables were past the snapshot when it was ready: transactions on the source take"
        " long, or a table is being copied",
        "try again when they have ended (SELECT pid, xact_start, query FROM pg_stat_activity ORDER BY xact_start)",
    )


@contextmanager
def _snapshot(
    source: Source, slot: str, changelog: Path, receive: Callable[[Lsn], object], wait: float
) -> Iterator[Snapshot | None]:
    """A snapshot from a slot; without a slot if that would have to wait."""
    with ExitStack() as stack:
        try:
            made: Snapshot | None = stack.enter_context(_by_slot(source, slot, min(wait, SLOT_WAIT)))
        except NotCompared as waited:
            deadline = time.monotonic() + wait
            try:
                made = stack.enter_context(
                    snapshot_beside_open_transactions(source, changelog, receive, APPLICATION, deadline)
                )
            except (TimeoutError, SourceError):  # as on a standby
                raise waited from None
        yield None if made is None else replace(made, lock_timeout=min(wait, LOCK_TIMEOUT))


@contextmanager
def _by_slot(source: Source, slot: str, wait: float) -> Iterator[Snapshot]:
    with ExitStack() as stack:
        with _exported(source, slot, wait) as made:
            session = stack.enter_context(snapshot.imported(source, APPLICATION, made))
            with translate_errors(source, "exporting a snapshot"):
                row = session.execute("SELECT pg_catalog.pg_export_snapshot()").fetchone()
            assert row is not None
        yield Snapshot(row[0], made.lsn)


@contextmanager
def _exported(source: Source, slot: str, wait: float) -> Iterator[Snapshot]:
    """The snapshot of a temporary slot. Raises NotCompared if making it takes too long."""
    late = threading.Event()
    blocking: list[str] = []
    timers: list[threading.Timer] = []

    def give_up(connection: Connection) -> None:
        with suppress(WalmereError):
            blocking.extend(transactions.writing(source, APPLICATION))
        late.set()
        # otherwise the server goes on waiting after this process has ended
        with suppress(WalmereError), translate_errors(source, "cancelling"):
            connection.cancel_safe(timeout=5.0)

    def opened(connection: Connection) -> None:
        timers.append(threading.Timer(wait, give_up, [connection]))
        timers[0].daemon = True
        timers[0].start()

    with ExitStack() as stack:
        try:
            made = stack.enter_context(snapshot.exported(source, slot, opened))
        except SourceError:
            if late.is_set():
                raise NotCompared(
                    _DOING,
                    f"a snapshot has waited {wait:g} s for transactions that are open on the source: "
                    + ("; ".join(blocking) or "this role cannot see which ones"),
                    "end them (SELECT pg_terminate_backend(pid), or ROLLBACK PREPARED / COMMIT PREPARED), or give"
                    " them more time: --wait SECONDS",
                ) from None
            raise
        finally:
            for each in timers:
                each.cancel()
        yield made


def _reach(source: Source, directory: Path, lsn: Lsn, catch_up: Callable[[Lsn], None], wait: float) -> Entry | None:
    """Wait until the tables are at the LSN; None if they are past it."""
    run = directory / paths.RUN
    emitted = False
    reached: Lsn | None = None
    deadline = time.monotonic() + wait
    while True:
        ledger = Ledger(directory)
        last = ledger.last()
        if last is not None and last.lsn >= lsn:
            return ledger.at(lsn)
        if last is not None and last.lsn != reached:
            reached, deadline = last.lsn, time.monotonic() + wait
        elif time.monotonic() > deadline:
            raise NotCompared(
                _DOING,
                f"the running process has not applied anything for {wait:g} s: it is at {reached or 'no LSN yet'},"
                f" before {lsn}",
                "see `walmere status`; or give it more time: --wait SECONDS",
            )
        if Lock.holder(run) is None:
            with suppress(ChangeLogInUse):  # a run has started meanwhile
                catch_up(lsn)
                return Ledger(directory).at(lsn)
        if not emitted:
            _emit_message(source)
            emitted = True
        time.sleep(_POLL)


def _emit_message(source: Source) -> None:
    """Write a logical message: without any changes, the stream may take long to reach the LSN."""
    with (
        suppress(SourceError),
        closing(connect(source, APPLICATION)) as connection,
        translate_errors(source, "writing a logical message"),
    ):
        catalog.emit_message(connection, HEARTBEAT)
