"""The frame around pgoutput: the messages of walsender and receiver inside CopyData.

    ← 'w' XLogData     one message of the output plugin, with its position in the WAL
    ← 'k' Keepalive    how far walsender has read; "reply requested": without a reply, it ends soon
    → 'r' Standby Status Update    how far we have written, flushed and applied

Only `flushed` has an effect: the server may remove WAL before it. `wal_start` is 0/0 on every message that is not the
last one for its change: Relation, Type, and a Begin before an Origin. So the position of a Relation is not known; use
the LSN of the row, or of the transaction.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar, Final, TypeAlias

from walmere.errors import ProtocolError
from walmere.lsn import Lsn
from walmere.pgoutput.messages import POSTGRES_EPOCH_US, at, unix_us

_XLOG_DATA: Final = struct.Struct("!xQQq")
_KEEPALIVE: Final = struct.Struct("!xQqB")
_STATUS: Final = struct.Struct("!cQQQqB")
_DOING: Final = "decoding a replication message"
_HINT: Final = "if this repeats, the connection is damaged, or the server speaks a newer protocol"


@dataclass(frozen=True, slots=True)
class XLogData:
    """One message of the output plugin."""

    letter: ClassVar[str] = "w"
    wal_start: Lsn  # of the change; 0/0 if another message for the same change follows
    wal_end: Lsn  # equal to wal_start, for a logical slot
    send_time_us: int
    data: bytes = field(repr=False)

    @property
    def send_time(self) -> datetime:
        return at(self.send_time_us)


@dataclass(frozen=True, slots=True)
class Keepalive:
    """How far the server has read."""

    letter: ClassVar[str] = "k"
    wal_end: Lsn
    send_time_us: int
    reply_requested: bool

    @property
    def send_time(self) -> datetime:
        return at(self.send_time_us)


Frame: TypeAlias = XLogData | Keepalive


def decode_frame(data: bytes | memoryview) -> Frame:
    """Decode the content of one CopyData from walsender."""
    raw = bytes(data)
    match raw[:1]:
        case b"w":
            if len(raw) < _XLOG_DATA.size:
                raise ProtocolError(
                    _DOING, f"XLogData needs {_XLOG_DATA.size} bytes, it has {len(raw)}", _HINT, len(raw)
                )
            start, end, sent = _XLOG_DATA.unpack_from(raw)
            return XLogData(Lsn(start), Lsn(end), unix_us(sent), raw[_XLOG_DATA.size :])
        case b"k":
            if len(raw) != _KEEPALIVE.size:
                where = min(len(raw), _KEEPALIVE.size)
                wrong = f"Keepalive must have {_KEEPALIVE.size} bytes, not {len(raw)}"
                raise ProtocolError(_DOING, wrong, _HINT, where)
            end, sent, reply = _KEEPALIVE.unpack(raw)
            return Keepalive(Lsn(end), unix_us(sent), reply != 0)
        case b"":
            raise ProtocolError(_DOING, "it is empty", _HINT, 0)
        case _:
            raise ProtocolError(_DOING, f"its kind 0x{raw[0]:02x} is unknown", _HINT, 0)


def standby_status_update(written: Lsn, flushed: Lsn, applied: Lsn, *, now_us: int, reply: bool = False) -> bytes:
    """Encode a status update. `reply` requests an answer of the server. `now_us` is Unix time."""
    return _STATUS.pack(b"r", written, flushed, applied, now_us - POSTGRES_EPOCH_US, reply)
