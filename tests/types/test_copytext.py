"""CSV as COPY writes it becomes columns of text, byte for byte."""

from __future__ import annotations

import csv
import io

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from walmere.errors import CastError
from walmere.types import copytext

VALUES = st.one_of(st.none(), st.text(st.sampled_from('a",\n\r \\.N\ufeff😀\x00'), max_size=6))


def written(rows: list[list[str | None]]) -> bytes:
    """As CopyAttributeOutCSV does: quoted only if needed, and an empty string is."""

    def one(value: str | None, alone: bool) -> str:
        if value is None:
            return ""
        needed = not value or any(c in value for c in '",\n\r') or (alone and value == "\\.")
        return '"' + value.replace('"', '""') + '"' if needed else value

    return "".join(",".join(one(value, len(row) == 1) for value in row) + "\n" for row in rows).encode()


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
    with pytest.raises(CastError, match="CSV of 2 columns") as refused:
        copytext.read(b"1,secret,3\n", ["a", "b"])
    assert "secret" not in str(refused.value)
    assert refused.value.__suppress_context__


def test_pythons_own_reader_agrees_but_for_null() -> None:
    data = written([["a,b", 'say "so"', "l1\nl2"], ["", "x", " y "]])
    assert list(csv.reader(io.StringIO(data.decode(), newline=""))) == [
        [v.decode() for v in row.values()] for row in copytext.read(data, ["a", "b", "c"]).to_pylist()
    ]
