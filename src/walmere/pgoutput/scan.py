"""The fields that the receiver needs from every message, for many messages at once.

The receiver does not decode rows. It needs only kind, LSN, relation and transaction of each message, to write it to the
change log. Reading them one message at a time in Python would cost more than receiving them. So frames (XLogData with
its header) are joined into one buffer, and each field is gathered from all of them at once. `Scan` has that buffer and
the first fields; the others are gathered when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from walmere.errors import ProtocolError

XLOGDATA_HEADER: Final = 25
"""Bytes before the message of pgoutput: 'w', start of the data in the WAL, end of the WAL, send time."""

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_ROWS: Final = np.zeros(256, np.bool_)
_ROWS[list(b"IUD")] = True


@dataclass(frozen=True, slots=True)
class Scan:
    """Messages of the stream, in order of arrival."""

    buffer: U8
    start: I64  # start of each message in the buffer (its kind byte)
    end: I64  # end of each message
    kind: U8
    lsn: U64  # of the change; a message without one (Relation, Type, Origin) has that of the message before it

    def __len__(self) -> int:
        return len(self.kind)

    def is_row(self) -> Bools:
        """Which messages are Insert, Update or Delete."""
        return _ROWS[self.kind]

    def where(self, kinds: bytes) -> I64:
        """The positions of the messages of these kinds."""
        wanted = np.zeros(256, np.bool_)
        wanted[list(kinds)] = True
        return np.flatnonzero(wanted[self.kind])

    def u32(self, at: int, rows: I64 | Bools | slice) -> U32:
        """The Int32 of the protocol at this offset of each message."""
        return self._gather(at, 4, rows).view(">u4").astype(np.uint32).reshape(-1)

    def u64(self, at: int, rows: I64 | Bools | slice) -> U64:
        """The Int64 of the protocol at this offset of each message."""
        return self._gather(at, 8, rows).view(">u8").astype(np.uint64).reshape(-1)

    def i64(self, at: int, rows: I64 | Bools | slice) -> I64:
        """The signed Int64, such as a time, at this offset of each message."""
        return self._gather(at, 8, rows).view(">i8").astype(np.int64).reshape(-1)

    def message(self, index: int) -> bytes:
        """The bytes of one message."""
        return self.buffer[self.start[index] : self.end[index]].tobytes()

    def _gather(self, at: int, width: int, rows: I64 | Bools | slice) -> U8:
        position = self.start[rows] + at
        short = position + width > self.end[rows]
        if short.any():
            offset = int(position[short][0])
            raise ProtocolError("scanning messages of the stream", "a message is truncated", offset=offset)
        # Overlapping windows over the buffer need one index per message instead of one per byte.
        if not len(position):
            return np.empty((0, width), np.uint8)
        return np.lib.stride_tricks.sliding_window_view(self.buffer, width)[position]


def scan(frames: Sequence[bytes | memoryview], before: int = 0) -> Scan:
    """Join XLogData frames and find their messages. `before` is the LSN of the message before the first."""
    length = np.fromiter(map(len, frames), np.int64, len(frames))
    if len(length) and length.min() <= XLOGDATA_HEADER:
        raise ProtocolError("scanning messages of the stream", "an XLogData message is empty")
    buffer = np.frombuffer(b"".join(frames), np.uint8)
    end = np.cumsum(length)
    start = end - length + XLOGDATA_HEADER
    bare = Scan(buffer, start, end, buffer[start], np.empty(0, np.uint64))
    lsn = bare.u64(1 - XLOGDATA_HEADER, slice(None))
    if len(lsn) and not lsn.all():
        last = np.maximum.accumulate(np.where(lsn != 0, np.arange(len(lsn)), -1))
        lsn = np.where(last >= 0, lsn[last], np.uint64(before))
    return Scan(buffer, start, end, bare.kind, lsn)
