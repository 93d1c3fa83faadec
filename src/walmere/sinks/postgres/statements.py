"""The statements that apply the net effect of a batch to one table, set by set. Values are array parameters.

No staging table is needed: `unnest` of the parameters is the set, the planner knows its size, and no catalog grows.

From some thousand keys on, the planner would rather read the whole table once than look up each key in the index. But
the cost of a batch must follow its changes, not the size of the table. So these plans are switched off where there is
an index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from psycopg.sql import SQL, Composable, Composed, Identifier

from walmere.sinks.base import Mask, RowNet
from walmere.sinks.postgres.relation import TargetColumn, TargetRelation
from walmere.sinks.postgres.text import bool_array, copy_text, text_array

_STATEMENT_BYTES: Final = 64 << 20
"""Values of one statement, at most."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement that must change `rows` rows; if it changes fewer, rows are missing in the target."""

    query: Composed
    parameters: Sequence[Any]
    rows: int
    matches: Composed | None = None  # the FROM and WHERE clauses that find the rows as t; None: a multiset has no key
    by_index: bool = True  # an index finds the rows; otherwise the whole table is read


@dataclass(frozen=True, slots=True)
class RowSet:
    """What applies a net effect to a table, in order. Iterate over it once."""

    statements: Iterable[Statement]
    copy: Composed | None  # for new rows
    copied: Iterable[bytes]

    def made(self) -> RowSet:
        """The same, with everything that is sent in memory."""
        return RowSet(list(self.statements), self.copy, list(self.copied))


def row_set(relation: TargetRelation, net: RowNet) -> RowSet:
    """The net effect of changes as statements, each of which is made when it is needed."""
    command = copy_into(relation.sql, net.inserts.column_names) if len(net.inserts) else None
    return RowSet(changes_of(relation, net), command, copy_text(net.inserts))


def restrict_plans(*, to_index: bool) -> Composed:
    """The statements that let the planner find rows only by an index, or again as it likes, in this transaction."""
    value = SQL("off" if to_index else "DEFAULT")
    names = ("enable_hashjoin", "enable_mergejoin", "enable_seqscan")
    return SQL("; ").join(SQL("SET LOCAL {} TO {}").format(SQL(name), value) for name in names)


def copy_into(table: Composable, names: Sequence[str]) -> Composed:
    """COPY into these columns of a table, which may have none."""
    columns = SQL("({})").format(SQL(", ").join(map(Identifier, names))) if names else SQL("")
    return SQL("COPY {} {} FROM STDIN (FORMAT text, DELIMITER E'\\t', NULL '\\N', ENCODING 'UTF8')").format(
        table, columns
    )


def changes_of(relation: TargetRelation, net: RowNet) -> Iterator[Statement]:
    """Deletes, then updates. The rows of `net.inserts` are copied afterwards."""
    for part in _slices(net.deletes):
        deletes = _part(net.deletes, part)
        if net.counts is None:
            yield _delete(relation, deletes)
        else:
            yield _delete_counted(relation, deletes, net.counts[part])
    for part in _slices(net.updates):
        masks = tuple(None if mask is None else mask[part] for mask in net.unchanged)
        yield _update(relation, _part(net.updates, part), _part(net.update_keys, part), masks)


def _slices(rows: pa.Table) -> Iterator[slice]:
    """Divide rows into parts: a parameter has at most 1 GB."""
    step = max(1, len(rows) * _STATEMENT_BYTES // max(rows.nbytes, 1))
    return (slice(start, start + step) for start in range(0, len(rows), step))


def _part(rows: pa.Table, part: slice) -> pa.Table:
    return rows.slice(part.start, part.stop - part.start)


def _delete(relation: TargetRelation, keys: pa.Table) -> Statement:
    places = {name: f"k{number}" for number, name in enumerate(keys.column_names)}
    arrays = {place: relation.columns[name].array for name, place in places.items()}
    values, same = _set(relation, arrays, places), _same_key(relation, places)
    query = SQL("DELETE FROM {} AS t USING {} WHERE {}").format(relation.only, values, same)
    matches = SQL("FROM {} AS t, {} WHERE {}").format(relation.only, values, same)
    by_index = relation.has_index(keys.column_names)
    return Statement(query, [text_array(column) for column in keys.columns], len(keys), matches, by_index)


def _delete_counted(relation: TargetRelation, deletes: pa.Table, copies: NDArray[np.int64]) -> Statement:
    """Rows of a multiset are compared as text, which every type has; and by the primary key, which has an index."""
    columns = [relation.columns[name] for name in deletes.column_names]
    here = SQL("ROW({})::text").format(SQL(", ").join(each.in_row(SQL("t.{}").format(each.sql)) for each in columns))
    wanted = SQL("ROW({})::text").format(
        SQL(", ").join(each.in_row(SQL(f"s.c{number}::{each.compared}")) for number, each in enumerate(columns))
    )
    arrays = SQL(", ").join(SQL(f"${number + 1}::text[]") for number in range(len(columns)))
    names = SQL(", ").join(SQL(f"c{number}") for number in range(len(columns)))
    query = SQL(
        "DELETE FROM {only} AS d USING (SELECT t.tableoid AS tableoid, t.ctid AS ctid, w.copies AS copies,"
        " row_number() OVER (PARTITION BY w.place) AS number FROM {only} AS t JOIN"
        " (SELECT s.*, {wanted} AS row FROM unnest({arrays}, ${last}::text[])"
        " WITH ORDINALITY AS s({names}, copies, place)) w ON {key}{here} = w.row) AS f"
        " WHERE f.number <= f.copies::int8 AND d.tableoid = f.tableoid AND d.ctid = f.ctid"
    ).format(
        only=relation.only,
        wanted=wanted,
        arrays=arrays,
        last=SQL(str(len(columns) + 1)),
        names=names,
        key=_primary_key(relation, deletes.column_names),
        here=here,
    )
    counts = pa.array(copies.astype(str).tolist(), pa.string()).cast(pa.binary())
    parameters = [text_array(column) for column in deletes.columns]
    return Statement(
        query,
        [*parameters, text_array(counts)],
        int(copies.sum()),
        by_index=_has_primary_key(relation, deletes.column_names) and relation.has_index(relation.primary_key),
    )


def _has_primary_key(relation: TargetRelation, names: Sequence[str]) -> bool:
    return bool(relation.primary_key) and set(relation.primary_key) <= set(names)


def _primary_key(relation: TargetRelation, names: Sequence[str]) -> Composable:
    """A condition by which an index finds the rows, if there is one."""
    if not _has_primary_key(relation, names):
        return SQL("")
    same = SQL("t.{} {} w.{} AND ")
    return SQL("").join(
        same.format(column.sql, column.equals, SQL(f"c{names.index(column.name)}::{column.compared}"))
        for column in map(relation.columns.__getitem__, relation.primary_key)
    )


def _update(
    relation: TargetRelation, updates: pa.Table, update_keys: pa.Table, unchanged: Sequence[Mask | None]
) -> Statement:
    keys = {name: f"k{number}" for number, name in enumerate(update_keys.column_names)}
    parameters = [text_array(column) for column in update_keys.columns]
    arrays = {place: relation.columns[name].array for name, place in keys.items()}
    assignments: list[Composable] = []
    conditions: list[Composable] = []
    for number, (name, mask) in enumerate(zip(updates.column_names, unchanged, strict=True)):
        column = relation.columns[name]
        if name in keys and updates[name].equals(update_keys[name]):
            continue  # no key changes
        parameters.append(text_array(updates[name]))
        arrays[f"c{number}"] = column.array
        if column.identity == "a":  # SQL cannot update it: rows in which it changes are applied one by one
            conditions.append(SQL("t.{} = s.{}").format(column.sql, SQL(f"c{number}::{column.type}")))
            continue
        value: Composable = SQL(f"s.c{number}::{column.type}")
        if mask is not None:
            parameters.append(bool_array(mask))
            arrays[f"u{number}"] = "bool[]"
            value = SQL("CASE WHEN s.{} THEN t.{} ELSE {} END").format(SQL(f"u{number}"), column.sql, value)
        assignments.append(SQL("{} = {}").format(column.sql, value))
    if not assignments:  # a table whose columns are all in the key: an UPDATE changes nothing
        plain = (each for each in relation.columns.values() if each.identity != "a" and not each.generated)
        assignments += [SQL("{0} = t.{0}").format(each.sql) for each in plain][:1]
    values, same = _set(relation, arrays, keys), _same_key(relation, keys)
    where = SQL(" AND ").join([same, *conditions])
    query = SQL("UPDATE {} AS t SET {} FROM {} WHERE {}").format(
        relation.only, SQL(", ").join(assignments), values, where
    )
    if not assignments:  # no column can be assigned
        query = SQL("SELECT FROM {} AS t, {} WHERE {}").format(relation.only, values, where)
    matches = SQL("FROM {} AS t, {} WHERE {}").format(relation.only, values, same)
    return Statement(query, parameters, len(updates), matches, relation.has_index(list(keys)))


def _set(relation: TargetRelation, arrays: Mapping[str, str], keys: Mapping[str, str]) -> Composed:
    """The parameters as a set of rows s. In the order of the primary key, neighbouring rows are found together.

    `arrays`: by the name that a column has in s, the type of its parameter, in order.
    """
    parameters = SQL(", ").join(SQL(f"${number + 1}::{kind}") for number, kind in enumerate(arrays.values()))
    rows = SQL("unnest({}) AS s({})").format(parameters, SQL(", ").join(map(SQL, arrays)))
    if set(keys) != set(relation.primary_key):  # a type in another unique index need not have an order
        return rows
    order = SQL(", ").join(SQL(f"{keys[name]}::{relation.columns[name].type}") for name in relation.primary_key)
    return SQL("(SELECT * FROM {} ORDER BY {}) AS s").format(rows, order)


def _same_key(relation: TargetRelation, places: dict[str, str]) -> Composed:
    def same(column: TargetColumn, place: str) -> Composed:
        return SQL("t.{} {} s.{}").format(column.sql, column.equals, SQL(f"{place}::{column.compared}"))

    return SQL(" AND ").join(same(relation.columns[name], place) for name, place in places.items())
