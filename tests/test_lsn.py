from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walmere.lsn import INVALID_LSN, Lsn


@given(st.integers(0, (1 << 64) - 1))
def test_what_is_printed_is_read_again(value: int) -> None:
    assert Lsn.parse(str(Lsn(value))) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0/0"), (0x16_B374D848, "16/B374D848"), (1 << 32, "1/0"), ((1 << 64) - 1, "FFFFFFFF/FFFFFFFF")],
)
def test_it_prints_as_postgresql_does(value: int, text: str) -> None:
    assert str(Lsn(value)) == text
    assert f"{Lsn(value)}" == text
    assert repr(Lsn(value)) == f"Lsn('{text}')"


def test_small_letters_and_leading_zeros_are_read() -> None:
    assert Lsn.parse("00000016/b374d848") == Lsn.parse("16/B374D848")


@pytest.mark.parametrize(
    "text", ["", "0", "/", "1/", "/1", "g/0", "1/2/3", " 1/2", "1/2\n", "-1/2", "123456789/0", "1/123456789"]
)
def test_what_is_no_lsn_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an LSN"):
        Lsn.parse(text)


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_more_than_64_bits_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        Lsn(value)


def test_it_orders_as_the_log_does_and_subtracts_to_bytes() -> None:
    assert INVALID_LSN < Lsn.parse("0/FFFFFFFF") < Lsn.parse("1/0")
    assert Lsn.parse("1/0") - Lsn.parse("0/FFFFFFF0") == 16


def test_it_pickles_as_an_lsn() -> None:
    again = pickle.loads(pickle.dumps(Lsn(5)))
    assert (type(again), again) == (Lsn, 5)


def test_the_constructor_takes_what_repr_shows() -> None:
    lsn = Lsn("16/B374D848")
    assert eval(repr(lsn)) == lsn == Lsn.parse("16/B374D848")
    assert Lsn("0/0") == 0
    with pytest.raises(ValueError, match="is not an LSN"):
        Lsn("soon")
