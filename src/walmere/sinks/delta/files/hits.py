"""The rows of a table's files that a batch removes or replaces, and the values that it takes from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from walmere.directory import Directory
from walmere.errors import SinkMismatch
from walmere.sinks.base import Net
from walmere.sinks.delta.files.data_file import DataFile
from walmere.sinks.delta.files.parquet import row_groups
from walmere.sinks.row_index import I64, RowIndex, one_array


@dataclass(slots=True)
class Hits:
    """The rows of a file that the batch removes or replaces."""

    file: DataFile
    places: I64  # rows of the file, ascending
    which: I64  # rows of the index


def take_counted(candidates: Iterable[Hits], counts: I64) -> list[Hits]:
    """As many rows equal to each row of the index as `counts` says, in the first files that have them."""
    left = counts.copy()
    taken = []
    for hits in candidates:
        order = np.argsort(hits.which, kind="stable")
        sorted_which = hits.which[order]
        rank = np.empty(len(order), np.int64)  # number of equal rows before it in this file
        rank[order] = np.arange(len(order)) - np.searchsorted(sorted_which, sorted_which)
        goes = rank < left[hits.which]
        hits.places, hits.which = hits.places[goes], hits.which[goes]
        if hits.which.size:
            left -= np.bincount(hits.which, minlength=len(left))
            taken.append(hits)
        if not left.any():
            break
    return taken


def fill_carried(
    directory: Directory, net: Net, carry_from: pa.Table, index: RowIndex, hits: Sequence[Hits], upserts: pa.Table
) -> pa.Table:
    """The upserts, with the values that are taken from the target."""
    schema = upserts.schema
    masks = {name: mask for name, mask in zip(schema.names, net.carry, strict=True) if mask is not None}
    carrying = np.flatnonzero(np.logical_or.reduce(list(masks.values())))
    keys = carry_from.take(pa.array(carrying))
    where, source = index.find(lambda name: one_array(keys[name]), len(keys))
    if len(where) != len(keys):
        raise _missing_rows(len(keys) - len(where))
    wanted = np.zeros(len(net.deletes) + len(upserts), np.bool_)
    wanted[source] = True
    taken = pa.schema([schema.field(name) for name in masks])
    values = [taken.empty_table()]
    place = np.full(len(wanted), -1, np.int64)
    count = 0
    needed = [(hit, is_wanted) for hit in hits if (is_wanted := wanted[hit.which]).any()]
    values += directory.map(lambda each: fetch(directory, each[0].file, taken, each[0].places[each[1]]), needed)
    for hit, is_wanted in needed:
        which = hit.which[is_wanted]
        place[which] = count + np.arange(len(which))
        count += len(which)
    if (place[source] < 0).any():
        raise _missing_rows(int((place[source] < 0).sum()))
    fetched = pa.concat_tables(values)
    at = np.full(len(upserts), -1, np.int64)
    at[carrying] = place[source]
    for name, mask in masks.items():
        both = pa.concat_arrays([one_array(upserts[name]), one_array(fetched[name])])
        chosen = both.take(pa.array(np.where(mask, len(upserts) + at, np.arange(len(upserts)))))
        upserts = upserts.set_column(schema.names.index(name), schema.field(name), chosen)
    return upserts


def fetch(directory: Directory, file: DataFile, schema: pa.Schema, rows: I64) -> pa.Table:
    """These columns of some rows of a file, by their numbers, ascending. Reads the row groups that have them."""
    found = [schema.empty_table()]
    for group in row_groups(directory, file.name, schema):
        begin, end = np.searchsorted(rows, [group.first, group.first + group.rows])
        if end > begin:
            found.append(group.table().take(pa.array(rows[begin:end] - group.first)))
    return pa.concat_tables(found)


def _missing_rows(count: int) -> SinkMismatch:
    return SinkMismatch(
        "applying updates with unchanged TOAST values",
        f"the target does not have {count} of the updated rows",
        "another program has changed the table; let the subscription copy it again",
    )
