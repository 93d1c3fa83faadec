"""The source's part of `walmere status`: positions, slot, published tables."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from walmere.config import Config
from walmere.errors import SourceError
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.publisher import catalog, slot
from walmere.publisher.catalog import PublishedTable
from walmere.publisher.connect import Connection, connect, translate_errors
from walmere.publisher.copy_progress import estimated_rows
from walmere.publisher.slot import Slot
from walmere.shaping.table_choice import TableChoice

CATCH_UP_TIMEOUT: Final = 0.25
"""A running receiver is not behind if it reaches the source's position within this many seconds."""


@dataclass(slots=True)
class SourceStatus:
    """What was read from the source."""

    now: float = field(default_factory=time.time)  # by the source's clock, as the times of commits
    wal: Lsn | None = None
    slot: Slot | None = None
    sent: Lsn | None = None  # by the walsender of the slot
    sent_after: float = 0.0  # seconds until it had sent everything up to `wal`, if it has
    published: list[PublishedTable] | None = None
    locked: dict[int, str] = field(default_factory=dict)  # relations that a lock keeps from being read
    estimated: dict[int, int] = field(default_factory=dict)  # by OID, about how many rows a table has
    error: str | None = None


class SourceReader:
    """Asks the source, again and again over one connection. Used by one thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._connection: Connection | None = None

    def read(self, *, tables: bool = True) -> SourceStatus:
        """Ask now. If the source does not answer, `error` has the reason. `tables`: False: only the positions."""
        found = SourceStatus()
        source = self._config.source
        try:
            if self._connection is None or self._connection.closed:
                self._connection = connect(source, "walmere status")
                with translate_errors(source, "reading the source"):
                    catalog.set_timeouts(self._connection)
            with translate_errors(source, "reading the source"):
                self._read(self._connection, found)
                if tables:
                    self._read_tables(self._connection, found)
        except SourceError as error:
            found.error = f"{error.doing}: {error.wrong}"
            self.close()
        return found

    def _read(self, connection: Connection, found: SourceStatus) -> None:
        found.wal = catalog.wal_position(connection)
        found.now = catalog.clock(connection)
        found.slot = slot.read(connection, self._config.source.slot)
        _wait_for_walsender(connection, found)

    def _read_tables(self, connection: Connection, found: SourceStatus) -> None:
        target = self._config.target
        gather = target is not None and target.gather_partitions
        published = catalog.published_tables(connection, self._config.source.publications, gather)
        choice = TableChoice(self._config.table)
        found.published = [each for each in published if choice.includes(TableName(each.schema, each.name))]
        relations = [oid for each in found.published for oid in (each.oid, *(leaf for leaf, _ in each.leaves))]
        found.locked = catalog.locked_tables(connection, relations)
        found.estimated = estimated_rows(connection, found.published)

    def close(self) -> None:
        """Close the connection. The next `read` opens another one."""
        if self._connection is not None:
            self._connection.close()


def _wait_for_walsender(connection: Connection, found: SourceStatus) -> None:
    """Wait until the walsender has sent everything up to the source's position, at most CATCH_UP_TIMEOUT."""
    if found.slot is None or found.slot.active_pid is None or found.wal is None:
        return
    began = time.monotonic()
    while True:
        found.sent = slot.sent_position(connection, found.slot.active_pid)
        found.sent_after = time.monotonic() - began
        if found.sent is None or found.sent >= found.wal or found.sent_after > CATCH_UP_TIMEOUT:
            return
        time.sleep(CATCH_UP_TIMEOUT / 10)
