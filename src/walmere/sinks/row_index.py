"""Rows as numbers: equal rows get equal numbers, so that keys of any types are compared as integers.

Equal means: the same bits, and NULL equals NULL. A mirror needs this, because a key or an old row is always the image
of the row it belongs to: 0.0 and -0.0 are two values, NaN is one, and text has no collation. Arrow's hashing does the
same.

`codes` numbers the rows of several columns. `RowIndex` has a set of rows and finds them among others, column by column:
after the first column, few rows are left to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

I64: TypeAlias = NDArray[np.int64]

_LIMIT: Final = 1 << 62


def codes(columns: list[pa.Array]) -> tuple[I64, int]:
    """One number per row, from 0 on and without gaps, and how many different numbers there are."""
    total, count = _column_codes(columns[0])
    for column in columns[1:]:
        more, size = _column_codes(column)
        if count * size >= _LIMIT:  # impossible below 2 billion rows: neither exceeds the number of rows
            raise OverflowError("too many different rows to number")
        total, count = _dense(total * size + more)
    return total, count


def _dense(values: I64) -> tuple[I64, int]:
    encoded = pa.array(values).dictionary_encode()
    return _numbers(encoded.indices), len(encoded.dictionary)


def _numbers(array: pa.Array) -> I64:
    numbers: I64 = array.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return numbers


def _column_codes(column: pa.Array) -> tuple[I64, int]:
    kind = column.type
    if pa.types.is_nested(kind):
        return _column_codes(_flat(column))
    encoded = column.dictionary_encode(null_encoding="encode")
    return _numbers(encoded.indices), len(encoded.dictionary)


def _flat(column: pa.Array) -> pa.Array:
    """Lists, maps and structs as binary: a list is the string of the numbers of its elements."""
    kind = column.type
    valid = column.is_valid()
    if pa.types.is_struct(kind):
        fields = column.flatten()
        inner = codes(fields)[0] if fields else np.zeros(len(column), np.int64)
        return pc.if_else(valid, pa.array(inner), None)
    if pa.types.is_fixed_size_list(kind):
        column = column.cast(pa.list_(kind.value_field))
    elif pa.types.is_map(kind):
        entries = pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])
        column = pa.ListArray.from_arrays(column.offsets, entries)
    elements = column.values  # also those outside of a slice: the offsets count from the first
    inner = codes([elements])[0] if len(elements) else np.zeros(0, np.int64)
    offsets = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64) * inner.itemsize
    text = pa.Array.from_buffers(
        pa.large_binary(), len(column), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(inner))]
    )
    return pc.if_else(valid, text, pa.scalar(None, pa.large_binary()))


class RowIndex:
    """Finds rows by some of their columns. All rows of the index are different."""

    def __init__(self, rows: pa.Table, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self._values: list[pa.Array] = []  # per column, its different values
        self._known: list[I64] = []  # per column, the sorted combinations of all columns up to it
        self._count = len(rows)
        dense = np.zeros(len(rows), np.int64)
        for name in columns:
            column = one_array(rows[name])
            if pa.types.is_nested(column.type):  # numbered again in each search
                values, mine = column, codes([column])[0]
            else:
                values = pc.unique(column)
                mine = _numbers(pc.index_in(column, value_set=values))
            known, dense = np.unique(dense * max(len(values), 1) + mine, return_inverse=True)
            self._values.append(values)
            self._known.append(known)
        self._row = np.empty(len(rows), np.int64)
        self._row[dense] = np.arange(len(rows))

    def find(self, column: Callable[[str], pa.Array], count: int) -> tuple[I64, I64]:
        """Of `count` rows, those that are in the index, and the rows of the index that they are equal to.

        `column` returns a column of these rows by its name. It is called only if the column is needed.
        """
        where: I64 | None = None  # None: all
        dense = np.zeros(count, np.int64)
        for name, values, known in zip(self.columns, self._values, self._known, strict=True):
            if not len(dense):
                break
            searched = column(name)
            if where is not None and len(where) < count:
                searched = searched.take(pa.array(where))
            found = _find_values(searched, values)
            there = np.flatnonzero(found >= 0)
            packed = dense[there] * max(len(values), 1) + found[there]
            place = np.minimum(np.searchsorted(known, packed), max(len(known) - 1, 0))
            hit = known[place] == packed if len(known) else np.zeros(len(packed), np.bool_)
            there = there[hit]
            where = there if where is None else where[there]
            dense = place[hit]
        if where is None or not self._count:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        return where, self._row[dense]


def _find_values(searched: pa.Array, values: pa.Array) -> I64:
    """For each searched value, its place in `values`; -1 for none."""
    if pa.types.is_nested(searched.type):
        both, size = codes([pa.concat_arrays([values, searched])])
        # `values` may repeat here; __init__ has used their numbers in order of first appearance
        mine, others = both[: len(values)], both[len(values) :]
        number = np.full(size, -1, np.int64)
        number[mine] = codes([values])[0]
        return number[others]
    found = pc.index_in(searched, value_set=values)
    return _numbers(pc.fill_null(found, -1))


def one_array(column: Any) -> pa.Array:
    """A column as one array."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
