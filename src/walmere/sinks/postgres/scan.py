"""Reads a table of the target, as PostgreSQL's text, in ranges of pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from psycopg.sql import SQL, Composable, Composed, Identifier
from psycopg.sql import Literal as SqlLiteral

from walmere.libpq import Address
from walmere.names import TableName
from walmere.sinks.base import TableScan
from walmere.sinks.postgres.connect import Connection, connect
from walmere.sinks.postgres.errors import translate_errors
from walmere.sinks.postgres.relation import missing_table, read_relations

PIECE_BYTES: Final = 64 << 20
"""About how much one task reads."""
_CHUNK: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Some pages of a table in a snapshot: from `first` to before `end`, or to the end of the table."""

    table: TableName
    snapshot: str | None
    first: int = 0
    end: int | None = None
    whole: bool = True  # not by pages: a partitioned table has none


def scan(address: Address, snapshot: str | None, table: TableName, at_least: int) -> TableScan:
    """The table in pieces. All columns are text."""
    doing = f"reading the target's table {table}"
    with translate_errors(address, doing), closing(connect(address, "walmere verify")) as connection:
        relation = read_relations(connection, [table]).get(table)
        if relation is None:
            raise missing_table(table, doing)
        query = "SELECT pg_relation_size({0}::regclass) / current_setting('block_size')::int, reltuples::int8"
        query += " FROM pg_class WHERE oid = {0}::regclass"
        name = SqlLiteral(relation.sql.as_string(connection))
        [(pages, estimate)] = connection.execute(SQL(query).format(name)).fetchall()
    schema = pa.schema([(each, pa.string()) for each in relation.columns])
    rows = max(estimate, pages * 50)
    if relation.kind == "p" or pages < 2:
        return TableScan(schema, rows, [Piece(table, snapshot)])
    count = max(at_least, -(-pages * 8192 // PIECE_BYTES))
    starts = list(range(0, pages, -(-pages // min(count, pages))))
    ends = [*starts[1:], None]
    return TableScan(
        schema, rows, [Piece(table, snapshot, a, b, whole=False) for a, b in zip(starts, ends, strict=True)]
    )


def copy_text(address: Address, piece: Piece, columns: Mapping[str, str]) -> Iterator[bytes]:
    """The rows of a piece as COPY's text, in pieces of whole rows. Each column is cast to this type, if it differs."""
    doing = f"reading the target's table {piece.table}"
    with translate_errors(address, doing), closing(connect(address, "walmere verify")) as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if piece.snapshot is not None:
            connection.execute(SQL("SET TRANSACTION SNAPSHOT {}").format(SqlLiteral(piece.snapshot)))
        parts: list[bytes] = []
        size = 0
        with connection.cursor() as cursor, cursor.copy(_command(connection, piece, columns)) as copy:
            for row in copy:
                parts.append(bytes(row))
                size += len(row)
                if size >= _CHUNK:
                    yield b"".join(parts)
                    parts, size = [], 0
        if parts:
            yield b"".join(parts)


def _command(connection: Connection, piece: Piece, columns: Mapping[str, str]) -> Composed:
    relation = read_relations(connection, [piece.table])[piece.table]
    values: list[Composable] = []
    for name, kind in columns.items():
        [row] = connection.execute("SELECT to_regtype($1) IS NOT NULL", [kind]).fetchall()
        differs = row[0] and relation.columns[name].declared != kind
        values.append(SQL("{}::{}").format(Identifier(name), SQL(kind)) if differs else Identifier(name))
    where: Composable = SQL("")
    if not piece.whole:
        where = SQL(" WHERE ctid >= '({},0)'::tid").format(piece.first)
        if piece.end is not None:
            where += SQL(" AND ctid < '({},0)'::tid").format(piece.end)
    select = SQL("SELECT {} FROM {}{}").format(SQL(", ").join(values), relation.only, where)
    return SQL("COPY ({}) TO STDOUT (FORMAT text, ENCODING 'UTF8')").format(select)
