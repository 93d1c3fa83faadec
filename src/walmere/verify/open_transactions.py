"""A snapshot with an LSN while transactions are open on the source: without a slot, which would wait for their end.

A new slot gives a snapshot and its LSN, but only after the end of every transaction that was running when the slot was
requested. A prepared transaction, or one that is idle in transaction, can delay it for hours. An ordinary snapshot does
not wait, and it says which transactions it does not see: those whose xid is listed as in progress, or is newer than all
others. The change log has the xid of every transaction, in commit order. So the LSN is found there: where the first
transaction commits that the snapshot does not see.

PostgreSQL makes a commit visible a moment after it is in the WAL, and with synchronous replication only when a standby
has confirmed it. So two commits may become visible in another order than they are in the log. Then there is no such
LSN, and another snapshot is taken. The log is searched from a position that was flushed some time before the snapshot.
A commit that is older and not visible yet would make source and target look different, never equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walmere.changelog.assembly import HEARTBEAT
from walmere.changelog.records import Transaction, Transactions
from walmere.changelog.search import ManifestSearch
from walmere.changelog.segment import read_block
from walmere.config import Source
from walmere.errors import ChangeLogInUse, SourceError
from walmere.lsn import Lsn
from walmere.publisher import catalog
from walmere.publisher.connect import connect, translate_errors
from walmere.publisher.snapshot import Snapshot
from walmere.storage import Lock

_POLL: Final = 0.05
_BEFORE: Final = 1.0
"""Seconds from reading the position at which the search of the log starts, to the snapshot."""


@dataclass(frozen=True, slots=True)
class Visible:
    """Which transactions a snapshot sees: PostgreSQL's pg_snapshot."""

    xmax: int  # the first xid that was not assigned yet
    in_progress: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Visible:
        """From `xmin:xmax:xip,xip,…`."""
        _, xmax, running = text.split(":")
        return cls(int(xmax), frozenset(map(int, filter(None, running.split(",")))))

    def sees(self, xid: int) -> bool:
        """Whether a committed transaction is visible. The stream has the lower 32 bits of an xid."""
        distance = (xid - self.xmax + (1 << 31)) % (1 << 32) - (1 << 31)
        full = self.xmax + distance
        return full < self.xmax and full not in self.in_progress


@contextmanager
def snapshot_beside_open_transactions(
    source: Source, changelog: Path, receive: Callable[[Lsn], object], application_name: str, deadline: float
) -> Iterator[Snapshot | None]:
    """A snapshot and its LSN, as long as the context is open. None: there is no such LSN, so try again.

    `receive` receives up to an LSN, if no receiver is running. Raises TimeoutError if the log does not reach it.
    """
    with closing(connect(source, application_name)) as session:
        with translate_errors(source, "taking a snapshot"):
            [(flushed,)] = session.execute("SELECT pg_catalog.pg_current_wal_flush_lsn()::text").fetchall()
            time.sleep(_BEFORE)
            session.execute("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ")
            [(name, visible)] = session.execute(
                "SELECT pg_catalog.pg_export_snapshot(), pg_catalog.pg_current_snapshot()::text"
            ).fetchall()
            end = catalog.insert_position(session)
        _emit_message(source, application_name)
        _wait_for_log(changelog, end, receive, deadline)
        lsn = boundary(changelog, Lsn.parse(flushed), end, Visible.parse(visible))
        yield None if lsn is None else Snapshot(name, lsn)


def boundary(changelog: Path, start: Lsn, end: Lsn, visible: Visible) -> Lsn | None:
    """The LSN between these with all visible transactions of the log before it, and no others; None: there is none."""
    first_unseen, last_seen = end, start
    with ManifestSearch(changelog) as log:
        for record in log.commits_after(start):
            for commit_lsn, xid in _transactions(changelog, record):
                if visible.sees(xid):
                    last_seen = max(last_seen, commit_lsn)
                else:
                    first_unseen = min(first_unseen, commit_lsn)
    return first_unseen if last_seen <= first_unseen else None  # equal: nothing was committed in between


def _transactions(changelog: Path, record: Transactions | Transaction) -> Iterator[tuple[Lsn, int]]:
    """Commit and xid of every transaction of a record: in a segment, each has its Begin under relation 0."""
    if isinstance(record, Transaction):
        yield record.commit_lsn, record.xid
        return
    file = record.segment
    for block in [block for block in file.blocks if block.relation == 0]:
        rows = read_block(changelog, file.only(block), 0)
        commits, xids = rows.column("commit_lsn").to_pylist(), rows.column("xid").to_pylist()
        # a logical message outside transactions has no xid
        yield from ((Lsn(commit), xid) for commit, xid in {*zip(commits, xids, strict=True)} if xid)


def _emit_message(source: Source, application_name: str) -> None:
    """Write a logical message: without any changes, the stream may take long to reach the snapshot's LSN."""
    with (
        suppress(SourceError),
        closing(connect(source, application_name)) as connection,
        translate_errors(source, "writing a logical message"),
    ):
        catalog.emit_message(connection, HEARTBEAT)
        catalog.push_wal(connection)


def _wait_for_log(changelog: Path, end: Lsn, receive: Callable[[Lsn], object], deadline: float) -> None:
    while True:
        with ManifestSearch(changelog) as log:
            if log.end_lsn >= end:
                return
        if Lock.holder(changelog) is None:
            with suppress(ChangeLogInUse):  # a receiver has started meanwhile
                receive(end)
                continue
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_POLL)
