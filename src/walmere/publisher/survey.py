"""What `walmere init` asks a database: publications, tables and their sizes. And the statements that prepare it."""
# ruff: noqa: S608 - the parts of the queries are constants, or quoted identifiers

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg.sql import SQL, Identifier

from walmere.config import Source
from walmere.errors import AccessRefused
from walmere.names import TableName
from walmere.publisher.catalog import set_timeouts
from walmere.publisher.connect import Connection, connect, translate_errors
from walmere.publisher.identity import IS_REPLICA_IDENTITY
from walmere.publisher.publication import published

_FIRST_NORMAL_OBJECT_ID: Final = 16384
_SIZE: Final = "pg_catalog.pg_total_relation_size(c.oid)"
_SIZE_WITHOUT_LOCKS: Final = "c.relpages::int8 * pg_catalog.current_setting('block_size')::int8"


@dataclass(frozen=True, slots=True)
class SurveyedTable:
    """A table that can be published. A partitioned table has the size of its partitions."""

    table: TableName
    bytes: int
    rows: int | None  # the planner's estimate; None: never analysed
    identified: bool  # whether it has a replica identity, so that it can be updated when it is published
    publications: tuple[str, ...]  # that have it, or its partitions


@dataclass(frozen=True, slots=True)
class SurveyedPublication:
    """A publication."""

    name: str
    tables: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Survey:
    """A database."""

    database: str
    role: str
    version: str
    publications: tuple[SurveyedPublication, ...]
    tables: tuple[SurveyedTable, ...]


def survey(source: Source) -> Survey:
    """Ask the database of the source. Raises SourceError."""
    connection = connect(source, "walmere init")
    try:
        with translate_errors(source, "reading the catalogs"):
            set_timeouts(connection)
            try:
                tables = _tables(connection, _SIZE)
            except psycopg.errors.LockNotAvailable:
                tables = _tables(connection, _SIZE_WITHOUT_LOCKS)
            names = connection.execute("SELECT pubname FROM pg_catalog.pg_publication ORDER BY 1").fetchall()
            row = connection.execute("SELECT current_user, pg_catalog.current_setting('server_version')").fetchone()
            assert row is not None
        publications = tuple(_publication(name, tables) for (name,) in names)
        return Survey(connection.info.dbname, row[0], row[1], publications, tuple(tables))
    finally:
        connection.close()


def _publication(name: str, tables: Sequence[SurveyedTable]) -> SurveyedPublication:
    published = [each for each in tables if name in each.publications]
    return SurveyedPublication(name, len(published), sum(each.bytes for each in published))


def _tables(connection: Connection, size: str) -> list[SurveyedTable]:
    """Ordinary and partitioned tables; not partitions, which are parts of their root."""
    every = [name for (name,) in connection.execute("SELECT pubname FROM pg_catalog.pg_publication")]
    rows = connection.execute(
        f"""{published(connection)},
        part (root, relid) AS (
            SELECT oid, oid FROM pg_catalog.pg_class WHERE relkind = 'r' AND NOT relispartition
            UNION ALL SELECT l.root, l.relid FROM leaf l JOIN pg_catalog.pg_class r ON r.oid = l.root
            WHERE NOT r.relispartition)
        SELECT n.nspname, t.relname, coalesce(sum({size}), 0)::int8,
            CASE WHEN bool_or(c.reltuples >= 0) THEN sum(greatest(c.reltuples, 0))::int8 END,
            t.relreplident = 'f' OR EXISTS (
                SELECT FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indrelid
                WHERE i.indrelid = t.oid AND {IS_REPLICA_IDENTITY}),
            ARRAY(SELECT DISTINCT p.pubname FROM published s JOIN chosen p ON p.oid = s.pubid
                  WHERE s.relid = t.oid OR s.relid IN (SELECT relid FROM tree WHERE root = t.oid) ORDER BY 1)::text[]
        FROM pg_catalog.pg_class t JOIN pg_catalog.pg_namespace n ON n.oid = t.relnamespace
        LEFT JOIN part ON part.root = t.oid LEFT JOIN pg_catalog.pg_class c ON c.oid = part.relid
        WHERE t.relkind IN ('r', 'p') AND NOT t.relispartition AND t.relpersistence = 'p'
          AND t.oid >= {_FIRST_NORMAL_OBJECT_ID} AND n.nspname NOT LIKE 'pg\\_%%'
        GROUP BY n.nspname, t.oid, t.relname, t.relreplident ORDER BY 1, 2""",
        [every],
    )
    return [
        SurveyedTable(TableName(schema, name), size, rows, identified, tuple(publications))
        for schema, name, size, rows, identified, publications in rows
    ]


def create_publication(name: str, tables: Iterable[TableName] | None) -> str:
    """The statement that creates a publication of these tables; None: of all tables."""
    new = SQL("CREATE PUBLICATION {}").format(Identifier(name))
    if tables is None:
        return (new + SQL(" FOR ALL TABLES;")).as_string(None)
    listed = SQL(", ").join(Identifier(*each) for each in tables)
    return (new + SQL(" FOR TABLE {};").format(listed)).as_string(None)


def execute(admin: Source, statements: Iterable[str]) -> None:
    """Run statements, all or none. Raises SourceError."""
    connection = connect(admin, "walmere init")
    try:
        with translate_errors(admin, "preparing the database"), connection.transaction():
            for statement in statements:
                connection.execute(statement.encode())
    except AccessRefused as error:
        hint = "--admin DSN names a connection as the owner, or as a superuser"
        raise AccessRefused(error.doing, error.wrong, hint) from None
    finally:
        connection.close()
