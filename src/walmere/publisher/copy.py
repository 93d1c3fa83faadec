"""COPY to the client, in chunks of whole rows.

The server sends a message for each row, and what a driver does per message decides how fast a copy is. psycopg2's
loop is in C: it takes a quarter of the CPU that the calls of psycopg need for the same (0.5 s against 2.3 s for a
million rows), so this is the one place where we use it. It runs in a thread of its own, which never gets ahead of us by
more than a few pieces, so that memory stays the same however large the table is.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, Queue
from typing import Any, Final

import psycopg
import psycopg2
from psycopg.sql import SQL, Composed
from psycopg.sql import Literal as SqlLiteral

from walmere.config import Source
from walmere.errors import SourceError, SourceUnavailable
from walmere.publisher.connect import conninfo_of, describe, settings, speaking
from walmere.publisher.snapshot import Snapshot, lock_timeout
from walmere.publisher.table import Part

CHUNK: Final = 4 << 20
_PIECE: Final = 1 << 20
_AHEAD: Final = 4
"""Pieces that may wait for us."""


def copy_out(
    source: Source, application_name: str, snapshot: Snapshot, command: Composed, part: Part | None = None
) -> Iterator[bytes]:
    """The text of COPY … TO STDOUT as the snapshot sees it, in whole rows, about CHUNK bytes at a time.

    It ends with an error if the rows of `part` are no longer on the pages they were on when its ranges were made.
    """
    with speaking(source, f"connecting to {describe(source)}"):
        connection = _connect(conninfo_of(source, application_name))
    try:
        begin = SQL("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ; SET TRANSACTION SNAPSHOT {}")
        try:
            with speaking(source, "importing the copy's snapshot"):
                _execute(connection, begin.format(SqlLiteral(snapshot.name)))
                if snapshot.lock_timeout:
                    _execute(connection, lock_timeout(snapshot))
        except SourceError as error:  # the connection that has it was cut: the copy is begun anew
            raise SourceUnavailable(error.doing, error.wrong) from None
        copying = _Copying(connection, command)
        try:
            with speaking(source, "copying from the source"):
                yield from _whole_rows(copying.take)
        finally:
            copying.give_up()
        if part is not None:
            with speaking(source, "looking where the rows lie"):
                _require_unmoved(connection, part)
    finally:
        connection.close()


def _connect(conninfo: str) -> Any:
    try:
        connection = psycopg2.connect(conninfo)
    except psycopg2.Error as error:
        raise _ours(error) from None
    connection.autocommit = True
    _execute(connection, settings())
    return connection


def _execute(connection: Any, statement: Composed) -> None:
    try:
        connection.cursor().execute(statement.as_string(None))
    except psycopg2.Error as error:
        raise _ours(error) from None


def _ours(error: psycopg2.Error) -> psycopg.Error:
    """The same error as psycopg would have raised it, which all others here know how to read."""
    text = str(error).strip()
    if error.pgcode is None:
        return psycopg.OperationalError(text)
    return psycopg.errors.lookup(error.pgcode)(text)


def _require_unmoved(connection: Any, part: Part) -> None:
    """COPY holds its lock until the transaction ends, so nothing can move between it and this."""
    cursor = connection.cursor()
    cursor.execute(
        "SELECT pg_catalog.pg_relation_filenode(c.oid)::int8 FROM pg_catalog.pg_class c"
        " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s",
        (part.schema, part.name),
    )
    if cursor.fetchone() != (part.filenode,):
        raise psycopg.OperationalError(f"{part.schema}.{part.name} was rewritten meanwhile")


class _Copying(io.RawIOBase):
    """A COPY that runs in a thread, and what it writes, piece by piece. The thread waits if nobody takes them."""

    def __init__(self, connection: Any, command: Composed) -> None:
        self._connection = connection
        self._command = command.as_string(None)
        self._pieces: Queue[bytes] = Queue(_AHEAD)
        self._error: Exception | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            file = io.BufferedWriter(self, _PIECE)
            self._connection.cursor().copy_expert(self._command, file)
            file.flush()
        except BrokenPipeError:
            pass
        except Exception as error:  # whatever it is: somebody waits for us
            self._error = error
        self._pieces.put(b"")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Called by the thread, with a full buffer."""
        if self._given_up:
            raise BrokenPipeError
        self._pieces.put(bytes(data))
        return len(data)

    def take(self) -> bytes:
        """The next piece; nothing at its end. Raises what it ended with, if that was an error."""
        piece = self._pieces.get()
        if not piece and self._error is not None:
            raise _ours(self._error) if isinstance(self._error, psycopg2.Error) else self._error
        return piece

    def give_up(self) -> None:
        """End it, whether or not all was read."""
        self._given_up = True
        if self._thread.is_alive():
            with suppress(psycopg2.Error):
                self._connection.cancel()
            while self._thread.is_alive():
                with suppress(Empty):
                    self._pieces.get(timeout=0.1)


def _whole_rows(take: Callable[[], bytes]) -> Iterator[bytes]:
    """The pieces, cut where a row ends: a line break within a value is never written as one."""
    parts: list[bytes] = []
    size = 0
    while piece := take():
        parts.append(piece)
        size += len(piece)
        if size < CHUNK:
            continue
        data = b"".join(parts)
        end = data.rfind(b"\n")
        if end >= 0:
            yield data[: end + 1]
        parts = [data[end + 1 :]]
        size = len(parts[0])
    if rest := b"".join(parts):
        yield rest
