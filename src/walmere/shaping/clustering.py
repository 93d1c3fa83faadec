"""Sorts the rows of a copy, so that readers who filter by some columns skip most row groups of its files.

A task holds a limited number of bytes, sorts them, and writes them as one run. Each run is one or more row groups,
whose least and greatest values are in the file. Changes that follow the copy are not sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

RUN_BYTES: Final = 256 << 20
"""Bytes that are sorted at a time. A task needs about twice as much memory for a moment."""


def clustered(
    batches: Iterable[pa.RecordBatch], columns: Sequence[str], run_bytes: int = RUN_BYTES
) -> Iterator[pa.RecordBatch]:
    """The same rows, in runs that are sorted by these columns. Without columns, the batches as they are."""
    if not columns:
        yield from batches
        return
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= run_bytes:
            yield from _sorted(held, columns)
            held, size = [], 0
    if held:
        yield from _sorted(held, columns)


def _sorted(held: Sequence[pa.RecordBatch], columns: Sequence[str]) -> list[pa.RecordBatch]:
    table = pa.Table.from_batches(held)
    order = pc.sort_indices(table, sort_keys=[(name, "ascending") for name in columns])
    found: list[pa.RecordBatch] = table.take(order).combine_chunks().to_batches()
    return found


def can_sort(kind: pa.DataType) -> bool:
    """Whether rows can be sorted by a column of this type."""
    return not pa.types.is_nested(kind)
