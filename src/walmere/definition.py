"""The definition of a table: its columns and identity, from the source's catalogs or a Relation message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from walmere.names import Identity, TableName

MESSAGES_OID: Final = 0
"""The OID that stands for the table of logical messages. No relation of the source has it."""


@dataclass(frozen=True, slots=True)
class PublishedColumn:
    """A published column."""

    attnum: int  # never reused, so it distinguishes a renamed column from a new one
    name: str
    type_oid: int
    typmod: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class ShapedColumn:
    """A column of the source that the target does not have as it is."""

    name: str
    drop: bool = False
    mask: str | None = None  # see walmere.table_sections
    type: str | None = None

    @property
    def hidden(self) -> bool:
        """Whether the target must not have its values."""
        return self.drop or self.mask is not None


@dataclass(frozen=True, slots=True)
class Shaping:
    """How the target's table differs from the published one. If it changes, the table is copied again."""

    columns: tuple[ShapedColumn, ...] = ()
    types: tuple[tuple[str, str], ...] = ()  # chosen for types of PostgreSQL that columns of the table have
    key_fingerprint: str | None = None  # of the key of its hashes
    soft_deletes: str | None = None  # a column of the target with the time at which the row was deleted

    def column(self, name: str) -> ShapedColumn | None:
        """What is done with a column; None: nothing."""
        return next((each for each in self.columns if each.name == name), None)


class Layout(NamedTuple):
    """Numbers from the catalogs that change with DDL. Comparing two layouts shows what kind of DDL was run."""

    shape: int = 0  # names and types of all columns
    attnums: int = 0  # changes if a column is replaced, even by one of the same name
    versions: int = 0  # of the rows of pg_attribute
    filenodes: int = 0  # changes if all rows were rewritten
    replica_identity: int = 0
    rewrites: tuple[tuple[int, int], ...] = ()  # (heap, number): changes if ALTER TABLE may have rewritten all rows


class Shape(NamedTuple):
    """The part of a definition that a Relation message has, and that the target must follow."""

    table: TableName
    columns: tuple[tuple[str, int, int], ...]  # name, type, type modifier

    def same(self, other: Shape) -> bool:
        """Whether both are equal except for the order of columns: a partition may have another order than its root."""
        return self.table == other.table and sorted(self.columns) == sorted(other.columns)


@dataclass(frozen=True, slots=True)
class Definition:
    """A table as the catalogs described it when its target was created or altered."""

    columns: tuple[PublishedColumn, ...]  # published, in order
    natts: int  # relnatts, which counts dropped columns: a column with a greater attnum was added later
    layout: Layout
    publication_fingerprint: str  # changes when the publications publish the table in another way
    leaves: tuple[tuple[int, int], ...] = ()  # of a partitioned table: (OID, xid that attached it)
    partial: bool = False  # not all changes are published, so an inserted row may already exist
    gathered: bool = False  # the leaves are published under their own names
    identity: Identity | None = None  # of a partitioned table; None: use that of the Relation message
    xid: int = 0  # every transaction before it had ended when the catalogs were read
    shaping: Shaping | None = None  # None: the target has the published columns

    @property
    def key_identity(self) -> Identity | None:
        """The key by which batches find rows; None if there is none."""
        key = self.identity.key if self.identity is not None else tuple(c.name for c in self.columns if c.is_key)
        return Identity("d", key) if key else None

    @property
    def hidden(self) -> tuple[tuple[int, str], ...]:
        """The columns that are dropped or masked: attnum and name."""
        if self.shaping is None:
            return ()
        names = {each.name for each in self.shaping.columns if each.hidden}
        return tuple((column.attnum, column.name) for column in self.columns if column.name in names)

    def shape(self, table: TableName) -> Shape:
        """The shape that a Relation message of this definition would have."""
        return Shape(table, tuple((column.name, column.type_oid, column.typmod) for column in self.columns))
