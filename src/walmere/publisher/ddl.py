"""The DDL of a published table, from the source's catalogs, for a target that creates missing tables.

Only published columns are created, with types, NOT NULL, identity, and defaults that do not use a sequence; then the
primary key, and the index of the replica identity. Enums, domains and composite types that the target lacks are
created, too. A partitioned table becomes a plain one: its rows are published as those of one table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from psycopg.sql import SQL, Composed, Identifier, Literal

from walmere.pgoutput.messages import ReplicaIdentity
from walmere.publisher.connect import Connection
from walmere.publisher.table import Table

_COLUMNS: Final = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity::text,
    CASE WHEN a.attgenerated = '' AND NOT EXISTS(
        SELECT FROM pg_depend d JOIN pg_class s ON s.oid = d.refobjid AND s.relkind = 'S'
        WHERE d.classid = 'pg_attrdef'::regclass AND d.objid = e.oid AND d.refclassid = 'pg_class'::regclass
    ) THEN pg_get_expr(e.adbin, e.adrelid) END,
    CASE WHEN a.atthasmissing AND t.typdelim = ',' THEN (a.attmissingval::text::text[])[1] END
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_attrdef e ON e.adrelid = a.attrelid AND e.adnum = a.attnum
WHERE a.attrelid = %s AND a.attname = ANY(%s) AND NOT a.attisdropped ORDER BY a.attnum
"""
_INDEX: Final = """
SELECT i.indisprimary, c.relname, (
    SELECT array_agg(a.attname::text ORDER BY k.place) FROM unnest(i.indkey::int2[]) WITH ORDINALITY k(attnum, place)
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum WHERE k.place <= i.indnkeyatts
), coalesce(n.condeferrable, false), coalesce(n.condeferred, false)
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
LEFT JOIN pg_constraint n ON n.conrelid = i.indrelid AND n.conindid = i.indexrelid AND n.contype = 'p'
WHERE i.indrelid = %s AND (i.indisprimary OR i.indisreplident) ORDER BY i.indisprimary DESC
"""
_TYPES: Final = """
WITH RECURSIVE used(oid, depth) AS (
    SELECT a.atttypid, 0 FROM pg_attribute a WHERE a.attrelid = %s AND a.attname = ANY(%s) AND NOT a.attisdropped
    UNION SELECT part, depth + 1 FROM used JOIN pg_type t ON t.oid = used.oid, LATERAL (
        SELECT unnest(ARRAY[t.typelem, t.typbasetype])
        UNION SELECT atttypid FROM pg_attribute WHERE attrelid = t.typrelid AND attnum > 0 AND NOT attisdropped
    ) AS of(part)
    WHERE part <> 0
), deepest AS (SELECT oid, max(depth) AS depth FROM used GROUP BY oid)
SELECT n.nspname, t.typname, t.typtype::text,
    ARRAY(SELECT e.enumlabel::text FROM pg_enum e WHERE e.enumtypid = t.oid ORDER BY e.enumsortorder),
    format_type(t.typbasetype, t.typtypmod), t.typnotnull,
    ARRAY(SELECT pg_get_constraintdef(c.oid) FROM pg_constraint c WHERE c.contypid = t.oid AND c.contype = 'c'),
    ARRAY(SELECT quote_ident(a.attname) || ' ' || format_type(a.atttypid, a.atttypmod) FROM pg_attribute a
          WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum)
FROM deepest JOIN pg_type t ON t.oid = deepest.oid JOIN pg_namespace n ON n.oid = t.typnamespace
WHERE (t.typtype IN ('e', 'd') OR EXISTS(SELECT FROM pg_class c WHERE c.oid = t.typrelid AND c.relkind = 'c'))
AND n.nspname NOT IN ('pg_catalog', 'information_schema')
AND NOT EXISTS(SELECT FROM pg_depend d WHERE d.classid = 'pg_type'::regclass AND d.objid = t.oid AND d.deptype = 'e')
ORDER BY deepest.depth DESC, t.oid
"""


@dataclass(frozen=True, slots=True)
class TableDdl:
    """How to create a table."""

    types: tuple[str, ...] = ()  # create the types of its columns, if they do not exist
    create: tuple[str, ...] = ()
    after: tuple[str, ...] = ()  # when its rows are there
    added: dict[str, str] = field(default_factory=dict)  # by name, a column that is added later, for existing rows
    defaults: dict[str, str] = field(default_factory=dict)  # by name, its default for new rows


def table_ddl(connection: Connection, table: Table) -> TableDdl:
    """Read the DDL of a table."""
    names = [column.name for column in table.columns]
    name = Identifier(table.schema, table.name)
    definitions, added, defaults = [], {}, {}
    for column, kind, not_null, identity, default, missing in connection.execute(_COLUMNS, [table.oid, names]):
        plain = SQL("{} {}").format(Identifier(column), SQL(kind))
        definition = plain + SQL(" NOT NULL" if not_null else "")
        if identity:
            definition += SQL(f" GENERATED {'ALWAYS' if identity == 'a' else 'BY DEFAULT'} AS IDENTITY")
        elif default is not None:
            definition += SQL(" DEFAULT ") + SQL(default)
        definitions.append(definition)
        if missing is not None:
            plain += SQL(" DEFAULT ") + Literal(missing)
        added[column] = plain.as_string(connection)
        if default is not None:
            defaults[column] = default
    types = [each for row in connection.execute(_TYPES, [table.oid, names]) for each in _type(row)]
    create = [_schema(table.schema), SQL("CREATE TABLE {} ({})").format(name, SQL(", ").join(definitions))]
    after = _identity(connection, table, name)
    return TableDdl(
        tuple(each.as_string(connection) for each in types),
        tuple(each.as_string(connection) for each in create),
        tuple(each.as_string(connection) for each in after),
        added,
        defaults,
    )


def _type(row: tuple[Any, ...]) -> list[Composed]:
    """Create an enum, a domain or a composite type, and its schema, if they do not exist."""
    schema, name, kind, labels, base, not_null, checks, attributes = row
    type_name = Identifier(schema, name)
    if kind == "e":
        create = SQL("CREATE TYPE {} AS ENUM ({})").format(type_name, SQL(", ").join(map(Literal, labels)))
    elif kind == "c":
        create = SQL("CREATE TYPE {} AS ({})").format(type_name, SQL(", ").join(map(SQL, attributes)))
    else:
        more = SQL(" ").join([SQL("NOT NULL" if not_null else ""), *map(SQL, checks)])
        create = SQL("CREATE DOMAIN {} AS {} {}").format(type_name, SQL(base), more)
    found = SQL("pg_type JOIN pg_namespace n ON n.oid = typnamespace WHERE nspname = {} AND typname = {}")
    return [_schema(schema), _unless(found.format(Literal(schema), Literal(name)), create)]


def _schema(name: str) -> Composed:
    """Create a schema, if it does not exist. IF NOT EXISTS needs the privilege to create one, even if it exists."""
    found = SQL("pg_namespace WHERE nspname = {}").format(Literal(name))
    return _unless(found, SQL("CREATE SCHEMA {}").format(Identifier(name)))


def _unless(found: Composed, create: Composed) -> Composed:
    """Run a statement if a query of the catalogs finds nothing."""
    block = SQL("BEGIN IF NOT EXISTS (SELECT FROM {}) THEN {}; END IF; END").format(found, create)
    return SQL("DO {}").format(Literal(block.as_string(None)))


def _identity(connection: Connection, table: Table, name: Identifier) -> list[Composed]:
    """The primary key and the index of the replica identity, each if all its columns are published."""
    statements: list[Composed] = []
    published = {column.name for column in table.columns}
    for primary, index, columns, deferrable, deferred in connection.execute(_INDEX, [table.oid]):
        if not set(columns) <= published:
            continue
        listed = SQL(", ").join(map(Identifier, columns))
        more = SQL(" DEFERRABLE" * deferrable + " INITIALLY DEFERRED" * deferred)
        add = SQL("ALTER TABLE {0} ADD CONSTRAINT {1} PRIMARY KEY ({2}){3};")
        if not primary:
            add = SQL("CREATE UNIQUE INDEX {1} ON {0} ({2}); ALTER TABLE {0} REPLICA IDENTITY USING INDEX {1};")
        # the target may have a table that was renamed at the source, with an index of this name
        first, second = (add.format(name, Identifier(each), listed, more) for each in (index, f"{table.oid}_{index}"))
        block = SQL("BEGIN {} EXCEPTION WHEN duplicate_table THEN {} END").format(first, second)
        statements.append(SQL("DO {}").format(Literal(block.as_string(None))))
    if table.replica_identity is ReplicaIdentity.FULL:
        statements.append(SQL("ALTER TABLE {} REPLICA IDENTITY FULL").format(name))
    return statements
