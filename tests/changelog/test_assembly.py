"""From the stream to the log: however it is cut into pieces and sent again, every transaction is there once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from changelog.walsender import START, T, U, Walsender, assert_sound, begin_log, insert, read, relation, truncate
from walmere.changelog.assembly import HEARTBEAT
from walmere.changelog.manifest import Manifest
from walmere.changelog.records import Position
from walmere.errors import ProtocolError
from walmere.lsn import Lsn


def flat(stream: list[list[memoryview]]) -> list[memoryview]:
    return [frame for frames in stream for frame in frames]


def a_stream(source: Walsender) -> list[list[memoryview]]:
    stream = []
    for number in range(0, 60, 6):
        gid = b"g%d" % number
        stream += [
            source.inserts(number),
            source.prepared(gid, relation(U), insert(number + 1, U)),
            source.transaction(relation(T), relation(U), insert(number + 2), truncate(T, U)),
            source.message(b"m%d" % number),
            source.rollback_prepared(gid) if number % 4 else source.commit_prepared(gid),
            source.message(b"", HEARTBEAT.encode()),
            source.transaction(relation(U), insert(number + 3, U)),
        ]
    return stream


@pytest.mark.parametrize("large", [64, 300, 1 << 20], ids=["spooled", "mixed", "whole"])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_cuts_and_repetitions_make_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int, seed: int
) -> None:
    monkeypatch.setattr("walmere.changelog.assembly.SPOOL_BYTES", large)
    rng = random.Random(seed)
    writer, assembly = begin_log(tmp_path / "whole")
    stream = a_stream(Walsender())
    assert assembly.feed(flat(stream)) == []
    writer.flush()
    writer.close()
    truth = read(tmp_path / "whole")
    assert len(truth) == 45

    source = Walsender()
    stream, ends = [], []
    for frames in a_stream(source):
        stream.append(frames)
    ends = ends_of(stream)
    writer, assembly = begin_log(tmp_path / "log")
    confirmed = START
    at = 0
    while at < len(stream):
        # the server begins after what was confirmed, and goes on for a while
        at = next((i for i, end in enumerate(ends) if end > confirmed), len(stream))
        left: list[memoryview] = []
        frames = flat(stream[at:])
        for _ in range(rng.randint(1, 12)):
            size = rng.choice([1, 2, 5, 30])
            left = assembly.feed(left + frames[:size])
            frames = frames[size:]
            if rng.random() < 0.3:
                writer.cut()
        if rng.random() < 0.6:
            writer.flush()
            confirmed = rng.choice([confirmed, writer.durable])
        if rng.random() < 0.5:  # the connection is cut
            assembly.reset()
        else:  # the receiver is killed
            writer.close()
            writer, assembly = begin_log(tmp_path / "log", confirmed)
        if not frames and not left:
            writer.flush()
            break
    assembly.reset()
    for frames in stream:
        assembly.feed(frames)
    writer.flush()
    writer.close()
    assert read(tmp_path / "log") == truth
    assert_sound(tmp_path / "log")


def ends_of(stream: list[list[memoryview]]) -> list[Lsn]:
    """Where each of them ends in the WAL: the LSN in the header of its last message, which says how far that is."""
    return [Lsn(int.from_bytes(frames[-1][9:17], "big")) for frames in stream]


def test_an_unfinished_transaction_is_given_back(tmp_path: Path) -> None:
    writer, assembly = begin_log(tmp_path)
    first, second = (source := Walsender()).inserts(1), source.inserts(2)
    left = assembly.feed(first + second[:-1])
    assert left == second[:-1]
    assert assembly.position < source.lsn
    assert assembly.feed(left + second[-1:]) == []
    assert assembly.position == source.lsn
    writer.flush()
    writer.close()
    assert read(tmp_path) == [["1"], ["2"]]


def test_a_heartbeat_moves_the_position_and_is_not_shown(tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    assembly.feed(source.message(b"", HEARTBEAT.encode()))
    writer.flush()
    assert writer.durable == source.lsn
    writer.close()
    assert read(tmp_path) == []
    with Manifest(tmp_path) as manifest:
        assert [type(entry) for entry in manifest.entries()] == [Position]


def test_a_position_never_goes_back(tmp_path: Path) -> None:
    writer, assembly = begin_log(tmp_path)
    for lsn in (Lsn(0x5000), Lsn(0x4000), Lsn(0x5000), Lsn(0x5001)):
        assembly.advance(lsn)
    writer.flush()
    assert writer.durable == Lsn(0x5001)
    writer.close()
    with Manifest(tmp_path) as manifest:
        assert [e.end_lsn for e in manifest.entries() if isinstance(e, Position)] == [Lsn(0x5000), Lsn(0x5001)]


def test_a_transaction_whose_commit_begins_at_the_logs_end_is_new(tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    commit = Lsn(source.lsn + 3 * 16)  # after a Relation and an Insert
    assembly.advance(commit)
    assembly.feed(source.inserts(1))
    writer.flush()
    writer.close()
    assert read(tmp_path) == [["1"]]


def test_a_prepared_transaction_that_was_not_sent_at_its_prepare_comes_with_its_commit(tmp_path: Path) -> None:
    """Where two_phase was turned on in between, the server sends it right before Commit Prepared, with its old LSN."""
    source = Walsender()
    late = source.prepared(b"late", relation(), insert(1))
    between = source.inserts(2)
    writer, assembly = begin_log(tmp_path)
    assembly.feed(between)
    commit = source.commit_prepared(b"late")
    assembly.feed(late)
    assembly.reset()  # the connection is cut between the two: both come again
    assembly.feed(late)
    assembly.feed(commit)
    assembly.feed(late)  # and again, now that the log has them
    assembly.feed(commit)
    writer.flush()
    writer.close()
    assert read(tmp_path) == [["2"], ["1"]]
    assert len(list(tmp_path.glob("*.arrow"))) == 2
    assert_sound(tmp_path)


def test_a_late_prepared_transaction_that_is_rolled_back_leaves_nothing(tmp_path: Path) -> None:
    source = Walsender()
    late = source.prepared(b"late", relation(), insert(1))
    writer, assembly = begin_log(tmp_path)
    assembly.feed(source.inserts(2))
    assembly.feed(late)
    assembly.feed(source.rollback_prepared(b"late"))
    writer.flush()
    writer.close()
    assert read(tmp_path) == [["2"]]
    assert len(list(tmp_path.glob("*.arrow"))) == 1


def test_a_commit_of_what_was_never_prepared_is_refused(tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    with pytest.raises(ProtocolError, match="no prepared transaction 'g'"):
        assembly.feed(source.commit_prepared(b"g"))
    writer.close()


@pytest.mark.parametrize(
    "broken",
    [
        lambda s: s.inserts(1)[1:],  # no Begin
        lambda s: s.inserts(1)[:-1] + s.inserts(2),  # no Commit
        lambda s: [*s.inserts(1)[:-1], *s.commit_prepared(b"g")],  # another end
        lambda s: [s.frame(b"I\0\0\0\1")],
        lambda s: [s.frame(b"?")],
        lambda s: s.transaction(insert(1)),  # no Relation
        lambda s: [s.frame(b"E")],  # Stream Stop without a start
        lambda s: [s.frame(b"c" + bytes(29))],
        lambda s: s.transaction(b"T\0\0\0\1\0\0\0\0\7"),  # Truncate of what nobody knows
    ],
)
def test_a_stream_that_makes_no_sense_is_an_error_of_ours(tmp_path: Path, broken: object) -> None:
    writer, assembly = begin_log(tmp_path)
    assert callable(broken)
    with pytest.raises(ProtocolError):
        assembly.feed(broken(Walsender()))
    assembly.reset()
    writer.close()
    assert read(tmp_path) == []
