"""COPY to the client, in chunks of whole rows.

The server sends a message for each row, and what a driver does per message decides how fast a copy is. psycopg2's
loop is in C: it takes a quarter of the CPU that the calls of psycopg need for the same (0.5 s against 2.3 s for a
million rows), so this is the one place where we use it. It runs in a thread of its own, which never gets ahead of us by
more than a few pieces, so that memory stays the same however large the table is.
"""

from __future__ import annotations

import io
import os
import socket
import threading
import time
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
from walmere.publisher.connect import conninfo_of, describe, settings, translate_errors
from walmere.publisher.silence import silence_of
from walmere.publisher.snapshot import Snapshot, lock_timeout
from walmere.publisher.table import Part

CHUNK: Final = 4 << 20
_PIECE: Final = 1 << 20
_AHEAD: Final = 4
"""Pieces that may wait for us."""
_LOOK: Final = 0.1
_CANCELLING: Final = 5.0
"""Seconds that the server has to cancel a COPY."""


def copy_out(
    source: Source, application_name: str, snapshot: Snapshot, command: Composed, part: Part | None = None
) -> Iterator[bytes]:
    """The text of COPY … TO STDOUT as the snapshot sees it, in whole rows, about CHUNK bytes at a time.

    It ends with an error if the rows of `part` are no longer on the pages they were on when its ranges were made.
    """
    with translate_errors(source, f"connecting to {describe(source)}"):
        session = _Session(source, application_name)
    try:
        begin = SQL("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ; SET TRANSACTION SNAPSHOT {}")
        try:
            with translate_errors(source, "importing the copy's snapshot"):
                session.execute(begin.format(SqlLiteral(snapshot.name)))
                if snapshot.lock_timeout:
                    session.execute(lock_timeout(snapshot))
        except SourceError as error:  # the connection that has it was cut: the copy is begun anew
            raise SourceUnavailable(error.doing, error.wrong) from None
        copying = _Copying(session, command)
        try:
            with translate_errors(source, "copying from the source"):
                yield from _whole_rows(copying.take)
        finally:
            copying.give_up()
        if part is not None:
            with translate_errors(source, "looking where the rows lie"):
                _require_unmoved(session, part)
    finally:
        session.close()


class _Session:
    """A connection of psycopg2's. It works in threads of its own: psycopg2 itself waits for a server for ever."""

    def __init__(self, source: Source, application_name: str) -> None:
        try:
            self.connection: Any = psycopg2.connect(conninfo_of(source, application_name))
        except psycopg2.Error as error:
            raise _ours(error) from None
        self.connection.autocommit = True
        second = conninfo_of(source, f"{application_name} timeout")
        pid = self.connection.info.backend_pid
        self.silence = silence_of(self.connection, second, pid, source.timeout)
        [(pid, _), *_] = self.execute(settings())
        self.silence = silence_of(self.connection, second, pid, source.timeout)

    def execute(self, statement: Composed) -> list[Any]:
        """Run a statement, and return its rows if it has any."""
        done: Queue[list[Any] | Exception] = Queue()
        threading.Thread(target=self._execute, args=(statement.as_string(None), done), daemon=True).start()
        self.silence.heard()
        while True:
            try:
                result = done.get(timeout=_LOOK)
            except Empty:
                self.check()
                continue
            if isinstance(result, Exception):
                raise _ours(result) if isinstance(result, psycopg2.Error) else result
            return result

    def _execute(self, statement: str, done: Queue[list[Any] | Exception]) -> None:
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(statement)
                done.put(cursor.fetchall() if cursor.description else [])
        except Exception as error:  # whatever it is: somebody waits for us
            done.put(error)

    def check(self) -> None:
        """Nothing came for a moment. Raises if the server is lost; then the thread that waits for it ends, too."""
        try:
            self.silence.check()
        except psycopg.OperationalError:
            self.cut()
            raise

    def cut(self) -> None:
        """End a wait for the server. To close the connection would take it away below the thread that uses it."""
        with suppress(OSError, psycopg2.Error), socket.socket(fileno=os.dup(self.connection.fileno())) as its:
            its.shutdown(socket.SHUT_RDWR)

    def cancel(self) -> None:
        """Have the server end what it does, if it answers."""
        thread = threading.Thread(target=self._cancel, daemon=True)
        thread.start()
        thread.join(_CANCELLING)

    def _cancel(self) -> None:
        with suppress(psycopg2.Error):
            self.connection.cancel()

    def close(self) -> None:
        """End it."""
        self.connection.close()


def _ours(error: psycopg2.Error) -> psycopg.Error:
    """The same error as psycopg would have raised it, which all others here know how to read."""
    text = str(error).strip()
    if error.pgcode is None:
        return psycopg.OperationalError(text)
    return psycopg.errors.lookup(error.pgcode)(text)


def _require_unmoved(session: _Session, part: Part) -> None:
    """COPY holds its lock until the transaction ends, so nothing can move between it and this."""
    query = SQL(
        "SELECT pg_catalog.pg_relation_filenode(c.oid)::int8 FROM pg_catalog.pg_class c"
        " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = {} AND c.relname = {}"
    )
    found = session.execute(query.format(SqlLiteral(part.schema), SqlLiteral(part.name)))
    if found != [(part.filenode,)]:
        raise psycopg.OperationalError(f"{part.schema}.{part.name} was rewritten meanwhile")


class _Copying(io.RawIOBase):
    """A COPY that runs in a thread, and what it writes, piece by piece. The thread waits if nobody takes them."""

    def __init__(self, session: _Session, command: Composed) -> None:
        self._session = session
        self._command = command.as_string(None)
        self._pieces: Queue[bytes] = Queue(_AHEAD)
        self._error: Exception | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            file = io.BufferedWriter(self, _PIECE)
            self._session.connection.cursor().copy_expert(self._command, file)
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
        self._session.silence.heard()
        while True:
            try:
                piece = self._pieces.get(timeout=_LOOK)
                break
            except Empty:
                self._session.check()
        if not piece and self._error is not None:
            raise _ours(self._error) if isinstance(self._error, psycopg2.Error) else self._error
        return piece

    def give_up(self) -> None:
        """End it, whether or not all was read."""
        self._given_up = True
        if not self._thread.is_alive():
            return
        if not self._session.silence.lost:
            self._session.cancel()
        deadline = time.monotonic() + _CANCELLING
        while self._thread.is_alive():
            if time.monotonic() > deadline:
                self._session.cut()
            with suppress(Empty):
                self._pieces.get(timeout=_LOOK)


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
