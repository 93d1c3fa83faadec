"""Queries of the source's catalogs: publications and their tables, types of columns, WAL positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import psycopg
from psycopg.sql import SQL, Identifier

from walmere.definition import Layout
from walmere.errors import PublicationMissing
from walmere.lsn import Lsn
from walmere.publisher.connect import Connection
from walmere.publisher.identity import IS_REPLICA_IDENTITY, TreeIdentity, tree_identities
from walmere.publisher.publication import published
from walmere.types.builtin import BUILT_IN
from walmere.types.pgtype import PgType, TypType

LOCK_TIMEOUT: Final = "5s"
"""How long a catalog query waits for a locked table."""
STATEMENT_TIMEOUT: Final = "60s"


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table as the publications publish it; a partitioned table may be published in place of its partitions."""

    oid: int
    schema: str
    name: str
    columns: tuple[str, ...]
    leaves: tuple[tuple[int, int], ...]  # of a partitioned table: (OID, xid that attached it)
    partial: bool  # `publish` does not include updates, deletes or truncates
    publication_fingerprint: str  # changes when the publications publish the table in another way
    layout: Layout
    gathered: bool = False  # the leaves are published under their own names, and mirrored as one table
    identity: TreeIdentity | None = None  # of a partitioned table; None: use that of the Relation message
    xid: int = field(default=0, compare=False)  # when this was read, every transaction before it had ended


def require_publications(connection: Connection, names: tuple[str, ...]) -> None:
    """Raise PublicationMissing unless all exist. (PostgreSQL 18 only warns, and sends nothing.)"""
    found = connection.execute("SELECT pubname FROM pg_catalog.pg_publication WHERE pubname = ANY(%s)", [list(names)])
    missing = sorted(set(names) - {name for (name,) in found})
    if missing:
        raise PublicationMissing(
            "reading the publications",
            f"there is no publication {', '.join(missing)} in database {connection.info.dbname}",
            f"CREATE PUBLICATION {Identifier(missing[0]).as_string(connection)} FOR ALL TABLES (or FOR TABLE …) there, "
            "or correct source.publications",
        )


def set_timeouts(connection: Connection) -> None:
    """Limit how long catalog queries may take: a table may be locked, or the server busy."""
    connection.execute(
        "SELECT pg_catalog.set_config('lock_timeout', %s, false),"
        " pg_catalog.set_config('statement_timeout', %s, false)",
        [LOCK_TIMEOUT, STATEMENT_TIMEOUT],
    )


def locked_tables(connection: Connection, oids: Sequence[int]) -> dict[int, str]:
    """The relations that a session holds ACCESS EXCLUSIVE on, with that session. They cannot be read meanwhile."""
    rows = connection.execute(
        "SELECT l.relation::int8, coalesce('process ' || l.pid || coalesce(' (' || a.state || ', transaction open"
        " since ' || date_trunc('second', a.xact_start) || ')', ''), 'a prepared transaction')"
        " FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a USING (pid)"
        " WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock' AND l.granted AND l.relation = ANY(%s)"
        " AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())",
        [list(oids)],
    )
    return {oid: f"{holder} holds ACCESS EXCLUSIVE" for oid, holder in rows}


def published_tables(
    connection: Connection, names: tuple[str, ...], gather: bool = False, only: int | None = None
) -> list[PublishedTable]:
    """The tables of the publications, with the columns that are published. Locks no table.

    A partition is omitted if one publication publishes its ancestor in its place: the stream then has its changes as
    those of the ancestor, whatever the other publications publish.

    `gather`: partitions that are published under their own names are returned as one table, their root. `only`: the OID
    of one table, to save the queries for the others.
    """
    # with the transaction that has put the table there: while it was in another schema, changes were not published
    schemas = (
        "(SELECT concat_ws(' ', s.oid, 'there since', (SELECT d.xmin FROM pg_catalog.pg_depend d"
        " WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid AND d.objsubid = 0"
        " AND d.refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass LIMIT 1))"
        " FROM pg_catalog.pg_publication_namespace s WHERE s.pnpubid = p.oid AND s.pnnspid = n.oid)"
    )
    if connection.info.server_version < 150_000:
        schemas = "NULL::text"
    rows = connection.execute(
        f"{published(connection)} SELECT c.oid, n.nspname, c.relname,"  # noqa: S608
        " ARRAY(SELECT attname FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid"
        "       AND a.attnum = ANY(max(t.attnums)) ORDER BY a.attnum),"
        " ARRAY(SELECT l.relid::int8 FROM leaf l WHERE l.root = c.oid ORDER BY 1),"
        " NOT (bool_or(pubupdate) AND bool_or(pubdelete) AND bool_or(pubtruncate)),"
        " string_agg(concat_ws(' ', pubname, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot,"
        "  (SELECT string_agg(r.oid::text, ' ' ORDER BY r.oid) FROM pg_catalog.pg_publication_rel r"
        "   WHERE prpubid = p.oid AND (prrelid = c.oid"
        "    OR prrelid IN (SELECT relid FROM pg_catalog.pg_partition_ancestors(c.oid)))),"
        f" {schemas}), ', ' ORDER BY pubname),"
        " bool_or(pubupdate OR pubdelete),"
        f" c.relispartition AND bool_and(NOT puballtables AND {schemas} IS NULL AND NOT EXISTS ("
        "  SELECT FROM pg_catalog.pg_publication_rel r WHERE prpubid = p.oid AND prrelid = c.oid))"
        " FROM published t JOIN chosen p ON p.oid = t.pubid JOIN pg_catalog.pg_class c ON c.oid = t.relid"
        " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " WHERE NOT EXISTS (SELECT FROM tree JOIN published AS above ON above.relid = tree.root"
        "  WHERE tree.relid = c.oid AND tree.root <> c.oid)"
        " GROUP BY c.oid, n.oid, n.nspname, c.relname, c.relispartition ORDER BY 2, 3",
        [list(names)],
    ).fetchall()
    links = _partitions(connection)
    found = [
        PublishedTable(
            oid,
            schema,
            name,
            tuple(columns),
            tuple((leaf, links[leaf][1] if leaf in links else 0) for leaf in leaves),
            partial,
            publication_fingerprint,
            Layout(),
        )
        for oid, schema, name, columns, leaves, partial, publication_fingerprint, *_ in rows
    ]
    by_ancestor = {oid for oid, *_, of_ancestor in rows if of_ancestor}
    changing = {oid for oid, *_, changes, _ in rows if changes}
    found = _gathered(connection, found, links) if gather else found
    changing |= {table.oid for table in found if table.gathered and changing & {leaf for leaf, _ in table.leaves}}
    found = [table for table in found if only in (None, table.oid)]
    identities = tree_identities(
        connection,
        {table.oid: [leaf for leaf, _ in table.leaves] for table in found if table.leaves and table.oid in changing},
    )
    layouts = _layouts(connection, [table.oid for table in found])
    [(xid,)] = connection.execute("SELECT pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text::int8")
    return [
        replace(
            table,
            publication_fingerprint=table.publication_fingerprint
            + (_ancestry(table.oid, links) if table.oid in by_ancestor else ""),
            layout=layouts.get(table.oid, Layout()),
            identity=identities.get(table.oid),
            xid=xid,
        )
        for table in found
    ]


def _partitions(connection: Connection) -> dict[int, tuple[int, int]]:
    """By partition: its parent, and the transaction that created or last attached it."""
    rows = connection.execute(
        "SELECT inhrelid, inhparent, xmin::text::int8 FROM pg_catalog.pg_inherits WHERE NOT inhdetachpending"
    )
    return {oid: (parent, since) for oid, parent, since in rows}


def _ancestry(oid: int, links: Mapping[int, tuple[int, int]]) -> str:
    """Since when a partition is in its tree. The stream does not have the changes from before."""
    text = ""
    while oid in links:
        oid, since = links[oid]
        text += f", in {oid} since {since}"
    return text


def _layouts(connection: Connection, oids: Sequence[int]) -> dict[int, Layout]:
    # ALTER TABLE gives the table another TOAST table; VACUUM FULL, CLUSTER and TRUNCATE do not. Of a table without a
    # TOAST table there is only the filenode, stored as a negative number: see `rewritten_since`. A table that is
    # published by name cannot be UNLOGGED, so it needs no number (0).
    rows = connection.execute(
        "WITH RECURSIVE tree (root, relid) AS ("  # noqa: S608
        " SELECT oid, oid FROM pg_catalog.pg_class WHERE oid = ANY(%s)"
        " UNION ALL SELECT root, inhrelid FROM tree JOIN pg_catalog.pg_class ON oid = relid AND relkind = 'p'"
        "  JOIN pg_catalog.pg_inherits ON inhparent = relid AND NOT inhdetachpending"
        "), heaps AS ("
        " SELECT root, hashtextextended(string_agg(relfilenode::text, ',' ORDER BY oid), 0) AS filenodes,"
        "  array_agg(ARRAY[oid::int8, CASE WHEN reltoastrelid <> 0 THEN reltoastrelid::int8"
        "   WHEN EXISTS (SELECT FROM pg_catalog.pg_publication_rel WHERE prrelid = relid) THEN 0"
        "   ELSE -(relfilenode::int8) END] ORDER BY oid) FILTER (WHERE relkind <> 'p') AS rewrites"
        " FROM tree JOIN pg_catalog.pg_class ON oid = relid WHERE oid = root OR relkind <> 'p' GROUP BY root"
        ") SELECT c.oid,"
        " hashtextextended(string_agg(concat_ws(' ', attname, atttypid, atttypmod), ',' ORDER BY attnum), 0),"
        " hashtextextended(string_agg(attnum::text, ',' ORDER BY attnum), 0),"
        " hashtextextended(string_agg(a.xmin::text, ',' ORDER BY attnum), 0), max(filenodes),"
        " hashtextextended(concat(c.relreplident, (SELECT i.indexrelid FROM pg_catalog.pg_index i"
        f"  WHERE i.indrelid = c.oid AND {IS_REPLICA_IDENTITY})), 0), max(rewrites)"
        " FROM pg_catalog.pg_class c JOIN heaps ON root = c.oid JOIN pg_catalog.pg_attribute a ON attrelid = c.oid"
        " WHERE attnum > 0 AND NOT attisdropped GROUP BY c.oid",
        [list(oids)],
    )
    return {
        oid: Layout(
            shape, attnums, versions, filenodes, identity, tuple((heap, number) for heap, number in rewrites or ())
        )
        for oid, shape, attnums, versions, filenodes, identity, rewrites in rows
    }


def _gathered(
    connection: Connection, tables: Sequence[PublishedTable], links: Mapping[int, tuple[int, int]]
) -> list[PublishedTable]:
    roots = {
        leaf: (oid, schema, name)
        for leaf, oid, schema, name in connection.execute(
            "SELECT p.oid, c.oid, n.nspname, c.relname FROM pg_catalog.pg_class p"
            " JOIN pg_catalog.pg_class c ON c.oid = pg_catalog.pg_partition_root(p.oid)"
            " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE p.relispartition AND p.oid = ANY(%s)",
            [[table.oid for table in tables]],
        )
    }
    found = {table.oid: table for table in tables if table.oid not in roots}
    parts: dict[int, list[PublishedTable]] = {}
    for table in tables:
        if table.oid in roots:
            parts.setdefault(roots[table.oid][0], []).append(table)
    for oid, leaves in parts.items():
        first = leaves[0]
        found[oid] = replace(
            first,
            oid=oid,
            schema=roots[first.oid][1],
            name=roots[first.oid][2],
            leaves=tuple(sorted((leaf.oid, links[leaf.oid][1] if leaf.oid in links else 0) for leaf in leaves)),
            partial=any(leaf.partial for leaf in leaves),
            publication_fingerprint=f"gathered: {'; '.join(sorted({leaf.publication_fingerprint for leaf in leaves}))}",
            gathered=True,
        )
    return sorted(found.values(), key=lambda table: (table.schema, table.name))


def may_have_come_with_rows(connection: Connection, partition: int) -> bool:
    """Whether a partition may have rows from before it, or one of its ancestors, was attached.

    Those rows are not in the stream. A table that was created as a partition has none, if none of its ancestors was
    attached since. ATTACH is recognised in pg_attribute: it updates the row of every column (`attinhcount`), but not
    the rows of the system columns.
    """
    row = connection.execute(
        "SELECT bool_or(c.xmin = s.xmin AND c.cmin = s.cmin) AND bool_and(age(i.xmin) >= age(s.xmin))"
        " FROM pg_catalog.pg_attribute s JOIN pg_catalog.pg_attribute c ON c.attrelid = s.attrelid AND c.attnum > 0,"
        " pg_catalog.pg_partition_ancestors(%s) t JOIN pg_catalog.pg_inherits i ON i.inhrelid = t.relid"
        " WHERE s.attrelid = %s AND s.attnum = -1",
        [partition, partition],
    ).fetchone()
    return row != (True,)


def rewritten_since(connection: Connection, heaps: Sequence[int], xid: int) -> bool:
    """Whether ALTER TABLE may have rewritten one of these tables after this transaction.

    A row with an older xmin shows that it has not: ALTER TABLE inserts all rows again, while VACUUM FULL and CLUSTER
    keep their xmin. If there is no such row, or the role may not read the table, the answer is yes.
    """
    names = connection.execute(
        "SELECT n.nspname, c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = relnamespace"
        " WHERE c.oid = ANY(%s)",
        [list(heaps)],
    ).fetchall()
    older = SQL("SELECT EXISTS (SELECT FROM ONLY {} WHERE age(xmin) > age(%s::xid))")
    try:
        for name in names:
            if connection.execute(older.format(Identifier(*name)), [str(xid & 0xFFFFFFFF)]).fetchone() != (True,):
                return True
    except psycopg.Error:
        return True
    return False


def types_of(connection: Connection, oids: Iterable[int]) -> dict[int, PgType]:
    """The types with these OIDs, their base types (of domains) and element types (of arrays).

    Built-in types, and types that do not exist any more, are omitted.
    """
    wanted = sorted(set(oids) - BUILT_IN.keys())
    if not wanted:
        return {}
    rows = connection.execute(
        # a type is an array if its element's typarray points back to it; name, point and others have a typelem too
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
    """The end of the written WAL; on a standby, of the replayed WAL."""
    [(text,)] = connection.execute(
        "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()"
        " ELSE pg_catalog.pg_current_wal_lsn() END::text"
    )
    return Lsn.parse(text)


def insert_position(connection: Connection) -> Lsn:
    """The position of the next WAL record: everything committed until now, also asynchronously, is before it."""
    [(text,)] = connection.execute(
        "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()"
        " ELSE pg_catalog.pg_current_wal_insert_lsn() END::text"
    )
    return Lsn.parse(text)


def clock(connection: Connection) -> float:
    """The time of the source's clock, which commit times are from, as Unix time in seconds."""
    [(now,)] = connection.execute("SELECT extract(epoch FROM pg_catalog.clock_timestamp())::float8")
    return float(now)


def push_wal(connection: Connection) -> None:
    """Have the WAL flushed soon: walsender sends only flushed WAL, and an idle server may take seconds to flush.

    A logical message in a transaction that is rolled back wakes the walwriter, and is never sent.
    """
    [(standby,)] = connection.execute("SELECT pg_catalog.pg_is_in_recovery()")
    if not standby:
        with connection.transaction(force_rollback=True):
            connection.execute("SELECT pg_catalog.pg_logical_emit_message(true, 'walmere', ''::text)")


def emit_message(connection: Connection, prefix: str) -> None:
    """Write an empty logical message outside of transactions."""
    connection.execute("SELECT pg_catalog.pg_logical_emit_message(false, %s::text, ''::text)", [prefix])
