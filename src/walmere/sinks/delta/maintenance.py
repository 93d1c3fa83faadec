"""Upkeep of a table: join small files, purge deleted rows, and delete the files that are no longer needed.

Every batch adds a small file and marks rows as deleted. Both make reads slower, and every batch writes the vectors of
the files that it touches. So files are rewritten from time to time, beside the stream:

1. `plan` chooses files: those with too large a share of deleted rows, those whose vectors have taken as many bytes as
   the file itself, and small ones of similar size. A vector is written whole with every batch that touches its file, so
   without the second rule a batch would cost what was deleted long before it. Files of similar size are joined, so a
   row is written again once for each level of sizes, not with every join.
2. `rewrite` writes their rows into new files. It runs in a task, for as long as it takes.
3. `replace` commits. Batches may have deleted rows of the old files meanwhile: they are marked in the new files. So
   neither waits for the other, and nothing is done twice.

Replaced files stay for readers of older versions. `vacuum` deletes them `keep_seconds` later, with the vectors, the
key indexes, and after some days also files that no commit ever had: what a task leaves that dies or loses. The files of
the points that must be readable stay in any case. Such a version may have been replaced long ago: while a table is
ahead of the others, there may be no newer point for hours.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from walmere.errors import SinkConflict, SinkMismatch
from walmere.names import Identity, TableName
from walmere.sinks.base import StagedFile, Upkeep
from walmere.sinks.delta import points
from walmere.sinks.delta.files import vectors
from walmere.sinks.delta.files.data_file import NO_ROWS, DataFile
from walmere.sinks.delta.files.key_index import KeyIndex, remove_unused
from walmere.sinks.delta.files.vectors import Vector
from walmere.sinks.delta.log import replay, retention
from walmere.sinks.delta.log.actions import require_supported
from walmere.sinks.delta.log.commit import ATTEMPTS, Change, switch_off_vectors, try_commit
from walmere.sinks.delta.log.names import LOG
from walmere.sinks.delta.log.replay import TableVersion
from walmere.sinks.delta.tables import DeltaTables
from walmere.sinks.row_index import I64

JOIN_FILES: Final = 8
"""Join so many files of similar size; each level of sizes is so many times the one below."""
_LEAST_SIZE: Final = 16 << 10
"""Bytes. Files up to this size are of similar size."""
_MARGIN: Final = 60.0
"""Seconds to keep a file longer: a point begins before the version that replaces it is in the next point."""
_UNKNOWN_SECONDS: Final = 7 * 86_400.0
"""Seconds after which a file that is in no commit is deleted. A copy that takes longer would lose its files."""


@dataclass(frozen=True, slots=True)
class Work:
    """Files to rewrite into new ones."""

    table: TableName
    schema: pa.Schema
    files: tuple[DataFile, ...]
    identity: Identity | None

    @property
    def bytes(self) -> int:
        """About how many bytes are written."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """New files with the rows of old ones, in order."""

    work: Work
    staged: tuple[StagedFile, ...]


def plan(tables: DeltaTables, table: TableName, identity: Identity | None, limits: Upkeep) -> list[Work]:
    """What is to be rewritten now."""
    found = tables.newest(table)
    if found is None:
        return []
    directory = tables.directory(table)
    purged, small = [], []
    for file in found.files:
        rows = file.rows(directory)
        many = file.deleted >= limits.deleted_share * rows
        costly = found.vector_bytes.get(file.path, 0) >= file.size
        if file.vector is not None and (not tables.deletion_vectors or many or costly):
            purged.append(file)
        elif file.size < tables.file_size // 4:
            small.append(file)
    groups = [*_joined(purged, tables.file_size), *_similar(small, tables.file_size)]
    return [Work(table, found.arrow_schema, tuple(group), identity) for group in groups]


def _joined(files: Sequence[DataFile], size: int) -> list[list[DataFile]]:
    """Files in groups of about a size, small ones together."""
    groups: list[list[DataFile]] = []
    total = 0
    for file in sorted(files, key=lambda each: each.size):
        if not groups or total + file.size > size:
            groups.append([])
            total = 0
        groups[-1].append(file)
        total += file.size
    return groups


def _similar(files: Sequence[DataFile], size: int) -> list[list[DataFile]]:
    """Groups of at least `JOIN_FILES` files of one level of sizes, with all files below it."""
    levels: dict[int, list[DataFile]] = {}
    for file in files:
        level = max(0, math.ceil(math.log(file.size / _LEAST_SIZE, JOIN_FILES))) if file.size else 0
        levels.setdefault(level, []).append(file)
    for level in sorted(levels, reverse=True):
        if len(levels[level]) >= JOIN_FILES:
            groups = _joined([file for each in levels if each <= level for file in levels[each]], size)
            return [group for group in groups if len(group) > 1]
    return []


def rewrite(tables: DeltaTables, work: Work) -> Rewritten:
    """Write the rows of some files into new ones. They become part of the table by `replace`.

    Raises SinkConflict if other upkeep has replaced them meanwhile, and they are deleted.
    """
    try:
        return _rewrite(tables, work)
    except FileNotFoundError as error:
        raise SinkConflict(f"rewriting files of the Delta table {work.table}", f"a file is gone: {error}") from None


def _rewrite(tables: DeltaTables, work: Work) -> Rewritten:
    directory = tables.directory(work.table)
    rows = (part for file in work.files for part in file.tables(directory, work.schema))
    index = None
    if work.identity is not None and work.identity.keyed:
        index = KeyIndex.of(directory, work.schema, work.identity, tables.index_of(work.table))
    return Rewritten(work, tuple(tables.write(work.table, work.schema, rows, index)))


def replace(tables: DeltaTables, table: TableName, done: Sequence[Rewritten]) -> int | None:
    """Put new files in the place of the old ones, in one commit. Returns the version; None if nothing was replaced.

    Old files that the table does not have any more are left out, with the new files that have their rows.
    """
    for _ in range(ATTEMPTS):
        found = tables.current(table)
        tables.require_owner(table, found)
        removed: list[str] = []
        added: list[StagedFile] = []
        marked: dict[str, I64] = {}
        for each in done:
            deleted = _deleted_since(tables, found, each)
            if deleted is None or not set(removed).isdisjoint(file.path for file in each.work.files):
                continue
            removed += [file.path for file in each.work.files]
            for new, rows in _places(each.staged, deleted):
                added.append(new)
                if len(rows):
                    marked[new.path] = rows
        if not removed:
            return None
        written = vectors.write(tables.directory(table), list(marked.values()))
        left = any(file.vector is not None for file in found.files if file.path not in set(removed))
        change = Change(
            added,
            removed,
            dict(zip(marked, written, strict=True)),
            properties={} if left or marked else switch_off_vectors(tables, found),
            operation="OPTIMIZE",
            metrics={
                "numRemovedFiles": len(removed),
                "numRemovedBytes": sum(found.adds[path]["size"] for path in removed),
                "numAddedFiles": len(added),
                "numAddedBytes": sum(file.size for file in added),
                "numRowsPurged": _deleted(found, removed) - sum(len(rows) for rows in marked.values()),
            },
        )
        version = try_commit(tables, table, found, change, None)
        if version is not None:
            return version
    return None


def _deleted(found: TableVersion, paths: Sequence[str]) -> int:
    return sum(DataFile.from_action(found.adds[path]).deleted for path in paths)


def _deleted_since(tables: DeltaTables, found: TableVersion, done: Rewritten) -> I64 | None:
    """Which of the rewritten rows, in their order, were deleted since the old files were read.

    None if what was rewritten cannot be used: the table has other columns or not all old files, or another program has
    brought deleted rows back (RESTORE).
    """
    work = done.work
    if found.arrow_schema != work.schema or not all(file.path in found.adds for file in work.files):
        return None
    directory = tables.directory(work.table)
    first = 0
    places = [NO_ROWS]
    with contextlib.suppress(FileNotFoundError):  # see below
        now_there = (DataFile.from_action(found.adds[file.path]) for file in work.files)
        vectors.prefetch(directory, [file.vector for file in (*work.files, *now_there)])
    for file in work.files:
        try:
            before = file.deleted_rows(directory)
        except FileNotFoundError:  # `vacuum` has deleted the vector: the rewriting has taken longer than `keep_seconds`
            return None
        now = DataFile.from_action(found.adds[file.path]).deleted_rows(directory)
        new = np.setdiff1d(now, before, assume_unique=True)
        if len(new) != len(now) - len(before):
            return None
        places.append(first + new - np.searchsorted(before, new))
        first += file.rows(directory) - len(before)
    return np.concatenate(places)


def _places(staged: Sequence[StagedFile], deleted: I64) -> Iterator[tuple[StagedFile, I64]]:
    """The new files that have rows left, each with the numbers of its deleted rows."""
    begin = 0
    for file in staged:
        rows = deleted[(deleted >= begin) & (deleted < begin + file.rows)] - begin
        begin += file.rows
        if len(rows) < file.rows:
            yield file, rows


def vacuum(tables: DeltaTables, table: TableName) -> None:
    """Delete the files that no version within `keep_seconds` needs, and no point that must be readable."""
    found = tables.newest(table)
    if found is None:
        return
    tables.require_owner(table, found)
    require_supported(table, found)  # the files of a table with other features may not be known here
    directory = tables.directory(table)
    now = time.time()
    expired = now - tables.keep_seconds - (_MARGIN if tables.keep_seconds else 0)
    used = _in_points(tables, table, found, now, expired)
    removed: set[str] = set()
    for file in found.files:
        used |= _names(file)
    data: set[str] = set()  # of removed ones, also if they may still be read
    for action in replay.tombstones(directory, found.version):
        file = DataFile.from_action({"size": 0, **action})
        data.add(file.name)
        names = _names(file)
        if (action.get("deletionTimestamp") or 0) / 1000 > expired:
            used |= names
        else:
            removed |= names
    oldest = now - max(_UNKNOWN_SECONDS, tables.keep_seconds)
    if retention.too_short(found.properties, tables.keep_hours):
        oldest = 0.0  # a checkpoint may have dropped tombstones of files that can still be read
    unused: list[str] = []
    for prefix in ("", vectors.DIRECTORY):
        for name, written in directory.files(prefix).items():
            path = f"{prefix}/{name}" if prefix else name
            if path not in used and not name.startswith("_") and (path in removed or written < oldest):
                unused.append(path)
    if directory.local:
        for name, written in directory.files(LOG).items():  # what `Directory.create` leaves when it is killed
            if name.startswith(".") and name.endswith(".tmp") and written < now - _UNKNOWN_SECONDS:
                unused.append(f"{LOG}/{name}")
    directory.remove(*unused)
    remove_unused(tables.index_of(table), found.files, data, now - _UNKNOWN_SECONDS / 7)


def _in_points(tables: DeltaTables, table: TableName, found: TableVersion, now: float, expired: float) -> set[str]:
    """The files of the points that must be readable, as far as they may have been removed before `expired`."""
    used: set[str] = set()
    directory = tables.directory(table)
    versions = sorted(points.readable_versions(tables, table, int(now * 1e6)) - {found.version})
    # until the commit after a version nothing was removed that this version, or a later one, has; the newest one stays
    # in any case: programs write other times into `deletionTimestamp`
    old = itertools.takewhile(lambda version: replay.committed_at(directory, version + 1) <= expired, versions)
    for version in {*old, *versions[-1:]}:
        with contextlib.suppress(SinkMismatch):  # the log does not have it any more: it cannot be read in any case
            for file in replay.at(directory, version).files:
                used |= _names(file)
    return used


def _names(file: DataFile) -> set[str]:
    vector: Vector | None = file.vector
    path = None if vector is None else vector.path
    return {file.name} if path is None else {file.name, path}
