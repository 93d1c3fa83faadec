"""Bytes → one message. This decoder is used for control messages, and the faster decoders are tested against it.

The bytes come from another server, through a log on a disk, so they are not trusted. A length or a count is compared
with the number of bytes left *before* it is used; a message must end exactly at its last byte; and any fault raises
`ProtocolError` and nothing else. Its offset is that of the first byte of the wrong field: for a string without a
terminator, the start of the string.

Between Stream Start and Stream Stop, messages about relations and rows have a transaction id after their kind byte. The
caller of `decode` passes this as `streamed`; `Decoder` tracks it.

As PostgreSQL's subscriber does, unknown flags in the messages that end a transaction are refused: a flag there could
change the meaning of the commit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from walmere.errors import ProtocolError
from walmere.lsn import Lsn
from walmere.pgoutput.messages import (
    UNCHANGED,
    Begin,
    BeginPrepare,
    Binary,
    Column,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    Kind,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    ReplicaIdentity,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Tuple,
    Type,
    Update,
    Value,
    unix_us,
)

_HINT: Final = "if this repeats, the connection or a file is damaged, or the server speaks a newer protocol"
_COLUMN_BYTES: Final = 10  # the shortest column of a Relation: flags, terminator of an empty name, type, modifier

_U16: Final = struct.Struct("!H")
_U32: Final = struct.Struct("!I")
_I32: Final = struct.Struct("!i")
_U64: Final = struct.Struct("!Q")
_I64: Final = struct.Struct("!q")


class ByteReader:
    """Reads fields from bytes and checks that they are there."""

    __slots__ = ("data", "doing", "position")

    def __init__(self, data: bytes, doing: str) -> None:
        self.data = data
        self.doing = doing
        self.position = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def fail(self, wrong: str, offset: int) -> ProtocolError:
        return ProtocolError(self.doing, wrong, _HINT, offset)

    def take(self, size: int, what: str) -> int:
        """Advance by `size` bytes and return their start."""
        start = self.position
        if size > len(self.data) - start:
            raise self.fail(f"{what} needs {size} bytes, {len(self.data) - start} are left", start)
        self.position = start + size
        return start

    def u8(self, what: str) -> int:
        return self.data[self.take(1, what)]

    def u16(self, what: str) -> int:
        value: int = _U16.unpack_from(self.data, self.take(2, what))[0]
        return value

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.take(4, what))[0]
        return value

    def i32(self, what: str) -> int:
        value: int = _I32.unpack_from(self.data, self.take(4, what))[0]
        return value

    def lsn(self, what: str) -> Lsn:
        return Lsn(_U64.unpack_from(self.data, self.take(8, what))[0])

    def time_us(self, what: str) -> int:
        return unix_us(_I64.unpack_from(self.data, self.take(8, what))[0])

    def string(self, what: str) -> str:
        """A null-terminated string in the client encoding, which is UTF-8 on our connections."""
        start = self.position
        stop = self.data.find(0, start)
        if stop < 0:
            raise self.fail(f"{what} has no terminator", start)
        self.position = stop + 1
        try:
            return self.data[start:stop].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8", start + error.start) from None

    def counted(self, what: str) -> bytes:
        """Bytes after their length."""
        at = self.position
        size = self.u32(f"the length of {what}")
        if size > self.left:
            raise self.fail(f"{what} should have {size} bytes, {self.left} are left", at)
        start = self.take(size, what)
        return self.data[start : start + size]

    def no_flags(self) -> int:
        at = self.position
        flags = self.u8("the flags")
        if flags:
            raise self.fail(f"the flags 0x{flags:02x} are unknown", at)
        return flags

    def end(self) -> None:
        if self.left:
            raise self.fail(f"there are {self.left} bytes after its end", self.position)


def _tuple(r: ByteReader) -> Tuple:
    at = r.position
    count = r.u16("the number of columns")
    if count > r.left:
        raise r.fail(f"{count} columns cannot be in {r.left} bytes", at)
    return tuple([_value(r) for _ in range(count)])


def _value(r: ByteReader) -> Value:
    at = r.position
    match r.u8("the kind of a value"):
        case 0x74:  # t
            return r.counted("a value")
        case 0x6E:  # n
            return None
        case 0x75:  # u
            return UNCHANGED
        case 0x62:  # b
            return Binary(r.counted("a value"))
        case other:
            raise r.fail(f"a value has the unknown kind 0x{other:02x}", at)


def _new(r: ByteReader, at: int, letter: int) -> Tuple:
    if letter != 0x4E:  # N
        raise r.fail(f"the new tuple begins with 0x{letter:02x} instead of N", at)
    return _tuple(r)


def _old(r: ByteReader, letter: int) -> tuple[Tuple | None, Tuple | None]:
    """The key tuple and the old tuple; at most one is present."""
    if letter == 0x4B:  # K
        return _tuple(r), None
    if letter == 0x4F:  # O
        return None, _tuple(r)
    return None, None


def _begin(r: ByteReader, _: int | None) -> Message:
    return Begin(r.lsn("the final LSN"), r.time_us("the commit time"), r.u32("the xid"))


def _commit(r: ByteReader, _: int | None) -> Message:
    return Commit(r.no_flags(), r.lsn("the commit LSN"), r.lsn("the end LSN"), r.time_us("the commit time"))


def _origin(r: ByteReader, _: int | None) -> Message:
    return Origin(r.lsn("the origin's commit LSN"), r.string("the origin's name"))


def _relation(r: ByteReader, xid: int | None) -> Message:
    oid, namespace, name = r.u32("the relation's OID"), r.string("the namespace"), r.string("the relation's name")
    at = r.position
    letter = r.u8("the replica identity")
    try:
        identity = ReplicaIdentity(chr(letter))
    except ValueError:
        raise r.fail(f"0x{letter:02x} is not a replica identity", at) from None
    at = r.position
    count = r.u16("the number of columns")
    if count * _COLUMN_BYTES > r.left:
        raise r.fail(f"{count} columns cannot be in {r.left} bytes", at)
    columns = [
        Column(
            r.u8("a column's flags"),
            r.string("a column's name"),
            r.u32("a column's type"),
            r.i32("a column's type modifier"),
        )
        for _ in range(count)
    ]
    return Relation(oid, namespace, name, identity, tuple(columns), xid)


def _type(r: ByteReader, xid: int | None) -> Message:
    return Type(r.u32("the type's OID"), r.string("the namespace"), r.string("the type's name"), xid)


def _insert(r: ByteReader, xid: int | None) -> Message:
    relation, at = r.u32("the relation's OID"), r.position
    return Insert(relation, _new(r, at, r.u8("the new tuple")), xid)


def _update(r: ByteReader, xid: int | None) -> Message:
    relation, at = r.u32("the relation's OID"), r.position
    letter = r.u8("a tuple")
    key, old = _old(r, letter)
    if r.position > at + 1:
        at = r.position
        letter = r.u8("the new tuple")
    return Update(relation, key, old, _new(r, at, letter), xid)


def _delete(r: ByteReader, xid: int | None) -> Message:
    relation, at = r.u32("the relation's OID"), r.position
    letter = r.u8("the old tuple")
    key, old = _old(r, letter)
    if key is None and old is None:
        raise r.fail(f"the old tuple begins with 0x{letter:02x} instead of K or O", at)
    return Delete(relation, key, old, xid)


def _truncate(r: ByteReader, xid: int | None) -> Message:
    at = r.position
    count, flags = r.u32("the number of relations"), r.u8("the flags")
    if count * 4 > r.left:
        raise r.fail(f"{count} relations cannot be in {r.left} bytes", at)
    relations = struct.unpack_from(f"!{count}I", r.data, r.take(count * 4, "the relations' OIDs"))
    return Truncate(relations, bool(flags & 1), bool(flags & 2), xid)


def _message(r: ByteReader, xid: int | None) -> Message:
    flags, lsn = r.u8("the flags"), r.lsn("the LSN")
    return LogicalMessage(bool(flags & 1), lsn, r.string("the prefix"), r.counted("the content"), xid)


def _stream_start(r: ByteReader, _: int | None) -> Message:
    return StreamStart(r.u32("the xid"), r.u8("the flag of the first segment") == 1)


def _stream_stop(_r: ByteReader, _: int | None) -> Message:
    return StreamStop()


def _stream_commit(r: ByteReader, _: int | None) -> Message:
    return StreamCommit(
        r.u32("the xid"), r.no_flags(), r.lsn("the commit LSN"), r.lsn("the end LSN"), r.time_us("the commit time")
    )


def _stream_abort(r: ByteReader, _: int | None) -> Message:
    xid, subxid = r.u32("the xid"), r.u32("the subtransaction's xid")
    # The message has no version: the server adds these fields only with streaming = parallel.
    if not r.left:
        return StreamAbort(xid, subxid)
    return StreamAbort(xid, subxid, r.lsn("the abort LSN"), r.time_us("the abort time"))


def _prepared(r: ByteReader) -> tuple[Lsn, Lsn, int, int, str]:
    """The common fields of the messages about a prepared transaction."""
    lsn, end_lsn = r.lsn("the LSN"), r.lsn("the end LSN")
    return lsn, end_lsn, r.time_us("the time"), r.u32("the xid"), r.string("the gid")


def _begin_prepare(r: ByteReader, _: int | None) -> Message:
    return BeginPrepare(*_prepared(r))


def _prepare(r: ByteReader, _: int | None) -> Message:
    return Prepare(r.no_flags(), *_prepared(r))


def _commit_prepared(r: ByteReader, _: int | None) -> Message:
    return CommitPrepared(r.no_flags(), *_prepared(r))


def _rollback_prepared(r: ByteReader, _: int | None) -> Message:
    flags, prepared, end = r.no_flags(), r.lsn("the prepare's end LSN"), r.lsn("the rollback's end LSN")
    times = r.time_us("the prepare time"), r.time_us("the rollback time")
    return RollbackPrepared(flags, prepared, end, *times, r.u32("the xid"), r.string("the gid"))


def _stream_prepare(r: ByteReader, _: int | None) -> Message:
    return StreamPrepare(r.no_flags(), *_prepared(r))


WITH_XID: Final = frozenset(
    {Kind.RELATION, Kind.TYPE, Kind.INSERT, Kind.UPDATE, Kind.DELETE, Kind.TRUNCATE, Kind.MESSAGE}
)
"""The kinds that have an xid after their kind byte inside a stream."""

_IN_STREAM: Final = WITH_XID | {Kind.ORIGIN, Kind.STREAM_STOP}

_Decode = Callable[[ByteReader, int | None], Message]
_BY_KIND: Final[dict[Kind, _Decode]] = {
    Kind.BEGIN: _begin,
    Kind.COMMIT: _commit,
    Kind.ORIGIN: _origin,
    Kind.RELATION: _relation,
    Kind.TYPE: _type,
    Kind.INSERT: _insert,
    Kind.UPDATE: _update,
    Kind.DELETE: _delete,
    Kind.TRUNCATE: _truncate,
    Kind.MESSAGE: _message,
    Kind.STREAM_START: _stream_start,
    Kind.STREAM_STOP: _stream_stop,
    Kind.STREAM_COMMIT: _stream_commit,
    Kind.STREAM_ABORT: _stream_abort,
    Kind.BEGIN_PREPARE: _begin_prepare,
    Kind.PREPARE: _prepare,
    Kind.COMMIT_PREPARED: _commit_prepared,
    Kind.ROLLBACK_PREPARED: _rollback_prepared,
    Kind.STREAM_PREPARE: _stream_prepare,
}
_BY_BYTE: Final = {
    ord(kind): (_BY_KIND[kind], kind in WITH_XID, f"decoding a {kind.name.replace('_', ' ').title()} message")
    for kind in Kind
}


def decode(data: bytes | memoryview, *, streamed: bool = False) -> Message:
    """Decode one message. `streamed`: it is between Stream Start and Stream Stop."""
    raw = bytes(data)
    if not raw:
        raise ProtocolError("decoding a message", "it is empty", _HINT, 0)
    found = _BY_BYTE.get(raw[0])
    if found is None:
        raise ProtocolError("decoding a message", f"its kind 0x{raw[0]:02x} is unknown", _HINT, 0)
    read, with_xid, doing = found
    reader = ByteReader(raw, doing)
    reader.position = 1
    message = read(reader, reader.u32("the xid") if streamed and with_xid else None)
    reader.end()
    return message


class Decoder:
    """Decodes the messages of one connection in order, and tracks which are streamed."""

    __slots__ = ("_stream",)

    def __init__(self) -> None:
        self._stream: int | None = None

    @property
    def stream(self) -> int | None:
        """The top-level xid of the current stream; None outside a stream."""
        return self._stream

    def decode(self, data: bytes | memoryview) -> Message:
        message = decode(data, streamed=self._stream is not None)
        if self._stream is None:
            if isinstance(message, StreamStop):
                raise ProtocolError("decoding a stream", "Stream Stop comes without Stream Start", _HINT, 0)
            if isinstance(message, StreamStart):
                self._stream = message.xid
        elif isinstance(message, StreamStop):
            self._stream = None
        elif message.kind not in _IN_STREAM:
            name = message.kind.name.replace("_", " ").title()
            raise ProtocolError(
                "decoding a stream", f"{name} comes inside the stream of transaction {self._stream}", _HINT, 0
            )
        return message
