"""The tables of publications, read from the catalogs without locking any table.

PostgreSQL's view `pg_publication_tables` opens every table that it lists, so it waits for a session that holds ACCESS
EXCLUSIVE on one of them. So do `pg_partition_tree`, `pg_get_expr` and `pg_get_replica_identity_index`. One table that
is locked for an hour would block the query for all tables. The queries here read only the catalogs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from walmere.publisher.connect import Connection

_FIRST_NORMAL_OBJECT_ID: Final = 16384

_TREE: Final = """
    tree (root, relid) AS (
        SELECT oid, oid FROM pg_catalog.pg_class WHERE relkind = 'p'
        UNION ALL
        SELECT root, inhrelid FROM tree JOIN pg_catalog.pg_inherits ON inhparent = relid AND NOT inhdetachpending
    ),
    leaf (root, relid) AS (
        SELECT root, relid FROM tree JOIN pg_catalog.pg_class ON oid = relid AND relkind <> 'p'
    )"""
"""Every partitioned table with itself and all tables below it; and with its leaf partitions."""


def published(connection: Connection) -> str:
    """Common table expressions for a query. The first parameter is the list of names of publications.

    `tree` and `leaf` as above, and `published (pubid, relid, attnums)`: as in `pg_publication_tables`, one row for each
    publication and table; `attnums` are the columns that are sent.
    """
    version = connection.info.server_version
    if version >= 180_000:
        listed, unlisted = "true", "attgenerated = '' OR (p.pubgencols = 's' AND attgenerated = 's')"
    else:  # 15 to 17 accept a generated column in a list, but never send it
        listed = unlisted = "attgenerated = ''"
    prattrs, in_schema, by_schema = "NULL::int2[]", "false", ""
    if version >= 150_000:
        prattrs = "r.prattrs::int2[]"
        in_schema = (
            "EXISTS (SELECT FROM pg_catalog.pg_publication_namespace"
            " WHERE pnpubid = p.oid AND pnnspid = c.relnamespace)"
        )
        by_schema = f"""
        UNION
        SELECT pnpubid, c.oid FROM pg_catalog.pg_publication_namespace
        JOIN pg_catalog.pg_class c ON c.relnamespace = pnnspid AND {_publishable("c")}"""  # noqa: S608
    return f"""
    WITH RECURSIVE {_TREE},
    chosen AS (SELECT * FROM pg_catalog.pg_publication WHERE pubname = ANY(%s)),
    named (pubid, relid) AS (
        SELECT prpubid, prrelid FROM pg_catalog.pg_publication_rel
        UNION
        SELECT p.oid, c.oid FROM chosen p JOIN pg_catalog.pg_class c ON {_publishable("c")}
        WHERE p.puballtables AND (c.relkind = 'r' OR p.pubviaroot){by_schema}
    ),
    listed (pubid, relid) AS (
        SELECT n.pubid, n.relid FROM named n JOIN chosen p ON p.oid = n.pubid
        WHERE p.pubviaroot AND NOT EXISTS (
            SELECT FROM tree t JOIN named a ON a.relid = t.root
            WHERE t.relid = n.relid AND t.root <> n.relid AND a.pubid = n.pubid)
        UNION
        SELECT n.pubid, coalesce(l.relid, n.relid) FROM named n JOIN chosen p ON p.oid = n.pubid
        JOIN pg_catalog.pg_class c ON c.oid = n.relid LEFT JOIN leaf l ON l.root = n.relid
        WHERE NOT p.pubviaroot AND (c.relkind <> 'p' OR l.relid IS NOT NULL)
    ),
    published (pubid, relid, attnums) AS (
        SELECT l.pubid, l.relid, ARRAY(
            SELECT attnum FROM pg_catalog.pg_attribute
            WHERE attrelid = l.relid AND attnum > 0 AND NOT attisdropped
              AND CASE WHEN wanted.attnums IS NULL THEN {unlisted}
                       ELSE attnum = ANY(wanted.attnums) AND {listed} END
            ORDER BY attnum)
        FROM listed l JOIN chosen p ON p.oid = l.pubid JOIN pg_catalog.pg_class c ON c.oid = l.relid
        LEFT JOIN LATERAL (
            SELECT {prattrs} AS attnums FROM pg_catalog.pg_publication_rel r
            WHERE r.prpubid = l.pubid AND r.prrelid = l.relid AND NOT p.puballtables AND NOT {in_schema}
        ) wanted ON true
    )"""  # noqa: S608


def _publishable(relation: str) -> str:
    """PostgreSQL's `is_publishable_class`."""
    return (
        f"{relation}.relkind IN ('r', 'p') AND {relation}.relpersistence = 'p'"
        f" AND {relation}.oid >= {_FIRST_NORMAL_OBJECT_ID}"
    )


def row_filters(connection: Connection, names: tuple[str, ...], oids: Sequence[int]) -> dict[int, str | None]:
    """The row filter of each of these tables, combined from all publications. Locks the tables that have one."""
    if connection.info.server_version < 150_000:
        return dict.fromkeys(oids)
    rows = connection.execute(
        f"{published(connection)} SELECT relid, array_agg(DISTINCT"  # noqa: S608
        "  (SELECT pg_catalog.pg_get_expr(r.prqual, r.prrelid) FROM pg_catalog.pg_publication_rel r"
        "   WHERE r.prpubid = pubid AND r.prrelid = relid AND NOT puballtables"
        "   AND NOT EXISTS (SELECT FROM pg_catalog.pg_publication_namespace"
        "    WHERE pnpubid = pubid AND pnnspid = c.relnamespace)))"
        " FROM published JOIN chosen ON chosen.oid = pubid JOIN pg_catalog.pg_class c ON c.oid = relid"
        " WHERE relid = ANY(%s) GROUP BY relid",
        [list(names), list(oids)],
    )
    return {oid: _any_of(filters) for oid, filters in rows}


def _any_of(filters: Sequence[str | None]) -> str | None:
    """Combine row filters: a row passes if it passes one of them, or if a publication has no filter."""
    expressions = sorted({each for each in filters if each is not None})
    return None if not expressions or None in filters else " OR ".join(f"({each})" for each in expressions)
