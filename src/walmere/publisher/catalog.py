"""What the source's catalogs say: publications and their tables."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg.sql import Identifier

from walmere.errors import PublicationMissing
from walmere.lsn import Lsn
from walmere.publisher.connect import Connection


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table as the publication publishes it: a partition root may stand for its partitions."""

    schema: str
    name: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


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
    """The tables of the publications, with the columns that are published."""
    # PostgreSQL 14 has no column lists, and no column for them
    columns = "t.attnames" if connection.info.server_version >= 150_000 else "NULL::name[]"
    rows = connection.execute(
        f"SELECT DISTINCT t.schemaname, t.tablename, {columns}"  # noqa: S608
        " FROM pg_catalog.pg_publication_tables t WHERE t.pubname = ANY(%s) ORDER BY 1, 2",
        [list(names)],
    )
    return [PublishedTable(schema, name, tuple(attnames or ())) for schema, name, attnames in rows]


def wal_position(connection: Connection) -> Lsn:
    """Where the source's WAL ends now; of a standby, what it has replayed."""
    [(text,)] = connection.execute(
        "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()"
        " ELSE pg_catalog.pg_current_wal_lsn() END::text"
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
