"""Fold: the net effect of a batch of changes of one table. No I/O, and column by column: no loop over rows.

A change is one or two events of a key. An Insert or an Update *writes* the key of its new row. A Delete, or an Update
that changes the key of a row, first *removes* the old key. The events are sorted by key and time. The first and the
last event of a key decide:

    last event      write: the row exists at the end, with the values of that change;  remove: it does not exist
    first event     an Insert, or a row that got this key: the target has no such key, else the source would have
                    refused the change;  anything else: the target has it

    first / last             write                   remove
    target has it            replace it (upserts)    remove it (deletes)
    target does not have it  add it (appends)        nothing

So a batch with only inserts is an append, and nothing is compared. Keys that swap, or move in a chain, are not
special: 1 → 9, 2 → 1, 9 → 2 removes and writes both 1 and 2, so both are replaced, and 9 is nothing.

**Unchanged TOAST.** PostgreSQL does not send a TOAST value that an UPDATE does not change. The value is in the change
that wrote the row before. That is the event before the one by which this update found its row (of its *old* key, if the
key changes). So the changes of a row form a chain. Chains are followed by doubling: a row with a hundred thousand
updates takes seventeen rounds. If a chain ends at a change whose row is in the target, the value is taken from the
target, from the key by which that change found the row: `Net.carry` and `Net.carry_from`. If the old row was sent
(REPLICA IDENTITY FULL, or the column is part of the key), it has the value, and no chain is followed.

**TRUNCATE** makes all changes before it irrelevant. The rest begins with an empty target.

**A multiset** (REPLICA IDENTITY FULL without a key) has no key: a Delete removes one of several equal rows. The order
does not matter, because only rows that exist can be deleted. So rows are counted: +1 for each new one, -1 for each old.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from walmere.errors import NotMirrored
from walmere.names import Identity
from walmere.sinks.base import Mask, Net
from walmere.sinks.row_index import I64, codes, one_array

__all__ = ["Changes", "Identity", "Net", "fold"]

INSERT, UPDATE, DELETE, TRUNCATE = b"IUDT"
KEY, OLD = b"KO"

_DOING: Final = "folding a batch of changes"
_Columns: TypeAlias = list[pa.Array]


@dataclass(frozen=True, slots=True)
class Changes:
    """Typed changes of one table, in order. All fields have one item per change.

    An Insert and an Update have a new tuple. There is an old tuple unless `old_kind` is 0; with KEY, only the columns
    of the key are valid in it. `new` and `old` have the same columns.
    """

    kind: NDArray[np.uint8]  # INSERT, UPDATE, DELETE, TRUNCATE
    new: pa.Table
    unchanged: tuple[Mask | None, ...]  # per column, where the new tuple has an unchanged TOASTed value; None: nowhere
    old_kind: NDArray[np.uint8]  # 0, KEY, OLD
    old: pa.Table | None  # None: no row has an old tuple

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, rows: I64) -> Changes:
        """These rows, in this order."""
        return Changes(
            self.kind[rows],
            self.new.take(pa.array(rows)),
            tuple(None if mask is None else mask[rows] for mask in self.unchanged),
            self.old_kind[rows],
            None if self.old is None else self.old.take(pa.array(rows)),
        )


def fold(changes: Changes, identity: Identity, *, may_exist: bool = False) -> Net:
    """The net effect of the changes. Raises NotMirrored for changes that this replica identity cannot have.

    `may_exist`: the publication may omit deletes, so the target may have a row with the key of an insert.
    """
    truncates = np.flatnonzero(changes.kind == TRUNCATE)
    truncate = bool(len(truncates))
    if truncate:
        changes = _after(changes, int(truncates[-1]) + 1)
    require_new_values(changes)
    if not len(changes) or ((changes.kind == INSERT).all() and not (may_exist and identity.keyed)):
        return replace(_empty(changes, identity, truncate), appends=changes.new)
    if identity.keyed:
        return KeyedChanges(changes, identity, truncate).net(may_exist)
    if identity.multiset:
        return multiset(changes, identity, truncate)
    raise NotMirrored(
        _DOING,
        "there is an UPDATE or DELETE of a table without a replica identity",
        "give the table a primary key, or ALTER TABLE … REPLICA IDENTITY FULL, and copy it again",
    )


def require_new_values(changes: Changes) -> None:
    """Raise NotMirrored for an Insert that does not have all values of its row."""
    if any(mask is not None and mask[changes.kind == INSERT].any() for mask in changes.unchanged):
        raise NotMirrored(
            _DOING,
            "a change of its key moved a row into the row filter, and the server did not send all of its TOAST values",
            "no action needed: the table is being copied again. REPLICA IDENTITY FULL avoids it",
        )


def _after(changes: Changes, start: int) -> Changes:
    return Changes(
        changes.kind[start:],
        changes.new.slice(start),
        tuple(None if mask is None else mask[start:] for mask in changes.unchanged),
        changes.old_kind[start:],
        None if changes.old is None else changes.old.slice(start),
    )


def _empty(changes: Changes, identity: Identity, truncate: bool) -> Net:
    """A net effect without rows."""
    schema = changes.new.schema
    key = identity.key if identity.keyed else schema.names
    return Net(
        truncate,
        deletes=pa.schema([schema.field(name) for name in key]).empty_table(),
        counts=np.zeros(0, np.int64) if identity.multiset else None,
        upserts=schema.empty_table(),
        carry=(None,) * len(schema),
        carry_from=None,
        appends=schema.empty_table(),
    )


class _Tuples:
    """New and old tuples. Unchanged values are taken from the old tuple of the same change, if it has them."""

    def __init__(self, changes: Changes, key: tuple[str, ...]) -> None:
        names = changes.new.schema.names
        self.count = len(changes)
        self.new: _Columns = [one_array(column) for column in changes.new.columns]
        self.old: _Columns | None = (
            None if changes.old is None else [one_array(column) for column in changes.old.columns]
        )
        self.unchanged: list[Mask | None] = [None] * len(names)  # where the value is not in the change
        sent_whole = changes.old_kind == OLD
        sent_key = changes.old_kind != 0
        for column, mask in enumerate(changes.unchanged):
            if mask is None or not mask.any():
                continue
            in_old = mask & (sent_key if names[column] in key else sent_whole)
            if self.old is not None and in_old.any():
                place = np.arange(self.count)
                place[in_old] += self.count
                both = pa.concat_arrays([self.new[column], self.old[column]])
                self.new[column] = both.take(pa.array(place))
            missing = mask & ~in_old
            if missing.any():
                self.unchanged[column] = missing

    def old_columns(self) -> _Columns:
        return [pa.nulls(self.count, column.type) for column in self.new] if self.old is None else self.old


class KeyedChanges:
    """Changes as events of keys."""

    def __init__(self, changes: Changes, identity: Identity, truncate: bool) -> None:
        self.changes = changes
        self.identity = identity
        self.truncate = truncate
        self.schema = changes.new.schema
        self.tuples = _Tuples(changes, identity.key)
        kind = changes.kind
        has_old = changes.old_kind != 0
        if (has_old & (kind == INSERT)).any() or (~has_old & (kind == DELETE)).any():
            raise NotMirrored(_DOING, "an Insert has an old tuple, or a Delete has none")
        key = [self.schema.names.index(name) for name in identity.key]
        if any(self.tuples.unchanged[column] is not None for column in key):
            raise NotMirrored(_DOING, "a value of the key was not sent")

        # The keys of all old tuples, then of all new ones, and the place of each change's keys among them.
        old_rows, new_rows = np.flatnonzero(has_old), np.flatnonzero(kind != DELETE)
        self.keys: _Columns = []
        for column in key:
            parts = [take(self.tuples.old[column], old_rows)] if self.tuples.old is not None else []
            self.keys.append(pa.concat_arrays([*parts, take(self.tuples.new[column], new_rows)]))
        if any(column.null_count for column in self.keys):
            raise NotMirrored(
                _DOING,
                "a column of the key is NULL: the replica identity of a partition was altered",
                "no action needed: the table is being copied again",
            )
        self.old_place = np.full(len(kind), -1, np.int64)
        self.old_place[old_rows] = np.arange(len(old_rows))
        self.new_place = np.full(len(kind), -1, np.int64)
        self.new_place[new_rows] = len(old_rows) + np.arange(len(new_rows))
        code, self.different = codes(self.keys)
        old_code, new_code = code[self.old_place], code[self.new_place]  # valid only where there is such a tuple
        self.moved = (kind == UPDATE) & has_old & (old_code != new_code)

        # Each event is one number of key, time and whether it writes, so that one sort orders them.
        removing = np.flatnonzero((kind == DELETE) | self.moved)
        self.width = 2 * len(kind)
        events = np.concatenate(
            [old_code[removing] * self.width + 2 * removing, new_code[new_rows] * self.width + 2 * new_rows + 1]
        )
        events.sort()
        self.event_key, when = np.divmod(events, self.width)
        self.event_change, self.writes = when >> 1, (when & 1).astype(np.bool_)

    def net(self, may_exist: bool) -> Net:
        edge = np.flatnonzero(self.event_key[1:] != self.event_key[:-1])
        first = np.concatenate([[0], edge + 1])
        last = np.concatenate([edge, [len(self.event_key) - 1]])
        first_change = self.event_change[first]
        found = ~self.writes[first] | ((self.changes.kind[first_change] == UPDATE) & ~self.moved[first_change])
        if self.truncate or may_exist:
            found[:] = not self.truncate
        exists = self.writes[last]
        last_change = self.event_change[last]

        removed = np.sort(last_change[found & ~exists])
        replaced = np.sort(last_change[found & exists])
        added = np.sort(last_change[~found & exists])
        deletes = self.key_table(self.old_place[removed])
        if not any(mask is not None for mask in self.tuples.unchanged):
            rows = [[take(column, places) for column in self.tuples.new] for places in (replaced, added)]
            upserts, appends = (pa.Table.from_arrays(columns, schema=self.schema) for columns in rows)
            return replace(self.empty(), deletes=deletes, upserts=upserts, appends=appends)
        return self.net_with_unchanged(deletes, replaced, added)

    def net_with_unchanged(self, deletes: pa.Table, replaced: I64, added: I64) -> Net:
        parent = self.parents()
        both = np.concatenate([replaced, added])
        ends_at = both.copy()  # the change at which the search for a row's values ends
        sources: list[I64 | None] = []
        carried: list[Mask | None] = []
        open_ended = np.zeros(len(both), np.bool_)
        for mask in self.tuples.unchanged:
            if mask is None:
                sources.append(None)
                carried.append(None)
                continue
            source = follow(mask, parent)[both]
            missing = mask[source]
            ends_at[missing] = source[missing]
            open_ended |= missing
            sources.append(source)
            carried.append(missing)
        if self.truncate and open_ended.any():
            raise NotMirrored(_DOING, "an UPDATE has an unchanged TOAST value of a row that a TRUNCATE has removed")

        # A row that got a new key, but takes values from the target, is an upsert, not an append.
        is_upsert = np.arange(len(both)) < len(replaced)
        is_upsert |= open_ended
        chosen = np.flatnonzero(is_upsert)
        chosen = chosen[np.argsort(both[chosen])]
        tables = []
        for places in (chosen, np.flatnonzero(~is_upsert)):
            columns = [
                take(column, both[places] if source is None else source[places])
                for column, source in zip(self.tuples.new, sources, strict=True)
            ]
            tables.append(pa.Table.from_arrays(columns, schema=self.schema))
        carry = tuple(None if mask is None or not mask[chosen].any() else mask[chosen] for mask in carried)
        at = ends_at[chosen]
        by_old = self.old_place[at] >= 0
        by_old &= open_ended[chosen]  # a row that takes nothing from the target is listed with its own key
        place = np.where(by_old, self.old_place[at], self.new_place[at])
        return replace(
            self.empty(),
            deletes=deletes,
            upserts=tables[0],
            carry=carry,
            carry_from=self.key_table(place) if open_ended.any() else None,
            appends=tables[1],
        )

    def empty(self) -> Net:
        return _empty(self.changes, self.identity, self.truncate)

    def parents(self) -> I64:
        """For each update, the change that wrote the row which it found; -1 if the row is in the target."""
        before = np.full(len(self.event_key), -1, np.int64)
        after_write = self.writes[:-1] & (self.event_key[1:] == self.event_key[:-1])
        before[1:][after_write] = self.event_change[:-1][after_write]
        finding = ~self.writes | ((self.changes.kind == UPDATE) & ~self.moved)[self.event_change]
        parent = np.full(len(self.changes), -1, np.int64)
        parent[self.event_change[finding]] = before[finding]
        return parent

    def key_table(self, place: I64) -> pa.Table:
        schema = pa.schema([self.schema.field(name) for name in self.identity.key])
        return pa.Table.from_arrays([take(column, place) for column in self.keys], schema=schema)


def follow(unchanged: Mask, parent: I64) -> I64:
    """For each change, the nearest earlier change of its row that has the value, or else the row's first change."""
    jump = np.where(unchanged & (parent >= 0), parent, np.arange(len(parent)))
    while True:
        further = jump[jump]
        if (further == jump).all():
            return jump
        jump = further


def multiset(changes: Changes, identity: Identity, truncate: bool) -> Net:
    """The net effect of changes of rows that have no key."""
    kind = changes.kind
    if ((changes.old_kind != OLD) & (kind != INSERT)).any():
        raise NotMirrored(_DOING, "an UPDATE or DELETE of a table with REPLICA IDENTITY FULL does not have its old row")
    tuples = _Tuples(changes, ())
    if any(mask is not None for mask in tuples.unchanged):
        raise NotMirrored(_DOING, "a value was not sent, and is not in the old row either")
    old_rows, new_rows = np.flatnonzero(kind != INSERT), np.flatnonzero(kind != DELETE)
    rows = [
        pa.concat_arrays([take(old, old_rows), take(new, new_rows)])
        for old, new in zip(tuples.old_columns(), tuples.new, strict=True)
    ]
    code, different = codes(rows)
    change = np.bincount(code[len(old_rows) :], minlength=different) - np.bincount(
        code[: len(old_rows)], minlength=different
    )
    example = np.empty(different, np.int64)
    example[code] = np.arange(len(code))
    fewer, more = np.flatnonzero(change < 0), np.flatnonzero(change > 0)
    if truncate:
        fewer = fewer[:0]
    added = np.sort(np.repeat(example[more], change[more]))
    schema = changes.new.schema
    deletes, appends = (
        pa.Table.from_arrays([take(column, places) for column in rows], schema=schema)
        for places in (example[fewer], added)
    )
    return replace(_empty(changes, identity, truncate), deletes=deletes, counts=-change[fewer], appends=appends)


def take(column: pa.Array, rows: I64) -> pa.Array:
    """These rows of a column."""
    if len(rows) == len(column) and (not len(rows) or (np.diff(rows) == 1).all()):
        return column  # ascending places, as many as there are rows: all rows in order
    return column.take(pa.array(rows))
