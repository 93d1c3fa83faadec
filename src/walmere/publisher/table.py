"""A published table as a copy needs it: columns, identity, row filter, and the relations and pages of its rows.

The queries are those of PostgreSQL's tablesync worker (`fetch_remote_table_info`). They run under the snapshot of the
copy, so that they match its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from psycopg.sql import SQL, Composable, Composed, Identifier

from walmere.definition import PublishedColumn
from walmere.errors import AccessRefused, NotMirrored, PublicationMissing, SourceUnavailable
from walmere.pgoutput.messages import ReplicaIdentity
from walmere.publisher.catalog import PublishedTable, published_tables
from walmere.publisher.connect import Connection
from walmere.publisher.identity import HINT, IS_REPLICA_IDENTITY
from walmere.publisher.publication import row_filters
from walmere.types.copytext import COPY_OPTIONS

RANGE_BYTES: Final = 64 << 20
"""About how much one task copies: some seconds, so that batches of other tables do not wait long for a free core."""
LARGE_RANGE_BYTES: Final = 2 << 30
"""The same, while no other table is followed. Larger ranges make larger files, which are not joined later."""


@dataclass(frozen=True, slots=True)
class Part:
    """A relation that has rows: the table itself, or one of its leaf partitions."""

    schema: str
    name: str
    pages: int | None  # None: it has no pages (a foreign table), or the role may not read by ctid
    filenode: int | None = None  # changes if VACUUM FULL or CLUSTER moves the rows to other pages
    whole_tree: bool = False  # a partitioned table, read with all its partitions


@dataclass(frozen=True, slots=True)
class Table:
    """A published table."""

    oid: int
    schema: str
    name: str
    replica_identity: ReplicaIdentity
    columns: tuple[PublishedColumn, ...]
    published: PublishedTable
    parts: tuple[Part, ...]
    natts: int  # pg_class.relnatts, which counts dropped columns
    row_filter: str | None = None

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify its rows."""
        if self.published.identity is not None:
            return self.published.identity.key
        return tuple(column.name for column in self.columns if column.is_key)


@dataclass(frozen=True, slots=True)
class Range:
    """A range of pages that one task copies: from `first` to before `end`."""

    part: Part
    first: int
    end: int | None  # None: to the end of the table


def describe(connection: Connection, publications: tuple[str, ...], oid: int, gather: bool = False) -> Table:
    """Read one table from the catalogs. With `gather`, the table may be one whose partitions are published."""
    row = connection.execute(
        "SELECT n.nspname, c.relname, c.relreplident, c.relkind, c.relnatts FROM pg_class c"
        " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s",
        [oid],
    ).fetchone()
    if row is None:
        raise PublicationMissing(f"reading the definition of relation {oid}", "it does not exist any more")
    schema, name, identity, kind, natts = row
    published = _published(connection, publications, oid, f"{schema}.{name}", gather)
    filtered = published.leaves[0][0] if published.gathered else oid
    row_filter = row_filters(connection, publications, [filtered]).get(filtered)
    columns = columns_of(connection, oid, published.columns)
    _require_every_row(connection, f"checking table {schema}.{name}", oid)
    leaves = {leaf for leaf, _ in published.leaves} if published.gathered else None
    parts = _parts(connection, oid, kind, Part(schema, name, None, whole_tree=True), leaves)
    return Table(oid, schema, name, ReplicaIdentity(identity), columns, published, parts, natts, row_filter)


def columns_of(connection: Connection, oid: int, published: tuple[str, ...]) -> tuple[PublishedColumn, ...]:
    """Read the published columns of a relation. Locks nothing."""
    rows = connection.execute(
        # INCLUDE columns of an index come after its key columns
        "SELECT a.attnum, a.attname, a.atttypid, a.atttypmod,"  # noqa: S608
        " coalesce(a.attnum = ANY((i.indkey::int2[])[0:i.indnkeyatts - 1]), false)"
        " FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid"
        f" LEFT JOIN pg_index i ON i.indrelid = c.oid AND {IS_REPLICA_IDENTITY}"
        " WHERE c.oid = %s AND a.attnum > 0 AND NOT a.attisdropped"
        " AND a.attname = ANY(%s) ORDER BY a.attnum",
        [oid, list(published)],
    )
    return tuple(PublishedColumn(*row) for row in rows)


def declared_types(connection: Connection, columns: Sequence[PublishedColumn]) -> dict[str, str]:
    """The type of each column, as SQL writes it."""
    rows = connection.execute(
        "SELECT c.name, format_type(c.type_oid, c.typmod)"
        " FROM unnest(%s::text[], %s::oid[], %s::int[]) AS c(name, type_oid, typmod)",
        [[each.name for each in columns], [each.type_oid for each in columns], [each.typmod for each in columns]],
    )
    return dict(rows.fetchall())


def _require_every_row(connection: Connection, doing: str, oid: int) -> None:
    """Refuse a table with row security for this role: the stream sends every row, so the copy must have every row."""
    row = connection.execute(
        "SELECT string_agg(c.oid::regclass::text, ', ' ORDER BY c.oid), quote_ident(current_user) FROM pg_class c"
        " WHERE (c.oid = %s OR c.oid IN (SELECT relid FROM pg_partition_tree(%s) WHERE isleaf))"
        " AND row_security_active(c.oid)",
        [oid, oid],
    ).fetchone()
    assert row is not None
    tables, role = row
    if tables is not None:
        raise AccessRefused(
            doing,
            f"row security applies to role {role} on {tables}, so a copy would be partial",
            f"ALTER ROLE {role} BYPASSRLS; or remove the table from the publication",
        )


def missing_values(connection: Connection, oid: int) -> dict[int, str | None] | None:
    """By attnum, the value of an added column in rows that are older than it: `attmissingval`, as text.

    `attmissingval` is an array with one element. It is cast to text[], which works only if the delimiter of the type
    is a comma; if one type has another delimiter, the result is None.
    """
    rows = connection.execute(
        "SELECT attnum, CASE WHEN typdelim = ',' THEN (attmissingval::text::text[])[1] END, typdelim = ','"
        " FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid WHERE attrelid = %s AND atthasmissing",
        [oid],
    ).fetchall()
    return {attnum: text for attnum, text, _ in rows} if all(readable for *_, readable in rows) else None


def _published(
    connection: Connection, publications: tuple[str, ...], oid: int, name: str, gather: bool
) -> PublishedTable:
    found = published_tables(connection, publications, gather, only=oid)
    if not found:
        raise PublicationMissing(f"checking table {name}", "it is not in the publication any more")
    [table] = found
    if table.gathered:
        _require_same_columns(connection, publications, table, name)
    if table.identity is not None and table.identity.refused:
        raise NotMirrored(f"checking table {name}", table.identity.refused, HINT)
    return table


def _require_same_columns(
    connection: Connection, publications: tuple[str, ...], root: PublishedTable, name: str
) -> None:
    wanted = [leaf for leaf, _ in root.leaves]
    columns = {frozenset(table.columns) for table in published_tables(connection, publications) if table.oid in wanted}
    if len(columns) > 1 or len(set(row_filters(connection, publications, wanted).values())) > 1:
        raise NotMirrored(
            f"gathering the partitions of {name}",
            "they have different columns or row filters",
            "publish all partitions with the same columns and row filter, or set target.gather_partitions = false",
        )


def _parts(connection: Connection, oid: int, kind: str, root: Part, gathered: set[int] | None) -> tuple[Part, ...]:
    """The relations to read, with their sizes in pages.

    Reading ranges of `ctid`, and reading partitions directly, needs SELECT on the whole relation. A role that has
    SELECT only on some columns, or only on the root, can read the rows in one range.
    """
    rows = connection.execute(
        "SELECT n.nspname, c.relname, CASE WHEN c.relkind = 'r' AND has_table_privilege(c.oid, 'SELECT') THEN"
        " (pg_relation_size(c.oid) / current_setting('block_size')::int)::int END, pg_relation_filenode(c.oid)::int8,"
        " c.oid::int8, has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE'),"
        " c.relfilenode NOT IN (0, pg_relation_filenode(c.oid))"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE CASE WHEN %s THEN c.oid IN (SELECT relid FROM pg_partition_tree(%s) WHERE isleaf) ELSE c.oid = %s END"
        " ORDER BY 1, 2",
        [kind == "p", oid, oid],
    ).fetchall()
    if any(rewritten for *_, rewritten in rows):
        # the function shows the current filenode, the catalog that of the snapshot: the rewritten rows are not visible
        raise SourceUnavailable(f"checking {root.schema}.{root.name}", "it was rewritten since the snapshot")
    wanted = [row for row in rows if gathered is None or row[4] in gathered]
    if kind == "p" and wanted == rows and not all(row[5] for row in rows):
        return (root,)
    return tuple(Part(*row[:4]) for row in wanted)


def ranges(table: Table, at_least: int = 1, range_bytes: int = RANGE_BYTES, page_bytes: int = 8192) -> list[Range]:
    """Divide a table into about `at_least` ranges of pages, or a multiple of it, so that none exceeds `range_bytes`."""
    found: list[Range] = []
    total = sum(part.pages or 0 for part in table.parts) or 1
    for part in table.parts:
        if part.pages is None or part.pages < 2:
            found.append(Range(part, 0, None))
            continue
        share = max(1, round(at_least * part.pages / total))  # all tasks end at about the same time
        count = share * -(-part.pages * page_bytes // (range_bytes * share))
        step = -(-part.pages // min(count, part.pages))
        starts = list(range(0, part.pages, step))
        found += [Range(part, first, end) for first, end in zip(starts, [*starts[1:], None], strict=True)]
    return found


def copy_command(
    table: Table, piece: Range, only_if: str | None = None, columns: Sequence[str] | None = None
) -> Composed:
    """The COPY of one range, with the published columns and the row filter. `publish` does not apply to a copy.

    `only_if`: an SQL condition; only rows for which it is true. `columns`: only these.
    """
    conditions: list[Composable] = [] if only_if is None else [SQL("(") + SQL(only_if) + SQL(")")]
    if piece.part.pages is not None:
        conditions.append(SQL("ctid >= '({},0)'::tid").format(piece.first))
        if piece.end is not None:
            conditions.append(SQL("ctid < '({},0)'::tid").format(piece.end))
    if table.row_filter is not None:
        conditions.append(SQL("(") + SQL(table.row_filter) + SQL(")"))
    names = [column.name for column in table.columns] if columns is None else columns
    selected = SQL(", ").join(map(Identifier, names))
    where = SQL(" WHERE ") + SQL(" AND ").join(conditions) if conditions else SQL("")
    only = SQL("") if piece.part.whole_tree else SQL("ONLY ")
    relation = Identifier(piece.part.schema, piece.part.name)
    select = SQL("SELECT {} FROM {}{}{}").format(selected, only, relation, where)
    return SQL("COPY ({}) TO STDOUT ({})").format(select, SQL(COPY_OPTIONS))
