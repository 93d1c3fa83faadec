"""Have the receiver record a position now. With a store, it does not record every one, because each is a put.

Some things need the log to reach an LSN although there are no changes: a run with `until` that follows a receiver on
another machine, and tables that were just copied, which take part in the batches after that. A logical message at the
source comes through the stream, and its position is always recorded.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress
from typing import Final

from walmere.changelog.assembly import HEARTBEAT
from walmere.config import Source
from walmere.errors import SourceError
from walmere.lsn import Lsn
from walmere.publisher import catalog
from walmere.publisher.connect import connect, translate_errors

INTERVAL: Final = 2.0
"""Seconds between two messages, at least."""


class PositionRequests:
    """Writes logical messages, in a thread."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._at = 0.0
        self._applied: Lsn | None = None
        self._writing = threading.Lock()

    def add(self, applied: Lsn) -> None:
        """Write a message, unless one was just written, or batches go on. Returns at once.

        A source that is a standby cannot do this.
        """
        if applied != self._applied:
            self._applied, self._at = applied, time.monotonic()
        if time.monotonic() - self._at < INTERVAL or not self._writing.acquire(blocking=False):
            return
        self._at = time.monotonic()
        threading.Thread(target=self._write, name="walmere-position", daemon=True).start()

    def _write(self) -> None:
        try:
            with (
                suppress(SourceError),
                closing(connect(self._source, "walmere launcher")) as connection,
                translate_errors(self._source, "writing a logical message"),
            ):
                catalog.set_timeouts(connection)
                catalog.emit_message(connection, HEARTBEAT)
                catalog.push_wal(connection)
        finally:
            self._writing.release()
