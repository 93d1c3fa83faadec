"""The replication stream: IDENTIFY_SYSTEM, START_REPLICATION, and the messages after it.

walsender flushes after every message. A reader that wakes up for each message makes both sides slow. So `read` takes
everything that has arrived, and the caller waits before it reads again, so that walsender can fill its buffer.

The loop in `read` is the only place that handles every message in Python, so it only moves it to a list.
"""

from __future__ import annotations

import fcntl
import gc
import select
import sys
import termios
import time
from dataclasses import dataclass
from typing import Final

from psycopg import OperationalError, generators, pq
from psycopg.sql import SQL, Composed, Identifier, Literal

from walmere.config import Source
from walmere.errors import SourceUnavailable
from walmere.lsn import INVALID_LSN, Lsn
from walmere.pgoutput.replication import Keepalive, decode_frame, standby_status_update
from walmere.publisher.connect import Connection, capabilities, error_of, translate_errors

_KEEPALIVE_LENGTH: Final = 18  # of 'k'; XLogData is always longer
_READ_AGAIN: Final = 8192  # bytes in the socket; libpq reads about twice as many at once
_MAX_SHORT_READS: Final = 2  # of fewer bytes, one after the other: a server that is sending always leaves some


@dataclass(frozen=True, slots=True)
class System:
    """The result of IDENTIFY_SYSTEM."""

    identifier: str
    timeline: int
    wal_position: Lsn
    database: str


def identify_system(connection: Connection) -> System:
    """Run IDENTIFY_SYSTEM."""
    row = connection.execute("IDENTIFY_SYSTEM").fetchone()
    assert row is not None
    identifier, timeline, position, database = row
    return System(str(identifier), int(timeline), Lsn.parse(position), database)


def end_when_lost(source: Source, connection: Connection, seconds: float) -> None:
    """Have the server end this connection, and free the slot, if it hears nothing from here for so long.

    Otherwise it waits for `wal_sender_timeout`: a minute by default, or for ever if that is 0. A shorter setting of the
    server, or one in the connection string, is kept.
    """
    limit = round(seconds * 1000)
    with translate_errors(source, "setting wal_sender_timeout"):
        connection.execute(
            SQL(
                "SELECT pg_catalog.set_config(name, {}, false) FROM pg_catalog.pg_settings"
                " WHERE name = 'wal_sender_timeout' AND source <> 'client' AND setting::int NOT BETWEEN 1 AND {}"
            ).format(Literal(str(limit)), Literal(limit))
        )


class Stream:
    """A running START_REPLICATION."""

    def __init__(self, source: Source, connection: Connection, start: Lsn) -> None:
        self._source = source
        self._connection = connection
        self._pgconn = connection.pgconn
        self.keepalive_lsn: Lsn = INVALID_LSN
        """The position of the last keepalive: everything before it was sent and has been read."""
        self.reply_requested = False
        command = self._command(start).as_string(connection)
        with translate_errors(source, f"starting replication from slot {source.slot}"):
            self._pgconn.send_query(command.encode())
            [result, *_] = connection.wait(generators.execute(self._pgconn))
            if result.status != pq.ExecStatus.COPY_BOTH:
                raise error_of(result)
        self.heard: float = time.monotonic()
        """When data last came from the server (monotonic time)."""

    def _command(self, start: Lsn) -> Composed:
        source, features = self._source, capabilities(self._connection)
        options = {"proto_version": str(features.protocol), "messages": "true", "binary": "false"}
        options["streaming"] = features.streaming if source.streaming else "off"
        if source.two_phase:
            features.require("two_phase")
            options["two_phase"] = "on"
        if source.origin != "any":
            features.require("origin")
            options["origin"] = source.origin
        names = SQL(",").join(Identifier(name) for name in source.publications).as_string(self._connection)
        options["publication_names"] = names
        # psycopg's literals write a backslash as E'…', which replication commands do not support
        pairs = SQL(", ").join(
            SQL("{} {}").format(Identifier(name), SQL("'" + value.replace("'", "''") + "'"))
            for name, value in options.items()
        )
        return SQL("START_REPLICATION SLOT {} LOGICAL {} ({})").format(Identifier(source.slot), SQL(str(start)), pairs)

    def read(self, frames: list[memoryview], limit: int) -> tuple[int, bool]:
        """Move what has arrived to `frames`, about `limit` bytes at most. Returns how many, and if that was all.

        A few remaining bytes are read, too: the kernel frees the memory of a packet when all of it is read. If some
        stay, the receive buffer can be full although nearly everything was read, and the server cannot send until the
        next read.
        """
        get, consume, append = self._pgconn.get_copy_data, self._pgconn.consume_input, frames.append
        total = short_reads = 0
        collects = gc.isenabled()
        gc.disable()  # thousands of new objects, none in a cycle: looking for garbage would take half of the time
        try:
            while total < limit:
                length, data = get(1)
                if length > _KEEPALIVE_LENGTH:
                    append(data)
                    total += length
                elif length == 0:
                    pending = self._pending()
                    if pending:
                        self.heard = time.monotonic()  # a part of a message counts too
                    short_reads = short_reads + 1 if pending < _READ_AGAIN else 0
                    if short_reads > _MAX_SHORT_READS or (short_reads > 1 and not pending):
                        return total, True
                    consume()
                elif length > 0:
                    self.heard = time.monotonic()
                    self._keepalive(data)
                else:
                    self._ended()
        except OperationalError as error:
            with translate_errors(self._source, f"reading from replication slot {self._source.slot}", of_rows=True):
                raise error
        finally:
            if collects:
                gc.enable()
        return total, False

    def wait(self, seconds: float) -> bool:
        """Wait until data arrives, at most for `seconds`. Returns whether it has."""
        return bool(select.select([self._pgconn.socket], [], [], seconds)[0])

    def confirm(self, received: Lsn, durable: Lsn, applied: Lsn, *, reply: bool = False) -> None:
        """Send a standby status update: what was received, what is durable here, what the sinks have applied.

        `reply` requests an answer from the server. It never waits: what the socket does not accept is sent later.
        """
        message = standby_status_update(received, durable, applied, now_us=time.time_ns() // 1000, reply=reply)
        with translate_errors(self._source, "sending feedback to the source"):
            self._pgconn.put_copy_data(message)
            self._pgconn.flush()
        self.reply_requested = False

    def close(self) -> None:
        """Close the connection. The slot is free when the walsender has noticed."""
        self._connection.close()

    def _pending(self) -> int:
        """The number of bytes that can be read from the socket."""
        answer = fcntl.ioctl(self._pgconn.socket, termios.FIONREAD, b"\0\0\0\0")
        return int.from_bytes(answer, sys.byteorder)

    def _keepalive(self, data: memoryview) -> None:
        frame = decode_frame(data)
        if isinstance(frame, Keepalive):
            self.keepalive_lsn = max(self.keepalive_lsn, frame.wal_end)
            self.reply_requested |= frame.reply_requested

    def _ended(self) -> None:
        doing = f"reading from replication slot {self._source.slot}"
        result = self._pgconn.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            with translate_errors(self._source, doing, of_rows=True):
                raise error_of(result)
        raise SourceUnavailable(doing, "the server ended the stream", "no action needed: the receiver connects again")
