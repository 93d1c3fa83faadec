"""Writes a logical message to the source when nothing was received for a while, and checks the publications.

On an idle database the slot's position would not move while other databases of the cluster write WAL, and the disk
would fill. `pg_logical_emit_message` needs no table and no privilege, and comes back through the stream, which proves
that the stream works. The same thread checks that the publications exist: if one is dropped, PostgreSQL 18 only logs a
warning on the server, and sends nothing.

With a store, each message is a put, so it is written only if the slot keeps a WAL segment that it could free.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import suppress
from typing import Final

from walmere.changelog.assembly import HEARTBEAT
from walmere.config import Source
from walmere.errors import PublicationMissing, WalmereError
from walmere.publisher import catalog, slot
from walmere.publisher.connect import translate_errors
from walmere.publisher.silence import WatchedConnection

_log = logging.getLogger(__name__)

CHECK_INTERVAL: Final = 2.5
"""Seconds between two checks of the publications, at most."""


class Heartbeat:
    """A thread with its own SQL connection."""

    def __init__(self, connection: WatchedConnection, source: Source, unconfirmed_bytes: int = 0) -> None:
        """`unconfirmed_bytes`: write a message only if so many bytes of WAL are not confirmed."""
        self._unconfirmed_bytes = unconfirmed_bytes
        self._connection = connection
        self._source = source
        self._stopping = threading.Event()
        self._failure: WalmereError | None = None
        self._received_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="walmere-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread. Without `source.heartbeat` it only checks the publications."""
        self._thread.start()

    def received(self, now: float) -> None:
        """Note that something was received."""
        self._received_at = now

    def check(self) -> None:
        """Raise the error that the thread has found."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop the thread. A running query is cancelled."""
        self._stopping.set()
        if self._thread.ident is None:
            return
        self._thread.join(0.1)
        if self._thread.is_alive():
            self._connection.end_within(1.0)
            with suppress(WalmereError), translate_errors(self._source, "cancelling"):  # the server may be gone
                self._connection.cancel_safe(timeout=1.0)
            self._thread.join(5.0)

    def _is_needed(self) -> bool:
        if not self._unconfirmed_bytes:
            return True
        with translate_errors(self._source, "reading the replication slot"):
            found = slot.read(self._connection, self._source.slot)
            if found is None or found.confirmed_lsn is None:
                return True
            return catalog.wal_position(self._connection) - found.confirmed_lsn >= self._unconfirmed_bytes

    def _run(self) -> None:
        interval = self._source.heartbeat or math.inf
        writable = True
        while not self._stopping.wait(min(interval / 4, CHECK_INTERVAL)):
            try:
                with translate_errors(self._source, "checking the publications"):
                    catalog.require_publications(self._connection, self._source.publications)
                if writable and time.monotonic() - self._received_at >= interval and self._is_needed():
                    with translate_errors(self._source, "writing a heartbeat message"):
                        catalog.emit_message(self._connection, HEARTBEAT)
            except PublicationMissing as error:
                self._failure = error
                return
            except WalmereError as error:
                if self._connection.closed:
                    if not self._stopping.is_set():
                        self._failure = error  # the stream may work, but the publications are not checked any more
                    return
                if writable and not self._stopping.is_set():
                    _log.warning("%s: %s; continuing without heartbeats", error.doing, error.wrong)
                writable = False
