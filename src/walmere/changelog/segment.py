"""A segment: an immutable Arrow IPC file of messages, grouped by relation.

Each record batch is a *block*: the messages of one relation with one definition, in order of arrival, so that a task
reads only the blocks of its table. Relation 0 is for messages without a relation (Begin, Commit, Relation, Type,
Origin, logical messages). A Truncate is in the block of each relation that it empties, always with the same sequence
number. So a segment sorted by `sequence` is the stream again, apart from these repetitions.

A segment is written under a temporary name, and renamed when it is complete and fsynced. So a file with a segment's
name is complete, and any Arrow tool can open it. The checksum of each block is in the manifest.
"""

from __future__ import annotations

import itertools
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from walmere.changelog.segment_entry import TEMPORARY, Block, Segment
from walmere.changelog.store.log_store import LogStore, store_of
from walmere.errors import ChangeLogDamaged
from walmere.pgoutput.scan import I64, U32, U64, Scan

SCHEMA: Final = pa.schema(
    [
        pa.field("sequence", pa.uint64(), nullable=False),  # order of arrival
        pa.field("lsn", pa.uint64(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),  # the protocol's own letter
        pa.field("relation", pa.uint32(), nullable=False),  # OID, or 0
        pa.field("xid", pa.uint32(), nullable=False),  # inside a streamed transaction, of the subtransaction
        pa.field("commit_lsn", pa.uint64()),  # null in a spooled transaction: then it is in the manifest
        pa.field("commit_time", pa.timestamp("us", "UTC")),
        pa.field("origin", pa.string()),
        pa.field("message", pa.binary(), nullable=False),  # as pgoutput sent it
    ]
)

_INSERT: Final = ord("I")
_MAGIC: Final = len(b"ARROW1\0\0")
_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive messages, still in the buffer they came in, with the other columns of a segment."""

    scan: Scan
    rows: slice  # of the scan
    first_sequence: int
    relation: U32
    version: U32
    xid: U32
    commit_lsn: U64 | None
    commit_time: I64 | None
    origin: npt.NDArray[np.object_] | None
    truncates: tuple[tuple[int, int, int], ...] = ()  # (row, relation, version) for each relation emptied

    def groups(self) -> Iterator[tuple[int, int, I64]]:
        """Relation, version and rows of each block, in order."""
        key = self.relation.astype(np.uint64) << np.uint64(32) | self.version
        row = np.arange(len(key))
        if self.truncates:
            emptied = np.array([t[0] for t in self.truncates], np.int64)
            keep = np.ones(len(key), np.bool_)
            keep[emptied] = False
            truncate_key = np.array([t[1] << 32 | t[2] for t in self.truncates], np.uint64)
            row = np.concatenate([row[keep], emptied])
            key = np.concatenate([key[keep], truncate_key])
        order = np.lexsort((row, key))
        row, key = row[order], key[order]
        edges = np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1], [True])))
        for begin, end in itertools.pairwise(edges):
            yield int(key[begin]) >> 32, int(key[begin]) & 0xFFFFFFFF, row[begin:end]

    def batch(self, relation: int, rows: I64) -> pa.RecordBatch:
        """The record batch of these rows."""
        start, end = self.scan.start[self.rows][rows], self.scan.end[self.rows][rows]
        kind = np.ascontiguousarray(self.scan.kind[self.rows][rows])
        return pa.RecordBatch.from_arrays(
            [
                _numbers("sequence", rows.astype(np.uint64) + np.uint64(self.first_sequence), len(rows)),
                _numbers("lsn", self.scan.lsn[self.rows][rows], len(rows)),
                _letters(kind),
                _numbers("relation", np.full(len(rows), relation, np.uint32), len(rows)),
                _numbers("xid", self.xid[rows], len(rows)),
                _numbers("commit_lsn", None if self.commit_lsn is None else self.commit_lsn[rows], len(rows)),
                _numbers("commit_time", None if self.commit_time is None else self.commit_time[rows], len(rows)),
                pa.nulls(len(rows), pa.string()) if self.origin is None else pa.array(self.origin[rows], pa.string()),
                _slices(self.scan.buffer, start, end),
            ],
            schema=SCHEMA,
        )


def _numbers(column: str, values: npt.NDArray[Any] | None, count: int) -> pa.Array:
    """The values of a column, or nulls. (`pa.array` would import pandas, which takes a third of a second.)"""
    kind = SCHEMA.field(column).type
    return pa.nulls(count, kind) if values is None else pa.Array.from_buffers(kind, count, [None, pa.py_buffer(values)])


def _letters(kind: npt.NDArray[np.uint8]) -> pa.Array:
    offsets = np.arange(len(kind) + 1, dtype=np.int32)
    return pa.StringArray.from_buffers(len(kind), pa.py_buffer(offsets), pa.py_buffer(kind))


def _slices(buffer: npt.NDArray[np.uint8], start: I64, end: I64) -> pa.Array:
    """The bytes between each start and end. Takes every second item of an array value, gap, value, gap, …"""
    offsets = np.empty(2 * len(start), np.int32)
    offsets[0::2], offsets[1::2] = start, end
    both = pa.BinaryArray.from_buffers(
        pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(buffer)]
    )
    even = np.arange(0, len(offsets), 2)
    return both.take(pa.Array.from_buffers(pa.int64(), len(even), [None, pa.py_buffer(even)]))


class SegmentWriter:
    """Writes one segment file. `seal` completes it, `finish` makes it durable under its name."""

    def __init__(self, directory: Path, file: str, *, streamed: bool = False) -> None:
        self.path = directory / file
        self.streamed = streamed
        self.opened = time.monotonic()
        self.sink = _ChecksummedFile(self.path.with_name(file + TEMPORARY))
        self._writer = pa.ipc.new_file(pa.PythonFile(self.sink, "w"), SCHEMA, options=_OPTIONS)
        self._blocks: list[Block] = []

    @property
    def length(self) -> int:
        """Bytes written so far."""
        return self.sink.position

    def append(self, chunk: Chunk) -> None:
        """Write each relation's messages of the chunk as a block."""
        for relation, version, rows in chunk.groups():
            batch = chunk.batch(relation, rows)
            offset = self.sink.begin()
            self._writer.write_batch(batch)
            first, last = chunk.first_sequence + int(rows[0]), chunk.first_sequence + int(rows[-1])
            self._blocks.append(
                Block(
                    relation,
                    version,
                    len(rows),
                    first,
                    last,
                    offset,
                    self.sink.position - offset,
                    self.sink.checksum,
                    bool((chunk.scan.kind[chunk.rows][rows] == _INSERT).all()),
                )
            )

    def seal(self) -> Segment:
        """Write the footer. The file is complete, but not yet durable."""
        self._writer.close()
        return Segment(self.path.name, self.sink.position, self.streamed, tuple(self._blocks))

    def finish(self) -> None:
        """Fsync the file and rename it. The caller fsyncs the directory."""
        self.sink.sync()
        self.sink.path.rename(self.path)

    def finish_cached(self) -> None:
        """Rename the file without an fsync: it is a cache of what goes to the store."""
        self.sink.release()
        self.sink.path.rename(self.path)

    def discard(self) -> None:
        """Delete the file."""
        self.sink.release()
        self.sink.path.unlink(missing_ok=True)


class _ChecksummedFile:
    """A file that Arrow writes to. It has the checksum of what was written since `begin`."""

    closed = False  # Arrow reads it. Arrow must not close the file, which is fsynced after the footer

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.checksum = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def begin(self) -> int:
        self.checksum = 0
        return self.position

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.checksum = zlib.crc32(view, self.checksum)
        written = 0
        while written < len(view):
            written += os.write(self._descriptor, view[written:])
        self.position += written
        return written

    def flush(self) -> None:
        """Arrow calls this. There is no buffer."""

    def sync(self) -> None:
        os.fsync(self._descriptor)
        self.release()

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_block(directory: Path, segment: Segment, index: int, store: LogStore | None = None) -> pa.RecordBatch:
    """Read one block, and check it against its checksum.

    If the segment is in a store, the local file is only a cache. `store` is the log in that store, for a process on
    another machine; the directory names it otherwise.
    """
    block = segment.blocks[index]
    try:
        data = _read_local(directory, segment, index)
    except ChangeLogDamaged:
        log = store or store_of(directory)
        if segment.stored is None or log is None:
            raise
        data = pa.py_buffer(log.read_block(segment.stored, block.offset, block.length, block.checksum))
    # not through the file's footer, which has no checksum
    messages = pa.BufferReader(data)
    if not block.offset:  # the first block has the file's magic bytes and its schema before it
        messages.seek(_MAGIC)
        pa.ipc.read_message(messages)
    return pa.ipc.read_record_batch(pa.ipc.read_message(messages), SCHEMA)


def _read_local(directory: Path, segment: Segment, index: int) -> pa.Buffer:
    block = segment.blocks[index]
    with open_segment(directory, segment) as source:
        source.seek(block.offset)
        data = source.read_buffer(block.length)
        if zlib.crc32(data) != block.checksum:
            raise damaged(directory / segment.file, f"block {index} fails its checksum")
        return data


def open_segment(directory: Path, segment: Segment) -> pa.MemoryMappedFile:
    """Open a segment's file. Raises ChangeLogDamaged if it is missing or its length is wrong."""
    path = directory / segment.file
    try:
        source = pa.memory_map(str(path))
    except FileNotFoundError:
        raise damaged(path, "the file is missing") from None
    except PermissionError:  # on another machine, where the path is something else
        raise damaged(path, "the file cannot be read") from None
    if source.size() != segment.length:
        size = source.size()
        source.close()
        raise damaged(path, f"it has {size} bytes instead of {segment.length}")
    return source


def damaged(path: Path, wrong: str) -> ChangeLogDamaged:
    """The error for a damaged segment."""
    return ChangeLogDamaged(
        f"reading segment {path}",
        wrong,
        "the receiver receives it again at its next start, if the slot has not been confirmed past it; "
        "otherwise run `walmere drop`, then start the subscription again",
    )
