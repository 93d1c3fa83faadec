"""Blocks of rows come out of the vectorised decoder as they do out of the careful one."""

from __future__ import annotations

import pickle
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgoutput import corpus
from pgoutput.oracle import as_messages, assert_agrees
from pgoutput.wire import OID, relation, row
from walmere.errors import ProtocolError
from walmere.pgoutput import UNCHANGED, Binary, Value, columns
from walmere.pgoutput.columns import DELETE, INSERT, KEY, OLD, UPDATE, decode_rows

TEXT_BLOCKS = [block for block in corpus.blocks() if not block.section.endswith("binary")]
VALUES: st.SearchStrategy[Value] = st.one_of(st.none(), st.just(UNCHANGED), st.binary(max_size=12), st.just(b"\0"))


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[bytes], int, bool]:
    """Messages, the number of their columns, and whether they are streamed."""
    count = draw(st.integers(0, 5))
    streamed = draw(st.booleans())
    tuples = st.tuples(*[draw(st.sampled_from([VALUES, st.binary(max_size=9)])) for _ in range(count)])
    xids = st.integers(0, 0xFFFFFFFF) if streamed else st.none()
    insert = st.builds(lambda new, xid: row(b"I", new=new, xid=xid), tuples, xids)
    update = st.builds(
        lambda which, old, new, xid: row(b"U", new=new, xid=xid, **({which: old} if which else {})),
        st.sampled_from(["key", "old", ""]),
        tuples,
        tuples,
        xids,
    )
    delete = st.builds(
        lambda which, old, xid: row(b"D", xid=xid, **{which: old}), st.sampled_from(["key", "old"]), tuples, xids
    )
    some = draw(st.lists(st.sampled_from([insert, update, delete]), min_size=1, max_size=3))
    return draw(st.lists(st.one_of(some), max_size=12)), count, streamed


@settings(max_examples=400, deadline=None)
@given(blocks())
def test_random_blocks_agree_with_the_one_message_decoder(made: tuple[list[bytes], int, bool]) -> None:
    messages, count, streamed = made
    assert assert_agrees(messages, relation(count), streamed=streamed)


@settings(max_examples=100, deadline=None)
@given(blocks(), st.integers(0, 3), st.sampled_from([pa.binary(), pa.large_binary()]))
def test_a_slice_of_a_larger_array_of_either_width_agrees(
    made: tuple[list[bytes], int, bool], before: int, width: pa.DataType
) -> None:
    messages, count, streamed = made
    padded = pa.array([b"x" * 7] * before + messages + [b"y" * 5], width)
    block = padded.slice(before, len(messages))
    assert assert_agrees(messages, relation(count), streamed=streamed, block=block)


@pytest.mark.parametrize("block", TEXT_BLOCKS, ids=lambda b: f"{b.section} {b.relation.name} {b.streamed}")
def test_what_real_servers_sent_agrees(block: corpus.Block) -> None:
    assert assert_agrees(block.messages, block.relation, streamed=block.streamed)


def test_the_corpus_has_streamed_blocks_and_blocks_of_every_kind_of_row() -> None:
    assert {block.streamed for block in TEXT_BLOCKS} == {True, False}
    assert {message[:1] for block in TEXT_BLOCKS for message in block.messages} == {b"I", b"U", b"D"}


def test_what_is_in_rows_by_example() -> None:
    block = [
        row(b"I", new=(b"1", b"x")),
        row(b"U", new=(b"1", UNCHANGED)),
        row(b"U", key=(b"1", None), new=(b"2", None)),
        row(b"U", old=(b"2", b""), new=(b"3", b"")),
        row(b"D", key=(b"3", None)),
    ]
    rows = decode_rows(pa.array(block, pa.binary()), relation(2))
    assert rows.kind.tolist() == [INSERT, UPDATE, UPDATE, UPDATE, DELETE]
    assert rows.old_kind.tolist() == [0, 0, KEY, OLD, KEY]
    assert rows.new[0].text == pa.array([b"1", b"1", b"2", b"3", None], pa.binary())
    assert rows.new[1].text == pa.array([b"x", None, None, b"", None], pa.binary())
    assert rows.new[0].unchanged is None
    assert rows.new[1].unchanged is not None
    assert rows.new[1].unchanged.tolist() == [False, True, False, False, False]
    assert rows.old[0].text == pa.array([None, None, b"1", b"2", b"3"], pa.binary())
    assert rows.old[1].text == pa.array([None, None, None, b"", None], pa.binary())
    assert rows.xid is None


def test_an_empty_block_has_all_columns_and_no_rows() -> None:
    for width in (pa.binary(), pa.large_binary()):
        for streamed in (False, True):
            rows = decode_rows(pa.array([], width), relation(2), streamed=streamed)
            assert len(rows) == 0
            assert [len(column.text) for column in (*rows.new, *rows.old)] == [0] * 4


def test_a_row_without_columns_is_still_a_row() -> None:
    assert assert_agrees([row(b"I", new=())] * 3, relation(0), streamed=False)
    assert assert_agrees([row(b"U", old=(), new=()), row(b"D", old=())], relation(0), streamed=False)


def test_a_block_that_needs_64_bit_offsets_gives_large_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    block = [row(b"I", new=(b"1",)), row(b"D", key=(b"1",))]
    expected = as_messages(decode_rows(pa.array(block, pa.binary()), relation(1)))
    monkeypatch.setattr(columns, "_LARGE", 8)
    rows = decode_rows(pa.array(block, pa.large_binary()), relation(1))
    assert {column.text.type for column in (*rows.new, *rows.old)} == {pa.large_binary()}
    assert as_messages(rows) == expected


def test_the_result_does_not_hold_on_to_the_block() -> None:
    big = pa.array([row(b"I", new=(b"1", b"x" * 100_000))] * 10, pa.binary())
    values = decode_rows(big, relation(2)).new[0].text
    assert sum(buffer.size for buffer in values.buffers() if buffer) < 1000


GOOD = row(b"I", new=(b"1", b"2"))
REFUSED = {
    "another relation": row(b"I", new=(b"1", b"2"), oid=OID + 1),
    "fewer columns": row(b"I", new=(b"1",)),
    "more columns": row(b"I", new=(b"1", b"2", b"3")),
    "fewer columns in the key": row(b"U", key=(b"1",), new=(b"1", b"2")),
    "a binary value": row(b"I", new=(b"1", Binary(b"2"))),
    "an unknown kind of value": GOOD[:-6] + b"x" + GOOD[-5:],
    "not a row": b"E" + bytes(20),
    "an empty message": b"",
    "a short message": b"I\0\0",
    "a message cut after the OID": GOOD[:5],
    "a message cut in its column count": GOOD[:7],
    "a message cut before a value": GOOD[:8],
    "a message cut in a length": GOOD[:11],
    "a message cut in a value": GOOD[:-1],
    "a value of 4 GiB": GOOD[:9] + b"\xff\xff\xff\xff" + GOOD[13:],
    "bytes left over": GOOD + b"\0",
    "an insert with a key": row(b"I", key=(b"1", None), new=(b"1", b"2")),
    "a delete with a new tuple": row(b"D", new=(b"1", b"2")),
    "an update without a new tuple": row(b"U", key=(b"1", None)),
    "an update with two old tuples": row(b"U", key=(b"1", None), old=(b"1", None), new=(b"1", b"2")),
}


@pytest.mark.parametrize("bad", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("others", [[GOOD], [GOOD, row(b"D", key=(b"1", None)), row(b"U", new=(b"1", UNCHANGED))]])
def test_a_bad_message_is_refused_at_its_own_offset_wherever_it_stands(bad: bytes, others: list[bytes]) -> None:
    for place in range(len(others) + 1):
        messages = [*others[:place], bad, *others[place:]]
        with pytest.raises(ProtocolError) as caught:
            decode_rows(pa.array(messages, pa.binary()), relation(2))
        assert caught.value.offset == sum(map(len, messages[:place]))
        assert f"message {place} of {len(messages)}" in caught.value.wrong
        assert pickle.loads(pickle.dumps(caught.value)).offset == caught.value.offset
        assert not assert_agrees(messages, relation(2), streamed=False)


def test_a_message_that_is_null_and_an_array_of_something_else_are_refused() -> None:
    with pytest.raises(ProtocolError, match="null"):
        decode_rows(pa.array([GOOD, None], pa.binary()), relation(2))
    with pytest.raises(TypeError, match="int64"):
        decode_rows(pa.array([1]), relation(2))


@pytest.mark.parametrize("offsets", [(0, 40, 26), (20, 13, 26)])  # Arrow sees the rest itself
def test_an_array_whose_own_offsets_lie_is_refused(offsets: tuple[int, int, int]) -> None:
    made = pa.py_buffer(struct.pack("<3i", *offsets))
    lying = pa.Array.from_buffers(pa.binary(), 2, [None, made, pa.py_buffer(bytes(26))])
    with pytest.raises(ProtocolError):
        decode_rows(lying, relation(2))


def test_a_large_block_takes_little_time_per_row() -> None:
    block = pa.array([row(b"I", new=(b"%d" % i, b"value", None)) for i in range(50_000)], pa.binary())
    rows = decode_rows(block, relation(3))
    assert rows.new[0].text.cast(pa.string()).cast(pa.int64()).to_numpy().tolist() == list(range(50_000))
    assert rows.new[2].text.null_count == 50_000
    assert np.array_equal(rows.kind, np.full(50_000, INSERT))


def test_a_streamed_message_cut_at_the_very_end_of_the_block_is_refused() -> None:
    whole = row(b"U", key=(b"1",), new=(b"2",), xid=7)
    for size in range(len(whole)):
        for before in ([], [whole]):
            assert not assert_agrees([*before, whole[:size]], relation(1), streamed=True)


def test_a_binary_value_is_refused_as_such() -> None:
    with pytest.raises(ProtocolError, match="in binary"):
        decode_rows(pa.array([row(b"I", new=(Binary(b"1"),))], pa.binary()), relation(1))
