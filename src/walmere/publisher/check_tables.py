"""The checks of the publications and their tables: privileges, replica identity, locks, kind of table."""
# ruff: noqa: S608 - the parts of the queries are constants of this module

from __future__ import annotations

from typing import Any

from psycopg.sql import Identifier

from walmere.config import Source
from walmere.publisher.catalog import locked_tables, published_tables
from walmere.publisher.column_lists import conflicts
from walmere.publisher.connect import Connection
from walmere.publisher.finding import (
    Check,
    problem,
    query_value,
    role_name,
    warning,
)
from walmere.publisher.identity import HINT, IS_REPLICA_IDENTITY
from walmere.publisher.publication import published


def publication(connection: Connection, source: Source) -> Check:
    """A publication is missing or empty."""
    rows = connection.execute(
        f"{published(connection)} SELECT p.pubname, p.puballtables, count(t.relid) FROM chosen p"
        " LEFT JOIN published t ON t.pubid = p.oid GROUP BY 1, 2",
        [list(source.publications)],
    )
    found = {name: (all_tables, count) for name, all_tables, count in rows}
    database = connection.info.dbname
    for name in source.publications:
        quoted = Identifier(name).as_string(connection)
        match found.get(name):
            case None:
                yield problem(
                    f"there is no publication {quoted} in database {database}",
                    f"CREATE PUBLICATION {quoted} FOR ALL TABLES;",
                )
            case (True, 0):
                yield warning(
                    f"publication {quoted} is for all tables, but database {database} has no tables",
                    "-- create tables, or correct the database in source.dsn",
                )
            case (False, 0):
                yield problem(f"publication {quoted} has no tables", _fill(connection, quoted))
    return f"published tables: {sum(count for _, count in found.values())}"


def select(connection: Connection, source: Source) -> Check:
    """Copying a table needs USAGE on its schema and SELECT on its published columns."""
    name = role_name(connection)
    for (schema,) in connection.execute(
        f"{published(connection)} SELECT DISTINCT quote_ident(n.nspname) FROM published"
        " JOIN pg_class c ON c.oid = relid JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE NOT has_schema_privilege(n.oid, 'USAGE') ORDER BY 1",
        [list(source.publications)],
    ):
        yield problem(f"role {name} has no USAGE on schema {schema}", f"GRANT USAGE ON SCHEMA {schema} TO {name};")
    for table, whole, columns in connection.execute(
        f"""
        SELECT t.name, bool_and(a.published) FILTER (WHERE NOT a.generated),
               string_agg(a.name, ', ' ORDER BY a.attnum) FILTER (WHERE a.published)
        FROM ({published(connection)} SELECT relid, relid::regclass::text AS name, attnums FROM published) t
        CROSS JOIN LATERAL (
            SELECT attnum, quote_ident(attname) AS name, attnum = ANY(t.attnums) AS published,
                   attgenerated <> '' AS generated, has_column_privilege(t.relid, attnum, 'SELECT') AS readable
            FROM pg_attribute WHERE attrelid = t.relid AND attnum > 0 AND NOT attisdropped) a
        GROUP BY t.name, t.attnums HAVING NOT bool_and(a.readable) FILTER (WHERE a.published) ORDER BY 1""",
        [list(source.publications)],
    ):
        of = "" if whole else f" ({columns})"
        yield problem(f"role {name} has no SELECT{of} on {table}", f"GRANT SELECT{of} ON TABLE {table} TO {name};")
    return f"role {name} can read the published tables"


def row_security(connection: Connection, source: Source) -> Check:
    """The stream has every row; a copy has only the rows that the role may see. Partitions have their own policies."""
    name = role_name(connection)
    for (table,) in connection.execute(
        f"""
        WITH every AS ({_with_leaves(connection)})
        SELECT relid::regclass::text FROM every WHERE row_security_active(relid) ORDER BY 1""",
        [list(source.publications)],
    ):
        yield problem(
            f"row security applies to role {name} on {table}, so a copy would be partial",
            f"ALTER ROLE {name} BYPASSRLS;",
        )
    return f"no row security applies to role {name} on the published tables"


def replica_identity(connection: Connection, source: Source) -> Check:
    """Without a replica identity, UPDATE and DELETE fail on the source. A partition has its own, besides its root's."""
    why = {"d": "no primary key", "n": "REPLICA IDENTITY NOTHING", "i": "no valid index of its replica identity"}
    for table, letter, index, primary in connection.execute(
        f"""
        WITH every AS ({_with_leaves(connection, "p.pubupdate OR p.pubdelete")})
        SELECT c.oid::regclass::text, c.relreplident::text, i.name, i.indisprimary
        FROM every JOIN pg_class c ON c.oid = every.relid
        LEFT JOIN LATERAL (
            SELECT quote_ident(k.relname) AS name, x.indisprimary
            FROM pg_index x JOIN pg_class k ON k.oid = x.indexrelid
            WHERE x.indrelid = c.oid AND x.indisunique AND x.indimmediate AND x.indisvalid
              AND x.indpred IS NULL AND x.indexprs IS NULL
              AND NOT EXISTS (SELECT FROM pg_attribute a
                              WHERE a.attrelid = c.oid AND NOT a.attnotnull
                                AND a.attnum = ANY((x.indkey::int2[])[0:x.indnkeyatts - 1]))
            ORDER BY x.indisprimary DESC, 1 LIMIT 1) i ON true
        WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.relreplident <> 'f'
          AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND {IS_REPLICA_IDENTITY})
        ORDER BY 1""",
        [list(source.publications)],
    ):
        if index is None:
            fix = (
                f"ALTER TABLE {table} REPLICA IDENTITY FULL;  -- or, cheaper: ALTER TABLE {table} ADD PRIMARY KEY (…);"
            )
        else:
            fix = f"ALTER TABLE {table} REPLICA IDENTITY {'DEFAULT' if primary else f'USING INDEX {index}'};"
        yield problem(f"{table} has {why[letter]}: UPDATE and DELETE on it fail, because they are published", fix)
    return "every table whose UPDATE or DELETE is published has a replica identity"


def partition_identity(connection: Connection, source: Source) -> Check:
    """Partitions that are mirrored as one table need a key that is unique across them."""
    for table in published_tables(connection, source.publications):
        if table.identity is not None and table.identity.refused:
            name = Identifier(table.schema, table.name).as_string(connection)
            yield problem(f"{name} cannot be mirrored: {table.identity.refused}", f"-- {HINT}")
    return "every partitioned table has a key that identifies its rows"


def locks(connection: Connection, source: Source) -> Check:
    """A locked table cannot be copied, and a new slot waits for the transaction that holds the lock."""
    tables = published_tables(connection, source.publications)
    by_oid = {oid: table for table in tables for oid in (table.oid, *(leaf for leaf, _ in table.leaves))}
    for oid, holder in locked_tables(connection, list(by_oid)).items():
        name = Identifier(by_oid[oid].schema, by_oid[oid].name).as_string(connection)
        yield warning(
            f"{name} is locked: {holder}",
            "SELECT pid, query FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE mode = 'AccessExclusiveLock';",
        )
    return "no published table is locked"


def unlogged_tables(connection: Connection, source: Source) -> Check:
    """Unlogged tables write no WAL, so their changes are never sent."""
    for table, parent, _server in _left_out(connection, source, "c.relpersistence = 'u'"):
        fix = f"ALTER TABLE {table} SET LOGGED;"
        if parent:
            yield problem(f"{table} is unlogged, so it is not published, although its parent {parent} is", fix)
        else:
            yield warning(f"{table} is unlogged, so the publication does not include it", fix)
    return "no unlogged table is missing from the publications"


def foreign_tables(connection: Connection, source: Source) -> Check:
    """The rows of a foreign table are on another server, so their changes are never sent."""
    for table, parent, server in _left_out(connection, source, "c.relkind = 'f'"):
        if parent:
            yield problem(
                f"{table} is a foreign table, so it is not published, although its parent {parent} is",
                f"ALTER TABLE {parent} DETACH PARTITION {table};",
            )
        else:
            yield warning(
                f"{table} is a foreign table, so the publication does not include it",
                f"-- publish it on the server that has its rows: foreign server {server}",
            )
    return "no foreign table is missing from the publications"


def column_lists(connection: Connection, source: Source) -> Check:
    """PostgreSQL cannot decode the changes of a table with different column lists."""
    for found in conflicts(connection, source.publications):
        yield problem(f"{found}: its changes cannot be decoded", found.fix)
    return "no table has different column lists"


def _with_leaves(connection: Connection, which: str = "true") -> str:
    """The published tables and the leaves of partitioned ones. `which` is a condition on the publication p."""
    return f"""
        {published(connection)}
        SELECT relid FROM published JOIN chosen p ON p.oid = pubid WHERE {which}
        UNION SELECT leaf.relid FROM published JOIN chosen p ON p.oid = pubid
              JOIN leaf ON leaf.root = published.relid WHERE {which}"""


def _left_out(connection: Connection, source: Source, which: str) -> list[tuple[Any, ...]]:
    """Tables that match `which` in a database, schema or partition tree that is published: name, parent, server."""
    by_schema = (
        "OR EXISTS (SELECT FROM pg_publication_namespace s JOIN pg_class m ON m.relnamespace = s.pnnspid"
        " WHERE s.pnpubid = p.oid AND m.oid = any_of.oid)"
    )
    return connection.execute(
        f"""
        SELECT DISTINCT c.oid::regclass::text, i.inhparent::regclass::text, quote_ident(f.srvname)
        FROM pg_publication p, pg_class c
        CROSS JOIN LATERAL (SELECT c.oid UNION SELECT relid FROM pg_partition_ancestors(c.oid)) any_of (oid)
        LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND c.relispartition
        LEFT JOIN pg_foreign_table t ON t.ftrelid = c.oid
        LEFT JOIN pg_foreign_server f ON f.oid = t.ftserver
        WHERE p.pubname = ANY(%s) AND c.relkind IN ('r', 'p', 'f') AND c.oid >= 16384 AND {which}
          AND (p.puballtables
               OR EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = any_of.oid)
               {by_schema if connection.info.server_version >= 150_000 else ""})
        ORDER BY 1""",
        [list(source.publications)],
    ).fetchall()


def _fill(connection: Connection, quoted: str) -> str:
    tables = query_value(
        connection,
        "SELECT string_agg(oid::regclass::text, ', ' ORDER BY oid) FROM pg_class WHERE relkind IN ('r', 'p')"
        " AND relpersistence = 'p' AND NOT relispartition AND oid >= 16384",
    )
    return f"ALTER PUBLICATION {quoted} ADD TABLE {tables};" if tables else "-- create tables, then add them to it"
