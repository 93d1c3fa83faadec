"""The frame around pgoutput: what walsender and receiver say to each other inside CopyData.

    ← 'w' XLogData     one message of the output plugin, with where it stands in the WAL
    ← 'k' Keepalive    how far walsender has read; "reply requested" means it is near to giving us up
    → 'r' Standby Status Update    how far we have written, flushed and applied

Only `flushed` has consequences: the server forgets what lies before it. `wal_start` is 0/0 on every message that is
not the last one the plugin writes for its change: Relation, Type, and a Begin that an Origin follows. So it never tells
where a Relation stands; take the LSN of the row or of the transaction around it.
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
    wal_start: Lsn  # of the change; 0/0 if the plugin has more to write for it
    wal_end: Lsn  # the same again, for a logical slot
    send_time_us: int
    data: bytes = field(repr=False)

    @property
    def send_time(self) -> datetime:
        return at(self.send_time_us)


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The server is there, and has read up to here."""

    letter: ClassVar[str] = "k"
    wal_end: Lsn
    send_time_us: int
    reply_requested: bool

    @property
    def send_time(self) -> datetime:
        return at(self.send_time_us)


Frame: TypeAlias = XLogData | Keepalive


def decode_frame(data: bytes | memoryview) -> Frame:
    """Decode what one CopyData from walsender holds."""
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
                raise ProtocolError(_DOING, f"Keepalive has {_KEEPALIVE.size} bytes, not {len(raw)}", _HINT, where)
            end, sent, reply = _KEEPALIVE.unpack(raw)
            return Keepalive(Lsn(end), unix_us(sent), reply != 0)
        case b"":
            raise ProtocolError(_DOING, "it is empty", _HINT, 0)
        case _:
            raise ProtocolError(_DOING, f"its kind 0x{raw[0]:02x} is not known", _HINT, 0)


def standby_status_update(written: Lsn, flushed: Lsn, applied: Lsn, *, now_us: int, reply: bool = False) -> bytes:
    """What to send back: `flushed` lets the server forget; `reply` asks it to answer at once. `now_us` is Unix time."""
    return _STATUS.pack(b"r", written, flushed, applied, now_us - POSTGRES_EPOCH_US, reply)
