"""Changes of a table that are applied one by one, and the SQL that refers to one of them.

The block of `block` has each change as a record r. Its fields `new` and `old` are arrays of text, `unchanged` is an
array of bool. A row of the target is t.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from psycopg.sql import SQL, Composable, Identifier
from psycopg.sql import Literal as SqlLiteral

from walmere.names import Identity
from walmere.sinks.postgres.relation import TargetRelation

MARK: Final = SQL("/* walmere */")
"""Marks the statements that change rows: in the context of an error, what is inside of a statement stands before it."""


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Some changes of a table, their values as text."""

    kind: NDArray[np.uint8]  # I, U, D
    new: pa.Table
    unchanged: Sequence[NDArray[np.bool_] | None]
    old: pa.Table  # by which a row is found
    commit_lsn: NDArray[np.uint64]
    sequence: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RowChanges:
    """Changes of one table. Each piece of them is made when it is needed, so that memory does not grow with them."""

    relation: TargetRelation
    identity: Identity
    names: Sequence[str]
    old_names: Sequence[str]  # by which a row is found: those of its key, or of a multiset all
    pieces: Iterable[RowPiece]  # iterate over it once

    @property
    def shown_key(self) -> list[str]:
        """The columns that messages may show: those of the key. Other values are not shown."""
        key = self.identity.key if self.identity.keyed else self.relation.primary_key
        return [name for name in key if name in self.names]


@dataclass(frozen=True, slots=True)
class TruncateRows:
    """A TRUNCATE of several tables."""

    tables: Sequence[str]  # for messages
    statement: str
    commit_lsn: int
    sequence: int


def new_value(changes: RowChanges, name: str) -> Composable:
    """The new value of a column."""
    place = changes.names.index(name) + 1
    return SQL(f"(r.new)[{place}]::{changes.relation.columns[name].type}")


def old_value(changes: RowChanges, name: str) -> Composable:
    """The value by which a row is found."""
    place = changes.old_names.index(name) + 1
    return SQL(f"(r.old)[{place}]::{changes.relation.columns[name].compared}")


def found(changes: RowChanges) -> Composable:
    """The condition for the row that an UPDATE or DELETE changes: one row, also if several have the key."""
    relation, names = changes.relation, changes.old_names

    def same(names: Sequence[str]) -> Composable:
        return SQL(" AND ").join(
            SQL("t.{} {} {}").format(Identifier(name), relation.columns[name].equals, old_value(changes, name))
            for name in names
        )

    if changes.identity.keyed:
        condition: Composable = same(changes.identity.key)
        if relation.is_unique(changes.identity):
            return condition
    elif relation.replica_identity and set(relation.replica_identity) <= set(names):
        return same(relation.replica_identity)  # as PostgreSQL: the other columns may differ
    else:
        columns = [relation.columns[name] for name in names]
        here = SQL(", ").join(each.in_row(SQL("t.{}").format(each.sql)) for each in columns)
        there = SQL(", ").join(each.in_row(old_value(changes, each.name)) for each in columns)
        condition = SQL("ROW({})::text = ROW({})::text").format(here, there)
        # PostgreSQL compares whole rows: columns that are not published must be NULL
        for column in relation.local(names):
            condition = SQL("{} AND t.{} IS NULL").format(condition, column.sql)
        if relation.primary_key and set(relation.primary_key) <= set(names):
            condition = SQL("{} AND {}").format(same(relation.primary_key), condition)  # finds it by the index
    return SQL("(t.tableoid, t.ctid) = (SELECT t.tableoid, t.ctid FROM {} AS t WHERE {} LIMIT 1)").format(
        relation.only, condition
    )


def key_text(changes: RowChanges) -> Composable:
    """The key of the row, as JSON; NULL if it has none."""
    parts: list[Composable] = []
    for name in changes.shown_key:
        value: Composable = SQL(f"(r.new)[{changes.names.index(name) + 1}]")
        if name in changes.old_names:
            value = SQL("coalesce({}, {})").format(SQL(f"(r.old)[{changes.old_names.index(name) + 1}]"), value)
        parts += [SqlLiteral(name), value]
    return SQL("json_build_object({})::text").format(SQL(", ").join(parts)) if parts else SQL("NULL::text")
