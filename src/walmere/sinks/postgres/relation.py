"""The tables of the target, as its catalogs describe them: columns, unique keys, triggers, privileges.

They are read in every batch, all in one query, because they may be altered at any time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psycopg.sql import SQL, Composable, Identifier

from walmere.errors import ColumnMissing, SinkMismatch, SinkRefused
from walmere.names import Identity, TableName
from walmere.sinks.postgres.connect import Connection

_PLAIN: Final = re.compile(r"[a-z_][a-z0-9_]*")
_IN_TREE: Final = (
    "CASE c.relkind WHEN 'p' THEN ARRAY(SELECT relid::oid FROM pg_partition_tree(c.oid)) ELSE ARRAY[c.oid] END"
)
_RELATIONS: Final = f"""
WITH RECURSIVE domains AS (
    SELECT oid AS domain, typbasetype AS type, typtypmod AS modifier FROM pg_type WHERE typtype = 'd'
    UNION ALL SELECT d.domain, b.typbasetype, b.typtypmod
    FROM domains d JOIN pg_type b ON b.oid = d.type AND b.typtype = 'd'
), bases AS MATERIALIZED (SELECT d.* FROM domains d JOIN pg_type b ON b.oid = d.type AND b.typtype <> 'd')
SELECT n.nspname, c.relname, c.oid::int8, c.relkind::text, coalesce(columns.found, '[]'), coalesce(keys.found, '[]'),
    ARRAY(
        SELECT g.tgname::text FROM pg_trigger g
        WHERE g.tgrelid = ANY({_IN_TREE}) AND NOT g.tgisinternal AND g.tgenabled IN ('R', 'A')
        UNION SELECT w.rulename::text FROM pg_rewrite w
        WHERE w.ev_class = c.oid AND w.rulename <> '_RETURN' AND w.ev_enabled IN ('R', 'A')
    ),
    EXISTS(
        SELECT FROM pg_trigger g WHERE g.tgrelid = c.oid AND NOT g.tgisinternal AND g.tgenabled IN ('R', 'A')
        AND g.tgtype & 1 = 0
    ),
    EXISTS(SELECT FROM pg_constraint f WHERE f.contype = 'f' AND f.confrelid = c.oid),
    ARRAY(
        SELECT p FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) p
        WHERE NOT has_table_privilege(c.oid, p)
    ),
    row_security_active(c.oid), has_schema_privilege(n.oid, 'USAGE'),
    EXISTS(
        SELECT FROM pg_trigger g WHERE g.tgrelid = ANY({_IN_TREE}) AND NOT g.tgisinternal AND g.tgenabled IN ('R', 'A')
    ),
    coalesce(pg_partition_root(c.oid)::oid, c.oid)::int8,
    ARRAY(
        SELECT DISTINCT coalesce(pg_partition_root(g.tgconstrrelid)::oid, g.tgconstrrelid)::int8 FROM pg_trigger g
        WHERE g.tgrelid = ANY({_IN_TREE}) AND g.tgisinternal AND g.tgconstrrelid <> 0 AND g.tgenabled IN ('R', 'A')
    ),
    ARRAY(
        SELECT DISTINCT quote_ident(o.nspname) || '.' || quote_ident(f.conname)
        FROM pg_trigger g JOIN pg_constraint f ON f.oid = g.tgconstraint JOIN pg_namespace o ON o.oid = f.connamespace
        WHERE g.tgrelid = ANY({_IN_TREE}) AND g.tginitdeferred AND g.tgenabled IN ('R', 'A')
    )
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN unnest($1::text[], $2::text[]) AS wanted(schema, name) ON n.nspname = wanted.schema AND c.relname = wanted.name,
LATERAL (
    SELECT json_agg(json_build_array(
        a.attname, format_type(base.type, -1), format_type(base.type, base.modifier),
        format_type(a.atttypid, a.atttypmod), a.attidentity, a.attgenerated <> '',
        (SELECT quote_ident(o.nspname) FROM pg_operator e JOIN pg_namespace o ON o.oid = e.oprnamespace
         WHERE e.oprname = '=' AND e.oprleft = base.type AND e.oprright = base.type LIMIT 1),
        (SELECT y.typarray <> 0 AND y.typdelim = ',' AND y.typtype <> 'c' FROM pg_type y WHERE y.oid = base.type)
    ) ORDER BY a.attnum) AS found
    FROM pg_attribute a LEFT JOIN bases ON bases.domain = a.atttypid, LATERAL (
        SELECT coalesce(bases.type, a.atttypid) AS type,
            CASE WHEN bases.type IS NULL THEN a.atttypmod ELSE bases.modifier END AS modifier
    ) base
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
) columns,
LATERAL (
    SELECT json_agg(json_build_array(
        i.indisprimary, i.indisreplident, i.indimmediate AND of_index.same_collations, of_index.columns,
        coalesce((to_jsonb(i) ->> 'indnullsnotdistinct')::bool, false)
    ) ORDER BY i.indisprimary DESC, i.indexrelid) AS found
    FROM pg_index i,
    LATERAL (
        SELECT json_agg(a.attname ORDER BY k.place) AS columns,
            bool_and(k.collid = a.attcollation) AS same_collations
        FROM unnest(i.indkey::int2[], i.indcollation::oid[]) WITH ORDINALITY k(attnum, collid, place)
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum WHERE k.place <= i.indnkeyatts
    ) of_index
    WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
) keys
WHERE c.relkind NOT IN ('i', 'I', 'S', 't', 'c')
"""  # noqa: S608  only text of this module


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column of the target."""

    name: str
    type: str  # for a cast, of a domain its base type, without a modifier: an assignment checks, a cast would truncate
    stored: str  # the same with the modifier
    declared: str  # as in CREATE TABLE
    identity: str  # pg_attribute.attidentity
    generated: bool
    operator_schema: str | None  # of its = operator, if the type has one of its own
    has_array: bool  # values can be elements of an array that unnest divides again

    @property
    def equals(self) -> Composable:
        """Its = operator."""
        return SQL("=") if self.operator_schema is None else SQL(f"OPERATOR({self.operator_schema}.=)")

    @property
    def compared(self) -> str:
        """For a value that is compared: with the modifier, by which the target has rounded its values.

        Not for text and bits of a limited length: a cast would cut off what is too long, and find another row.
        """
        limited = self.padded or self.stored.startswith(("character varying", "bit"))
        return self.type if limited else self.stored

    @property
    def array(self) -> str:
        """The type of a parameter with the values of many rows: the server reads each of them once, if it can."""
        return f"{self.type}[]" if self.has_array else "text[]"

    @property
    def padded(self) -> bool:
        """Whether the server pads its values with blanks."""
        return self.stored.startswith("character(") and not self.stored.endswith("]")

    def in_row(self, value: Composable) -> Composable:
        """A value of its type, for a comparison of whole rows as text."""
        return SQL("{}::text").format(value) if self.padded else value  # without the blanks

    @property
    def sql(self) -> Identifier:
        return Identifier(self.name)


@dataclass(frozen=True, slots=True)
class TargetRelation:
    """A table of the target."""

    table: TableName
    oid: int
    kind: str  # pg_class.relkind
    columns: Mapping[str, TargetColumn]
    keys: Sequence[tuple[str, ...]]  # the columns of each unique index, the primary key first
    primary_key: tuple[str, ...]
    null_keys: Sequence[tuple[str, ...]]  # those of `keys` to which NULLs are equal (NULLS NOT DISTINCT)
    indexed: Sequence[tuple[str, ...]]  # those of `keys` that are checked at once, by the columns' own collations
    replica_identity: tuple[str, ...]  # the index by which PostgreSQL finds a row with replica identity FULL, if any
    fires: Sequence[str]  # triggers and rules that are enabled for a subscriber
    fires_per_statement: bool
    referenced: bool  # by a foreign key
    lacks: Sequence[str]  # privileges
    row_security: bool
    in_reach: bool  # the role may use its schema
    has_triggers: bool  # that are enabled for a subscriber
    root: int  # the OID of the partitioned table that it is a part of, or its own
    linked_roots: Sequence[int]  # the same of tables at the other end of foreign keys that are enabled for a subscriber
    deferred: Sequence[str]  # constraints and their triggers, enabled for a subscriber, that are checked at the commit

    @property
    def sql(self) -> Composable:
        return Identifier(*self.table)

    @property
    def only(self) -> Composable:
        """For UPDATE and DELETE: a subscriber changes the table itself, not those that inherit from it."""
        return self.sql if self.kind == "p" else SQL("ONLY ") + self.sql

    def local(self, names: Collection[str]) -> list[TargetColumn]:
        """The columns that are not published, without generated ones."""
        return [each for each in self.columns.values() if each.name not in names and not each.generated]

    def is_unique(self, identity: Identity) -> bool:
        """Whether at most one row has a given key."""
        return self.has_index(identity.key)

    def has_index(self, names: Iterable[str]) -> bool:
        """Whether a unique index finds the rows with given values of these columns."""
        return any(set(key) <= set(names) for key in self.indexed)

    def require(self, names: Iterable[str], doing: str) -> None:
        """Raise if the table cannot take these columns, or the role may not write to it."""
        if self.kind not in ("r", "p"):
            raise SinkMismatch(doing, f"{self.table} is not a table", "only tables can be a target")
        if not self.in_reach:
            schema = self.table.namespace
            wrong = f"the role lacks USAGE on the schema {schema} of {self.table}"
            raise SinkRefused(doing, wrong, f"GRANT USAGE ON SCHEMA {_in_sql(schema)} TO …;")
        if self.lacks:
            wrong = f"the role lacks {', '.join(self.lacks)} on {self.table}"
            raise SinkRefused(doing, wrong, f"GRANT {', '.join(self.lacks)} ON {_in_sql(*self.table)} TO …;")
        if self.row_security:
            wrong = f"row security applies to the role on {self.table}"
            raise SinkRefused(doing, wrong, "ALTER ROLE … BYPASSRLS; or make the role the owner of the table")
        missing = [name for name in names if name not in self.columns]
        if missing:
            raise missing_columns(self.table, missing, doing)
        generated = [name for name in names if self.columns[name].generated]
        if generated:
            wrong = f"{self.table} of the target generates columns that are published: {', '.join(generated)}"
            raise SinkMismatch(doing, wrong, "drop the expressions there, or publish a column list without them")


def _in_sql(*parts: str) -> str:
    """A name for a statement in a hint: quoted where it is not plain."""
    return ".".join(part if _PLAIN.fullmatch(part) else Identifier(part).as_string(None) for part in parts)


def missing_columns(
    table: TableName,
    missing: Sequence[str],
    doing: str,
    definitions: Mapping[str, str] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> ColumnMissing:
    """The error for columns that the target's table does not have.

    `definitions`: of all columns of the source, in SQL. `renamed`: old names, which the target has, by new ones.
    """
    columns = "column" if len(missing) == 1 else "columns"
    definitions, renamed = definitions or {}, renamed or {}
    statements: list[str] = []
    added: list[str] = []
    for name in missing:
        wanted = name
        while wanted in renamed:
            old = renamed[wanted]
            rename = f"RENAME COLUMN {_in_sql(old)} TO {_in_sql(wanted)}"
            statements.append(f"ALTER TABLE {_in_sql(*table)} {rename}; ")
            wanted = old
        if wanted == name or wanted in definitions:  # a new column may have the old name of another one
            added.append(f"ADD COLUMN {definitions.get(wanted, f'{_in_sql(wanted)} …')}")
    if added:  # a RENAME must be a statement of its own
        statements.append(f"ALTER TABLE {_in_sql(*table)} {', '.join(added)}; ")
    return ColumnMissing(
        doing,
        f"the target's table {table} lacks the {columns} {', '.join(missing)}",
        f"{''.join(statements)}or set target.create_tables = true",
    )


def missing_table(table: TableName, doing: str) -> SinkMismatch:
    """The error for a table that the target does not have."""
    hint = "create it there (pg_dump --schema-only shows how), or set target.create_tables = true"
    return SinkMismatch(doing, f"the target does not have the table {table}", hint)


def require_creation(connection: Connection, schema: str, what: str, doing: str) -> None:
    """Raise if the role may not create something in a schema, or the schema itself."""
    [row] = connection.execute(
        "SELECT coalesce((SELECT has_schema_privilege(oid, 'CREATE') FROM pg_namespace WHERE nspname = $1),"
        " has_database_privilege(current_database(), 'CREATE')), quote_ident($1), quote_ident(current_user),"
        " EXISTS(SELECT FROM pg_namespace WHERE nspname = $1)",
        [schema],
    ).fetchall()
    allowed, quoted, role, exists = row
    if not allowed:
        fix = f"GRANT USAGE, CREATE ON SCHEMA {quoted} TO {role};"
        hint = fix if exists else f"CREATE SCHEMA {quoted} AUTHORIZATION {role};"
        raise SinkRefused(doing, f"the role may not create {what}", hint)


def read_relations(connection: Connection, tables: Sequence[TableName]) -> dict[TableName, TargetRelation]:
    """Describe these tables. Those that do not exist are left out."""
    rows = connection.execute(
        _RELATIONS, [[each.namespace for each in tables], [each.name for each in tables]]
    ).fetchall()
    return {each.table: each for each in map(_relation, rows)}


def linked(relations: Iterable[TargetRelation]) -> set[TableName]:
    """Those of the tables that a foreign key links to another one of them, if a subscriber checks it."""
    among = list(relations)
    by_root: dict[int, list[TargetRelation]] = {}
    for each in among:
        by_root.setdefault(each.root, []).append(each)
    pairs = ((one, other) for one in among for root in one.linked_roots for other in by_root.get(root, ()))
    return {each.table for one, other in pairs if one is not other for each in (one, other)}


def require_same(connection: Connection, tables: Sequence[tuple[TableName, Sequence[str]]]) -> None:
    """Raise if somebody has altered tables since they were read, so that they cannot take these columns any more."""
    doing = "applying changes to the target"
    found = read_relations(connection, [table for table, _ in tables])
    for table, names in tables:
        if table not in found:
            raise missing_table(table, doing)
        found[table].require(names, doing)


def _relation(row: tuple[Any, ...]) -> TargetRelation:
    schema, name, oid, kind, columns, keys, *rest = row
    found = [TargetColumn(*each) for each in columns]
    by_identity = sorted((each for each in keys if each[0] or each[1]), key=lambda each: not each[1])
    return TargetRelation(
        TableName(schema, name),
        oid,
        kind,
        {each.name: each for each in found},
        [tuple(columns) for *_, columns, _ in keys],
        next((tuple(columns) for primary, _, _, columns, _ in keys if primary), ()),
        [tuple(columns) for *_, columns, nulls_equal in keys if nulls_equal],
        [tuple(columns) for _, _, is_checked, columns, _ in keys if is_checked],
        next((tuple(columns) for _, _, is_checked, columns, _ in by_identity if is_checked), ()),
        *rest,
    )
