"""Divide the changes of a table by key, so that several tasks apply one batch.

A change belongs to the part of its key's hash, so all changes of a key are in one part, in order. Every task reads the
raw values of all changes, and casts, folds and writes only those of its part. A batch in which a key changes, or a
TRUNCATE happens, is not divided: its parts would depend on each other. All tasks find this out in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from walmere.pgoutput.columns import DELETE, Rows, Values
from walmere.sinks.key_hash import hashes


@dataclass(frozen=True, slots=True)
class Part:
    """One of several parts."""

    number: int
    count: int

    def has(self, rows: Rows, key: tuple[str, ...]) -> NDArray[np.bool_]:
        """Which changes belong to this part. They must be divisible."""
        deletes = pa.array(rows.kind == DELETE)
        values = [pc.if_else(deletes, rows.old[place].text, rows.new[place].text) for place in _places(rows, key)]
        mine: NDArray[np.bool_] = (hashes(values) >> np.uint64(32)) % np.uint64(self.count) == self.number
        return mine


def can_be_divided(rows: Rows, key: tuple[str, ...]) -> bool:
    """Whether every change has one key."""
    changed = np.flatnonzero((rows.old_kind != 0) & (rows.kind != DELETE))
    for place in _places(rows, key):
        old, new = rows.old[place].text, rows.new[place].text
        if rows.new[place].unchanged is not None:
            return False  # the key itself was not sent
        if changed.size:
            places = pa.array(changed)
            if not pc.all(pc.equal(old.take(places), new.take(places)), min_count=0).as_py():
                return False
    return True


def _places(rows: Rows, key: tuple[str, ...]) -> list[int]:
    own = {column.name: place for place, column in enumerate(rows.relation.columns)}
    return [own[name] for name in key]


def filtered(rows: Rows, mask: NDArray[np.bool_]) -> Rows:
    """Some of the rows of a block."""
    return replace(
        rows,
        kind=rows.kind[mask],
        xid=None if rows.xid is None else rows.xid[mask],
        new=tuple(_filtered(values, mask) for values in rows.new),
        old_kind=rows.old_kind[mask],
        old=tuple(_filtered(values, mask) for values in rows.old),
    )


def _filtered(values: Values, mask: NDArray[np.bool_]) -> Values:
    return Values(values.text.filter(pa.array(mask)), None if values.unchanged is None else values.unchanged[mask])
