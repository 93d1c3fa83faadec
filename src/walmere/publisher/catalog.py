"""What the source's catalogs say: publications and their tables, and the types of columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from psycopg.sql import Identifier

from walmere.errors import PublicationMissing
from walmere.lsn import Lsn
from walmere.publisher.connect import Connection
from walmere.types.builtin import BUILT_IN
from walmere.types.pgtype import PgType, TypType


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table as the publication publishes it: a partition root may stand for its partitions."""

    oid: int
    schema: str
    name: str
    columns: tuple[str, ...]


def require_publications(connection: Connection, names: tuple[str, ...]) -> None:
    """Raise PublicationMissing unless all exist. (PostgreSQL 18 only warns, and sends nothing.)"""
    found = connection.execute("SELECT pubname FROM pg_catalog.pg_publication WHERE pubname = ANY(%s)", [list(names)])
    missing = sorted(set(names) - {name for (name,) in found})
    if missing:
        raise PublicationMissing(
            "looking for the publications",
            f"there is no publication {', '.join(missing)} in database {connection.info.dbname}",
            f"CREATE PUBLICATION {Identifier(missing[0]).as_string(connection)} FOR ALL TABLES (or FOR TABLE …) there, "
            "or correct source.publications",
        )


def published_tables(connection: Connection, names: tuple[str, ...]) -> list[PublishedTable]:
    """The tables of the publications, with the columns that are published.

    A partition is left out if one of them publishes an ancestor of it in its place: whatever the others say, the stream
    has its changes as that ancestor's.
    """
    # PostgreSQL 14 has no column lists, and no column for them
    columns = "t.attnames" if connection.info.server_version >= 150_000 else "NULL::name[]"
    rows = connection.execute(
        f"WITH published AS ("  # noqa: S608
        f"SELECT DISTINCT c.oid, t.schemaname, t.tablename, {columns} FROM pg_catalog.pg_publication_tables t"
        " JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname"
        " JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename"
        " WHERE t.pubname = ANY(%s)"
        ") SELECT * FROM published WHERE NOT EXISTS ("
        "SELECT FROM pg_catalog.pg_partition_ancestors(oid) AS a JOIN published AS p ON p.oid = a.relid"
        " WHERE p.oid <> published.oid) ORDER BY 2, 3",
        [list(names)],
    )
    return [PublishedTable(oid, schema, name, tuple(attnames or ())) for oid, schema, name, attnames in rows]


def types_of(connection: Connection, oids: Iterable[int]) -> dict[int, PgType]:
    """The types with these OIDs, and with them what they are made of: base types of domains, elements of arrays.

    Built-in ones are known anyway and left out. One that does not exist any more is left out, too.
    """
    wanted = sorted(set(oids) - BUILT_IN.keys())
    if not wanted:
        return {}
    rows = connection.execute(
        # an array type is what its element's typarray says; name, point and others have a typelem as well
        "WITH RECURSIVE made AS ("
        " SELECT t.*, e.oid AS elem FROM pg_catalog.pg_type t"
        " LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem AND e.typarray = t.oid"
        "), wanted(oid) AS ("
        " SELECT pg_catalog.unnest(%s::oid[])"
        " UNION SELECT part FROM wanted JOIN made USING (oid), LATERAL (VALUES (elem), (typbasetype)) AS of(part)"
        " WHERE part IS NOT NULL AND part <> 0"
        ") SELECT made.oid, nspname, typname, typtype::text, typbasetype, typtypmod, coalesce(elem, 0), typdelim::text,"
        " (SELECT extname FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_extension x ON d.refobjid = x.oid"
        "  WHERE d.classid = 'pg_catalog.pg_type'::regclass AND d.objid = made.oid AND d.deptype = 'e'"
        "  AND d.refclassid = 'pg_catalog.pg_extension'::regclass)"
        " FROM wanted JOIN made USING (oid) JOIN pg_catalog.pg_namespace n ON n.oid = typnamespace",
        [wanted],
    )
    return {
        oid: PgType(oid, namespace, name, TypType(typtype), *rest)
        for oid, namespace, name, typtype, *rest in rows
        if oid not in BUILT_IN
    }


def wal_position(connection: Connection) -> Lsn:
    """Where the source's WAL ends now; of a standby, what it has replayed."""
    [(text,)] = connection.execute(
        "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()"
        " ELSE pg_catalog.pg_current_wal_lsn() END::text"
    )
    return Lsn.parse(text)


def insert_position(connection: Connection) -> Lsn:
    """Where the next record will be: everything committed until now, asynchronously too, is before it."""
    [(text,)] = connection.execute(
        "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()"
        " ELSE pg_catalog.pg_current_wal_insert_lsn() END::text"
    )
    return Lsn.parse(text)


def push_wal(connection: Connection) -> None:
    """Have the WAL written so far flushed soon: walsender sends only that, and an idle server may take seconds.

    A message in a transaction that is rolled back wakes the walwriter, and nobody ever sees it.
    """
    [(standby,)] = connection.execute("SELECT pg_catalog.pg_is_in_recovery()")
    if not standby:
        with connection.transaction(force_rollback=True):
            connection.execute("SELECT pg_catalog.pg_logical_emit_message(true, 'walmere', ''::text)")


def emit_message(connection: Connection, prefix: str) -> None:
    """Write an empty logical message that belongs to no transaction."""
    connection.execute("SELECT pg_catalog.pg_logical_emit_message(false, %s::text, ''::text)", [prefix])
