"""A key index: finds the rows of a data file by their key, without reading the file.

Data files never change, so each has an index of its own: the hashes of its keys, sorted, each with its row number. The
task that writes a file writes the index too. It is memory-mapped: to find some keys costs what is searched, not what is
there. If hashes are not exact (see `key_hash`), the index also has the keys, in the order of the rows, and a match of
hashes is compared with the key. The index of rows without a key has no rows: a match is compared with the data file.

An index is a cache in a local directory, never a source of truth. It says which file it indexes, and has a checksum. A
missing, damaged or other index is made again from the key columns of the data file.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from walmere.directory import Directory
from walmere.names import Identity
from walmere.sinks.delta.files.data_file import NO_ROWS, DataFile, is_in
from walmere.sinks.delta.files.hits import Hits, fetch
from walmere.sinks.delta.files.parquet import row_groups
from walmere.sinks.delta.files.vectors import prefetch
from walmere.sinks.key_hash import U64, hashes, is_exact
from walmere.sinks.row_index import I64, RowIndex, one_array

_FORMAT: Final = b"walmere key index 1"
_HASH, _ROW = "#hash", "#row"
_CHECKSUM_BYTES: Final = 4
_MAX_OPEN: Final = 20_000
"""Keep so many indexes open in a process. If a table has more files, each batch reads all of their indexes.

Each is a memory map, of which a process can have 65,530 in Linux. None has an open file.
"""
_MAX_MEMORY: Final = 512 << 20
"""Bytes of indexes without a file that a process keeps."""

_PRUNE_SECONDS: Final = 600.0
_YOUNG_SECONDS: Final = 3600.0
"""An index of a file that is not in the table may be that of a file which will be committed."""
_pruned: Final[dict[Path, float]] = {}  # by cache, when it was pruned

_Name: TypeAlias = tuple[str, str, tuple[str, ...], bool, Path | None]
"""An open index: the table's directory, the file, what is indexed, and the cache."""


@dataclass(frozen=True, slots=True)
class FileIndex:
    """The index of one data file."""

    hashes: U64  # sorted
    rows: NDArray[np.uint32]
    keys: pa.Table | None  # by row number; None: they are not in the index
    exact: bool

    def find(self, wanted: U64) -> tuple[I64, I64]:
        """The rows that have one of these hashes, which are sorted, and which of them each row has."""
        first = np.searchsorted(self.hashes, wanted)
        if not len(self.hashes):
            return NO_ROWS, NO_ROWS
        there = np.flatnonzero(self.hashes[np.minimum(first, len(self.hashes) - 1)] == wanted)
        if not there.size:
            return NO_ROWS, NO_ROWS
        first = first[there]
        counts = np.searchsorted(self.hashes, wanted[there], "right") - first
        if int(counts.max()) > 1:
            skip = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            first, there = np.repeat(first, counts) + skip, np.repeat(there, counts)
        return self.rows[first].astype(np.int64), there


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """The indexes of the files of a table."""

    directory: Directory  # of the table
    schema: pa.Schema  # of the table
    columns: tuple[str, ...]  # by which rows are found
    keyed: bool  # whether these are a key
    cache: Path | None  # None: indexes are kept in memory

    @staticmethod
    def of(directory: Directory, schema: pa.Schema, identity: Identity, cache: Path | None) -> KeyIndex:
        """The index of a table by its key, or by all its columns if it has none."""
        columns = identity.key if identity.keyed else tuple(schema.names)
        return KeyIndex(directory, schema, columns, identity.keyed, cache)

    @property
    def key_schema(self) -> pa.Schema:
        """The columns by which rows are found."""
        return pa.schema([self.schema.field(name) for name in self.columns])

    def find(self, files: Sequence[DataFile], rows: RowIndex, wanted: Sequence[pa.Array]) -> Iterable[Hits]:
        """For each file, its rows that are not deleted and equal one of `rows`, whose key columns are `wanted`."""
        found = hashes(list(wanted))
        order = np.argsort(found)
        found = found[order]
        _open.close_unused(self.directory.location, len(files), lambda: map(self._name, files))
        self._prune(files)
        if not self.directory.local:
            self._read_ahead(files, found)
        for file in files:
            hits = self._find_in(file, found, order, rows)
            if hits.which.size:
                yield hits

    def _prune(self, files: Sequence[DataFile]) -> None:
        """Sometimes, delete the indexes of files that the table does not have: vacuum may run on another machine."""
        now = time.monotonic()
        if self.cache is not None and now - _pruned.setdefault(self.cache, now) > _PRUNE_SECONDS:
            _pruned[self.cache] = now
            remove_unused(self.cache, files, (), time.time() - _YOUNG_SECONDS)

    def _read_ahead(self, files: Sequence[DataFile], wanted: U64) -> None:
        """Read several indexes and vectors at a time from an object store."""
        self.directory.map(self.open, [file for file in files if _open.get(self._name(file)) is None])
        hit = (file for file in files if file.vector is not None and self.open(file).find(wanted)[0].size)
        prefetch(self.directory, [file.vector for file in hit])

    def _find_in(self, file: DataFile, wanted: U64, order: I64, rows: RowIndex) -> Hits:
        index = self.open(file)
        places, which = index.find(wanted)
        if file.vector is not None and places.size:
            there = ~is_in(places, file.deleted_rows(self.directory))
            places, which = places[there], which[there]
        if index.exact or not places.size:
            ascending = np.argsort(places)
            return Hits(file, places[ascending], order[which[ascending]])
        places = np.unique(places)
        if index.keys is None:
            keys = fetch(self.directory, file, self.key_schema, places)
        else:
            keys = index.keys.take(pa.array(places))
        where, which = rows.find(lambda name: one_array(keys[name]), len(keys))
        return Hits(file, places[where], which)

    def open(self, file: DataFile) -> FileIndex:
        """The index of a file; made again if there is none that can be used."""
        name = self._name(file)
        found = _open.get(name)
        if found is not None:
            return found
        stored = self._read(file)
        if stored is None:
            groups = row_groups(self.directory, file.name, self.key_schema)
            made = self.write(file.name, file.size, (group.table() for group in groups))
            stored = self._read(file)  # it is mapped: what is not used takes no memory
        index = made if stored is None else stored
        _open.put(name, index, in_memory=stored is None)
        return index

    def _read(self, file: DataFile) -> FileIndex | None:
        path = self._path(file.name)
        return None if path is None else _read(path, self._tag(file.name, file.size), self._exact)

    def write(self, name: str, size: int, keys: Iterable[pa.Table]) -> FileIndex:
        """Make the index of a file from its keys, in the order of its rows. Only keys that it stores stay in memory."""
        found, stored = [np.zeros(0, np.uint64)], [self.key_schema.empty_table()]
        for part in keys:
            found.append(hashes([one_array(part[each]) for each in self.columns]))
            if self.keyed and not self._exact:
                stored.append(part.select(list(self.columns)))
        every = np.concatenate(found)
        order = np.argsort(every)
        kept = pa.concat_tables(stored).cast(self.key_schema) if self.keyed and not self._exact else None
        index = FileIndex(every[order], order.astype(np.uint32), kept, self._exact)
        if (path := self._path(name)) is not None:
            # a cache: what cannot be written, or has more than 2 GB of keys, stays in memory, and is made again
            with contextlib.suppress(OSError, pa.ArrowInvalid):
                _write(path, index, self._tag(name, size))
        return index

    @property
    def _exact(self) -> bool:
        return self.keyed and is_exact(self.key_schema)

    def _tag(self, name: str, size: int) -> bytes:
        """Says which file is indexed by which columns."""
        return repr((name, size, self.keyed, [(each.name, str(each.type)) for each in self.key_schema])).encode()

    def _path(self, name: str) -> Path | None:
        return None if self.cache is None else self.cache / _file_of(name)

    def _name(self, file: DataFile) -> _Name:
        return self.directory.location, file.name, self.columns, self.keyed, self.cache


class _Open:
    """The indexes that this process has open. The ones that were not used for the longest time are closed first."""

    def __init__(self) -> None:
        self._indexes: OrderedDict[_Name, tuple[FileIndex, int]] = OrderedDict()
        self._names: dict[str, set[_Name]] = {}  # by table
        self._memory = 0
        self._lock = threading.Lock()

    def get(self, name: _Name) -> FileIndex | None:
        with self._lock:
            found = self._indexes.get(name)
            if found is None:
                return None
            self._indexes.move_to_end(name)
            return found[0]

    def put(self, name: _Name, index: FileIndex, *, in_memory: bool) -> None:
        size = 12 * len(index.hashes) + (index.keys.nbytes if index.keys is not None else 0) if in_memory else 0
        with self._lock:
            self._close(name)  # another thread has opened it too
            self._indexes[name] = (index, size)
            self._names.setdefault(name[0], set()).add(name)
            self._memory += size
            while len(self._indexes) > _MAX_OPEN or (self._memory > _MAX_MEMORY and len(self._indexes) > 1):
                self._close(next(iter(self._indexes)))

    def close_unused(self, table: str, count: int, used: Callable[[], Iterable[_Name]]) -> None:
        """Close the indexes of files that a table does not have any more: the disk keeps what is mapped."""
        with self._lock:
            names = self._names.get(table, set())
            if len(names) > 2 * count:
                for name in names - set(used()):
                    self._close(name)

    def _close(self, name: _Name) -> None:
        found = self._indexes.pop(name, None)
        if found is not None:
            self._memory -= found[1]
            names = self._names[name[0]]
            names.discard(name)
            if not names:
                del self._names[name[0]]


_open: Final = _Open()


def _write(path: Path, index: FileIndex, tag: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [_HASH, _ROW, *(index.keys.column_names if index.keys is not None else ())]
    columns = [pa.array(index.hashes), pa.array(index.rows)]
    columns += [one_array(column) for column in (index.keys.columns if index.keys is not None else ())]
    batch = pa.RecordBatch.from_arrays(columns, names)
    schema = batch.schema.with_metadata({"format": _FORMAT, "tag": tag})
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with pa.OSFile(str(temporary), "wb") as file:
            with pa.ipc.new_file(file, schema) as writer:
                writer.write_batch(batch)
            file.write(_checksum_of(temporary))
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, tag: bytes, exact: bool) -> FileIndex | None:
    """An index in a file; None if it cannot be used."""
    try:
        with pa.memory_map(str(path)) as file:
            content = file.read_buffer()
        body, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if _checksum(body) != checksum.to_pybytes():
            return None
        reader = pa.ipc.open_file(body)
        batch = reader.get_batch(0)
        metadata = reader.schema.metadata or {}
    except (OSError, pa.ArrowInvalid):
        return None
    if metadata.get(b"format") != _FORMAT or metadata.get(b"tag") != tag:
        return None
    found, rows = (batch.column(place).to_numpy() for place in range(2))  # not by name: a key may have any
    keys = pa.Table.from_batches([batch]).select(range(2, batch.num_columns))
    return FileIndex(found, rows, keys if keys.num_columns else None, exact)


def _checksum(content: Any) -> bytes:
    return zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "big")


def _checksum_of(path: Path) -> bytes:
    with pa.memory_map(str(path)) as file:
        return _checksum(file.read_buffer())


def remove_unused(cache: Path | None, files: Iterable[DataFile], removed: Iterable[str], newer_than: float) -> None:
    """Delete the indexes of files that were removed from the table, and other ones that it does not have and are old.

    Only the newest version is searched. A young index that the table does not have is that of a file which is not
    committed yet.
    """
    if cache is None or not cache.is_dir():
        return
    kept = {_file_of(file.name) for file in files}
    gone = {_file_of(name) for name in removed}
    for entry in os.scandir(cache):
        with contextlib.suppress(OSError):
            if entry.name not in kept and (entry.name in gone or entry.stat().st_mtime < newer_than):
                os.unlink(entry.path)  # noqa: PTH108


def _file_of(name: str) -> str:
    """The name of the index of a data file."""
    return f"{Path(name).name}.arrow"
