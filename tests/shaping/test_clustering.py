"""The rows of a copy are sorted in runs, and none is lost."""

from __future__ import annotations

import random

import pyarrow as pa

from walmere.shaping.clustering import clustered

NUMBERS = list(range(1000))
random.Random(7).shuffle(NUMBERS)
BATCHES = pa.table({"n": NUMBERS, "half": [n % 2 for n in NUMBERS], "t": [str(n) for n in NUMBERS]}).to_batches(50)


def test_rows_are_sorted_by_the_columns_in_order() -> None:
    found = pa.Table.from_batches(clustered(BATCHES, ["half", "n"]))
    assert found["n"].to_pylist() == [*range(0, 1000, 2), *range(1, 1000, 2)]
    assert found["t"].to_pylist() == [str(n) for n in found["n"].to_pylist()]


def test_a_run_has_a_limited_size() -> None:
    found = list(clustered(BATCHES, ["n"], run_bytes=BATCHES[0].nbytes * 4))
    assert 2 <= len(found) <= 10
    assert all(each["n"].to_pylist() == sorted(each["n"].to_pylist()) for each in found)
    assert sorted(n for each in found for n in each["n"].to_pylist()) == sorted(NUMBERS)


def test_without_columns_the_rows_stay_as_they_are() -> None:
    assert list(clustered(BATCHES, [])) == BATCHES
    assert list(clustered([], ["n"])) == []
