"""Soft deletes: a row that is deleted at the source stays in the target, with the time of the delete in a column.

A delete becomes an update that sends nothing but that time: all other values are as unchanged TOAST values, so the fold
takes them from the change before, or from the target's row. A row that is inserted again with the same key replaces the
deleted one, so the target may have the key of an insert. TRUNCATE is not a delete: it removes all rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walmere.apply.fold import DELETE, UPDATE, Changes
from walmere.changelog.plan import BlockRef
from walmere.shaping.columns import DELETED_AT
from walmere.sinks.base import Mask
from walmere.sinks.row_index import one_array

_TIME: Final = "commit_time"


def with_commit_time(ref: BlockRef, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The messages of a block with their commit times: a transaction of its own has it in the reference."""
    if ref.commit_time is None:
        return batch
    place = batch.schema.get_field_index(_TIME)
    times = pa.array(np.full(batch.num_rows, ref.commit_time, np.int64)).cast(batch.schema.field(place).type)
    return batch.set_column(place, batch.schema.field(place), times)


def soften(changes: Changes, column: str | None, key: tuple[str, ...], batch: pa.RecordBatch) -> Changes:
    """The same changes, with a column for the time of the delete. Those that delete are updates. None: deletes stay."""
    if column is None:
        return changes
    is_delete = changes.kind == DELETE
    deleted = pa.array(is_delete)
    new, old = changes.new, changes.old
    unchanged: list[Mask | None] = list(changes.unchanged)
    if is_delete.any():
        assert old is not None
        for place, name in enumerate(new.column_names):
            if name in key:
                values = pc.if_else(deleted, one_array(old.column(name)), one_array(new.column(name)))
                new = new.set_column(place, new.schema.field(place), values)
            else:
                mask = unchanged[place]
                unchanged[place] = is_delete if mask is None else mask | is_delete
    times = pc.if_else(deleted, batch.column(_TIME).cast(DELETED_AT), pa.scalar(None, DELETED_AT))
    field = pa.field(column, DELETED_AT)
    return Changes(
        np.where(is_delete, UPDATE, changes.kind).astype(np.uint8),
        new.append_column(field, times),
        (*unchanged, None),
        changes.old_kind,
        None if old is None else old.append_column(field, pa.nulls(len(changes), DELETED_AT)),
    )
