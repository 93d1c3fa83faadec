"""A delete becomes an update that keeps the row, whatever else happens to the row in the batch."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from walmere.apply.fold import DELETE, INSERT, KEY, OLD, UPDATE, Changes, fold
from walmere.apply.soft_deletes import soften
from walmere.names import Identity
from walmere.shaping.columns import DELETED_AT
from walmere.sinks.base import Net

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = pa.schema([("id", pa.int32()), ("v", pa.string())])
BY_ID = Identity("d", ("id",))

Change = tuple[int, tuple[Any, Any] | None, tuple[Any, Any] | None]
"""Kind, old tuple and new tuple. An old tuple without a value has the key only."""


def at(number: int) -> datetime:
    return BEGAN + timedelta(seconds=number)


def changes(*given: Change) -> Changes:
    kinds = np.array([kind for kind, *_ in given], np.uint8)
    old_kinds = np.array([0 if old is None else KEY if old[1] is None else OLD for _, old, _ in given], np.uint8)
    new = pa.table(list(map(list, zip(*(row or (None, None) for *_, row in given), strict=True))), schema=SCHEMA)
    old = pa.table(list(map(list, zip(*(row or (None, None) for _, row, _ in given), strict=True))), schema=SCHEMA)
    return Changes(kinds, new, (None, None), old_kinds, old if old_kinds.any() else None)


def softened(*given: Change) -> Changes:
    times = pa.array([at(number) for number in range(len(given))], DELETED_AT)
    batch = pa.RecordBatch.from_arrays([times], ["commit_time"])
    return soften(changes(*given), "deleted_at", BY_ID.key, batch)


def net(*given: Change) -> Net:
    return fold(softened(*given), BY_ID, may_exist=True)


def test_a_delete_keeps_the_values_of_the_target() -> None:
    found = net((DELETE, (1, None), None))
    assert not len(found.deletes)
    assert found.upserts.to_pylist() == [{"id": 1, "v": None, "deleted_at": at(0)}]
    assert found.carry_from is not None
    assert found.carry_from.to_pylist() == [{"id": 1}]
    assert [None if mask is None else mask.tolist() for mask in found.carry] == [None, [True], None]


def test_a_delete_keeps_the_values_of_the_change_before() -> None:
    found = net((UPDATE, None, (1, "new")), (DELETE, (1, None), None))
    assert found.upserts.to_pylist() == [{"id": 1, "v": "new", "deleted_at": at(1)}]
    assert found.carry_from is None
    inserted = net((INSERT, None, (1, "new")), (DELETE, (1, None), None))
    assert inserted.upserts.to_pylist() == [{"id": 1, "v": "new", "deleted_at": at(1)}]


def test_an_old_row_that_was_sent_has_the_values() -> None:
    found = net((DELETE, (1, "old"), None))
    assert found.upserts.to_pylist() == [{"id": 1, "v": "old", "deleted_at": at(0)}]
    assert found.carry_from is None


def test_a_row_that_is_inserted_again_is_not_deleted() -> None:
    found = net((DELETE, (1, None), None), (INSERT, None, (1, "again")))
    assert found.upserts.to_pylist() == [{"id": 1, "v": "again", "deleted_at": None}]
    later = net((INSERT, None, (1, "again")))
    assert later.upserts.to_pylist() == [{"id": 1, "v": "again", "deleted_at": None}], "it replaces the deleted row"
    assert not len(later.appends)


def test_a_row_that_gets_another_key_is_moved_and_not_deleted() -> None:
    found = net((UPDATE, (1, None), (2, "moved")), (DELETE, (2, None), None))
    assert found.deletes.to_pylist() == [{"id": 1}]
    assert found.upserts.to_pylist() == [{"id": 2, "v": "moved", "deleted_at": at(1)}]


def test_without_soft_deletes_nothing_changes() -> None:
    given = changes((INSERT, None, (1, "a")))
    assert soften(given, None, BY_ID.key, pa.RecordBatch.from_arrays([pa.array([])], ["x"])) is given
