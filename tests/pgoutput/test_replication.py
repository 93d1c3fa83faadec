"""The frame around the messages. The literals were sniffed between two PostgreSQL servers."""

from __future__ import annotations

import pytest

from walmere.errors import ProtocolError
from walmere.lsn import Lsn
from walmere.pgoutput import Keepalive, XLogData, decode_frame, standby_status_update
from walmere.pgoutput.messages import POSTGRES_EPOCH_US

KEEPALIVE = bytes([107, 0, 0, 0, 0, 1, 155, 218, 32, 0, 2, 179, 42, 70, 55, 146, 232, 0])
# fmt: off
STATUS = bytes([114, 0, 0, 0, 0, 1, 155, 218, 32, 0, 0, 0, 0, 1, 155, 218, 32, 0, 0, 0, 0, 1, 155, 218, 32,
                0, 2, 179, 42, 70, 55, 146, 255, 0])
# fmt: on
FIRST_STATUS = bytes([114, *[0, 0, 0, 0, 1, 155, 217, 232] * 3, 0, 2, 179, 42, 70, 55, 57, 124, 0])
CONSISTENT_POINT = Lsn.parse("0/19BDA20")


def test_a_keepalive_as_sniffed() -> None:
    frame = decode_frame(KEEPALIVE)
    assert frame == Keepalive(CONSISTENT_POINT, 0x0002B32A463792E8 + POSTGRES_EPOCH_US, False)
    assert frame.send_time.isoformat() == "2024-01-30T15:35:01.466856+00:00"
    assert decode_frame(memoryview(KEEPALIVE[:-1] + b"\x01")) == Keepalive(CONSISTENT_POINT, frame.send_time_us, True)


def test_a_status_update_as_sniffed() -> None:
    lsn, now = CONSISTENT_POINT, 0x0002B32A463792FF + POSTGRES_EPOCH_US
    assert standby_status_update(lsn, lsn, lsn, now_us=now) == STATUS
    first = Lsn.parse("0/19BD9E8")
    assert standby_status_update(first, first, first, now_us=0x0002B32A4637397C + POSTGRES_EPOCH_US) == FIRST_STATUS


def test_a_status_update_keeps_its_three_positions_apart_and_can_ask_for_a_reply() -> None:
    data = standby_status_update(Lsn(3), Lsn(2), Lsn((1 << 64) - 1), now_us=POSTGRES_EPOCH_US - 1, reply=True)
    assert data.hex() == "72" + "0" * 15 + "3" + "0" * 15 + "2" + "f" * 16 + "f" * 16 + "01"


def test_xlog_data_is_unwrapped() -> None:
    head = b"w" + bytes.fromhex("00000016b374d848" + "00000016b374d849" + "ffffffffffffffff")
    frame = decode_frame(head + b"message")
    assert frame == XLogData(Lsn(0x16_B374D848), Lsn(0x16_B374D849), POSTGRES_EPOCH_US - 1, b"message")
    assert decode_frame(memoryview(head)) == XLogData(frame.wal_start, frame.wal_end, frame.send_time_us, b"")
    assert "message" not in repr(frame)


@pytest.mark.parametrize(
    ("data", "offset"),
    [
        (b"", 0),
        (b"x" + bytes(30), 0),
        (b"w", 1),
        (b"w" + bytes(23), 24),
        (KEEPALIVE[:-1], 17),
        (KEEPALIVE + b"\0", 18),
    ],
)
def test_a_malformed_frame_is_refused_with_its_offset(data: bytes, offset: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_frame(data)
    assert caught.value.offset == offset


def test_the_extremes_of_time_are_taken() -> None:
    for wire in (b"\x7f" + b"\xff" * 7, b"\x80" + bytes(7)):
        frame = decode_frame(b"k" + bytes(8) + wire + b"\0")
        assert frame.send_time.year in (1, 9999)
