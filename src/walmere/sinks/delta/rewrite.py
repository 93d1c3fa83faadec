"""Changes of single rows: rewrite the files that have a row which a batch removes or replaces.

A batch that only has new rows is a new file, and is not for this module. For all other batches:

1. The log has the least and greatest key of every file. Only files that can have a key of the batch are opened.
2. The key's columns are read from these, one column after the other, as long as there are rows that may match. The
   result is the place of every row to remove or replace, and the values that unchanged TOAST takes from the target.
3. Files with a match are read, filtered and written, several at once, with one row group of each in memory. A replaced
   row stays in its file, so that neighbouring keys stay together. Small files are joined.

Nothing here commits. The result is the list of files to remove and of files, already staged, to add: one commit.

This is for readers that do not support deletion vectors (see `merge` for the other way). So a batch also rewrites the
files that have a vector, once.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walmere.bins import bins
from walmere.directory import Directory
from walmere.names import Identity
from walmere.sinks.base import Net, StagedFile
from walmere.sinks.delta.files.data_file import NO_ROWS, DataFile, is_in
from walmere.sinks.delta.files.hits import Hits, fill_carried, take_counted
from walmere.sinks.delta.files.parquet import conform, row_groups, write
from walmere.sinks.row_index import RowIndex

_MAX_EXACT_KEYS: Final = 10_000
"""Up to this many keys, each is compared with the bounds of a file; of more keys, only the least and the greatest."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The files to add and remove in one commit."""

    added: list[StagedFile]
    removed: list[DataFile]
    hits: int = 0  # rows that were removed or replaced
    replaced: int = 0  # of these


@dataclass(frozen=True, slots=True)
class Files:
    """All files of a table at one version."""

    directory: Directory
    schema: pa.Schema
    files: Sequence[DataFile]
    file_size: int  # of new files


def rewrite(old: Files, net: Net, identity: Identity) -> Rewrite:
    """Write the files for a net effect."""
    upserts, appends = conform(net.upserts, old.schema), conform(net.appends, old.schema)
    with ThreadPoolExecutor(min(max(len(old.files), 1), os.cpu_count() or 1)) as pool:
        return _Rewriter(old, pool).run(net, identity, upserts, appends)


class _Rewriter:
    def __init__(self, old: Files, pool: ThreadPoolExecutor) -> None:
        self.files, self.pool = old.files, pool
        self.directory, self.schema, self.file_size = old.directory, old.schema, old.file_size

    def run(self, net: Net, identity: Identity, upserts: pa.Table, appends: pa.Table) -> Rewrite:
        columns = identity.key if identity.keyed else tuple(self.schema.names)
        by_key = pa.schema([self.schema.field(name) for name in columns])
        removed = pa.concat_tables([conform(net.deletes, by_key), upserts.select(list(columns))])
        index = RowIndex(removed, columns)
        candidates = [] if net.append_only else _candidates(self.files, removed)
        if net.counts is None:
            hits = [
                found
                for found in self.pool.map(lambda file: self.find_rows(file, index), candidates)
                if found.which.size
            ]
        else:
            hits = take_counted((self.find_rows(file, index) for file in candidates), net.counts)
        if net.carry_from is not None:
            upserts = fill_carried(self.directory, net, conform(net.carry_from, by_key), index, hits, upserts)

        touched = {hit.file.path for hit in hits}
        # no file keeps a deletion vector: this is for readers that do not support them
        hits += [Hits(file, NO_ROWS, NO_ROWS) for file in self.files if file.vector and file.path not in touched]
        unplaced = np.ones(len(upserts), np.bool_)
        jobs: list[list[pa.Table | Hits]] = []
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
        which = np.concatenate([NO_ROWS, *(hit.which for hit in hits)])
        replaced = int((which >= len(net.deletes)).sum())
        return Rewrite(added, [hit.file for hit in hits], len(which), replaced)

    def find_rows(self, file: DataFile, index: RowIndex) -> Hits:
        """The rows of a file that are in the index."""
        places, which = [NO_ROWS], [NO_ROWS]
        for group in row_groups(self.directory, file.name, self.schema):
            where, found = index.find(group.column, group.rows)
            places.append(where + group.first)
            which.append(found)
        hits = Hits(file, np.concatenate(places), np.concatenate(which))
        if file.vector is not None:
            there = ~is_in(hits.places, file.deleted_rows(self.directory))
            hits.places, hits.which = hits.places[there], hits.which[there]
        return hits

    def write(self, job: list[pa.Table | Hits]) -> list[StagedFile]:
        def tables() -> Iterator[pa.Table]:
            for part in job:
                if isinstance(part, Hits):
                    yield from part.file.tables(self.directory, self.schema, part.places)
                else:
                    yield part

        return write(self.directory, self.schema, tables(), self.file_size)


def _candidates(files: Sequence[DataFile], rows: pa.Table) -> list[DataFile]:
    """The files that may have one of these rows, by the bounds of their columns."""
    possible_files = list(files)
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        parse = _PARSE.get(_family(column.type))
        if parse is None or column.null_count:
            continue
        exact = pa.types.is_timestamp(column.type)
        values = pc.unique(column.cast(pa.int64()) if exact else column)
        if len(values) > _MAX_EXACT_KEYS:
            ends = pc.min_max(values)
            keys, only_ends = [ends["min"].as_py(), ends["max"].as_py()], True
        else:
            keys, only_ends = sorted(values.to_pylist()), False
        possible_files = [file for file in possible_files if _may_have(file, name, keys, parse, only_ends=only_ends)]
    return possible_files


def _may_have(file: DataFile, name: str, keys: list[Any], parse: Callable[[Any], Any], *, only_ends: bool) -> bool:
    """Whether one of the keys is between the bounds of a file; if only the ends are known, whether one may be."""
    found = file.statistics
    try:
        first, last = (found[side][name] for side in ("minValues", "maxValues"))
        first, last = parse(first), parse(last)
    except (KeyError, TypeError, ValueError, OverflowError):
        return True
    if parse is _microseconds:
        last += 1000  # Spark truncates bounds to milliseconds
    if only_ends:
        return bool(keys[0] <= last and first <= keys[1])
    return bisect_left(keys, first) < bisect_right(keys, last)


def _family(kind: Any) -> str:
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_string(kind):
        return "string"
    if pa.types.is_date(kind):
        return "date"
    if pa.types.is_timestamp(kind):
        return "timestamp"
    return "decimal" if pa.types.is_decimal(kind) else ""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _microseconds(value: Any) -> int:
    found = datetime.fromisoformat(value)
    since = (found if found.tzinfo else found.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return since // timedelta(microseconds=1)


_PARSE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "integer": int,
    "string": _text,
    "date": date.fromisoformat,
    "timestamp": _microseconds,
    "decimal": Decimal,
}
"""How the bounds of a column are read from the statistics of a file, by the kind of its type."""
