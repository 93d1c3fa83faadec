"""The definition of a table: what the source's catalogs, or a Relation message, say of its columns and its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from walmere.names import Identity, TableName

MESSAGES_OID: Final = 0
"""The table of logical messages stands under this OID among the tables. No relation of the source has it."""


@dataclass(frozen=True, slots=True)
class PublishedColumn:
    """A published column."""

    attnum: int  # never given to another column: it tells a rename from a new one
    name: str
    type_oid: int
    typmod: int
    is_key: bool


class Layout(NamedTuple):
    """How a table is laid out, as numbers to compare: PostgreSQL changes some of them with some DDL."""

    shape: int = 0  # names and types of all columns
    attnums: int = 0  # another column, be it of the same name
    versions: int = 0  # of the rows of pg_attribute
    filenodes: int = 0  # all rows were written anew
    replica_identity: int = 0
    rewrites: tuple[tuple[int, int], ...] = ()  # by heap; another one if ALTER TABLE may have written all rows again;


class Shape(NamedTuple):
    """What a Relation message says of a table that its target has to follow."""

    table: TableName
    columns: tuple[tuple[str, int, int], ...]  # name, type, type modifier

    def same(self, other: Shape) -> bool:
        """Whether both are one, but for the order of columns: partitions may have another than their root."""
        return self.table == other.table and sorted(self.columns) == sorted(other.columns)


@dataclass(frozen=True, slots=True)
class Definition:
    """What the catalogs said of a table when its target was made like it."""

    columns: tuple[PublishedColumn, ...]  # published, in order
    natts: int  # columns that it ever had: one with a greater attnum was added later
    layout: Layout
    publication_fingerprint: str  # changes when the publications publish the table in another way
    leaves: tuple[tuple[int, int], ...] = ()  # of a partitioned table: who holds its rows, and since when
    partial: bool = False  # not all changes are published, so what is inserted may be there already
    gathered: bool = False  # the stream has its leaves, each under its own name
    identity: Identity | None = None  # of a partitioned table; None: the stream says it
    xid: int = 0  # every transaction before it had ended when the catalogs said this

    def shape(self, table: TableName) -> Shape:
        """As a Relation message would say it."""
        return Shape(table, tuple((column.name, column.type_oid, column.typmod) for column in self.columns))
