"""One consistent point for a copy: PostgreSQL's tablesync worker up to its COPY (Connection 3 of a subscriber's trace).

A temporary replication slot gives two things at once: an LSN, and a snapshot that shows exactly what had committed
before it. PostgreSQL's worker *uses* the snapshot in its own transaction; we *export* it, so that many connections,
in many Spark tasks, see the same rows. It lives as long as the connection that made it says nothing more, and the slot
goes with the connection, whatever happens to us.
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
from walmere.publisher.connect import Connection, capabilities, connect, translate_errors


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What had committed before `lsn`, under a name that other sessions can import."""

    name: str
    lsn: Lsn
    lock_timeout: float = 10.0  # seconds that who imports it waits for a locked table; 0: for ever


def slot_name(subscription: str, relation: int, system_identifier: str) -> str:
    """`pg_<subscription>_sync_<relation>_<system>`, in what a slot's name may have."""
    readable = re.sub(r"[^a-z0-9_]", "_", subscription.lower())
    tail = f"_sync_{relation}_{system_identifier}"
    return f"pg_{readable[: 63 - len(tail) - 3]}{tail}"


@contextmanager
def exported(source: Source, slot: str, opened: Callable[[Connection], None] = lambda _: None) -> Iterator[Snapshot]:
    """A snapshot for others, as long as the context is open.

    `opened` gets the connection before the slot is made, to be able to cancel that: it waits for every transaction that
    is running, however long that takes.
    """
    connection = connect(source, slot, replication=True)
    opened(connection)
    try:
        able = capabilities(connection)
        tail = "(SNAPSHOT 'export')" if able.slot_options else "EXPORT_SNAPSHOT"
        command = SQL("CREATE_REPLICATION_SLOT {} TEMPORARY LOGICAL pgoutput " + tail).format(Identifier(slot))
        with translate_errors(source, f"creating temporary replication slot {slot}"):
            row = connection.execute(command).fetchone()
            assert row is not None
        yield Snapshot(row[2], Lsn.parse(row[1]))
    finally:
        connection.close()


def lock_timeout(snapshot: Snapshot) -> Composed:
    """The statement that bounds how long a transaction with this snapshot waits for a lock."""
    return SQL("SET LOCAL lock_timeout = {}").format(SqlLiteral(round(snapshot.lock_timeout * 1000)))


@contextmanager
def imported(source: Source, application_name: str, snapshot: Snapshot) -> Iterator[Connection]:
    """A connection inside a read-only transaction that sees the snapshot."""
    connection = connect(source, application_name)
    try:
        with translate_errors(source, "importing the copy's snapshot"):
            connection.execute("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ")
            connection.execute(SQL("SET TRANSACTION SNAPSHOT {}").format(SqlLiteral(snapshot.name)))
            if snapshot.lock_timeout:
                connection.execute(lock_timeout(snapshot))
        yield connection
    finally:
        connection.close()
