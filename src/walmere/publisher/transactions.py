"""Open transactions on the source: creating a slot, and so a snapshot, waits for all that have written."""

from __future__ import annotations

from contextlib import closing

from walmere.config import Source
from walmere.publisher.connect import connect, translate_errors


def writing(source: Source, application_name: str) -> list[str]:
    """Descriptions of the transactions that have an xid, the oldest first, then of the prepared ones."""
    with (
        closing(connect(source, application_name)) as connection,
        translate_errors(source, "reading the open transactions"),
    ):
        open_now = connection.execute(
            "SELECT pid, coalesce(usename, '?'), datname, date_trunc('second', xact_start)::text, state"
            " FROM pg_catalog.pg_stat_activity WHERE backend_xid IS NOT NULL ORDER BY xact_start"
        ).fetchall()
        prepared = connection.execute(
            "SELECT gid, owner, database, date_trunc('second', prepared)::text FROM pg_catalog.pg_prepared_xacts"
            " ORDER BY prepared"
        ).fetchall()
    return [
        f"pid {pid} of role {user} in database {database}, since {since or '?'}, {state or '?'}"
        for pid, user, database, since, state in open_now
    ] + [
        f"prepared transaction '{gid}' of role {owner} in database {database}, since {since}"
        for gid, owner, database, since in prepared
    ]
