"""Upkeep: which files are purged or joined, and how much that writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sinks.upkeep import (
    BY_ID,
    SCHEMA,
    TABLE,
    begin,
    content,
    delete,
    do,
    insert,
    rows,
    update,
)
from walmere.sinks.base import Upkeep
from walmere.sinks.delta import maintenance
from walmere.sinks.delta.files.data_file import DataFile
from walmere.sinks.delta.log import replay
from walmere.sinks.delta.maintenance import JOIN_FILES
from walmere.sinks.delta.sink import DeltaSink


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"), index=str(tmp_path / "index"))


def test_a_file_is_purged_when_its_vectors_have_taken_as_many_bytes_as_the_file(sink: DeltaSink) -> None:
    """A batch writes the whole vector of each file that it touches, so one row costs what was deleted before."""
    begin(sink, rows(*range(5000)))
    [old] = sink.current(TABLE).files
    limits = Upkeep(deleted_share=0.9)

    def is_purged() -> bool:
        return any(old.path in {file.path for file in work.files} for work in sink.plan_upkeep(TABLE, BY_ID, limits))

    sink = replace(sink, file_size=2 * old.size)  # then the file is not a small one
    written, count = 0, 0
    while not is_purged():
        do(sink, delete(7 * count % 5000))
        written += sink.current(TABLE).adds[old.path]["deletionVector"]["sizeInBytes"]
        count += 1
        assert written < old.size or is_purged()
    assert written >= old.size
    replay._kept.clear()  # another process knows the vectors since the last checkpoint
    assert is_purged()
    sink.optimize(TABLE, BY_ID, limits)
    assert old.path not in sink.current(TABLE).adds
    assert not is_purged()
    assert len(content(sink)) == 5000 - count


def test_a_new_vector_counts_as_written_and_its_file_does_not(sink: DeltaSink) -> None:
    begin(sink, rows(*range(5000)))
    before, [file] = sink.extent(TABLE), sink.current(TABLE).files
    do(sink, delete(1))
    after = sink.extent(TABLE)
    assert before is not None
    assert after is not None
    assert before.written < after.written < before.written + file.size


def simulate(count: int, row: int, file_size: int, footer: int = 1500) -> tuple[float, int]:
    """One-row batches with upkeep after every eight: bytes that upkeep writes per byte of batches, and most files."""
    files: list[DataFile] = []
    first = again = most = 0
    for number in range(count):
        files.append(DataFile(f"batch {number}", footer + row))
        first += footer + row
        if number % JOIN_FILES == JOIN_FILES - 1:
            small = [file for file in files if file.size < file_size // 4]
            for place, group in enumerate(maintenance._similar(small, file_size)):
                assert len(group) > 1
                size = footer + sum(file.size - footer for file in group)
                assert size <= file_size
                again += size
                gone = {file.path for file in group}
                files = [file for file in files if file.path not in gone]
                files.append(DataFile(f"joined {number} {place}", size))
        most = max(most, len(files))
    return again / first, most


@pytest.mark.parametrize(
    ("row", "file_size", "factor", "most"),
    [
        (20, 256 << 20, 0.8, 25),
        (1000, 256 << 20, 2.0, 40),
        (100_000, 256 << 20, 4.0, 50),
        (100_000, 16 << 20, 3.5, 400),
    ],
)
def test_upkeep_writes_a_row_once_per_level_of_sizes(row: int, file_size: int, factor: float, most: int) -> None:
    """20,000 one-row batches of a row size: upkeep writes up to `factor` times the bytes that the batches write."""
    written, files = simulate(20_000, row, file_size)
    assert written <= factor
    assert files <= most


def write_in_small_batches(sink: DeltaSink, count: int) -> tuple[int, int, int]:
    """Returns the bytes of data files that batches and upkeep have written, and the most files at once."""
    sink.create(TABLE, SCHEMA)
    most = 0
    for number in range(count):
        do(sink, insert(number), *([update(number // 2, number)] if number % 3 == 0 and number else []))
        if number % JOIN_FILES == JOIN_FILES - 1:
            sink.optimize(TABLE, BY_ID, Upkeep())
            sink.vacuum(TABLE) if number % 400 == 399 else None
        most = max(most, len(sink.current(TABLE).files))
    by_batches = by_upkeep = 0
    for version in range(sink.version(TABLE) + 1):
        lines = Path(sink.location(TABLE), "_delta_log", f"{version:020d}.json").read_text().splitlines()
        actions = [json.loads(line) for line in lines]
        [operation] = [action["commitInfo"]["operation"] for action in actions if "commitInfo" in action]
        removed = {action["remove"]["path"] for action in actions if "remove" in action}
        size = sum(a["add"]["size"] for a in actions if "add" in a and a["add"]["path"] not in removed)
        if operation == "OPTIMIZE":
            by_upkeep += size
        else:
            by_batches += size
    return by_batches, by_upkeep, most


@pytest.mark.parametrize("count", [160, pytest.param(2000, marks=pytest.mark.long)])
def test_upkeep_of_small_batches_writes_at_most_twice_their_bytes(sink: DeltaSink, count: int) -> None:
    by_batches, by_upkeep, most = write_in_small_batches(sink, count)
    assert 0 < by_upkeep <= 2 * by_batches
    assert most <= 4 * JOIN_FILES
    assert len(content(sink)) == count


def test_files_with_a_large_share_of_deleted_rows_are_purged_and_others_are_left(sink: DeltaSink) -> None:
    begin(sink, rows(*range(100)), rows(*range(100, 200)))
    do(sink, *(delete(key) for key in range(9)), *(delete(key) for key in range(100, 110)))
    [work] = sink.plan_upkeep(TABLE, BY_ID, Upkeep(0.1))
    assert [file.deleted for file in work.files] == [10]
    assert work.bytes == work.files[0].size
    sink.optimize(TABLE, BY_ID, Upkeep(0.1))
    assert sorted(file.deleted for file in sink.current(TABLE).files) == [0, 9]
    assert sink.optimize(TABLE, BY_ID, Upkeep(0.1)) is None
    assert len(content(sink)) == 181
