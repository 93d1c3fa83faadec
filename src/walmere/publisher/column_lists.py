"""Column lists of one table in several publications: PostgreSQL can decode its changes only if all lists are equal.

PostgreSQL notices when it decodes the first change, and then the slot never gets past that change, because decoding
uses the catalogs as they were at that time. So the lists are compared in advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg.sql import SQL, Composed, Identifier

from walmere.errors import ColumnListsDiffer
from walmere.publisher.connect import Connection
from walmere.publisher.publication import published


@dataclass(frozen=True, slots=True)
class ColumnList:
    """The columns of a table in one publication."""

    publication: str
    columns: tuple[str, ...]
    explicit: bool  # the publication names the table; otherwise it is for all tables or for the schema


@dataclass(frozen=True, slots=True)
class Conflict:
    """A table with different column lists, and the statements that set all lists to the first one."""

    table: str
    lists: tuple[ColumnList, ...]
    fix: str

    def __str__(self) -> str:
        described = "; ".join(f"{each.publication}: {', '.join(each.columns)}" for each in self.lists)
        return f"table {self.table} has different column lists in its publications ({described})"


def conflicts(connection: Connection, publications: Sequence[str]) -> list[Conflict]:
    """The tables whose lists differ."""
    if connection.info.server_version < 150_000:  # PostgreSQL 14 has no column lists
        return []
    rows = connection.execute(
        f"""{published(connection)}
        SELECT n.nspname, c.relname, p.pubname, r.oid IS NOT NULL, r.prattrs IS NOT NULL,
               ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a
                     WHERE a.attrelid = c.oid AND a.attnum = ANY(t.attnums) ORDER BY a.attnum)
        FROM published t JOIN chosen p ON p.oid = t.pubid JOIN pg_catalog.pg_class c ON c.oid = t.relid
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        JOIN (SELECT relid FROM published GROUP BY 1 HAVING count(DISTINCT attnums) > 1) d ON d.relid = t.relid
        LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
        ORDER BY 1, 2, 4, 3""",  # noqa: S608
        [list(publications)],
    )
    tables: dict[tuple[str, str], list[tuple[ColumnList, bool]]] = {}
    for schema, name, publication, explicit, has_list, columns in rows:
        column_list = ColumnList(publication, tuple(columns), explicit)
        tables.setdefault((schema, name), []).append((column_list, has_list))
    return [
        Conflict(f"{schema}.{name}", tuple(each for each, _ in found), _fix(connection, schema, name, found))
        for (schema, name), found in tables.items()
        if len({frozenset(each.columns) for each, _ in found}) > 1
    ]


def require_equal(connection: Connection, publications: Sequence[str]) -> None:
    """Raise ColumnListsDiffer if the lists of a table differ."""
    for found in conflicts(connection, publications):
        raise ColumnListsDiffer("checking the publications", str(found), found.fix)


def _fix(connection: Connection, schema: str, name: str, found: Sequence[tuple[ColumnList, bool]]) -> str:
    (first, has_list), *_ = found  # a publication for all tables comes first: it cannot have a list
    table = Identifier(schema, name)
    statements: list[Composed] = []
    for each, _ in found:
        if each.explicit and {*each.columns} != {*first.columns}:
            columns = SQL(" ({})").format(SQL(", ").join(map(Identifier, first.columns))) if has_list else SQL("")
            text = _row_filter(connection, each.publication, schema, name)
            row_filter = SQL(" WHERE ({})").format(SQL(text)) if text else SQL("")
            statements.append(
                SQL("ALTER PUBLICATION {0} DROP TABLE {1}; ALTER PUBLICATION {0} ADD TABLE {1}{2}{3};").format(
                    Identifier(each.publication), table, columns, row_filter
                )
            )
    return SQL("BEGIN; {} COMMIT;").format(SQL(" ").join(statements)).as_string(connection)


def _row_filter(connection: Connection, publication: str, schema: str, name: str) -> str | None:
    """Locks the table, so it is used only for the fix."""
    row = connection.execute(
        "SELECT pg_catalog.pg_get_expr(r.prqual, r.prrelid) FROM pg_catalog.pg_publication_rel r"
        " JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid JOIN pg_catalog.pg_class c ON c.oid = r.prrelid"
        " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " WHERE p.pubname = %s AND n.nspname = %s AND c.relname = %s",
        [publication, schema, name],
    ).fetchone()
    return None if row is None else row[0]
