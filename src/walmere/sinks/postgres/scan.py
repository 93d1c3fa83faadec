"""Reads a table of the target, as PostgreSQL's text, in ranges of pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from psycopg.sql import SQL, Composable, Identifier
from psycopg.sql import Literal as SqlLiteral

from walmere.libpq import Address
from walmere.names import TableName
from walmere.sinks.base import TableScan
from walmere.sinks.postgres.connect import connect, translate_errors
from walmere.sinks.postgres.relation import missing_table, read_relations

PIECE_BYTES: Final = 64 << 20
"""About how much one task reads."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some pages of a table: from `first` to before `end`; None: all of it."""

    table: TableName
    names: tuple[str, ...]
    first: int
    end: int | None
    whole: bool


def scan(address: Address, table: TableName, at_least: int) -> TableScan:
    """The table as it is now, in pieces."""
    doing = f"reading the target's table {table}"
    with translate_errors(address, doing), closing(connect(address, "walmere verify")) as connection:
        relation = read_relations(connection, [table]).get(table)
        if relation is None:
            raise missing_table(table, doing)
        query = SQL(
            "SELECT pg_relation_size({0}::regclass) / current_setting('block_size')::int, (SELECT count(*) FROM {1})"
        )
        name = relation.sql.as_string(connection)
        [(pages, rows)] = connection.execute(query.format(SqlLiteral(name), relation.only)).fetchall()
    names = tuple(relation.columns)
    schema = pa.schema([(each, pa.binary()) for each in names])
    if relation.kind == "p" or pages < 2:
        return TableScan(schema, rows, [Piece(table, names, 0, None, whole=True)])
    count = max(at_least, -(-pages * 8192 // PIECE_BYTES))
    step = -(-pages // min(count, pages))
    starts = list(range(0, pages, step))
    pieces = [Piece(table, names, a, b, whole=False) for a, b in zip(starts, [*starts[1:], None], strict=True)]
    return TableScan(schema, rows, pieces)


def read(address: Address, piece: Piece, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Not used: `verify` reads the text itself."""
    raise NotImplementedError


def copy_command(piece: Piece, columns: Sequence[Composable], options: str) -> Composable:
    """The COPY of one piece."""
    where: Composable = SQL("")
    if not piece.whole:
        where = SQL(" WHERE ctid >= '({},0)'::tid").format(piece.first)
        if piece.end is not None:
            where += SQL(" AND ctid < '({},0)'::tid").format(piece.end)
    only = SQL("") if piece.whole else SQL("ONLY ")
    relation = Identifier(*piece.table)
    select = SQL("SELECT {} FROM {}{}{}").format(SQL(", ").join(columns), only, relation, where)
    return SQL("COPY ({}) TO STDOUT ({})").format(select, SQL(options))
