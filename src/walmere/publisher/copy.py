"""COPY to the client, in chunks of whole rows.

The server sends a message for each row, and what a driver does per message decides how fast a copy is. psycopg2's
loop is in C: it takes a quarter of the CPU that the calls of psycopg need for the same (0.5 s against 2.3 s for a
million rows), so this is the one place where we use it. It runs in a thread of its own and writes to a pipe; we read
large pieces from there, and the pipe keeps the two in step, so that memory stays the same however large the table is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import psycopg
import psycopg2
from psycopg.sql import SQL, Composed
from psycopg.sql import Literal as SqlLiteral

from walmere.config import Source
from walmere.publisher.connect import conninfo_of, describe, settings, speaking
from walmere.publisher.snapshot import Snapshot

CHUNK: Final = 4 << 20
_WRITE: Final = 1 << 20


def copy_out(source: Source, application_name: str, snapshot: Snapshot, command: Composed) -> Iterator[bytes]:
    """The CSV of COPY … TO STDOUT as the snapshot sees it, in whole rows, about CHUNK bytes at a time."""
    with speaking(source, f"connecting to {describe(source)}"):
        connection = _connect(conninfo_of(source, application_name))
    try:
        with speaking(source, "importing the copy's snapshot"):
            begin = SQL("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ; SET TRANSACTION SNAPSHOT {}")
            _execute(connection, begin.format(SqlLiteral(snapshot.name)))
        copying = _Copying(connection, command)
        try:
            with speaking(source, "copying from the source"):
                yield from _whole_rows(copying.read)
        finally:
            copying.close()
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


class _Copying:
    """A COPY that runs in a thread, with the end of a pipe to read from."""

    def __init__(self, connection: Any, command: Composed) -> None:
        self._connection = connection
        self._command = command.as_string(None)
        self._error: psycopg2.Error | None = None
        self._reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with suppress(BrokenPipeError), open(self._writing, "wb", buffering=_WRITE) as file:  # noqa: PTH123
                self._connection.cursor().copy_expert(self._command, file)
        except psycopg2.Error as error:
            self._error = error

    def read(self) -> bytes:
        """Some more of it; nothing at its end. Raises what it ended with, if that was an error."""
        piece = os.read(self._reading, _WRITE)
        if not piece:
            self._thread.join()
            if self._error is not None:
                raise _ours(self._error)
        return piece

    def close(self) -> None:
        """End it, whether or not all was read."""
        os.close(self._reading)
        if self._thread.is_alive():
            with suppress(psycopg2.Error):
                self._connection.cancel()
        self._thread.join()


def _whole_rows(read: Callable[[], bytes]) -> Iterator[bytes]:
    """Pieces of CSV, cut where a row ends: at a line break with an even number of quotes before it."""
    parts: list[bytes] = []
    size = 0
    while piece := read():
        parts.append(piece)
        size += len(piece)
        if size < CHUNK:
            continue
        data = b"".join(parts)
        end = data.rfind(b"\n")
        while end >= 0 and data.count(b'"', 0, end) % 2:
            end = data.rfind(b"\n", 0, end)
        if end >= 0:
            yield data[: end + 1]
        parts = [data[end + 1 :]]
        size = len(parts[0])
    if rest := b"".join(parts):
        yield rest
