"""The net effect of a batch of changes of one table. Pure, and by whole columns: no row is ever looked at alone.

Every change is at most two events of a key. An Insert, and an Update, *writes* the key of its new row; a Delete, and an
Update that moves a row to another key, first *takes* the old key away. Sorted by key and time, the events of a key lie
one after the other, and all there is to know about the key stands at the two ends:

    its last event      a write: the row is there in the end, as that change has it;  taken: it is not
    its first event     an Insert, or a row that moved in: the target has no such key, or the source would have refused;
                        anything else: the target has it

    first / last     write                       taken
    target has it    replace it (upserts)        remove it (deletes)
    has it not       add it (appends)            nothing: it came and went

So an insert-only batch is an append and nothing is compared. Keys that swap, or move along a chain, need no thought:
1 → 9, 2 → 1, 9 → 2 takes and writes both 1 and 2, hence replaces both, and 9 came and went.

**Unchanged TOAST.** PostgreSQL does not send a large value that an UPDATE left alone. The value is that of the change
which wrote the row before: the event just before the one by which this update found its row (in the list of its *old*
key, if it moved). These steps form chains, a row's life within the batch; they are followed by doubling, so that a
row updated a hundred thousand times takes seventeen rounds. Where a chain ends at a change whose row came from the
target, the value is the target's, under the key that change found it by: `Net.carry` and `Net.carry_from`. Where the
old row was sent along (REPLICA IDENTITY FULL, or the column is of the key), it has the value, and no chain is followed.

**TRUNCATE** forgets all changes before it; what is left begins with an empty target.

**A multiset** (REPLICA IDENTITY FULL without a key) has no key to go by: a Delete takes one row out of
equal ones. Order does not matter then, since a row can only be deleted that is there, so rows are counted: +1 for each
new, -1 for each old one.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """Changes of one table, in order, typed. All parts are as long as the batch; `new` and `old` have the same columns.

    A row has a new tuple if it is an Insert or an Update, and an old one unless `old_kind` is 0; with KEY, only the
    columns of the key say anything in it.
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


def fold(changes: Changes, identity: Identity, *, maybe_there: bool = False) -> Net:
    """What the changes come to. Raises NotMirrored for changes that this replica identity cannot have.

    `maybe_there`: deletes may have been left out, so a row that is inserted may replace one of its key.
    """
    truncates = np.flatnonzero(changes.kind == TRUNCATE)
    truncate = bool(len(truncates))
    if truncate:
        changes = _after(changes, int(truncates[-1]) + 1)
    if any(mask is not None and mask[changes.kind == INSERT].any() for mask in changes.unchanged):
        raise NotMirrored(
            _DOING,
            "a change of its key moved a row into the row filter, and the server did not send all of its TOAST values",
            "no action needed: the table is being copied again. REPLICA IDENTITY FULL avoids it",
        )
    if not len(changes) or ((changes.kind == INSERT).all() and not (maybe_there and identity.keyed)):
        return _net(truncate, changes, identity, appends=changes.new)
    if identity.keyed:
        return _Keyed(changes, identity, truncate).net(maybe_there)
    if identity.multiset:
        return _multiset(changes, identity, truncate)
    raise NotMirrored(
        _DOING,
        "there is an UPDATE or DELETE of a table without a replica identity",
        "give the table a primary key, or ALTER TABLE … REPLICA IDENTITY FULL, and copy it again",
    )


def _after(changes: Changes, start: int) -> Changes:
    return Changes(
        changes.kind[start:],
        changes.new.slice(start),
        tuple(None if mask is None else mask[start:] for mask in changes.unchanged),
        changes.old_kind[start:],
        None if changes.old is None else changes.old.slice(start),
    )


def _net(
    truncate: bool,
    changes: Changes,
    identity: Identity,
    *,
    deletes: pa.Table | None = None,
    counts: I64 | None = None,
    upserts: pa.Table | None = None,
    carry: tuple[Mask | None, ...] | None = None,
    carry_from: pa.Table | None = None,
    appends: pa.Table,
) -> Net:
    schema = changes.new.schema
    if deletes is None:
        named = identity.key if identity.keyed else schema.names
        deletes = pa.schema([schema.field(name) for name in named]).empty_table()
    if identity.multiset and counts is None:
        counts = np.zeros(0, np.int64)
    return Net(
        truncate,
        deletes,
        counts,
        schema.empty_table() if upserts is None else upserts,
        (None,) * len(schema) if carry is None else carry,
        carry_from,
        appends,
    )


class _Tuples:
    """New and old tuples, with unchanged values taken from the old tuple of the same change where it has them."""

    def __init__(self, changes: Changes, key: tuple[str, ...]) -> None:
        names = changes.new.schema.names
        self.count = len(changes)
        self.new: _Columns = [one_array(column) for column in changes.new.columns]
        self.old: _Columns | None = (
            None if changes.old is None else [one_array(column) for column in changes.old.columns]
        )
        self.unchanged: list[Mask | None] = [None] * len(names)  # where the change itself does not tell the value
        sent_whole = changes.old_kind == OLD
        sent_key = changes.old_kind != 0
        for column, mask in enumerate(changes.unchanged):
            if mask is None or not mask.any():
                continue
            told = mask & (sent_key if names[column] in key else sent_whole)
            if self.old is not None and told.any():
                place = np.arange(self.count)
                place[told] += self.count
                both = pa.concat_arrays([self.new[column], self.old[column]])
                self.new[column] = both.take(pa.array(place))
            untold = mask & ~told
            if untold.any():
                self.unchanged[column] = untold

    def old_columns(self) -> _Columns:
        return [pa.nulls(self.count, column.type) for column in self.new] if self.old is None else self.old


class _Keyed:
    """A fold by key."""

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

        # The keys of all old tuples, then those of all new ones, and where among them each change has its own.
        old_rows, new_rows = np.flatnonzero(has_old), np.flatnonzero(kind != DELETE)
        self.keys: _Columns = []
        for column in key:
            parts = [_take(self.tuples.old[column], old_rows)] if self.tuples.old is not None else []
            self.keys.append(pa.concat_arrays([*parts, _take(self.tuples.new[column], new_rows)]))
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
        old_code, new_code = code[self.old_place], code[self.new_place]  # of use only where there is such a tuple
        self.moved = (kind == UPDATE) & has_old & (old_code != new_code)

        # Events as one number each: key, time, and whether it writes; sorted, in one go.
        taking = np.flatnonzero((kind == DELETE) | self.moved)
        self.width = 2 * len(kind)
        events = np.concatenate(
            [old_code[taking] * self.width + 2 * taking, new_code[new_rows] * self.width + 2 * new_rows + 1]
        )
        events.sort()
        self.event_key, when = np.divmod(events, self.width)
        self.event_change, self.writes = when >> 1, (when & 1).astype(np.bool_)

    def net(self, maybe_there: bool) -> Net:
        edge = np.flatnonzero(self.event_key[1:] != self.event_key[:-1])
        first = np.concatenate([[0], edge + 1])
        last = np.concatenate([edge, [len(self.event_key) - 1]])
        begins = self.event_change[first]
        found = ~self.writes[first] | ((self.changes.kind[begins] == UPDATE) & ~self.moved[begins])
        if self.truncate or maybe_there:
            found[:] = not self.truncate
        stays = self.writes[last]
        ends = self.event_change[last]

        gone = np.sort(ends[found & ~stays])
        replaced = np.sort(ends[found & stays])
        added = np.sort(ends[~found & stays])
        deletes = self.key_table(self.old_place[gone])
        if not any(mask is not None for mask in self.tuples.unchanged):
            rows = [[_take(column, some) for column in self.tuples.new] for some in (replaced, added)]
            upserts, appends = (pa.Table.from_arrays(columns, schema=self.schema) for columns in rows)
            return _net(self.truncate, self.changes, self.identity, deletes=deletes, upserts=upserts, appends=appends)
        return self.net_with_unchanged(deletes, replaced, added)

    def net_with_unchanged(self, deletes: pa.Table, replaced: I64, added: I64) -> Net:
        parent = self.parents()
        both = np.concatenate([replaced, added])
        origin = both.copy()  # the change at which the search for a row's values ended
        sources: list[I64 | None] = []
        carried: list[Mask | None] = []
        open_ended = np.zeros(len(both), np.bool_)
        for mask in self.tuples.unchanged:
            if mask is None:
                sources.append(None)
                carried.append(None)
                continue
            source = _follow(mask, parent)[both]
            missing = mask[source]
            origin[missing] = source[missing]
            open_ended |= missing
            sources.append(source)
            carried.append(missing)
        if self.truncate and open_ended.any():
            raise NotMirrored(_DOING, "an UPDATE has an unchanged TOAST value of a row that a TRUNCATE has removed")

        # A row that moved to a new key, but has values to fetch from the target, is no plain addition.
        is_upsert = np.arange(len(both)) < len(replaced)
        is_upsert |= open_ended
        chosen = np.flatnonzero(is_upsert)
        chosen = chosen[np.argsort(both[chosen])]
        tables = []
        for some in (chosen, np.flatnonzero(~is_upsert)):
            columns = [
                _take(column, both[some] if source is None else source[some])
                for column, source in zip(self.tuples.new, sources, strict=True)
            ]
            tables.append(pa.Table.from_arrays(columns, schema=self.schema))
        carry = tuple(None if mask is None or not mask[chosen].any() else mask[chosen] for mask in carried)
        at = origin[chosen]
        by_old = self.old_place[at] >= 0
        by_old &= open_ended[chosen]  # a row with nothing to fetch is listed under its own key
        place = np.where(by_old, self.old_place[at], self.new_place[at])
        return _net(
            self.truncate,
            self.changes,
            self.identity,
            deletes=deletes,
            upserts=tables[0],
            carry=carry,
            carry_from=self.key_table(place) if open_ended.any() else None,
            appends=tables[1],
        )

    def parents(self) -> I64:
        """Per update, the change that wrote the row which it found; -1 if the target has it."""
        before = np.full(len(self.event_key), -1, np.int64)
        after_write = self.writes[:-1] & (self.event_key[1:] == self.event_key[:-1])
        before[1:][after_write] = self.event_change[:-1][after_write]
        finding = ~self.writes | ((self.changes.kind == UPDATE) & ~self.moved)[self.event_change]
        parent = np.full(len(self.changes), -1, np.int64)
        parent[self.event_change[finding]] = before[finding]
        return parent

    def key_table(self, place: I64) -> pa.Table:
        schema = pa.schema([self.schema.field(name) for name in self.identity.key])
        return pa.Table.from_arrays([_take(column, place) for column in self.keys], schema=schema)


def _follow(unchanged: Mask, parent: I64) -> I64:
    """Per change, the nearest one back in its row's life that has the value, or else the one where that life began."""
    jump = np.where(unchanged & (parent >= 0), parent, np.arange(len(parent)))
    while True:
        further = jump[jump]
        if (further == jump).all():
            return jump
        jump = further


def _multiset(changes: Changes, identity: Identity, truncate: bool) -> Net:
    kind = changes.kind
    if ((changes.old_kind != OLD) & (kind != INSERT)).any():
        raise NotMirrored(_DOING, "an UPDATE or DELETE of a table with REPLICA IDENTITY FULL does not have its old row")
    tuples = _Tuples(changes, ())
    if any(mask is not None for mask in tuples.unchanged):
        raise NotMirrored(_DOING, "a value was not sent, and is not in the old row either")
    old_rows, new_rows = np.flatnonzero(kind != INSERT), np.flatnonzero(kind != DELETE)
    rows = [
        pa.concat_arrays([_take(old, old_rows), _take(new, new_rows)])
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
        pa.Table.from_arrays([_take(column, some) for column in rows], schema=schema)
        for some in (example[fewer], added)
    )
    return _net(truncate, changes, identity, deletes=deletes, counts=-change[fewer], appends=appends)


def _take(column: pa.Array, rows: I64) -> pa.Array:
    if len(rows) == len(column) and (not len(rows) or (np.diff(rows) == 1).all()):
        return column  # all of them in order, as strictly rising places among as many can only be
    return column.take(pa.array(rows))
