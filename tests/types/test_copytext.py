"""Text as COPY writes it becomes columns of text, byte for byte."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from walmere.errors import CastError
from walmere.types import copytext

VALUES = st.one_of(st.none(), st.text(st.sampled_from('a",\n\r\t\b\f\v \\.Nnt\ufeff😀'), max_size=6))
LETTERS = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f", "\v": "\\v"}


def written(rows: list[list[str | None]]) -> bytes:
    """As CopyAttributeOutText does."""

    def one(value: str | None) -> str:
        return "\\N" if value is None else "".join(LETTERS.get(letter, letter) for letter in value)

    return "".join("\t".join(map(one, row)) + "\n" for row in rows).encode()


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(VALUES, min_size=n, max_size=n), min_size=1, max_size=6)))
@example([[None]])
@example([["\ufeff\ufeffa", None]])
@example([[""], [None], ["\n"]])
def test_every_value_comes_back(rows: list[list[str | None]]) -> None:
    names = [f"c{n}" for n in range(len(rows[0]))]
    data = written(rows)
    for given_as in (data, bytearray(data), memoryview(data), pa.py_buffer(data)):
        table = copytext.read(given_as, names)
        assert table.schema.types == [pa.binary()] * len(names)
        found = [[None if v is None else v.decode() for v in row.values()] for row in table.to_pylist()]
        assert found == rows


def test_no_rows() -> None:
    assert copytext.read(b"", ["a", "b"]).to_pydict() == {"a": [], "b": []}


def test_a_row_may_be_as_large_as_it_likes() -> None:
    big = "x\n" * 3_000_000
    assert copytext.read(written([["1", big], ["2", big]]), ["a", "b"])["b"].to_pylist() == [big.encode()] * 2


def test_another_number_of_columns_is_refused_without_showing_the_row() -> None:
    with pytest.raises(CastError, match="do not have 2 columns") as refused:
        copytext.read(b"1\tsecret\t3\n", ["a", "b"])
    assert "secret" not in str(refused.value)
    assert refused.value.__suppress_context__


def test_bytes_that_are_not_utf8_stay_what_they_are_beside_a_backslash() -> None:
    data = b"\xff\\\\\xff1\n\xff0\\\\0\\t\n"
    assert copytext.read(data, ["a"])["a"].to_pylist() == [b"\xff\\\xff1", b"\xff0\\0\t"]
