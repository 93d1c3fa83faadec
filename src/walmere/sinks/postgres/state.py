"""What Walmere stores in the target, in a schema of its own. All of it changes in the transactions that it is about.

    <schema>.format          the version of these tables
    <schema>.tables          for each mirrored table: its LSN, how often it was committed to, and a copy that is running
    <schema>.copied_ranges   of a running copy, the ranges that are committed, and the transactions that have done it
    <schema>.conflicts       changes that met a conflict
    <schema>.prepared        of each prepared transaction the tables that it changes; visible when it is committed
    <schema>.staged_changes  changes that are applied row by row without a temporary table; nobody else sees them

The LSN of a table is in the transaction that brings it there. So after a crash nothing is lost or applied twice. The
transaction also advances a replication origin, if the role may use one: it marks the changes, so that a publication of
the target can leave them out, and PostgreSQL shows its progress in `pg_replication_origin_status`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg.sql import SQL, Composable, Composed, Identifier
from psycopg.sql import Literal as SqlLiteral

from walmere.errors import SinkMismatch
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.owner import Owner
from walmere.sinks.postgres.connect import Connection

VERSION: Final = 1
_LOCK_TIMEOUT: Final = "30s"
"""How long to wait for another session that applies changes."""
STAGED_COLUMNS: Final = (
    "commit_lsn int8, sequence int8, relation int, kind text, old text[], new text[], unchanged bool[]"
)
_CREATE: Final = (
    "CREATE SCHEMA {schema}",
    "CREATE TABLE {schema}.format (version int NOT NULL)",
    "INSERT INTO {schema}.format VALUES (1)",
    "CREATE TABLE {schema}.tables (subscription text, schema text, name text, lsn pg_lsn, version int8 NOT NULL,"
    " owner text, copy text, PRIMARY KEY (subscription, schema, name))",
    "CREATE TABLE {schema}.copied_ranges (copy text, range text, xid xid8 NOT NULL, PRIMARY KEY (copy, range))",
    "CREATE TABLE {schema}.conflicts (id int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at timestamptz NOT NULL"
    ' DEFAULT now(), subscription text, relation text, conflict text, key text, "constraint" text, lsn pg_lsn,'
    " message text)",
    "CREATE INDEX ON {schema}.conflicts (subscription, relation, lsn)",
    "CREATE TABLE {schema}.prepared (subscription text, gid text, tables text[], PRIMARY KEY (subscription, gid))",
    f"CREATE UNLOGGED TABLE {{schema}}.staged_changes ({STAGED_COLUMNS})",
)


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A row of `tables`."""

    lsn: Lsn | None  # None: its rows are not known to be those of an LSN
    version: int
    owner: Owner | None
    copy: str | None  # which copy is running
    copied: bool  # whether its rows were written by Walmere


@dataclass(frozen=True, slots=True)
class State:
    """The tables of Walmere in the target, for one subscription."""

    schema: str
    subscription: str

    def sql(self, text: str) -> Composed:
        """A statement in which {schema} is the schema."""
        return SQL(text).format(schema=Identifier(self.schema))

    def exists(self, connection: Connection) -> bool:
        """Whether the tables exist. Raises SinkMismatch if another version of Walmere has made them."""
        # not by to_regclass, which may remember that the table did not exist
        query = (
            "SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = $1 AND c.relname = 'format'"
        )
        if not connection.execute(query, [self.schema]).fetchall():
            return False
        versions = [version for (version,) in connection.execute(self.sql("SELECT version FROM {schema}.format"))]
        if versions != [VERSION]:
            raise SinkMismatch(
                f"reading the schema {self.schema} of the target",
                f"its tables have format {versions}, not {VERSION}",
                "use the Walmere version that made them; or set another target.schema",
            )
        return True

    def create(self, connection: Connection) -> None:
        """Create the tables, if they do not exist."""
        if self.exists(connection):
            return
        with connection.transaction():
            # two that create them at once would fail in the catalogs
            connection.execute("SELECT pg_advisory_xact_lock(hashtext('walmere'), hashtext($1))", [self.schema])
            if self.exists(connection):
                return
            found = connection.execute("SELECT FROM pg_namespace WHERE nspname = $1", [self.schema]).fetchall()
            for statement in _CREATE[1:] if found else _CREATE:
                connection.execute(self.sql(statement))

    def read(self, connection: Connection, tables: Sequence[TableName], lock: str = "") -> dict[TableName, StoredTable]:
        """What is stored for these tables. `lock`: FOR UPDATE, or another lock."""
        query = (
            "SELECT t.schema, t.name, t.lsn::text, t.version, t.owner, t.copy FROM {schema}.tables t"
            " JOIN unnest($2::text[], $3::text[]) AS w(schema, name) USING (schema, name)"
            " WHERE t.subscription = $1 ORDER BY 1, 2 "
        )
        rows = connection.execute(
            self.sql(query + lock),
            [self.subscription, [each.namespace for each in tables], [each.name for each in tables]],
        )
        return {
            TableName(schema, name): StoredTable(
                (lsn and Lsn.parse(lsn)) or None, version, owner and Owner.from_json(owner), copy, lsn is not None
            )
            for schema, name, lsn, version, owner, copy in rows
        }

    def lock(self, connection: Connection) -> None:
        """Wait until no other session applies changes of the subscription, and keep others out until `unlock`."""
        connection.execute(
            SQL("SET lock_timeout = {}; SELECT pg_advisory_lock({}); SET lock_timeout = 0").format(
                SqlLiteral(_LOCK_TIMEOUT), self._lock_key
            )
        )

    def unlock(self, connection: Connection) -> None:
        """Let other sessions apply changes."""
        connection.execute(SQL("SELECT pg_advisory_unlock({})").format(self._lock_key))

    @property
    def _lock_key(self) -> Composable:
        return SQL("hashtextextended({}, 0)").format(SqlLiteral(f"walmere {self.schema} {self.subscription}"))

    def require(self, connection: Connection) -> None:
        """Raise the server's error if the tables that apply row by row are not there, or may not be used."""
        for name in ("conflicts", "staged_changes"):
            connection.execute(self.sql(f"SELECT FROM {{schema}}.{name} LIMIT 0"))

    def put(self, connection: Connection, table: TableName, owner: Owner | None) -> None:
        """Make sure that there is a row for a table."""
        connection.execute(
            self.sql("INSERT INTO {schema}.tables VALUES ($1, $2, $3, NULL, 0, $4) ON CONFLICT DO NOTHING"),
            [self.subscription, *table, None if owner is None else owner.to_json()],
        )

    def advance(self, connection: Connection, tables: Iterable[tuple[TableName, Lsn]]) -> dict[TableName, int]:
        """Store the LSNs that tables reach in this transaction. Returns their new versions."""
        reached = list(tables)
        rows = connection.execute(
            self.sql(
                "UPDATE {schema}.tables t SET lsn = w.lsn::pg_lsn, version = t.version + 1"
                " FROM unnest($2::text[], $3::text[], $4::text[]) AS w(schema, name, lsn)"
                " WHERE t.subscription = $1 AND t.schema = w.schema AND t.name = w.name"
                " RETURNING t.schema, t.name, t.version"
            ),
            [
                self.subscription,
                [table.namespace for table, _ in reached],
                [table.name for table, _ in reached],
                [str(lsn) for _, lsn in reached],
            ],
        )
        return {TableName(schema, name): version for schema, name, version in rows}

    def unfinished(self, connection: Connection) -> dict[TableName, str]:
        """The tables that are being copied, each with its copy."""
        query = "SELECT schema, name, copy FROM {schema}.tables WHERE subscription = $1 AND copy IS NOT NULL"
        rows = connection.execute(self.sql(query), [self.subscription]).fetchall()
        return {TableName(schema, name): copy for schema, name, copy in rows}

    def conflicts(self, connection: Connection) -> dict[str, int]:
        """How many conflicts each table has had."""
        query = "SELECT relation, count(*) FROM {schema}.conflicts WHERE subscription = $1 GROUP BY 1"
        return dict(connection.execute(self.sql(query), [self.subscription]).fetchall())

    def forget(self, connection: Connection) -> list[str]:
        """Delete everything of the subscription; and the schema, if no other subscription uses it."""
        with connection.transaction():
            connection.execute(self.sql("DELETE FROM {schema}.tables WHERE subscription = $1"), [self.subscription])
            connection.execute(self.sql("DELETE FROM {schema}.conflicts WHERE subscription = $1"), [self.subscription])
            connection.execute(self.sql("DELETE FROM {schema}.prepared WHERE subscription = $1"), [self.subscription])
            [row] = connection.execute(self.sql("SELECT count(*) FROM {schema}.tables")).fetchall()
            if row[0]:
                return [f"deleted the state of {self.subscription} in schema {self.schema} of the target"]
            for name in ("format", "tables", "copied_ranges", "conflicts", "prepared", "staged_changes"):
                connection.execute(SQL("DROP TABLE {}.{}").format(Identifier(self.schema), Identifier(name)))
            owned = "SELECT FROM pg_namespace WHERE nspname = $1 AND pg_has_role(nspowner, 'USAGE')"
            if not connection.execute(owned, [self.schema]).fetchall():  # somebody else has created it
                return [f"dropped the tables of Walmere in schema {self.schema} of the target"]
            connection.execute(SQL("DROP SCHEMA {} RESTRICT").format(Identifier(self.schema)))
        return [f"dropped schema {self.schema} of the target"]
