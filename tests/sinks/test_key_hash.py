"""Hashes of keys: equal keys have equal hashes, small keys that differ have different ones, in every version."""

from __future__ import annotations

import itertools
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walmere.sinks.key_hash import U64, hashes, is_exact
from walmere.sinks.row_index import codes, one_array

special = st.sampled_from([0.0, -0.0, math.nan])  # PostgreSQL has one NaN
texts = st.one_of(
    st.text(max_size=20),
    st.integers(0, 700).map(lambda size: "é" * size),
    st.tuples(st.integers(240, 400), st.sampled_from("ab")).map(lambda each: "x" * each[0] + each[1] * 9),
)
timestamps = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31))  # noqa: DTZ001
KINDS: dict[Any, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float32(): st.one_of(st.floats(width=32, allow_nan=False), special),
    pa.float64(): st.one_of(st.floats(allow_nan=False), special),
    pa.string(): texts,
    pa.large_string(): texts,
    pa.binary(): st.binary(max_size=400),
    pa.date32(): st.dates(),
    pa.timestamp("us"): timestamps,
    pa.timestamp("us", "UTC"): timestamps.map(lambda each: each.replace(tzinfo=UTC)),
    pa.decimal128(5, 2): st.decimals(Decimal("-999.99"), Decimal("999.99"), places=2),
    pa.decimal128(38, 10): st.decimals(Decimal(-(10**27)), Decimal(10**27), places=10),
    pa.decimal128(38, 0): st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal),
    pa.list_(pa.int32()): st.lists(st.one_of(st.none(), st.integers(-5, 5)), max_size=4),
    pa.list_(pa.string()): st.lists(st.one_of(st.none(), texts), max_size=3),
    pa.list_(pa.float32()): st.lists(st.sampled_from([0.0, -0.0, 1.5, math.nan]), max_size=4),
    pa.list_(pa.decimal128(38, 10)): st.lists(st.one_of(st.none(), st.integers(-9, 9).map(Decimal)), max_size=3),
    pa.list_(pa.bool_()): st.lists(st.one_of(st.none(), st.booleans()), max_size=3),
    pa.list_(pa.timestamp("us", "UTC")): st.lists(timestamps.map(lambda each: each.replace(tzinfo=UTC)), max_size=2),
    pa.list_(pa.list_(pa.string())): st.lists(st.lists(st.sampled_from(["", "a", None]), max_size=2), max_size=3),
    pa.map_(pa.string(), pa.string()): st.lists(
        st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.sampled_from(["", "x"]))), max_size=3
    ),
    pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))]): st.fixed_dictionaries(
        {"a": st.one_of(st.none(), st.integers(0, 3)), "b": st.one_of(st.none(), st.lists(st.just("x"), max_size=2))}
    ),
    pa.list_(pa.float32(), 2): st.lists(st.sampled_from([0.0, -0.0, 1.5]), min_size=2, max_size=2),
    pa.binary(4): st.binary(min_size=4, max_size=4),
}
"""Every Arrow type that `types` makes, and what else a table of another program can have, with values."""
SMALL = [
    pa.bool_(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", "UTC"),
]


def array(kind: Any, values: list[Any]) -> pa.Array:
    return pa.array(values, kind, from_pandas=False)


@st.composite
def columns(draw: st.DrawFn, count: int | None = None, width: int = 1) -> list[pa.Array]:
    """Columns of one length, of any types, with NULLs and repeated values."""
    size = draw(st.integers(0, 12)) if count is None else count
    made = []
    for _ in range(width):
        kind = draw(st.sampled_from(list(KINDS)))
        different = draw(st.lists(st.one_of(st.none(), KINDS[kind]), min_size=1, max_size=6))
        made.append(array(kind, [draw(st.sampled_from(different)) for _ in range(size)]))
    return made


def in_chunks(column: pa.Array, cuts: list[int], junk: pa.Array) -> pa.Array:
    """The same values in another layout: pieces of a longer array, put together again."""
    longer = pa.concat_arrays([junk, column, junk])
    ends = sorted({0, len(column), *(cut % (len(column) + 1) for cut in cuts)})
    pieces = [longer.slice(len(junk) + first, last - first) for first, last in itertools.pairwise(ends)]
    return one_array(pa.chunked_array(pieces, column.type))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), width=st.integers(1, 3))
def test_equal_keys_have_equal_hashes_and_others_do_not(data: st.DataObject, width: int) -> None:
    """As `row_index` defines it: the same bits, and NULL equals NULL. No collisions are known for such keys."""
    made = data.draw(columns(width=width))
    found = hashes(made)
    assert found.dtype == np.uint64
    assert len(found) == len(made[0])
    if not len(found):
        return
    numbers, count = codes(made)
    for number in range(count):
        assert len(set(found[numbers == number].tolist())) == 1
    if not any(is_long(column) for column in made):
        assert len(set(found.tolist())) == count


def is_long(column: pa.Array) -> bool:
    return any(isinstance(value, (str, bytes)) and len(value) > 150 for value in column.to_pylist()) or bool(
        pa.types.is_nested(column.type)
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), cuts=st.lists(st.integers(0, 20), max_size=3), first=st.integers(0, 12))
def test_hashes_do_not_depend_on_slices_offsets_and_chunks(data: st.DataObject, cuts: list[int], first: int) -> None:
    [column] = data.draw(columns())
    kind = column.type
    junk = array(kind, data.draw(st.lists(st.one_of(st.none(), KINDS[kind]), max_size=9)))
    found = hashes([column])
    assert np.array_equal(hashes([in_chunks(column, cuts, junk)]), found)
    longer = pa.concat_arrays([junk, column, junk])
    assert np.array_equal(hashes([longer.slice(len(junk), len(column))]), found), "a slice"
    assert np.array_equal(hashes([longer])[len(junk) : len(junk) + len(column)], found), "the whole"
    assert np.array_equal(hashes([column.slice(min(first, len(column)))]), found[min(first, len(column)) :])
    order = np.argsort(np.arange(len(column)) * 7919 % 13, kind="stable")
    assert np.array_equal(hashes([column.take(pa.array(order, pa.int64()))]), found[order])
    [again] = pa.ipc.open_stream(stream_of(column)).read_all().columns
    assert np.array_equal(hashes([one_array(again)]), found), "read from a file"


def stream_of(column: pa.Array) -> pa.Buffer:
    out = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_arrays([column], ["c"])
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    return out.getvalue()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_empty_columns_and_columns_of_nulls_of_every_type_are_hashed(kind: Any) -> None:
    empty = pa.array([], kind)
    for none in (empty, pa.nulls(3, kind).slice(1, 0), one_array(pa.chunked_array([], kind)), empty.slice(0)):
        assert hashes([none]).shape == (0,)
        assert hashes([none, none]).shape == (0,)
    nulls = hashes([pa.nulls(3, kind)])
    assert len(set(nulls.tolist())) == 1
    assert hashes([pa.array([None], kind)])[0] == nulls[0]


@pytest.mark.parametrize("kind", SMALL, ids=str)
def test_one_column_of_at_most_eight_bytes_is_exact(kind: Any) -> None:
    assert is_exact(pa.schema([("key", kind)]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SMALL], ids=str)
def test_other_columns_and_several_columns_are_not_exact(kind: Any) -> None:
    assert not is_exact(pa.schema([("key", kind)]))
    assert not is_exact(pa.schema([("a", pa.int32()), ("b", pa.int32())]))
    assert not is_exact(pa.schema([]))


@pytest.mark.parametrize("kind", SMALL, ids=str)
def test_exact_hashes_can_be_inverted(kind: Any) -> None:
    """All values of a small type, many of a larger one: each has its own hash, and can be computed from it."""
    width = {pa.bool_(): 1, pa.int16(): 16}.get(kind, kind.bit_width)
    if width <= 16:
        numbers = np.arange(2**width)
    else:
        generator = np.random.default_rng(1)
        ends = np.concatenate([np.arange(5000), 2 ** np.arange(width - 1), 2 ** np.arange(width - 1) - 1])
        numbers = np.concatenate([ends, generator.integers(0, 2 ** (width - 1), 5000)])
    column = bits_as(kind, np.unique(np.concatenate([numbers, -numbers]) if width > 1 else numbers))
    if pa.types.is_floating(kind):
        column = column.filter(pa.compute.invert(pa.compute.is_nan(column)))
    found = hashes([column])
    assert len(np.unique(found)) == len(column)
    assert np.array_equal(inverse_of_mix(found), bits_of(column))


def bits_as(kind: Any, numbers: Any) -> pa.Array:
    """Values of a type with these bits, all different."""
    if pa.types.is_boolean(kind):
        return pa.array([False, True])
    small = np.unique(np.asarray(numbers, np.int64).astype(signed(kind).to_pandas_dtype()))
    return pa.array(small).view(kind)


def bits_of(column: pa.Array) -> U64:
    if pa.types.is_floating(column.type):
        return np.asarray(column.to_numpy().astype(np.float64).view(np.uint64))
    if pa.types.is_boolean(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False).astype(np.uint64))
    return np.asarray(column.view(signed(column.type)).to_numpy().astype(np.int64).view(np.uint64))


def signed(kind: Any) -> Any:
    """The integer of the same size."""
    return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[kind.bit_width]


def inverse_of_mix(values: U64) -> U64:
    def unshift(value: U64, by: int) -> U64:
        found = value
        for _ in range(math.ceil(64 / by)):
            found = value ^ (found >> np.uint64(by))
        return found

    values = unshift(values, 31) * np.uint64(pow(0x94D049BB133111EB, -1, 2**64))
    values = unshift(values, 27) * np.uint64(pow(0xBF58476D1CE4E5B9, -1, 2**64))
    return unshift(values, 30) - np.uint64(0x9E3779B97F4A7C15)


def test_a_nan_is_one_value_and_minus_zero_is_another_than_zero() -> None:
    for width, word in ((np.float64, np.uint64), (np.float32, np.uint32)):
        quiet = 0x7FF8 << 48 if width is np.float64 else 0x7FC0 << 16
        sign = 1 << (63 if width is np.float64 else 31)
        nans = np.array([quiet, quiet | sign, quiet + 5, (quiet | sign) + 99], word).view(width)
        assert len(set(hashes([pa.array(nans)]).tolist())) == 1
        assert len(set(hashes([pa.array(np.array([0.0, -0.0, np.nan, np.inf], width))]).tolist())) == 4


def test_columns_are_hashed_in_order_and_texts_do_not_run_into_each_other() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("c", "ab"), (None, "abc"), ("abc", None), (None, "")]
    found = hashes([pa.array([pair[i] for pair in pairs], pa.string()) for i in (0, 1)])
    assert len(set(found.tolist())) == len(pairs)
    lists = [["a", "b"], ["ab"], ["b", "a"], ["a", None, "b"], ["", "ab"], [], [None], None, [""], ["a", "b", None]]
    assert len(set(hashes([pa.array(lists, pa.list_(pa.string()))]).tolist())) == len(lists)
    nested = [[["a"], []], [[], ["a"]], [["a"]], [[], []], [[]], [], [None], None]
    assert len(set(hashes([pa.array(nested, pa.list_(pa.list_(pa.string())))]).tolist())) == len(nested)


def test_texts_differ_at_every_length_and_by_every_byte_that_is_hashed() -> None:
    lengths = ["x" * size for size in range(700)]
    assert len(set(hashes([pa.array(lengths)]).tolist())) == len(lengths)
    zeros = [b"\0" * size for size in range(700)]
    assert len(set(hashes([pa.array(zeros)]).tolist())) == len(zeros)
    for size in (1, 7, 8, 9, 255, 256, 257, 263, 264, 320):
        others = [bytes(place) + b"\x01" + bytes(size - place - 1) for place in range(size)]
        assert len(set(hashes([pa.array([bytes(size), *others])]).tolist())) == size + 1
    # what is between the first and the last bytes of a long text is not hashed: the key is compared
    assert len(set(hashes([pa.array(["a" * 300 + middle + "b" * 300 for middle in "xyz"])]).tolist())) == 1


def test_hashes_of_running_numbers_are_spread_over_all_bits() -> None:
    found = hashes([pa.array(np.arange(100_000))])
    for bit in range(64):
        ones = int(((found >> np.uint64(bit)) & np.uint64(1)).sum())
        assert 48_000 < ones < 52_000
    assert len(np.unique(found >> np.uint64(32))) > 99_990


PINNED: list[tuple[Any, Any, int]] = [
    (pa.int64(), None, 0x9AE16A3B2F90404F),
    (pa.bool_(), True, 0x910A2DEC89025CC1),
    (pa.int16(), -1, 0xE4D971771B652C20),
    (pa.int32(), 7, 0x63CBE1E459320DD7),
    (pa.int64(), -(2**63), 0x481EC0A212A9F3DB),
    (pa.float32(), 1.5, 0xD6DAB18E1392608A),
    (pa.float64(), -0.0, 0x481EC0A212A9F3DB),
    (pa.float64(), float("nan"), 0xC72971D82E15BB46),
    (pa.string(), "", 0xE220A8397B1DCDAF),
    (pa.string(), "walmere", 0x833DBCBC626EBB90),
    (pa.string(), "é" * 400, 0x1941589EFAF3AF85),
    (pa.binary(), b"\0\xff", 0x3847FC70AD88088D),
    (pa.date32(), date(2026, 1, 1), 0x89DB5515B8DE1F50),
    (pa.timestamp("us"), datetime(2026, 1, 1, 1, 2, 3, 4), 0x8AA3FAF1FECD860B),  # noqa: DTZ001
    (pa.timestamp("us", "UTC"), datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), 0xE4D971771B652C20),
    (pa.decimal128(5, 2), Decimal("-1.50"), 0x318170AD97D177D3),
    (pa.decimal128(38, 0), Decimal(10**37), 0xAFDCBE5383C4701C),
    (pa.list_(pa.int32()), [1, None, 3], 0xF41650AF2889C2DF),
    (pa.list_(pa.string()), [], 0xE220A8397B1DCDAF),
    (pa.map_(pa.string(), pa.string()), [("a", "b"), ("c", None)], 0x6287F18B8EBE6B6D),
    (pa.struct([("a", pa.int32())]), {"a": 1}, 0x910A2DEC89025CC1),
]


@pytest.mark.parametrize(("kind", "value", "expected"), PINNED, ids=str)
def test_hashes_stay_the_same_in_later_versions(kind: Any, value: Any, expected: int) -> None:
    """An index on disk has these. If a hash must change, so must the format of the index."""
    assert int(hashes([array(kind, [value])])[0]) == expected


def test_hashes_of_several_columns_stay_the_same_in_later_versions() -> None:
    found = hashes([pa.array([1, None]), pa.array(["a", "b"]), pa.array([date(2026, 1, 1), None])])
    assert found.tolist() == [0xCF5144A2E7F53D5A, 0xF6A2DDCF9DE53946]
