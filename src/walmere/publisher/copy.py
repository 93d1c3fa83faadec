"""COPY to the client, in chunks of whole rows.

The server sends a message for each row. Like the replication stream, this is drained below psycopg's own loop, which
takes several times as long for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from psycopg import pq
from psycopg.sql import Composed

from walmere.config import Source
from walmere.publisher.connect import Connection, error_of, speaking

CHUNK: Final = 4 << 20


def copy_out(connection: Connection, source: Source, command: Composed) -> Iterator[bytes]:
    """The text of COPY … TO STDOUT, about CHUNK bytes at a time."""
    pgconn = connection.pgconn
    with speaking(source, "copying from the source"):
        result = pgconn.exec_(command.as_string(connection).encode())
        if result.status != pq.ExecStatus.COPY_OUT:
            raise error_of(result)
        rows: list[memoryview] = []
        size = 0
        get, append = pgconn.get_copy_data, rows.append
        while True:
            length, row = get(0)
            if length < 0:
                break
            append(row)
            size += length
            if size >= CHUNK:
                yield b"".join(rows)
                rows.clear()
                size = 0
        if rows:
            yield b"".join(rows)
        while (end := pgconn.get_result()) is not None:
            if end.status == pq.ExecStatus.FATAL_ERROR:
                raise error_of(end)
