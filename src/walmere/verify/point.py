"""One point at which source and target can be compared: a snapshot of the source, and the target's versions at its LSN.

    1. A hold keeps the run, if there is one, from planning another batch.
    2. A temporary slot gives a snapshot and its LSN; the hold becomes a cut there.
    3. The run goes on; one of its batches ends exactly at that LSN, and the ledger says which versions that made. If
       nobody runs, we run the subscription up to there ourselves.

The snapshot and the cut are kept until all is compared; changes are received and applied meanwhile as ever. The slot is
not: an ordinary session takes the snapshot over and exports it again. So the source keeps no WAL for us, and what it
pays is what any long query costs: rows that are deleted or updated meanwhile cannot be vacuumed away.

A snapshot waits for the transactions that are open on the source. If they take longer than a hold lasts, tables go on
without waiting, and may be past the LSN when it is known; then it is tried again, with a longer hold.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walmere.changelog.assembly import HEARTBEAT
from walmere.changelog.writer import Lock
from walmere.config import Source
from walmere.errors import ChangeLogInUse, SourceError, SourceUnavailable
from walmere.lsn import Lsn
from walmere.publisher import catalog, snapshot
from walmere.publisher.connect import connect, speaking
from walmere.publisher.snapshot import Snapshot
from walmere.subscription.cuts import Cut
from walmere.subscription.ledger import Entry, Ledger

HOLD: Final = 10.0
"""Seconds for which tables wait for the snapshot, at first."""
_ATTEMPTS: Final = 4
_POLL: Final = 0.05
APPLICATION: Final = "walmere verify"


@dataclass(frozen=True, slots=True)
class Point:
    """Where to compare."""

    snapshot: Snapshot
    entry: Entry

    @property
    def lsn(self) -> Lsn:
        return self.snapshot.lsn


@contextmanager
def consistent_point(
    source: Source, subscription: str, directory: Path, catch_up: Callable[[Lsn], None]
) -> Iterator[Point]:
    """A point that lasts as long as the context is open. `catch_up` runs the subscription up to an LSN."""
    for attempt in range(_ATTEMPTS):
        # never the same name: the server lets go of a temporary slot in its own time
        slot = snapshot.slot_name(subscription, os.getpid(), f"verify_{secrets.token_hex(4)}")
        with closing(Cut(directory, HOLD * 2**attempt)) as cut, _snapshot(source, slot) as made:
            cut.at(made.lsn)
            entry = _reach(source, directory, made.lsn, catch_up)
            if entry is not None:
                yield Point(made, entry)
                return
    raise SourceUnavailable(
        "looking for a point to compare at",
        f"{_ATTEMPTS} times the tables were past the snapshot before it was there: transactions on the source take"
        " long, or a table is being copied",
        "try again when they are over (SELECT pid, xact_start, query FROM pg_stat_activity ORDER BY xact_start)",
    )


@contextmanager
def _snapshot(source: Source, slot: str) -> Iterator[Snapshot]:
    with ExitStack() as stack:
        with snapshot.exported(source, slot) as made:
            session = stack.enter_context(snapshot.imported(source, APPLICATION, made))
            with speaking(source, "exporting a snapshot"):
                row = session.execute("SELECT pg_catalog.pg_export_snapshot()").fetchone()
            assert row is not None
        yield Snapshot(row[0], made.lsn)


def _reach(source: Source, directory: Path, lsn: Lsn, catch_up: Callable[[Lsn], None]) -> Entry | None:
    """Wait until the tables are there; None if they are past it."""
    run = directory / "run"
    told = False
    while True:
        ledger = Ledger(directory)
        last = ledger.last()
        if last is not None and last.lsn >= lsn:
            return ledger.at(lsn)
        if Lock.holder(run) is None:
            with suppress(ChangeLogInUse):  # somebody was faster
                catch_up(lsn)
                return Ledger(directory).at(lsn)
        if not told:
            _nudge(source)
            told = True
        time.sleep(_POLL)


def _nudge(source: Source) -> None:
    """Have something go through the stream: where nothing happens, it would not come to the LSN for long."""
    with (
        suppress(SourceError),
        closing(connect(source, APPLICATION)) as connection,
        speaking(source, "writing a logical message"),
    ):
        catalog.emit_message(connection, HEARTBEAT)
