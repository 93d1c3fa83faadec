"""Whatever the bytes: a result, or ProtocolError, and soon. Seeded, so that a failure can be had again."""

from __future__ import annotations

import pickle
import random
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from pgoutput.corpus import blocks, captured, lines
from pgoutput.oracle import assert_agrees
from walmere.errors import ProtocolError
from walmere.pgoutput import decode, decode_frame

MESSAGES = sorted({(each.data, each.streamed) for each in captured()})
FRAMES = sorted({raw for _, raw in lines()})
LIES = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def flip(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def put(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randint(1, 6))


def cut(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randint(1, 6)]


def lie(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    size, form = rng.choice([(2, "!H"), (4, "!I")])
    if len(data) > size:
        at = rng.randrange(len(data) - size)
        data[at : at + size] = struct.pack(form, rng.choice(LIES) & (1 << 8 * size) - 1)


def letter(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    data[rng.randrange(len(data))] = rng.choice(b"tnubKONIUDRYTMSEcAbPKrp\0")


def splice(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    other = rng.choice(others)
    data[rng.randrange(len(data)) :] = other[rng.randrange(len(other)) :]


def mutated(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    mutable = bytearray(data)
    rng.choice([flip, put, cut, lie, lie, letter, splice])(mutable, rng, others)
    return bytes(mutable)


def bounded(call: Callable[[], object], size: int) -> bool:
    """True for a result, False for a ProtocolError that pickles and points into the bytes."""
    begun = time.process_time()
    refused: ProtocolError | None = None
    try:
        call()
    except ProtocolError as error:
        refused = error
    assert time.process_time() - begun < 1
    if refused is None:
        return True
    assert 0 <= refused.offset <= size
    assert str(pickle.loads(pickle.dumps(refused))) == str(refused)
    return False


def test_every_prefix_of_every_real_message_is_refused_cleanly() -> None:
    for data, streamed in MESSAGES:
        for size in range(len(data)):
            taken = bounded(partial(decode, data[:size], streamed=streamed), size)
            assert not taken or (data[:1] == b"A" and size == 9)


def test_every_prefix_of_every_real_frame_is_refused_or_has_its_head() -> None:
    for data in FRAMES:
        for size in range(min(len(data), 40)):
            taken = bounded(partial(decode_frame, data[:size]), size)
            assert taken == (data[:1] == b"w" and size >= 25)


@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_message_decodes_or_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    all_data = [data for data, _ in MESSAGES]
    results = set()
    for _ in range(10_000):
        data, streamed = rng.choice(MESSAGES)
        bad = mutated(data, rng, all_data)
        streamed ^= rng.random() < 0.05
        results.add(bounded(partial(decode, bad, streamed=streamed), len(bad)))
    assert results == {True, False}


def test_a_mutated_frame_decodes_or_is_refused() -> None:
    rng = random.Random(0)
    for _ in range(10_000):
        bad = mutated(rng.choice(FRAMES)[:60], rng, FRAMES)
        bounded(partial(decode_frame, bad), len(bad))


def test_random_bytes_after_every_kind_decode_or_are_refused() -> None:
    rng = random.Random(0)
    for kind in range(256):
        for size in range(40):
            data = bytes([kind]) + rng.randbytes(size)
            bounded(partial(decode, data), len(data))
            bounded(partial(decode, data, streamed=True), len(data))


def test_a_block_with_a_message_cut_anywhere_names_that_message() -> None:
    for block in blocks():
        for message in block.messages:
            sizes = range(len(message)) if len(message) < 100 else random.Random(0).sample(range(len(message)), 20)
            for size in sizes:
                neighbours = [m for m in block.messages[:2] if len(m) < 200]
                messages = [*neighbours, message[:size], *neighbours]
                assert not assert_agrees(messages, block.relation, streamed=block.streamed)


@pytest.mark.parametrize("seed", range(4))
def test_a_block_with_mutated_messages_agrees_with_the_one_message_decoder(seed: int) -> None:
    rng = random.Random(seed)
    found = [block for block in blocks() if not block.section.endswith("binary")]
    results = []
    for _ in range(800):
        block = rng.choice(found)
        messages = [m for m in block.messages if len(m) < 300][:6] or [block.messages[0][:300]]
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(messages))
            messages[at] = mutated(messages[at], rng, block.messages) if messages[at] else b""
        begun = time.process_time()
        results.append(assert_agrees(messages, block.relation, streamed=block.streamed))
        assert time.process_time() - begun < 1
    assert 0 < sum(results) < len(results)
