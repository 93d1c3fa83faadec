"""One message at a time, from byte literals."""

from __future__ import annotations

import pickle
import tracemalloc
from datetime import UTC, datetime

import pytest

from walmere.errors import ProtocolError
from walmere.lsn import Lsn
from walmere.pgoutput import (
    UNCHANGED,
    Begin,
    BeginPrepare,
    Binary,
    Column,
    Commit,
    CommitPrepared,
    Decoder,
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
    Type,
    Update,
    decode,
)
from walmere.pgoutput.messages import POSTGRES_EPOCH_US

LSN1, LSN2 = Lsn(0x16_B374D848), Lsn(0x16_B374D878)
L1, L2 = bytes.fromhex("00000016b374d848"), bytes.fromhex("00000016b374d878")
T1, T2 = bytes.fromhex("0000000000000001"), bytes.fromhex("ffffffffffffffff")
US1, US2 = POSTGRES_EPOCH_US + 1, POSTGRES_EPOCH_US - 1
XID, SUB = b"\x00\x00\x02\xc0", b"\x00\x00\x02\xc1"
OID = b"\x00\x00\x40\x00"

# name, bytes, message; those with an xid are streamed
TABLE: list[tuple[str, bytes, Message]] = [
    ("begin", b"B" + L1 + T1 + XID, Begin(LSN1, US1, 704)),
    ("commit", b"C\0" + L1 + L2 + T2, Commit(0, LSN1, LSN2, US2)),
    ("origin", b"O" + L1 + b"node_a\0", Origin(LSN1, "node_a")),
    ("origin without a name", b"O" + L1 + b"\0", Origin(LSN1, "")),
    (
        "relation",
        b"R" + OID + b"public\0gr\xc3\xb6\xc3\x9fe\0d\0\x02"
        b"\x01id\0\0\0\0\x17\xff\xff\xff\xff"
        b"\0price\0\0\0\x06\xa4\0\x0a\0\x06",
        Relation(
            16384,
            "public",
            "größe",
            ReplicaIdentity.DEFAULT,
            (Column(1, "id", 23, -1), Column(0, "price", 1700, 0xA0006)),
        ),
    ),
    (
        "relation of pg_catalog, without columns",
        b"R" + OID + b"\0x\0n\0\0",
        Relation(16384, "", "x", ReplicaIdentity.NOTHING, ()),
    ),
    (
        "relation, streamed",
        b"R" + SUB + OID + b"public\0x\0f\0\0",
        Relation(16384, "public", "x", ReplicaIdentity.FULL, (), 705),
    ),
    ("type", b"Y" + OID + b"public\0mood\0", Type(16384, "public", "mood")),
    ("type, streamed", b"Y" + SUB + OID + b"public\0mood\0", Type(16384, "public", "mood", 705)),
    (
        "insert of every kind of value",
        b"I" + OID + b"N\0\x05t\0\0\0\x02\0\xffnut\0\0\0\0b\0\0\0\x04\0\0\0\x07",
        Insert(16384, (b"\0\xff", None, UNCHANGED, b"", Binary(b"\0\0\0\x07"))),
    ),
    ("insert without columns", b"I" + OID + b"N\0\0", Insert(16384, ())),
    ("insert, streamed", b"I" + SUB + OID + b"N\0\x01n", Insert(16384, (None,), 705)),
    ("update", b"U" + OID + b"N\0\x01t\0\0\0\x011", Update(16384, None, None, (b"1",))),
    (
        "update of the key",
        b"U" + OID + b"K\0\x02t\0\0\0\x011nN\0\x02t\0\0\0\x012u",
        Update(16384, (b"1", None), None, (b"2", UNCHANGED)),
    ),
    ("update with the old row", b"U" + OID + b"O\0\x01nN\0\x01n", Update(16384, None, (None,), (None,))),
    ("update without columns", b"U" + OID + b"O\0\0N\0\0", Update(16384, None, (), ())),
    ("update, streamed", b"U" + SUB + OID + b"N\0\x01n", Update(16384, None, None, (None,), 705)),
    ("delete by key", b"D" + OID + b"K\0\x01t\0\0\0\x011", Delete(16384, (b"1",), None)),
    ("delete by old row", b"D" + OID + b"O\0\x01n", Delete(16384, None, (None,))),
    ("delete, streamed", b"D" + SUB + OID + b"K\0\x01n", Delete(16384, (None,), None, 705)),
    ("truncate", b"T\0\0\0\x02\x00" + OID + b"\0\0\x40\x01", Truncate((16384, 16385), False, False)),
    ("truncate cascade", b"T\0\0\0\x01\x01" + OID, Truncate((16384,), True, False)),
    ("truncate restart identity", b"T\0\0\0\x01\x02" + OID, Truncate((16384,), False, True)),
    ("truncate of nothing, streamed", b"T" + SUB + b"\0\0\0\0\x03", Truncate((), True, True, 705)),
    ("message", b"M\0" + L1 + b"po\0\0\0\0\x02\0\xff", LogicalMessage(False, LSN1, "po", b"\0\xff")),
    ("message, streamed", b"M" + SUB + b"\x01" + L1 + b"\0\0\0\0\0", LogicalMessage(True, LSN1, "", b"", 705)),
    ("stream start", b"S" + XID + b"\x01", StreamStart(704, True)),
    ("stream start again", b"S" + XID + b"\x00", StreamStart(704, False)),
    ("stream stop", b"E", StreamStop()),
    ("stream commit", b"c" + XID + b"\0" + L1 + L2 + T1, StreamCommit(704, 0, LSN1, LSN2, US1)),
    ("stream abort", b"A" + XID + SUB, StreamAbort(704, 705)),
    ("stream abort, protocol 4", b"A" + XID + SUB + L1 + T1, StreamAbort(704, 705, LSN1, US1)),
    ("begin prepare", b"b" + L1 + L2 + T1 + XID + b"gid\0", BeginPrepare(LSN1, LSN2, US1, 704, "gid")),
    ("prepare", b"P\0" + L1 + L2 + T1 + XID + b"gid\0", Prepare(0, LSN1, LSN2, US1, 704, "gid")),
    ("commit prepared", b"K\0" + L1 + L2 + T1 + XID + b"gid\0", CommitPrepared(0, LSN1, LSN2, US1, 704, "gid")),
    (
        "rollback prepared",
        b"r\0" + L1 + L2 + T1 + T2 + XID + b"gid\0",
        RollbackPrepared(0, LSN1, LSN2, US1, US2, 704, "gid"),
    ),
    ("stream prepare", b"p\0" + L1 + L2 + T1 + XID + b"gid\0", StreamPrepare(0, LSN1, LSN2, US1, 704, "gid")),
]
IDS = [name for name, _, _ in TABLE]


def is_streamed(name: str) -> bool:
    return name.endswith(", streamed")


@pytest.mark.parametrize(("name", "data", "message"), TABLE, ids=IDS)
def test_each_message_is_decoded_field_by_field(name: str, data: bytes, message: Message) -> None:
    assert decode(data, streamed=is_streamed(name)) == message
    assert decode(memoryview(data), streamed=is_streamed(name)) == message
    assert message.kind == chr(data[0])


def test_the_table_has_every_kind() -> None:
    assert {message.kind for _, _, message in TABLE} == set(Kind)


@pytest.mark.parametrize(("name", "data", "message"), TABLE, ids=IDS)
def test_a_message_pickles_and_unchanged_stays_itself(name: str, data: bytes, message: Message) -> None:
    assert pickle.loads(pickle.dumps(message)) == message
    assert pickle.loads(pickle.dumps(UNCHANGED)) is UNCHANGED


@pytest.mark.parametrize(("name", "data", "message"), TABLE, ids=IDS)
def test_a_message_cut_anywhere_is_refused_at_an_offset_inside_it(name: str, data: bytes, message: Message) -> None:
    for size in range(len(data)):
        if name == "stream abort, protocol 4" and size == 9:
            continue  # the same message, as an older server sends it
        with pytest.raises(ProtocolError) as caught:
            decode(data[:size], streamed=is_streamed(name))
        assert 0 <= caught.value.offset <= size


@pytest.mark.parametrize(("name", "data", "message"), TABLE, ids=IDS)
def test_bytes_left_over_are_refused_where_they_begin(name: str, data: bytes, message: Message) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(data + b"\0", streamed=is_streamed(name))
    assert caught.value.offset == len(data)


WRONG: list[tuple[str, bytes, int, str]] = [
    ("empty", b"", 0, "empty"),
    ("unknown kind", b"\xff", 0, "kind 0xff"),
    ("a kind of a later protocol", b"Z", 0, "kind 0x5a"),
    ("begin cut in its time", b"B" + L1 + T1[:3], 9, "needs 8 bytes, 3 are left"),
    ("commit with a flag", b"C\x01" + L1 + L2 + T1, 1, "flags 0x01"),
    ("stream commit with a flag", b"c" + XID + b"\x80" + L1 + L2 + T1, 5, "flags 0x80"),
    ("prepare with a flag", b"P\x02" + L1 + L2 + T1 + XID + b"gid\0", 1, "flags 0x02"),
    ("a name without an end", b"O" + L1 + b"node", 9, "no terminator"),
    ("a name that is not UTF-8", b"O" + L1 + b"no\xffde\0", 11, "not UTF-8"),
    ("an unknown replica identity", b"R" + OID + b"\0x\0q\0\0", 8, "replica identity"),
    ("a relation with too many columns", b"R" + OID + b"\0x\0d\xff\xff" + b"\0" * 10, 9, "65535 columns"),
    ("an insert without N", b"I" + OID + b"K\0\0", 5, "0x4b"),
    ("an update without N", b"U" + OID + b"X\0\0", 5, "0x58"),
    ("an update with two old tuples", b"U" + OID + b"K\0\0O\0\0N\0\0", 8, "0x4f"),
    ("a delete with a new tuple", b"D" + OID + b"N\0\0", 5, "0x4e"),
    ("a tuple with too many columns", b"I" + OID + b"N\xff\xffnnn", 6, "65535 columns"),
    ("a value of unknown kind", b"I" + OID + b"N\0\x01x", 8, "kind 0x78"),
    ("a value longer than the message", b"I" + OID + b"N\0\x01t\0\0\0\x05abc", 9, "5 bytes, 3 are left"),
    ("a value of negative length", b"I" + OID + b"N\0\x01t\xff\xff\xff\xffabc", 9, "4294967295 bytes"),
    ("a truncate of more than there are", b"T\xff\xff\xff\xff\0" + OID, 1, "4294967295 relations"),
    ("content longer than the message", b"M\0" + L1 + b"p\0\x7f\xff\xff\xff", 12, "2147483647 bytes"),
    ("half of a stream abort's rest", b"A" + XID + SUB + L1, 17, "abort time"),
]


@pytest.mark.parametrize(("name", "data", "offset", "wrong"), WRONG, ids=[w[0] for w in WRONG])
def test_what_is_wrong_is_named_with_its_offset(name: str, data: bytes, offset: int, wrong: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(data)
    error = caught.value
    assert error.offset == offset
    assert wrong in error.wrong
    assert error.doing.startswith("decoding a")
    assert error.hint
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.offset) == (str(error), offset)


def test_a_lying_length_or_count_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        for _, data, _, _ in WRONG:
            with pytest.raises(ProtocolError):
                decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("wire", [0, 1, -1, (1 << 63) - 1, -(1 << 63), 1 << 62, -(1 << 62)])
def test_any_64_bit_time_is_taken_and_fits_64_bits(wire: int) -> None:
    message = decode(b"B" + L1 + wire.to_bytes(8, "big", signed=True) + XID)
    assert isinstance(message, Begin)
    assert -(1 << 63) <= message.commit_time_us < 1 << 63
    assert message.commit_time.tzinfo is UTC


def test_a_time_is_exact_to_the_microsecond() -> None:
    message = decode(b"B" + L1 + (762_523_200_000_001).to_bytes(8, "big") + XID)
    assert isinstance(message, Begin)
    assert message.commit_time == datetime(2024, 2, 29, 12, 0, 0, 1, tzinfo=UTC)
    rollback = RollbackPrepared(0, LSN1, LSN2, 0, 1, 1, "")
    assert (rollback.rollback_time - rollback.prepare_time).microseconds == 1
    assert StreamAbort(1, 1).abort_time is None


def test_the_decoder_knows_what_is_streamed() -> None:
    decoder = Decoder()
    assert decoder.decode(b"I" + OID + b"N\0\0") == Insert(16384, ())
    streams = [decoder.stream]
    decoder.decode(b"S" + XID + b"\x01")
    streams.append(decoder.stream)
    assert decoder.decode(b"O" + L1 + b"node\0") == Origin(LSN1, "node")
    assert decoder.decode(b"I" + SUB + OID + b"N\0\0") == Insert(16384, (), 705)
    decoder.decode(b"E")
    streams.append(decoder.stream)
    assert streams == [None, 704, None]
    assert decoder.decode(b"I" + OID + b"N\0\0") == Insert(16384, ())


def test_the_decoder_refuses_a_stream_that_makes_no_sense() -> None:
    decoder = Decoder()
    with pytest.raises(ProtocolError, match="without Stream Start"):
        decoder.decode(b"E")
    decoder.decode(b"S" + XID + b"\x01")
    with pytest.raises(ProtocolError, match="Stream Start comes inside the stream of transaction 704"):
        decoder.decode(b"S" + XID + b"\x00")
    with pytest.raises(ProtocolError, match="Begin comes inside"):
        decoder.decode(b"B" + L1 + T1 + XID)


def test_the_users_data_is_not_in_an_error_and_a_messages_content_not_in_its_repr() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(b"I" + OID + b"N\0\x02t\0\0\0\x06secrett\0\0\0\x06")
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(LogicalMessage(True, LSN1, "p", b"secret"))
