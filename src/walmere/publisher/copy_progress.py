"""How far a copy is: rows that its COPYs have sent so far, and how many rows the table has, about.

A COPY runs for minutes in a task, which returns its result at the end. The server knows more: `pg_stat_progress_copy`
has the rows that each COPY has processed. The sessions of one copy are found by their `application_name`, which has the
name of the copy's snapshot in it. A role sees its own sessions.
"""

from __future__ import annotations

from collections.abc import Iterable

from walmere.publisher.catalog import PublishedTable
from walmere.publisher.connect import Connection
from walmere.publisher.snapshot import Snapshot


def application_name(snapshot: Snapshot) -> str:
    """Of all sessions that copy under this snapshot."""
    return f"walmere copy {snapshot.name}"


def rows_being_copied(connection: Connection, snapshot: Snapshot) -> int:
    """The rows that the running COPYs under this snapshot have sent so far."""
    [(rows,)] = connection.execute(
        "SELECT coalesce(sum(tuples_processed), 0)::int8 FROM pg_catalog.pg_stat_progress_copy"
        " JOIN pg_catalog.pg_stat_activity USING (pid) WHERE application_name = %s",
        [application_name(snapshot)],
    )
    return int(rows)


def estimated_rows(connection: Connection, tables: Iterable[PublishedTable]) -> dict[int, int]:
    """By OID, about how many rows each table has: the planner's `reltuples`. Tables never analysed are omitted."""
    relations = {each.oid: [leaf for leaf, _ in each.leaves] or [each.oid] for each in tables}
    found: dict[int, float] = dict(
        connection.execute(
            "SELECT oid::int8, reltuples FROM pg_catalog.pg_class WHERE oid = ANY(%s) AND reltuples >= 0",
            [[oid for parts in relations.values() for oid in parts]],
        ).fetchall()
    )
    return {
        oid: round(sum(found[part] for part in parts if part in found))
        for oid, parts in relations.items()
        if any(part in found for part in parts)
    }
