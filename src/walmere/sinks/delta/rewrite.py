"""Changes of single rows: rewrite the files that have a row which a batch removes or replaces.

A batch that only has new rows is a new file, and is not for this module. For all other batches:

1. The log has the least and greatest key of every file. Only files that can have a key of the batch are opened.
2. The key's columns are read from these, one column after the other, as long as there are rows that may match. The
   result is the place of every row to remove or replace, and the values that unchanged TOAST takes from the target.
3. Files with a match are read, filtered and written, several at once, with one row group of each in memory. A replaced
   row stays in its file, so that neighbouring keys stay together. Small files are joined.

Nothing here commits. The result is the list of files to remove and of files, already staged, to add: one commit.

Files with deletion vectors (Spark may have written them) are read correctly. `deltalake` cannot remove such a file by
its name, so a batch that changes one rewrites the whole table, once.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from walmere.bins import bins
from walmere.errors import SinkMismatch
from walmere.names import Identity
from walmere.sinks.base import Net, StagedFile
from walmere.sinks.delta.parquet import conform, row_groups, write
from walmere.sinks.row_index import I64, RowIndex, one_array
from walmere.storage import Directory

_MAX_EXACT_KEYS: Final = 10_000
"""Up to this many keys, each is compared with the bounds of a file; of more keys, only the least and the greatest."""

_NONE: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of the table as the log has it."""

    path: str
    size: int
    deleted: I64 | None = None  # rows that its deletion vector has removed

    def tables(self, directory: Directory, schema: pa.Schema, without: I64 = _NONE) -> Iterator[pa.Table]:
        """The rows of the file, without these (by their places, ascending) and without deleted ones."""
        if self.deleted is not None:
            without = np.union1d(without, self.deleted)
        for group in row_groups(directory, self.path, schema):
            begin, end = np.searchsorted(without, [group.first, group.first + group.rows])
            if end - begin == group.rows:
                continue
            table = group.table()
            if end > begin:
                keep = np.ones(group.rows, np.bool_)
                keep[without[begin:end] - group.first] = False
                table = table.filter(pa.array(keep))
            yield table


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The files to add and remove in one commit."""

    added: list[StagedFile]
    removed: list[DataFile]
    everything: bool = False  # `added` replaces all files of the table


@dataclass(slots=True)
class _Hits:
    """The rows of a file that the batch removes or replaces."""

    file: DataFile
    places: I64  # rows of the file, ascending
    which: I64  # rows of the index


@dataclass(frozen=True, slots=True)
class Files:
    """All files of a table at one version."""

    directory: Directory
    schema: pa.Schema
    files: Sequence[DataFile]
    bounds: pa.Table  # per file, structs `min` and `max` with the bounds of its columns in the log
    file_size: int  # of new files


def rewrite(old: Files, net: Net, identity: Identity) -> Rewrite:
    """Write the files for a net effect that has more than new rows."""
    upserts, appends = conform(net.upserts, old.schema), conform(net.appends, old.schema)
    if net.truncate:
        return Rewrite(write(old.directory, old.schema, [upserts, appends], old.file_size), [], everything=True)
    with ThreadPoolExecutor(min(max(len(old.files), 1), os.cpu_count() or 1)) as pool:
        return _Rewriter(old, pool).run(net, identity, upserts, appends)


class _Rewriter:
    def __init__(self, old: Files, pool: ThreadPoolExecutor) -> None:
        self.files, self.bounds, self.pool = old.files, old.bounds, pool
        self.directory, self.schema, self.file_size = old.directory, old.schema, old.file_size

    def run(self, net: Net, identity: Identity, upserts: pa.Table, appends: pa.Table) -> Rewrite:
        columns = identity.key if identity.keyed else tuple(self.schema.names)
        by_key = pa.schema([self.schema.field(name) for name in columns])
        removed = pa.concat_tables([conform(net.deletes, by_key), upserts.select(list(columns))])
        index = RowIndex(removed, columns)
        candidates = _candidates(self.files, self.bounds, removed)
        if net.counts is None:
            hits = [
                found
                for found in self.pool.map(lambda file: self.find_rows(file, index), candidates)
                if found.which.size
            ]
        else:
            hits = self.take_counted(candidates, index, net.counts)
        if net.carry_from is not None:
            upserts = self.fill_carried(net, conform(net.carry_from, by_key), index, hits, upserts)

        everything = any(hit.file.deleted is not None for hit in hits)
        if everything:
            touched = {hit.file.path for hit in hits}
            hits += [_Hits(file, _NONE, _NONE) for file in self.files if file.path not in touched]
        unplaced = np.ones(len(upserts), np.bool_)
        jobs: list[list[pa.Table | _Hits]] = []
        sizes: list[int] = []
        for together in bins(hits, lambda hit: hit.file.size, self.file_size):
            kept = np.concatenate([hit.which for hit in together]) - len(net.deletes)
            kept = np.unique(kept[kept >= 0])
            kept = kept[unplaced[kept]]  # a key that is in the target twice, which is an error, is written once
            unplaced[kept] = False
            jobs.append([*together, upserts.take(pa.array(kept))])
            sizes.append(sum(hit.file.size for hit in together))
        new = pa.concat_tables([upserts.filter(pa.array(unplaced)), appends])
        if len(new):
            smallest = int(np.argmin(sizes)) if sizes else -1
            if smallest >= 0 and sizes[smallest] < self.file_size // 2:
                jobs[smallest].append(new)
            else:
                jobs.append([new])
        added = [file for staged in self.pool.map(self.write, jobs) for file in staged]
        return Rewrite(added, [] if everything else [hit.file for hit in hits], everything)

    def find_rows(self, file: DataFile, index: RowIndex) -> _Hits:
        """The rows of a file that are in the index."""
        places, which = [_NONE], [_NONE]
        for group in row_groups(self.directory, file.path, self.schema):
            where, found = index.find(group.column, group.rows)
            places.append(where + group.first)
            which.append(found)
        hits = _Hits(file, np.concatenate(places), np.concatenate(which))
        if file.deleted is not None:
            there = ~np.isin(hits.places, file.deleted)
            hits.places, hits.which = hits.places[there], hits.which[there]
        return hits

    def take_counted(self, candidates: Sequence[DataFile], index: RowIndex, counts: I64) -> list[_Hits]:
        """Find as many rows equal to each row of the index as `counts` says, in the first files that have them."""
        left = counts.copy()
        taken = []
        for file in candidates:
            if not left.any():
                break
            hits = self.find_rows(file, index)
            order = np.argsort(hits.which, kind="stable")
            sorted_which = hits.which[order]
            rank = np.empty(len(order), np.int64)  # number of equal rows before it in this file
            rank[order] = np.arange(len(order)) - np.searchsorted(sorted_which, sorted_which)
            goes = rank < left[hits.which]
            hits.places, hits.which = hits.places[goes], hits.which[goes]
            if hits.which.size:
                left -= np.bincount(hits.which, minlength=len(left))
                taken.append(hits)
        return taken

    def fill_carried(
        self, net: Net, carry_from: pa.Table, index: RowIndex, hits: Sequence[_Hits], upserts: pa.Table
    ) -> pa.Table:
        """The upserts, with the values that are taken from the target."""
        masks = {name: mask for name, mask in zip(self.schema.names, net.carry, strict=True) if mask is not None}
        carrying = np.flatnonzero(np.logical_or.reduce(list(masks.values())))
        keys = carry_from.take(pa.array(carrying))
        where, source = index.find(lambda name: one_array(keys[name]), len(keys))
        if len(where) != len(keys):
            raise _missing_rows(len(keys) - len(where))
        wanted = np.zeros(len(net.deletes) + len(upserts), np.bool_)
        wanted[source] = True
        names = tuple(masks)
        values = [pa.schema([self.schema.field(name) for name in names]).empty_table()]
        place = np.full(len(wanted), -1, np.int64)
        count = 0
        for hit in hits:
            some = wanted[hit.which]
            if some.any():
                rows, which = hit.places[some], hit.which[some]
                values.append(self.fetch(hit.file, names, rows))
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
            upserts = upserts.set_column(self.schema.names.index(name), self.schema.field(name), chosen)
        return upserts

    def fetch(self, file: DataFile, names: tuple[str, ...], rows: I64) -> pa.Table:
        found = []
        for group in row_groups(self.directory, file.path, self.schema):
            begin, end = np.searchsorted(rows, [group.first, group.first + group.rows])
            if end > begin:
                found.append(group.table(names).take(pa.array(rows[begin:end] - group.first)))
        return pa.concat_tables(found)

    def write(self, job: list[pa.Table | _Hits]) -> list[StagedFile]:
        def tables() -> Iterator[pa.Table]:
            for part in job:
                if isinstance(part, _Hits):
                    yield from part.file.tables(self.directory, self.schema, part.places)
                else:
                    yield part

        return write(self.directory, self.schema, tables(), self.file_size)


def _missing_rows(count: int) -> SinkMismatch:
    return SinkMismatch(
        "applying updates with unchanged TOAST values",
        f"the target does not have {count} of the updated rows",
        "another program has changed the table; let the subscription copy it again",
    )


def _candidates(files: Sequence[DataFile], bounds: pa.Table, rows: pa.Table) -> list[DataFile]:
    """The files that may have one of these rows, by the bounds of their columns."""
    possible_files = [True] * len(files)
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        least, greatest = (_bound(bounds, side, name) for side in ("min", "max"))
        if least is None or greatest is None or column.null_count:
            continue
        slack = 0
        if pa.types.is_timestamp(column.type):  # Spark truncates bounds to milliseconds
            least, greatest = least.cast(pa.int64()), greatest.cast(pa.int64())
            slack = 1000
        values = pc.unique(column.cast(pa.int64()) if slack else column)
        if len(values) > _MAX_EXACT_KEYS:
            ends = pc.min_max(values)
            keys = [ends["min"].as_py(), ends["max"].as_py()]
            only_ends = True
        else:
            keys, only_ends = sorted(values.to_pylist()), False
        within = [
            first is None or last is None or _between(keys, first, last + slack if slack else last, only_ends)
            for first, last in zip(least.to_pylist(), greatest.to_pylist(), strict=True)
        ]
        possible_files = [one and other for one, other in zip(possible_files, within, strict=True)]
    return [file for file, possible in zip(files, possible_files, strict=True) if possible]


def _between(keys: list[Any], first: Any, last: Any, only_ends: bool) -> bool:
    """Whether one of the keys is between the bounds. `only_ends`: whether one may be, by the least and greatest key."""
    if only_ends:
        return bool(keys[0] <= last and first <= keys[1])
    return bisect_left(keys, first) < bisect_right(keys, last)


def _bound(bounds: pa.Table, side: str, name: str) -> Any:
    """The bounds of a column in all files; None for a type whose bounds cannot be compared."""
    if side not in bounds.column_names or bounds.schema.field(side).type.get_field_index(name) < 0:
        return None
    values = one_array(bounds[side]).field(name)
    kind = values.type
    ordered = pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date(kind)
    return values if ordered or pa.types.is_timestamp(kind) or pa.types.is_decimal(kind) else None


def files_of(opened: DeltaTable) -> tuple[list[DataFile], pa.Table]:
    """The files of the opened version, and the bounds of their columns."""
    actions = pa.table(opened.get_add_actions(flatten=False))
    deleted: dict[str, Any] = {}
    if "deletionVectors" in (opened.protocol().reader_features or ()):
        for batch in opened.deletion_vectors():
            vectors = pa.record_batch(batch)
            for path, kept in zip(vectors["filepath"].to_pylist(), vectors["selection_vector"], strict=True):
                keep = kept.values.to_numpy(zero_copy_only=False).astype(np.bool_)
                deleted[path.rpartition("/")[2]] = np.flatnonzero(~keep)
    paths, sizes = actions["path"].to_pylist(), actions["size_bytes"].to_pylist()
    files = [
        DataFile(path, size, deleted.get(path.rpartition("/")[2])) for path, size in zip(paths, sizes, strict=True)
    ]
    return files, actions
