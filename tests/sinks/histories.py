"""Random histories of one table: rows before, changes as pgoutput would tell them, and rows after.

The oracle is a plain Python loop over a dict (or, without a key, a list), one change at a time. `apply_net` says in
the same plain way what a `Net` does, so that a fold is right if both come to the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from walmere.apply.fold import Changes
from walmere.names import Identity
from walmere.sinks.base import Net

Row = tuple[Any, ...]
UNCHANGED = object()

SCHEMA = pa.schema(
    [
        ("part", pa.string()),  # of the key, if it is a composite one
        ("id", pa.int64()),
        ("count", pa.int32()),
        ("note", pa.string()),  # TOASTed
        ("tags", pa.list_(pa.string())),  # TOASTed
    ]
)
TOASTED = (3, 4)


@dataclass
class Change:
    kind: str
    new: Row | None = None
    old: Row | None = None
    old_kind: int = 0


K, O = ord("K"), ord("O")  # noqa: E741
TRUNCATE = Change("T")


def row(key: int | None, count: int = 0, note: Any = "n", tags: Any = None) -> Row:
    return ("p", key, count, note, tags)


def insert(key: int, **values: Any) -> Change:
    return Change("I", row(key, **values))


def update(key: int, was: int | None = None, **values: Any) -> Change:
    old = (None if was is None else (None, was, None, None, None), 0 if was is None else K)
    return Change("U", row(key, **values), *old)


def delete(key: int) -> Change:
    return Change("D", None, (None, key, None, None, None), K)


@dataclass
class History:
    identity: Identity
    before: list[Row]
    changes: list[Change]
    after: list[Row]
    schema: pa.Schema = field(default=SCHEMA)

    def typed(self) -> Changes:
        return typed(self.changes, self.schema)


def typed(changes: Sequence[Change], schema: pa.Schema = SCHEMA) -> Changes:
    """As the decoder and the casts would give them."""

    def table(rows: Iterable[Row | None]) -> pa.Table:
        absent: Row = (None,) * len(schema)
        listed = [absent if row is None else row for row in rows]
        return pa.table(
            [
                pa.array([None if row[i] is UNCHANGED else row[i] for row in listed], schema.field(i).type)
                for i in range(len(schema))
            ],
            schema=schema,
        )

    masks = []
    for i in range(len(schema)):
        mask = np.array([c.new is not None and c.new[i] is UNCHANGED for c in changes], np.bool_)
        masks.append(mask if mask.any() else None)
    return Changes(
        np.array([ord(c.kind) for c in changes], np.uint8),
        table(c.new for c in changes),
        tuple(masks),
        np.array([c.old_kind for c in changes], np.uint8),
        table(c.old for c in changes) if any(c.old_kind for c in changes) else None,
    )


def rows_of(table: pa.Table) -> list[Row]:
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True)) if table.num_columns else []


def frozen(row: Row) -> Row:
    return tuple(tuple(value) if isinstance(value, list) else value for value in row)


def apply_net(before: Sequence[Row], net: Net, identity: Identity, schema: pa.Schema = SCHEMA) -> list[Row]:
    """What a sink has to do, one row at a time."""
    rows = [] if net.truncate else list(before)
    if not identity.keyed:
        assert not len(net.upserts)
        if not identity.multiset:
            assert not len(net.deletes)
        counts = [] if net.counts is None else net.counts.tolist()
        wanted = Counter(dict(zip(map(frozen, rows_of(net.deletes)), counts, strict=True)))
        kept = []
        for row in rows:
            if wanted[frozen(row)] > 0:
                wanted[frozen(row)] -= 1
            else:
                kept.append(row)
        assert not +wanted, "a delete found no row"
        return kept + rows_of(net.appends)
    places = [schema.names.index(name) for name in identity.key]
    target = {tuple(row[i] for i in places): row for row in rows}
    sources = rows_of(net.carry_from) if net.carry_from is not None else [()] * len(net.upserts)
    upserts = []
    for number, row in enumerate(rows_of(net.upserts)):
        values = list(row)
        for column, mask in enumerate(net.carry):
            if mask is not None and mask[number]:
                assert values[column] is None
                values[column] = target[sources[number]][column]
        upserts.append(tuple(values))
    for key in rows_of(net.deletes):
        del target[key]
    for row in upserts:
        target[tuple(row[i] for i in places)] = row
    for row in rows_of(net.appends):
        key = tuple(row[i] for i in places)
        assert key not in target, "an append has a key that is there"
        target[key] = row
    return list(target.values())


ids = st.integers(0, 5)
parts = st.sampled_from(["a", "", "b\U0001f40d", "a\x01'"])
notes = st.one_of(st.none(), st.sampled_from(["", "x", "y" * 40]))
tags = st.one_of(st.none(), st.lists(st.one_of(st.none(), st.sampled_from(["", "q"])), max_size=2))
rows = st.tuples(parts, ids, st.one_of(st.none(), st.integers(0, 3)), notes, tags)


@st.composite
def keyed_histories(draw: st.DrawFn, max_size: int = 25) -> History:
    key = draw(st.sampled_from([("id",), ("part",), ("part", "id"), ("id", "part")]))
    full = draw(st.booleans())
    identity = Identity("f" if full else draw(st.sampled_from("di")), key)
    places = [SCHEMA.names.index(name) for name in key]

    def key_of(row: Row) -> Row:
        return tuple(row[i] for i in places)

    state: dict[Row, Row] = {}
    for row in draw(st.lists(rows, max_size=6)):
        state[key_of(row)] = row
    before = list(state.values())
    changes: list[Change] = []
    for _ in range(draw(st.integers(0, max_size))):
        op = draw(st.sampled_from("IIUUUDDMMT" if draw(st.integers(0, 3)) == 0 else "IIUUUDDMM"))
        row = draw(rows)
        if op == "T":
            state.clear()
            changes.append(Change("T"))
        elif op == "I":
            if key_of(row) in state:
                continue
            state[key_of(row)] = row
            changes.append(Change("I", row))
        elif state:
            at = draw(st.sampled_from(sorted(state)))
            was = state[at]
            key_only = tuple(value if i in places else None for i, value in enumerate(was))
            sent_old = (was, ord("O")) if full else (key_only, ord("K"))
            if op == "D":
                del state[at]
                changes.append(Change("D", None, *sent_old))
                continue
            values: list[Any] = list(row)
            if op == "U":
                for i in places:
                    values[i] = was[i]
            told: list[Any] = list(values)
            left_alone = set(draw(st.sets(st.sampled_from(TOASTED))))
            for i in left_alone:
                values[i], told[i] = was[i], UNCHANGED
            now = tuple(values)
            if key_of(now) != at and key_of(now) in state:
                continue
            moved = key_of(now) != at
            toasted_key = not moved and not full and draw(st.integers(0, 5)) == 0
            if toasted_key:  # a key so long that it is TOASTed itself: told in the old key only
                for i in places:
                    told[i] = UNCHANGED
            del state[at]
            state[key_of(now)] = now
            changes.append(Change("U", tuple(told), *(sent_old if full or moved or toasted_key else (None, 0))))
    return History(identity, before, changes, list(state.values()))


@st.composite
def multiset_histories(draw: st.DrawFn, max_size: int = 25) -> History:
    few = st.tuples(st.sampled_from([None, "a"]), st.sampled_from([None, 1]), st.none(), st.none(), tags)
    state: list[Row] = list(draw(st.lists(few, max_size=6)))
    before = list(state)
    changes: list[Change] = []
    for _ in range(draw(st.integers(0, max_size))):
        op = draw(st.sampled_from("IIIIUUUDDDT"))
        row = draw(few)
        if op == "T":
            state = []
            changes.append(Change("T"))
        elif op == "I":
            state.append(row)
            changes.append(Change("I", row))
        elif state:
            was = state.pop(draw(st.integers(0, len(state) - 1)))
            if op == "D":
                changes.append(Change("D", None, was, ord("O")))
                continue
            values: list[Any] = list(row)
            told: list[Any] = list(row)
            if draw(st.booleans()):
                values[4], told[4] = was[4], UNCHANGED
            state.append(tuple(values))
            changes.append(Change("U", tuple(told), was, ord("O")))
    return History(Identity("f"), before, changes, state)


def same_rows(some: Iterable[Row], others: Iterable[Row]) -> bool:
    return Counter(map(frozen, some)) == Counter(map(frozen, others))
