"""Keeps an idle subscription alive: a logical message when nothing has come for a while.

On a quiet database the slot's position would stand still while other databases of the cluster write WAL, and the disk
would fill. `pg_logical_emit_message` needs no table and no rights of its own, and comes back through the stream, which
proves the whole way. The same thread looks whether the publications are still there: PostgreSQL 18 only warns in its
own log when they are not, and sends nothing.
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
from walmere.publisher import catalog
from walmere.publisher.connect import translate_errors
from walmere.publisher.silence import WatchedConnection

_log = logging.getLogger(__name__)

LOOK: Final = 2.5
"""Seconds between two looks at the publications, at the most."""


class Heartbeat:
    """A thread beside the stream, on an ordinary connection."""

    def __init__(self, connection: WatchedConnection, source: Source) -> None:
        self._connection = connection
        self._source = source
        self._stopping = threading.Event()
        self._failure: WalmereError | None = None
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="walmere-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin. Without an interval nothing is written, but the publications are looked after."""
        self._thread.start()

    def heard(self, now: float) -> None:
        """Something came through the stream."""
        self._heard = now

    def check(self) -> None:
        """Raise what was found missing."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the thread; a query in progress is cancelled with its connection."""
        self._stopping.set()
        if self._thread.ident is None:
            return
        self._thread.join(0.1)
        if self._thread.is_alive():
            self._connection.end_within(1.0)
            with suppress(WalmereError), translate_errors(self._source, "cancelling"):  # the server may be gone
                self._connection.cancel_safe(timeout=1.0)
            self._thread.join(5.0)

    def _run(self) -> None:
        interval = self._source.heartbeat or math.inf
        writable = True
        while not self._stopping.wait(min(interval / 4, LOOK)):
            try:
                with translate_errors(self._source, "looking after the publications"):
                    catalog.require_publications(self._connection, self._source.publications)
                if writable and time.monotonic() - self._heard >= interval:
                    with translate_errors(self._source, "writing a heartbeat message"):
                        catalog.emit_message(self._connection, HEARTBEAT)
            except PublicationMissing as error:
                self._failure = error
                return
            except WalmereError as error:
                if self._connection.closed:
                    if not self._stopping.is_set():
                        self._failure = error  # the stream may be fine, but nobody looks after the publications
                    return
                if writable and not self._stopping.is_set():
                    _log.warning("%s: %s; going on without it", error.doing, error.wrong)
                writable = False
