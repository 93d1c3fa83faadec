"""Changes of single rows by deletion vectors: a batch costs what it changes, not the files that it changes.

1. The key index finds the rows to remove or replace. No data file is read, except for unchanged TOAST values, and to
   compare the rows of a table without a key: of these, the row groups that have them.
2. New row versions are written into one new file. The old ones are marked in the deletion vectors of their files.
3. One commit adds the new file, and replaces the vectors.

`rewrite` does the same without vectors. A part of a large batch is merged by a task of its own: a task finds and writes
(`find`), and one commit takes what all tasks have found (`change`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from walmere.errors import SinkConflict
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import Net, StagedFile
from walmere.sinks.delta.files import vectors
from walmere.sinks.delta.files.data_file import DataFile
from walmere.sinks.delta.files.hits import fill_carried, take_counted
from walmere.sinks.delta.files.key_index import KeyIndex
from walmere.sinks.delta.files.parquet import conform
from walmere.sinks.delta.log import history
from walmere.sinks.delta.log.commit import Change, overtaken
from walmere.sinks.delta.log.replay import TableVersion
from walmere.sinks.delta.tables import DeltaTables
from walmere.sinks.row_index import I64, RowIndex, one_array


@dataclass(frozen=True, slots=True)
class Found:
    """What a batch, or a part of one, does to a table: new files, and rows to delete by their numbers."""

    lsn: Lsn | None  # of the table, when the rows were found
    schema: pa.Schema  # likewise
    staged: Sequence[StagedFile] = ()
    deleted: Mapping[str, I64] = field(default_factory=dict)  # by the path of their file
    metrics: Mapping[str, int] = field(default_factory=history.rows)


def find(
    tables: DeltaTables, table: TableName, version: TableVersion, net: Net, identity: Identity, before: Found | None
) -> Found:
    """Find the rows of a net effect that has more than new rows, and write its new rows.

    `before` was found at an earlier version. Its new rows are used again, unless they have values of the target.
    """
    schema = version.arrow_schema
    if before is not None and not before.schema.equals(schema):
        raise overtaken(table)
    index = KeyIndex.of(tables.directory(table), schema, identity, tables.index_of(table))
    upserts, appends = conform(net.upserts, schema), conform(net.appends, schema)
    removed = pa.concat_tables([conform(net.deletes, index.key_schema), upserts.select(list(index.columns))])
    wanted = [one_array(removed[name]) for name in index.columns]
    rows = RowIndex(removed, index.columns)
    candidates = index.find(version.files, rows, wanted)
    hits = list(candidates) if net.counts is None else take_counted(candidates, net.counts)
    if net.carry_from is not None:
        upserts = fill_carried(index.directory, net, conform(net.carry_from, index.key_schema), rows, hits, upserts)
    if before is None or net.carry_from is not None:
        staged: Sequence[StagedFile] = tables.write(table, schema, [upserts, appends], index)
    else:
        staged = before.staged
    which = np.concatenate([np.zeros(0, np.int64), *(hit.which for hit in hits)])
    updated = len(np.unique(which[which >= len(net.deletes)]))
    metrics = history.rows(len(appends) + len(upserts) - updated, updated, int((which < len(net.deletes)).sum()))
    return Found(tables.lsn_of(version), schema, staged, {hit.file.path: hit.places for hit in hits}, metrics)


def change(tables: DeltaTables, table: TableName, version: TableVersion, parts: Sequence[Found]) -> Change:
    """The commit of all parts of a batch. The vectors of their files are written."""
    deleted: dict[str, list[I64]] = {}
    for part in parts:
        for path, rows in part.deleted.items():
            deleted.setdefault(path, []).append(rows)
    found = tables.lsn_of(version), version.arrow_schema
    if any((part.lsn, part.schema) != found for part in parts):  # a part that another attempt has found earlier
        raise overtaken(table)
    if not set(deleted) <= set(version.adds):
        doing = f"committing to the Delta table {table}"
        raise SinkConflict(doing, "another program has replaced its files", "the batch is retried")
    directory = tables.directory(table)
    removed: list[str] = []
    marked: dict[str, I64] = {}
    files = {path: DataFile.from_action(version.adds[path]) for path in deleted}
    vectors.prefetch(directory, [file.vector for file in files.values()])
    for path, row_numbers in deleted.items():
        file = files[path]
        rows = np.sort(np.concatenate([file.deleted_rows(directory), *row_numbers]))
        rows = rows[np.append(True, np.diff(rows) > 0)]
        if len(rows) == file.rows(directory):
            removed.append(path)
        else:
            marked[path] = rows
    written = vectors.write(directory, list(marked.values()))
    metrics = {name: sum(part.metrics[name] for part in parts) for name in history.rows()}
    return Change(
        [file for part in parts for file in part.staged],
        removed,
        dict(zip(marked, written, strict=True)),
        metrics=metrics,
    )
