"""Open transactions on the source: creating a slot, and so a snapshot, waits for all that have written.

On a standby, it waits until the primary writes the list of its transactions to the WAL; if one is open then, until it
has ended, and for another list.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final

from walmere.config import Source
from walmere.errors import WalmereError
from walmere.publisher.connect import connect, translate_errors

_log = logging.getLogger(__name__)

REPORTED_WAIT: Final = 5.0
"""Seconds after which a slot that waits is reported."""


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


def _awaited(source: Source, application_name: str) -> str:
    """What a slot waits for that is being created."""
    with (
        closing(connect(source, application_name)) as connection,
        translate_errors(source, "reading whether it is a standby"),
    ):
        [(is_standby,)] = connection.execute("SELECT pg_catalog.pg_is_in_recovery()")
    if is_standby:
        return (
            "the primary of this standby: run SELECT pg_log_standby_snapshot() on the primary, and again when the"
            " transactions that are open there now have ended"
        )
    return "open transactions on the source: " + ("; ".join(writing(source, application_name)) or "this role sees none")


@contextmanager
def reported_wait(source: Source, slot: str) -> Iterator[None]:
    """While the slot is created: if that takes long, log a warning that names the transactions."""
    created = threading.Event()

    def report() -> None:
        if created.wait(REPORTED_WAIT):
            return
        try:
            reason = f"waits for {_awaited(source, slot)}"
        except WalmereError as error:
            reason = f"waits; the reason could not be read ({error.doing}: {error.wrong})"
        if not created.is_set():
            _log.warning("creating replication slot %s: %s", slot, reason)

    threading.Thread(target=report, name="slot wait", daemon=True).start()
    try:
        yield
    finally:
        created.set()
