"""The same rows by both ways: as COPY sends them, and as the stream sends them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from conftest import Database
from walmere.pgoutput import Relation, decode
from walmere.pgoutput.columns import decode_rows
from walmere.publisher import catalog, connect
from walmere.types import PgType, copytext
from walmere.types.codec import Codec, codec


@dataclass(frozen=True)
class Landed:
    """One column of a table, by both ways, and its codec."""

    codec: Codec
    copied: pa.ChunkedArray
    streamed: pa.Array


class Source:
    """A database, through a session as Walmere opens it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.connection = connect.connect(database.config(Path()).source, "test")

    def table(self, columns: Mapping[str, str], rows: list[list[str]]) -> dict[str, Landed]:
        """A table `t` with these columns (name → type) and rows of SQL expressions, read by both ways."""
        database = self.database
        database.execute(
            f"CREATE TABLE public.t ({', '.join(f'{name} {kind}' for name, kind in columns.items())})",
            "CREATE PUBLICATION pub FOR TABLE public.t",
        )
        database.value("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", database.slot)
        with database.connection.transaction():
            for row in rows:
                database.execute(f"INSERT INTO public.t VALUES ({', '.join(row)})")
        copied = copytext.read(self.copy("public.t"), list(columns))
        relation, messages = self.changes()
        streamed = decode_rows(pa.array(messages, pa.binary()), relation)
        types = self.types_of(column.type_oid for column in relation.columns)
        return {
            column.name: Landed(codec(column.type_oid, column.type_modifier, types), copied[column.name], values.text)
            for column, values in zip(relation.columns, streamed.new, strict=True)
        }

    def copy(self, what: str) -> bytes:
        with (
            self.connection.cursor() as cursor,
            cursor.copy(f"COPY {what} TO STDOUT ({copytext.COPY_OPTIONS})") as copy,
        ):
            return b"".join(copy)

    def changes(self) -> tuple[Relation, list[bytes]]:
        raw = self.connection.execute(
            "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', 'pub')",
            [self.database.slot],
        ).fetchall()
        messages = [data for (data,) in raw]
        [relation] = [decode(message) for message in messages if message[:1] == b"R"]
        assert isinstance(relation, Relation)
        return relation, [message for message in messages if message[:1] == b"I"]

    def types_of(self, oids: Iterable[int]) -> dict[int, PgType]:
        return catalog.types_of(self.connection, oids)

    def texts(self, query: str, *parameters: object) -> pa.Array:
        """The only column of a query, as text."""
        cursor = psycopg.ClientCursor(self.connection)
        return pa.array([text for (text,) in cursor.execute(query, parameters)], pa.string())


@pytest.fixture
def source(database: Database) -> Iterator[Source]:
    source = Source(database)
    yield source
    source.connection.close()


@pytest.fixture
def source18(database18: Database) -> Iterator[Source]:
    source = Source(database18)
    yield source
    source.connection.close()
