"""What the behaviour suite does with a sink: one way to write and to read for lakes and for databases.

A lake gets the net effect of a batch in Arrow types, and commits each table by itself. A database gets changes as
PostgreSQL's text, and applies them in a transaction. A `Writer` hides this difference, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Protocol

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from psycopg.sql import SQL, Composed, Identifier
from psycopg.types import TypeInfo
from psycopg.types.hstore import register_hstore
from pydantic import SecretStr

from conftest import Database
from sinks.histories import SCHEMA, UNCHANGED, Change, Row, typed
from walmere.apply.decode import TextChanges, Truncation
from walmere.apply.fold import Changes, fold
from walmere.apply.transaction import TableChanges, apply_changes
from walmere.config import PostgresTarget
from walmere.directory import Directory
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.owner import Owner
from walmere.publisher.ddl import TableDdl
from walmere.sinks.base import OVERWRITE, LakeSink, Sink, StagedFile
from walmere.sinks.postgres import transaction as target_transaction
from walmere.sinks.postgres.copying import Copy
from walmere.sinks.postgres.sink import PostgresSink
from walmere.sinks.postgres.text import copy_text

BY_ID = Identity("d", ("id",))


class Dead(BaseException):
    """A process that has died."""


class RunningCopy(Protocol):
    """The copy of a table, while it is made."""

    def range(self, number: int, rows: Sequence[Row]) -> None:
        """What a task does. It may run several times."""

    def commit(self, lsn: int) -> int:
        """Make the copy the contents of the table. Returns the version."""

    def abandon(self) -> None:
        """The copy has failed."""


class Writer(Protocol):
    """Writes to a target as a run does. It pickles."""

    @property
    def sink(self) -> Sink: ...

    def begin_copy(self, table: TableName, schema: pa.Schema) -> RunningCopy: ...

    def apply(
        self, table: TableName, changes: Sequence[Change], lsn: int, identity: Identity, schema: pa.Schema
    ) -> int:
        """Apply a batch. Returns the version of the table."""

    def evolve(self, table: TableName, schema: pa.Schema, added: str, value: Any, renamed: tuple[str, str]) -> None:
        """Rename a column of a table that has these columns, and add one, with a value for all rows."""


@dataclass(frozen=True)
class Subject:
    """A sink under test, and what others do at its target."""

    writer: Writer
    create: Callable[[TableName, pa.Schema, Identity], None]  # what is needed before a table can be copied
    read: Callable[[TableName], pa.Table]
    again: Callable[[], Writer]  # the same, made anew as another process would
    dying: Callable[[], AbstractContextManager[None]]  # a context in which the writer dies at each commit
    races: int = 6  # how often two attempts are made at once

    @property
    def sink(self) -> Sink:
        return self.writer.sink


def table_of(*rows: Row, schema: pa.Schema = SCHEMA) -> pa.Table:
    columns = [pa.array([r[i] for r in rows], schema.field(i).type) for i in range(len(schema))]
    return pa.table(columns, schema=schema)


@contextmanager
def dying(where: Any, name: str) -> Iterator[None]:
    """A context in which a call of this function is death."""

    def die(*_: Any, **__: Any) -> None:
        raise Dead

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, die)
        yield


# -- lakes


@dataclass
class LakeCopy:
    sink: LakeSink
    table: TableName
    schema: pa.Schema
    staged: dict[int, list[StagedFile]] = field(default_factory=dict)  # by task; Spark takes one attempt of each

    def range(self, number: int, rows: Sequence[Row]) -> None:
        batches = table_of(*rows, schema=self.schema).to_batches()
        self.staged[number] = self.sink.stage(self.table, batches, self.schema)

    def commit(self, lsn: int) -> int:
        files = [file for each in self.staged.values() for file in each]
        return self.sink.commit(self.table, files, Lsn(lsn), OVERWRITE, self.schema)

    def abandon(self) -> None:
        """Its files are nobody's."""


@dataclass(frozen=True)
class LakeWriter:
    sink: LakeSink

    def begin_copy(self, table: TableName, schema: pa.Schema) -> LakeCopy:
        self.sink.create(table, schema)
        return LakeCopy(self.sink, table, schema)

    def apply(
        self, table: TableName, changes: Sequence[Change], lsn: int, identity: Identity, schema: pa.Schema
    ) -> int:
        return self.sink.apply(table, fold(typed(changes, schema), identity), Lsn(lsn), identity)

    def evolve(self, table: TableName, schema: pa.Schema, added: str, value: Any, renamed: tuple[str, str]) -> None:
        old, new = renamed
        names = [new if name == old else name for name in schema.names]
        wanted = pa.schema([*zip(names, schema.types, strict=True), (added, pa.string())])
        self.sink.evolve(table, wanted, [*schema.names, pa.scalar(value, pa.string())])


def lake(sink: LakeSink, read: Callable[[TableName], pa.Table], again: Callable[[], LakeSink], races: int) -> Subject:
    return Subject(
        LakeWriter(sink),
        lambda *_: None,
        read,
        lambda: LakeWriter(again()),
        lambda: dying(Directory, "create"),
        races,
    )


# -- databases

_PLAIN: Final = {
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.bool_(): "boolean",
    pa.string(): "text",
    pa.binary(): "bytea",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp without time zone",
    pa.timestamp("us", "UTC"): "timestamp with time zone",
    pa.map_(pa.string(), pa.string()): "hstore",
}
_FLOATS: Final = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}


def pg_type(kind: pa.DataType) -> str:
    """The type of PostgreSQL whose values have this type of Arrow."""
    if pa.types.is_list(kind):
        return pg_type(kind.value_type) + "[]"
    return f"numeric({kind.precision},{kind.scale})" if pa.types.is_decimal(kind) else _PLAIN[kind]


def arrow_type(name: str) -> pa.DataType:
    """The inverse of `pg_type`."""
    if name.endswith("[]"):
        return pa.list_(arrow_type(name[:-2]))
    if name.startswith("numeric("):
        return pa.decimal128(*map(int, name[8:-1].split(",")))
    return {text: kind for kind, text in _PLAIN.items()}[name]


def as_text(value: Any) -> bytes | None:
    """A value as PostgreSQL writes it."""
    if value is None or value is UNCHANGED:
        return None
    match value:
        case bool():
            return b"t" if value else b"f"
        case bytes():
            return b"\\x" + value.hex().encode()
        case float():
            return _FLOATS.get(repr(value), repr(value)).encode()
        case datetime():
            return value.isoformat(" ").encode()
        case [(_, _), *_]:
            pairs = (f"{_quoted(key)}=>{'NULL' if each is None else _quoted(each)}" for key, each in value)
            return ", ".join(pairs).encode()
        case list():
            return ("{" + ",".join("NULL" if each is None else _quoted(str(each)) for each in value) + "}").encode()
    return str(value).encode()


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def text_table(rows: Sequence[Row | None], schema: pa.Schema = SCHEMA) -> pa.Table:
    """Rows as columns of PostgreSQL's text."""
    absent: Row = (None,) * len(schema)
    listed = [absent if row is None else row for row in rows]
    columns = []
    for i, kind in enumerate(schema.types):
        texts = [as_text(row[i]) for row in listed]
        if pa.types.is_map(kind):  # an empty one looks like an empty array
            texts = [b"" if row[i] == [] else text for row, text in zip(listed, texts, strict=True)]
        columns.append(pa.array(texts, pa.binary()))
    return pa.table(columns, names=schema.names)


def text_changes(changes: Sequence[Change], schema: pa.Schema = SCHEMA, first: int = 1000) -> TextChanges:
    """Changes as `decode_text` gives them; each is a transaction of its own."""
    rows = [(first + number, each) for number, each in enumerate(changes) if each.kind != "T"]
    masks = []
    for i in range(len(schema)):
        mask = np.array([c.new is not None and c.new[i] is UNCHANGED for _, c in rows], np.bool_)
        masks.append(mask if mask.any() else None)
    lsns = np.array([number for number, _ in rows], np.uint64)
    return TextChanges(
        Changes(
            np.array([ord(c.kind) for _, c in rows], np.uint8),
            text_table([c.new for _, c in rows], schema),
            tuple(masks),
            np.array([c.old_kind for _, c in rows], np.uint8),
            text_table([c.old for _, c in rows], schema) if any(c.old_kind for _, c in rows) else None,
        ),
        lsns,
        lsns,
        tuple(
            Truncation(first + number, first + number, cascade=False, restart_identity=False)
            for number, each in enumerate(changes)
            if each.kind == "T"
        ),
    )


@dataclass(frozen=True)
class DatabaseCopy:
    copy: Copy
    schema: pa.Schema

    def range(self, number: int, rows: Sequence[Row]) -> None:
        self.copy.copy_range(str(number), copy_text(text_table(rows, self.schema)))

    def commit(self, lsn: int) -> int:
        return self.copy.finish(Lsn(lsn))

    def abandon(self) -> None:
        self.copy.abandon()


@dataclass(frozen=True)
class DatabaseWriter:
    sink: PostgresSink

    def begin_copy(self, table: TableName, schema: pa.Schema) -> DatabaseCopy:
        return DatabaseCopy(self.sink.begin_copy(table, schema.names), schema)

    def apply(
        self, table: TableName, changes: Sequence[Change], lsn: int, identity: Identity, schema: pa.Schema
    ) -> int:
        with self.sink.transaction([table]) as transaction:
            stored = transaction.stored[table]
            if stored.lsn is not None and stored.lsn >= lsn:
                return stored.version
            apply_changes(transaction, [TableChanges(table, identity, text_changes(changes, schema), Lsn(lsn))])
            transaction.reached[table] = Lsn(lsn)
            return self.sink.commit_transaction(transaction, Lsn(lsn), None)[table]

    def evolve(self, table: TableName, schema: pa.Schema, added: str, value: Any, renamed: tuple[str, str]) -> None:
        old, new = renamed
        names = [new if name == old else name for name in schema.names]
        columns = {name: f'"{name}" {pg_type(kind)}' for name, kind in zip(names, schema.types, strict=True)}
        columns[added] = f"\"{added}\" text DEFAULT '{value}'"
        self.sink.alter(table, TableDdl(added=columns), {new: old})


def sink_of(database: Database, **more: Any) -> PostgresSink:
    """A sink that writes to a database as its superuser."""
    target = PostgresTarget(kind="postgres", dsn=SecretStr(database.dsn))
    return PostgresSink(**{"address": target, "subscription": "test", "owner": Owner("test", "1", 1), **more})


class DatabaseSubjects:
    """A database whose tables are targets, one test after the other."""

    def __init__(self, database: Database) -> None:
        self.database = database
        database.connection.prepare_threshold = None  # each test has other tables
        database.execute("CREATE EXTENSION hstore", "SET TimeZone = 'UTC'")
        info = TypeInfo.fetch(database.connection, "hstore")
        assert info is not None
        register_hstore(info, database.connection)
        self._roles: list[str] = []

    def sink(self, user: str = "postgres", **more: Any) -> PostgresSink:
        target = PostgresTarget(kind="postgres", dsn=SecretStr(self.database.server.dsn(self.database.name, user)))
        return PostgresSink(target, "test", **{"owner": Owner("test", "1", 1), "create_tables": True, **more})

    def subject(self, *, row_by_row: bool = False, origins: bool = True) -> Subject:
        """`row_by_row`: all changes are applied so. `origins`: whether the role may use replication origins."""
        user = "postgres" if origins else self._role()
        sink = self.sink(user)

        def create(table: TableName, schema: pa.Schema, identity: Identity) -> None:
            self._create(table, schema, identity, user, row_by_row=row_by_row)

        return Subject(
            DatabaseWriter(sink),
            create,
            self.read,
            lambda: DatabaseWriter(self.sink(user)),
            lambda: dying(target_transaction, "stamp"),
            races=3 if row_by_row or not origins else 6,
        )

    def _role(self) -> str:
        """A role that may do what it needs, and may not use origins."""
        if self.database.major < 15:
            pytest.skip("before PostgreSQL 15, only a superuser may set session_replication_role")
        name = f"{self.database.name}_no_origins"
        if name not in self._roles:
            self.database.execute(
                f"CREATE ROLE {name} LOGIN",
                f"GRANT CREATE ON DATABASE {self.database.name} TO {name}",
                f"GRANT SET ON PARAMETER session_replication_role TO {name}",
            )
            self._roles.append(name)
        return name

    def _create(self, table: TableName, schema: pa.Schema, identity: Identity, owner: str, *, row_by_row: bool) -> None:
        columns = SQL(", ").join(SQL("{} {}").format(Identifier(each.name), SQL(pg_type(each.type))) for each in schema)
        name = Identifier(*table)
        statements: list[Composed] = [
            SQL("CREATE SCHEMA IF NOT EXISTS {}").format(Identifier(table.namespace)),
            SQL("GRANT ALL ON SCHEMA {} TO {}").format(Identifier(table.namespace), Identifier(owner)),
            SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(name, columns),
            SQL("ALTER TABLE {} OWNER TO {}").format(name, Identifier(owner)),
        ]
        if identity.keyed:
            key = SQL(", ").join(map(Identifier, identity.key))
            statements.append(SQL("CREATE UNIQUE INDEX ON {} ({})").format(name, key))
        if row_by_row:
            rule = "CREATE OR REPLACE RULE never AS ON UPDATE TO {} WHERE false DO INSTEAD NOTHING"
            statements += [SQL(rule).format(name), SQL("ALTER TABLE {} ENABLE ALWAYS RULE never").format(name)]
        for statement in statements:
            self.database.connection.execute(statement)

    def read(self, table: TableName) -> pa.Table:
        connection = self.database.connection
        columns = connection.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            " WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            [Identifier(*table).as_string(connection)],
        ).fetchall()
        schema = pa.schema([(name, arrow_type(kind)) for name, kind in columns])
        rows = connection.execute(SQL("SELECT * FROM {}").format(Identifier(*table))).fetchall()
        plain = [tuple(list(each.items()) if isinstance(each, dict) else each for each in row) for row in rows]
        return table_of(*plain, schema=schema)

    def clean(self) -> None:
        """Remove what a test has made."""
        for (name,) in self.database.rows(
            "SELECT nspname FROM pg_namespace WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'"
            " AND nspname <> 'public'"
        ):
            self.database.connection.execute(SQL("DROP SCHEMA {} CASCADE").format(Identifier(name)))
        for (name,) in self.database.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
            self.database.connection.execute(SQL("DROP TABLE {} CASCADE").format(Identifier("public", name)))

    def drop(self) -> None:
        self.clean()
        server = self.database.server
        for name in self._roles:
            self.database.execute(f"DROP OWNED BY {name}", f"DROP ROLE {name}")
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            for (origin,) in admin.execute("SELECT roname FROM pg_replication_origin WHERE roname ~ '^walmere_test'"):
                admin.execute("SELECT pg_replication_origin_drop(%s)", [origin])
        self.database.drop()
