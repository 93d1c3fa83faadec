"""Deletion vectors: the rows of a data file that are deleted, as Delta's protocol stores them.

A vector is a 64-bit roaring bitmap of row numbers after a magic number. A small one is in the log itself (`i`, Z85). A
larger one is in a file (`u`), with the other vectors of its commit: a version byte, then for each vector its size (big
endian), its bytes and their CRC-32.

The files are in `_dv`. All readers accept this prefix. A vacuum of `deltalake` with `full=True` would delete vector
files that are in use anywhere else. No vacuum of others deletes them there, so `maintenance` does.
"""

from __future__ import annotations

import array
import base64
import threading
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pyroaring import BitMap64

from walmere.directory import Directory
from walmere.errors import SinkMismatch
from walmere.sinks.row_index import I64

DIRECTORY: Final = "_dv"
INLINE_BYTES: Final = 192
"""A vector up to this size is in the log. It is repeated there when it is replaced, and in checkpoints."""

_MAGIC: Final = (1681511377).to_bytes(4, "little")
_Z85: Final = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85: Final = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_TO_Z85: Final = bytes.maketrans(_B85, _Z85)
_FROM_Z85: Final = bytes.maketrans(_Z85, _B85)
_MAX_KEPT: Final = 64 << 20
"""Bytes of vectors that a process keeps, of those in an object store."""
_UUID_LENGTH: Final = 20
"""Characters of a UUID in Z85."""


@dataclass(frozen=True, slots=True)
class Vector:
    """Where a deletion vector is: Delta's descriptor."""

    storage: str  # u: a file below the table, i: in `where` itself, p: a file anywhere
    where: str
    size: int
    count: int  # of deleted rows
    offset: int | None = None

    @staticmethod
    def from_action(found: Mapping[str, Any]) -> Vector:
        """Read the descriptor of an `add` or `remove` action."""
        return Vector(
            found["storageType"],
            found["pathOrInlineDv"],
            found["sizeInBytes"],
            found["cardinality"],
            found.get("offset"),
        )

    def to_action(self) -> dict[str, Any]:
        """The descriptor as an `add` or `remove` action has it."""
        action: dict[str, Any] = {
            "storageType": self.storage,
            "pathOrInlineDv": self.where,
            "sizeInBytes": self.size,
            "cardinality": self.count,
        }
        if self.offset is not None:
            action["offset"] = self.offset
        return action

    @property
    def path(self) -> str | None:
        """The path of its file, relative to the table; None if it is in the log."""
        if self.storage != "u":
            return None
        prefix, name = self.where[:-_UUID_LENGTH], self.where[-_UUID_LENGTH:]
        file = f"deletion_vector_{uuid.UUID(bytes=_from_z85(name, 16))}.bin"
        return f"{prefix}/{file}" if prefix else file

    def rows(self, directory: Directory) -> I64:
        """The numbers of the deleted rows, ascending. `directory` is that of the table."""
        if self.storage == "i":
            return _decode(_from_z85(self.where, self.size), "a deletion vector in the log")
        path = self.path
        if path is None:
            raise _unreadable(self.where, f"vectors of the storage type {self.storage} are not supported")
        place = (directory.location, self)
        if not directory.local and (kept := _kept.get(place)) is not None:
            return kept
        content = directory.read_range(path, self.offset or 0, self.size + 8)
        data = content[4:-4]
        size, checksum = (int.from_bytes(part, "big") for part in (content[:4], content[-4:]))
        if not size == self.size == len(data) or zlib.crc32(data) != checksum:
            raise _unreadable(path, "its size or checksum is wrong")
        rows = _decode(data, path)
        if not directory.local:
            _kept.put(place, rows)
        return rows


class _Kept:
    """The vectors in an object store that this process has read. Files of vectors do not change."""

    def __init__(self) -> None:
        self._vectors: OrderedDict[tuple[str, Vector], I64] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, place: tuple[str, Vector]) -> I64 | None:
        with self._lock:
            if place in self._vectors:
                self._vectors.move_to_end(place)
            return self._vectors.get(place)

    def put(self, place: tuple[str, Vector], rows: I64) -> None:
        rows.flags.writeable = False
        with self._lock:
            if place in self._vectors:
                return
            self._vectors[place] = rows
            self._bytes += rows.nbytes
            while self._bytes > _MAX_KEPT:
                self._bytes -= self._vectors.popitem(last=False)[1].nbytes


_kept: Final = _Kept()


def prefetch(directory: Directory, vectors: Iterable[Vector | None]) -> None:
    """Read vectors in an object store, several at a time, before they are needed one after the other."""
    if not directory.local:
        directory.map(lambda each: each.rows(directory), [each for each in vectors if each is not None])


def write(directory: Directory, deleted: Sequence[I64]) -> list[Vector]:
    """Make a vector of each set of row numbers, durably. They share one file."""
    encoded = [_encode(rows) for rows in deleted]
    vectors: list[Vector] = []
    name = uuid.uuid4()
    content = bytearray(b"\x01")
    for rows, data in zip(deleted, encoded, strict=True):
        if len(data) <= INLINE_BYTES:
            vectors.append(Vector("i", _to_z85(data), len(data), len(rows)))
            continue
        vectors.append(Vector("u", DIRECTORY + _to_z85(name.bytes), len(data), len(rows), len(content)))
        content += len(data).to_bytes(4, "big") + data + zlib.crc32(data).to_bytes(4, "big")
    if len(content) > 1:
        directory.below(DIRECTORY).make()
        directory.write(f"{DIRECTORY}/deletion_vector_{name}.bin", bytes(content))
    return vectors


def _encode(rows: I64) -> bytes:
    return _MAGIC + BitMap64(array.array("Q", rows.astype(np.uint64).tobytes())).serialize()


def _decode(data: bytes, what: str) -> I64:
    if data[:4] != _MAGIC:
        raise _unreadable(what, "its format is unknown")
    try:
        rows = BitMap64.deserialize(data[4:])
    except (ValueError, IndexError):
        raise _unreadable(what, "it cannot be decoded") from None
    return np.frombuffer(rows.to_array(), np.uint64).astype(np.int64)


def _to_z85(data: bytes) -> str:
    return base64.b85encode(data + bytes(-len(data) % 4)).translate(_TO_Z85).decode()


def _from_z85(text: str, size: int) -> bytes:
    return base64.b85decode(text.encode().translate(_FROM_Z85))[:size]


def _unreadable(what: str, why: str) -> SinkMismatch:
    return SinkMismatch(f"reading {what}", why, "let the subscription copy the table again")
