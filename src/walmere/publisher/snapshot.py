"""The snapshot of a copy, and its LSN: what PostgreSQL's tablesync worker does before its COPY.

Creating a temporary replication slot gives an LSN and a snapshot of exactly what had committed before it. PostgreSQL's
worker *uses* the snapshot in its own transaction; we *export* it, so that many connections, in many Spark tasks, see
the same rows. The snapshot is valid until the next command on the connection that created it. The slot is dropped when
the connection closes, also after a crash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from psycopg.sql import SQL, Composed, Identifier
from psycopg.sql import Literal as SqlLiteral

from walmere.config import Source
from walmere.lsn import Lsn
from walmere.publisher import transactions
from walmere.publisher.connect import Connection, capabilities, connect, translate_errors


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An exported snapshot of what had committed before `lsn`. Other sessions import it by name."""

    name: str
    lsn: Lsn
    lock_timeout: float = 10.0  # seconds that a session that imports it waits for a lock; 0: no limit


def slot_name(subscription: str, relation: int, system_identifier: str) -> str:
    """`pg_<subscription>_sync_<relation>_<system>`, with the characters that a slot name may have."""
    readable = re.sub(r"[^a-z0-9_]", "_", subscription.lower())
    tail = f"_sync_{relation}_{system_identifier}"
    return f"pg_{readable[: 63 - len(tail) - 3]}{tail}"


@contextmanager
def exported(source: Source, slot: str, opened: Callable[[Connection], None] = lambda _: None) -> Iterator[Snapshot]:
    """Export a snapshot. It is valid while the context is open.

    `opened` is called with the connection before the slot is created, so that the caller can cancel it: creating a slot
    waits for all running transactions, without a limit.
    """
    connection = connect(source, slot, replication=True)
    opened(connection)
    try:
        features = capabilities(connection)
        tail = "(SNAPSHOT 'export')" if features.slot_options else "EXPORT_SNAPSHOT"
        command = SQL("CREATE_REPLICATION_SLOT {} TEMPORARY LOGICAL pgoutput " + tail).format(Identifier(slot))
        with (
            translate_errors(source, f"creating temporary replication slot {slot}"),
            transactions.reported_wait(source, slot),
        ):
            row = connection.execute(command).fetchone()
            assert row is not None
        yield Snapshot(row[2], Lsn.parse(row[1]))
    finally:
        connection.close()


def lock_timeout(snapshot: Snapshot) -> Composed:
    """The statement that limits how long a transaction with this snapshot waits for a lock."""
    return SQL("SET LOCAL lock_timeout = {}").format(SqlLiteral(round(snapshot.lock_timeout * 1000)))


@contextmanager
def imported(source: Source, application_name: str, snapshot: Snapshot) -> Iterator[Connection]:
    """A connection inside a read-only transaction that sees the snapshot."""
    connection = connect(source, application_name)
    try:
        with translate_errors(source, "importing the snapshot of the copy"):
            connection.execute("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ")
            connection.execute(SQL("SET TRANSACTION SNAPSHOT {}").format(SqlLiteral(snapshot.name)))
            if snapshot.lock_timeout:
                connection.execute(lock_timeout(snapshot))
        yield connection
    finally:
        connection.close()
