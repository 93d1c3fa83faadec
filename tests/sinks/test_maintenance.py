"""Upkeep beside batches: rows stay what they are, versions that can be read stay, and everything else goes."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import walmere
from delta_rows import read_delta
from sinks.histories import Change, rows_of, typed
from walmere.apply.fold import fold
from walmere.errors import OwnedByAnother, SinkConflict
from walmere.ledger.entry import Entry
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.owner import Owner
from walmere.sinks.base import OVERWRITE, Upkeep
from walmere.sinks.delta import maintenance
from walmere.sinks.delta.files.data_file import DataFile
from walmere.sinks.delta.files.vectors import DIRECTORY
from walmere.sinks.delta.log import commit, history, replay
from walmere.sinks.delta.maintenance import JOIN_FILES, Rewritten, Work
from walmere.sinks.delta.sink import DeltaSink

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64()), ("n", pa.int64())])
BY_ID = Identity("d", ("id",))
K = ord("K")
ALL = Upkeep(deleted_share=0)


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"), index=str(tmp_path / "index"))


def rows(*ids: int, n: int = 0) -> pa.Table:
    return pa.table([list(ids), [n] * len(ids)], schema=SCHEMA)


def begin(sink: DeltaSink, *parts: pa.Table, lsn: int = 1) -> None:
    sink.create(TABLE, SCHEMA)
    staged = [file for part in parts for file in sink.stage(TABLE, part.to_batches(), identity=BY_ID)]
    sink.commit(TABLE, staged, Lsn(lsn), OVERWRITE)


def do(sink: DeltaSink, *changes: Change) -> int:
    lsn = Lsn((sink.applied(TABLE) or 0) + 1)
    return sink.apply(TABLE, fold(typed(changes, sink.current(TABLE).arrow_schema), BY_ID), lsn, BY_ID)


def update(key: int, n: int) -> Change:
    return Change("U", (key, n))


def delete(key: int) -> Change:
    return Change("D", None, (key, None), K)


def insert(key: int, n: int = 0) -> Change:
    return Change("I", (key, n))


TRUNCATE = Change("T")


def content(sink: DeltaSink, version: int | None = None) -> list[tuple[Any, ...]]:
    return sorted(rows_of(read_delta(DeltaTable(sink.location(TABLE), version))))


def rewritten(sink: DeltaSink) -> list[Rewritten]:
    """As a task returns it."""
    planned: list[Work] = pickle.loads(pickle.dumps(sink.plan_upkeep(TABLE, BY_ID, ALL)))
    return [pickle.loads(pickle.dumps(sink.rewrite_files(work))) for work in planned]


def files(sink: DeltaSink) -> set[str]:
    return {file.name for file in sink.current(TABLE).files}


def on_disk(sink: DeltaSink, directory: str = "") -> set[str]:
    path = Path(sink.location(TABLE), directory)
    return {each.name for each in path.iterdir() if each.is_file()} if path.exists() else set()


# What is rewritten


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


# What happens while files are rewritten


def test_rows_that_are_deleted_during_a_rewrite_are_deleted_in_the_new_files(sink: DeltaSink) -> None:
    begin(sink, rows(*range(30)), rows(*range(30, 60)), rows(*range(60, 90)))
    do(sink, *(delete(key) for key in range(0, 90, 7)))
    done = rewritten(sink)
    do(sink, *(delete(key) for key in range(1, 90, 7)), update(2, 5), insert(100))
    do(sink, *(update(key, 6) for key in range(3, 90, 7)))
    expected = content(sink)
    version = sink.replace_files(TABLE, done)
    assert version == sink.version(TABLE)
    assert content(sink) == expected
    assert files(sink).isdisjoint(file.path for each in done for file in each.work.files)
    deleted = sum(file.deleted for file in sink.current(TABLE).files)
    assert deleted == len(range(1, 90, 7)) + 1 + len(range(3, 90, 7)), "these, and not those that were purged"
    do(sink, delete(4), update(5, 9))
    assert content(sink) == sorted((key, 9 if key == 5 else n) for key, n in expected if key != 4)


def test_rows_of_several_new_files_are_found_by_their_place(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "lake"))
    ids = np.random.default_rng(1).permutation(400_000)
    begin(sink, pa.table([ids, ids % 97], schema=SCHEMA))
    do(sink, *(delete(int(key)) for key in range(0, 400_000, 1000)))
    smaller = replace(sink, file_size=1)
    done = rewritten(smaller)
    assert [len(each.staged) for each in done] == [4]
    gone = set(range(500, 400_000, 1000))
    do(sink, *(delete(key) for key in gone))
    smaller.replace_files(TABLE, done)
    assert len(files(sink)) == 4
    found = read_delta(sink.open(TABLE))
    assert sorted(found["id"].to_pylist()) == sorted(set(range(400_000)) - gone - set(range(0, 400_000, 1000)))
    assert all(n == key % 97 for key, n in rows_of(found.slice(0, 5000)))


def test_a_new_file_whose_rows_were_all_deleted_meanwhile_is_not_added(sink: DeltaSink) -> None:
    begin(sink, rows(1, 2), rows(3, 4), rows(*range(10, 20)))
    do(sink, delete(1), delete(3))
    done = rewritten(sink)
    do(sink, delete(2), update(9, 9))
    do(sink, *(update(key, 1) for key in (4,)))
    expected = content(sink)
    sink.replace_files(TABLE, done)
    assert content(sink) == expected


@dataclass(frozen=True)
class Meanwhile:
    """What may happen between a rewrite and its commit; and whether the rewrite can still be used."""

    do: Callable[[DeltaSink], object]
    usable: bool


def evolve(sink: DeltaSink, schema: pa.Schema, *values: Any) -> None:
    sink.evolve(TABLE, schema, list(values))


MEANWHILE: dict[str, Meanwhile] = {
    "nothing": Meanwhile(lambda sink: None, True),
    "a batch": Meanwhile(lambda sink: do(sink, update(1, 5), delete(40), insert(99)), True),
    "many batches": Meanwhile(lambda sink: [do(sink, update(key, 5)) for key in range(15)], True),
    "an append by another program": Meanwhile(
        lambda sink: write_deltalake(sink.location(TABLE), rows(500), mode="append"), True
    ),
    "a checkpoint": Meanwhile(lambda sink: sink.open(TABLE).create_checkpoint(), True),
    "properties": Meanwhile(
        lambda sink: sink.open(TABLE).alter.set_table_properties({"delta.appendOnly": "false"}), True
    ),
    "a truncation": Meanwhile(lambda sink: do(sink, TRUNCATE, insert(7)), False),
    "an overwrite": Meanwhile(
        lambda sink: write_deltalake(sink.location(TABLE), rows(*range(5)), mode="overwrite"), False
    ),
    "a copy": Meanwhile(lambda sink: begin(sink, rows(1, 2), lsn=100), False),
    "upkeep": Meanwhile(lambda sink: sink.optimize(TABLE, BY_ID, ALL), False),
    "a compaction by another program": Meanwhile(lambda sink: sink.open(TABLE).optimize.compact(), False),
    "a new column": Meanwhile(
        lambda sink: evolve(sink, SCHEMA.append(pa.field("c", pa.string())), "id", "n", pa.scalar(None, pa.string())),
        False,
    ),
    "a dropped column": Meanwhile(lambda sink: evolve(sink, pa.schema([("id", pa.int64())]), "id"), False),
    "a renamed column": Meanwhile(
        lambda sink: evolve(sink, pa.schema([("id", pa.int64()), ("m", pa.int64())]), "id", "n"), False
    ),
    "a restore of deleted rows": Meanwhile(lambda sink: sink.open(TABLE).restore(1), False),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_upkeep_changes_no_rows_whatever_was_committed_meanwhile(sink: DeltaSink, what: str) -> None:
    begin(sink, rows(*range(30)), rows(*range(30, 60)))
    do(sink, *(delete(key) for key in range(3, 60, 7)), update(2, 3))
    before = content(sink)
    done = rewritten(sink)
    MEANWHILE[what].do(sink)
    expected = content(sink)
    version, applied = sink.version(TABLE), sink.applied(TABLE)
    replaced = sink.replace_files(TABLE, done)
    assert replaced == (version + 1 if MEANWHILE[what].usable else None)
    assert (content(sink), sink.applied(TABLE)) == (expected, applied)
    assert content(sink, 2) == before
    if sink.current(TABLE).arrow_schema == SCHEMA:
        do(sink, *(update(key, 77) for key, _ in expected[:10]))
        assert [row for row in content(sink) if row[1] == 77] == [(key, 77) for key, _ in expected[:10]]


def test_a_part_of_what_was_rewritten_is_used_if_the_rest_cannot_be(sink: DeltaSink) -> None:
    sink = replace(sink, file_size=1)  # so that each file is rewritten alone
    begin(sink, rows(1, 2, 3), rows(11, 12, 13))
    do(sink, delete(1), delete(11))
    done = rewritten(sink)
    assert len(done) == 2
    do(sink, delete(2), delete(3))  # the first file is gone
    assert sink.replace_files(TABLE, [*done, *done]) is not None, "also if it is passed twice"
    assert content(sink) == [(12, 0), (13, 0)]
    assert sum(file.deleted for file in sink.current(TABLE).files) == 0


def test_files_that_vanish_before_they_are_rewritten_are_an_error_that_passes(sink: DeltaSink) -> None:
    begin(sink, rows(1, 2, 3), rows(4, 5, 6))
    do(sink, delete(1), delete(4))
    [work] = sink.plan_upkeep(TABLE, BY_ID, ALL)
    sink.optimize(TABLE, BY_ID, ALL)
    replace(sink, keep_seconds=0).vacuum(TABLE)
    with pytest.raises(SinkConflict, match=r"public\.t") as caught:
        sink.rewrite_files(work)
    assert caught.value.transient
    assert content(sink) == [(key, 0) for key in (2, 3, 5, 6)]


def test_a_rewrite_whose_old_vectors_are_deleted_by_then_is_not_used(sink: DeltaSink) -> None:
    """It has taken longer than `keep_seconds`."""
    begin(sink, rows(*range(4000)))
    do(sink, *(delete(key) for key in range(0, 4000, 3)))
    assert len(on_disk(sink, DIRECTORY)) == 1
    done = rewritten(sink)
    do(sink, *(delete(key) for key in range(1, 4000, 3)))
    replace(sink, keep_seconds=0).vacuum(TABLE)
    assert len(on_disk(sink, DIRECTORY)) == 1
    assert sink.replace_files(TABLE, done) is None
    assert content(sink) == [(key, 0) for key in range(2, 4000, 3)]


def test_upkeep_gives_way_to_others_who_commit_without_end(sink: DeltaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(sink, *(rows(key) for key in range(JOIN_FILES)))
    done = rewritten(sink)
    real = commit.try_commit

    def late(*args: Any) -> int | None:
        write_deltalake(sink.location(TABLE), rows(7), mode="append")
        return real(*args)

    monkeypatch.setattr(maintenance, "try_commit", late)
    assert sink.replace_files(TABLE, done) is None
    monkeypatch.undo()
    assert len(content(sink)) == JOIN_FILES + 10


def test_there_is_nothing_to_do_for_tables_that_are_not_there_or_have_nothing(sink: DeltaSink) -> None:
    assert sink.plan_upkeep(TABLE, BY_ID, ALL) == []
    sink.vacuum(TABLE)
    sink.create(TABLE, SCHEMA)
    assert (sink.plan_upkeep(TABLE, BY_ID, ALL), sink.replace_files(TABLE, [])) == ([], None)
    sink.vacuum(TABLE)
    begin(sink, rows(1, 2))
    assert sink.optimize(TABLE, BY_ID, ALL) is None


def batches(pickled: bytes, first: int, count: int) -> None:
    """Applies batches, as a process of its own."""
    sink: DeltaSink = pickle.loads(pickled)
    for number in range(first, first + count):
        do(sink, *batch(number))


def batch(number: int) -> list[Change]:
    changes = [update(key, number) for key in range(number % 5, 60, 5)]
    return [*changes, insert(1000 + number), *([delete(1000 + number - 4)] if number >= 4 else [])]


def after_batches(count: int) -> list[tuple[int, int]]:
    model = dict.fromkeys(range(60), 0)
    for number in range(count):
        model |= dict.fromkeys(range(number % 5, 60, 5), number)
        model[1000 + number] = 0
        model.pop(1000 + number - 4, None)
    return sorted(model.items())


def upkeep_until(sink: DeltaSink, done: threading.Event) -> int:
    rounds = 0
    while not done.is_set():
        rounds += sink.optimize(TABLE, BY_ID, ALL) is not None
        replace(sink, keep_seconds=3600).vacuum(TABLE)
    return rounds


@pytest.mark.parametrize("apart", [False, True], ids=["threads", "processes"])
def test_batches_and_upkeep_at_once_come_to_the_rows_of_the_batches(sink: DeltaSink, apart: bool) -> None:
    begin(sink, rows(*range(30)), rows(*range(30, 60)))
    done = threading.Event()
    count = 20
    with ThreadPoolExecutor(1) as pool:
        upkeep = pool.submit(upkeep_until, sink, done)
        try:
            if apart:
                process = multiprocessing.get_context("spawn").Process(
                    target=batches, args=(pickle.dumps(sink), 0, count)
                )
                process.start()
                process.join(120)
                assert process.exitcode == 0
            else:
                batches(pickle.dumps(sink), 0, count)
        finally:
            done.set()
        assert upkeep.result() > 0
    assert content(sink) == after_batches(count)
    assert sink.applied(TABLE) == Lsn(1 + count)


STEPS = ["batch", "batch", "plan", "rewrite", "rewrite", "replace", "truncate", "vacuum"]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_batches_and_steps_of_upkeep_in_any_order_come_to_the_rows_of_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("upkeep")
    size = data.draw(st.sampled_from([1, 2000, 1 << 20]), label="file size")
    sink = DeltaSink(str(path / "lake"), index=str(path / "index"), file_size=size)
    begin(sink, rows(*range(10)), rows(*range(10, 20)), rows(*range(20, 25)))
    model = dict.fromkeys(range(25), 0)
    planned: list[Work] = []
    done: list[Rewritten] = []
    keys = st.integers(0, 40)
    for number in range(1, data.draw(st.integers(4, 14))):
        step = data.draw(
            st.sampled_from(["batch", "batch", "plan", "rewrite", "rewrite", "replace", "truncate", "vacuum"])
        )
        if step == "batch":
            changes = []
            for key in data.draw(st.sets(keys, min_size=1, max_size=12)):
                if key in model and data.draw(st.booleans()):
                    del model[key]
                    changes.append(delete(key))
                else:
                    changes.append(update(key, number) if key in model else insert(key, number))
                    model[key] = number
            do(sink, *changes)
        elif step == "truncate" and data.draw(st.integers(0, 3)) == 0:
            do(sink, TRUNCATE, insert(3, number))
            model = {3: number}
        elif step == "plan":
            planned = sink.plan_upkeep(TABLE, BY_ID, Upkeep(data.draw(st.sampled_from([0, 0.1, 0.5]))))
        elif step == "rewrite" and planned:
            work = planned.pop(data.draw(st.integers(0, len(planned) - 1)))
            done.append(sink.rewrite_files(work))
        elif step == "replace" and done:
            some = data.draw(st.sets(st.integers(0, len(done) - 1), min_size=1))
            sink.replace_files(TABLE, [done[each] for each in sorted(some)])
            if data.draw(st.booleans()):  # otherwise it is tried again later
                done = [each for place, each in enumerate(done) if place not in some]
        elif step == "vacuum":
            sink.vacuum(TABLE)
        assert sink.count(TABLE) == len(model)
    assert content(sink) == sorted(model.items())


# Which files are joined


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


# What is deleted, and when


class Clock:
    """The time that commits and vacuum see."""

    def __init__(self) -> None:
        self.now = time.time() - 6 * 3600

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    @staticmethod
    def sleep(seconds: float) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(commit, "time", found)
    monkeypatch.setattr(history, "time", found)
    monkeypatch.setattr(maintenance, "time", found)
    return found


def needed(sink: DeltaSink, versions: set[int]) -> set[str]:
    """The data files and vector files of some versions, as the log has them."""
    names = set()
    for version in versions:
        for file in replay.at(sink.directory(TABLE), version).files:
            names |= maintenance._names(file)
    return names


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), keep=st.sampled_from([0, 600, 3600]))
def test_vacuum_deletes_what_no_version_that_can_be_read_needs_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, keep: int
) -> None:
    path = tmp_path_factory.mktemp("vacuum")
    sink = DeltaSink(str(path / "lake"), index=str(path / "index"), keep_seconds=keep)
    clock, checkpoint = Clock(), False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "time", clock)
        patch.setattr(history, "time", clock)
        patch.setattr(maintenance, "time", clock)
        begin(sink, rows(*range(2000)), rows(*range(2000, 2010)))
        committed = {0: clock.now, 1: clock.now}
        expected = {1: content(sink)}
        for _ in range(data.draw(st.integers(3, 9))):
            clock.now += data.draw(st.sampled_from([1, 100, 500, 1800, 4000]))
            match data.draw(st.sampled_from(["many", "few", "upkeep", "truncate", "restore", "vacuum", "checkpoint"])):
                case "many":  # its vector is in a file, and is replaced by the next one
                    do(sink, *(delete(key) for key in data.draw(st.sets(st.integers(0, 1999), min_size=150))))
                case "few":
                    do(sink, update(2001, 1), insert(9000 + sink.version(TABLE)))
                case "upkeep":
                    sink.optimize(TABLE, BY_ID, ALL)
                case "truncate":
                    do(sink, TRUNCATE, *(insert(key) for key in range(1000)))
                case "restore":
                    older = range(1, sink.version(TABLE))
                    if readable := [each for each in older if committed[each + 1] > clock.now - keep]:
                        DeltaTable(sink.location(TABLE)).restore(data.draw(st.sampled_from(readable)))
                        now_as_seen_by_deltalake(sink, clock)
                case "checkpoint":
                    checkpoint = True
                    DeltaTable(sink.location(TABLE)).create_checkpoint()
                case "vacuum":
                    sink.vacuum(TABLE)
            version = sink.version(TABLE)
            for each in range(max(committed) + 1, version + 1):
                committed[each] = clock.now
            expected[version] = content(sink)
        sink.vacuum(TABLE)
        after = on_disk(sink) | {f"{DIRECTORY}/{name}" for name in on_disk(sink, DIRECTORY)}
    newest = max(committed)
    margin = 60 if keep else 0
    readable_versions = {v for v in committed if v == newest or committed[v + 1] > clock.now - keep - margin}
    for version in readable_versions & set(expected):
        assert content(sink, version) == expected[version]
    assert needed(sink, readable_versions) <= after
    if not checkpoint:  # deltalake drops tombstones by its own clock: these files are deleted after days
        assert needed(sink, readable_versions) == after


def now_as_seen_by_deltalake(sink: DeltaSink, clock: Clock) -> None:
    """deltalake has its own clock: set the time of what it has removed."""
    version = DeltaTable(sink.location(TABLE)).version()
    path = Path(sink.location(TABLE), "_delta_log", f"{version:020d}.json")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if "remove" in line:
            line["remove"]["deletionTimestamp"] = clock.time_ns() // 1_000_000
    path.write_text("\n".join(map(json.dumps, lines)))


def test_vacuum_deletes_all_files_that_were_replaced_longer_ago_than_they_are_kept(
    sink: DeltaSink, clock: Clock
) -> None:
    sink = replace(sink, keep_seconds=600)
    begin(sink, rows(*range(2000)))
    for number in range(5):  # the vector of one file is replaced many times
        do(sink, *(delete(key) for key in range(number, 2000, 6)))
        clock.now += 100
    assert len(on_disk(sink, DIRECTORY)) == 5
    [file] = sink.current(TABLE).files
    kept = {version: content(sink, version) for version in range(1, 7)}
    sink.vacuum(TABLE)
    assert len(on_disk(sink, DIRECTORY)) == 5, "all versions can be read"
    assert all(content(sink, version) == kept[version] for version in kept)
    clock.now += 360  # the first version that has a vector was replaced 760 s ago, the second 660 s, the third 560 s
    sink.vacuum(TABLE)
    assert len(on_disk(sink, DIRECTORY)) == 3 + 0
    assert all(content(sink, version) == kept[version] for version in (4, 5, 6))
    sink.optimize(TABLE, BY_ID, ALL)
    clock.now += 650
    sink.vacuum(TABLE)
    assert file.name in on_disk(sink), "60 s longer than they are kept"
    assert content(sink, 6) == kept[6]
    clock.now += 11
    sink.vacuum(TABLE)
    assert (on_disk(sink, DIRECTORY), on_disk(sink)) == (set(), files(sink))
    assert content(sink) == kept[6]


def test_vacuum_keeps_the_newest_point_of_every_subscription_however_old_it_is(sink: DeltaSink, clock: Clock) -> None:
    """A table that was copied is ahead of the others: no point is made until these have caught up."""
    sink = replace(sink, keep_seconds=600)
    begin(sink, rows(*range(2000)))
    for name in ("shop", "other"):
        do(sink, *(delete(key) for key in range(len(name), 2000, 6)))
        sink.open_ledger(name, [Entry(Lsn(1), None, {str(TABLE): sink.version(TABLE)})])
    expected = {name: content(sink, sink.points(name)[-1].versions[str(TABLE)]) for name in ("shop", "other")}
    do(sink, *(delete(key) for key in range(0, 2000, 6)))
    sink.optimize(TABLE, BY_ID, ALL)
    clock.now += 3600
    do(sink, *(delete(key) for key in range(1, 2000, 6)))
    clock.now += 3600
    sink.vacuum(TABLE)
    for name in ("shop", "other"):
        assert sorted(rows_of(walmere.lake(sink.path, name).latest().arrow("t"))) == expected[name]
        sink.open_ledger(name, [Entry(Lsn(2), None, {str(TABLE): sink.version(TABLE)})])
    sink.vacuum(TABLE)
    assert on_disk(sink) == files(sink)
    assert len(on_disk(sink, DIRECTORY)) == 1


def test_vacuum_keeps_all_points_that_must_be_readable_also_if_their_files_were_replaced_long_before(
    sink: DeltaSink, clock: Clock
) -> None:
    """A batch is committed to this table, and not to another. Two hours later it is repeated, and makes the point."""
    sink = replace(sink, keep_seconds=3600)
    begin(sink, rows(*range(2000)))

    def point(lsn: int) -> Entry:
        return Entry(Lsn(lsn), None, {str(TABLE): sink.version(TABLE)}, int(clock.now * 1e6))

    ledger = sink.open_ledger("shop", [point(100)])
    before = sink.version(TABLE)
    expected = content(sink)
    clock.now += 60
    do(sink, *(delete(key) for key in range(0, 2000, 3)))
    sink.optimize(TABLE, BY_ID, ALL)
    clock.now += 7200
    ledger.append(point(200))
    sink.vacuum(TABLE)
    assert content(sink, before) == expected
    clock.now += 3500
    sink.vacuum(TABLE)
    assert content(sink, before) == expected
    clock.now += 200
    sink.vacuum(TABLE)
    assert on_disk(sink) == files(sink), "the first point is too old now"


def test_upkeep_leaves_a_table_alone_that_another_subscription_has_taken_over(sink: DeltaSink) -> None:
    sink = sink.owned_by(Owner("shop", "1", 1))
    begin(sink, *(rows(number) for number in range(10)))
    done = rewritten(sink)
    other = sink.owned_by(Owner("other", "1", 1), take_over=True)
    other.claim(TABLE)
    version = other.version(TABLE)
    with pytest.raises(OwnedByAnother):
        sink.replace_files(TABLE, done)
    with pytest.raises(OwnedByAnother):
        sink.vacuum(TABLE)
    assert sink.version(TABLE) == version


def test_one_vector_file_of_several_data_files_stays_as_long_as_one_of_them_needs_it(
    sink: DeltaSink, clock: Clock
) -> None:
    sink = replace(sink, keep_seconds=0)
    begin(sink, rows(*range(2000)), rows(*range(2000, 4000)))
    do(sink, *(delete(key) for key in range(0, 4000, 3)))
    [shared] = on_disk(sink, DIRECTORY)
    clock.now += 1
    do(sink, *(delete(key) for key in range(1, 2000, 3)))  # the first data file only
    clock.now += 1
    expected = content(sink)
    sink.vacuum(TABLE)
    assert shared in on_disk(sink, DIRECTORY)
    assert content(sink) == expected


def test_staged_files_that_were_never_committed_are_deleted_after_days(sink: DeltaSink) -> None:
    sink = replace(sink, keep_seconds=0)
    begin(sink, rows(*range(2000)))
    orphan, late = (sink.stage(TABLE, rows(key).to_batches())[0].path for key in (1, 2))
    do(sink, *(delete(key) for key in range(0, 2000, 3)))
    lost = Path(sink.location(TABLE), DIRECTORY, "deletion_vector_of_a_killed_task.bin")
    lost.write_bytes(b"\1")
    others = [Path(sink.location(TABLE), name) for name in ("_SUCCESS", "_of_another_program")]
    temporary = Path(sink.location(TABLE), "_delta_log", ".0123.tmp")
    for path in (*others, temporary):
        path.touch()
    week, day = 7 * 86_400, 86_400
    in_use = [Path(sink.location(TABLE), name) for name in files(sink)]
    in_use += list(Path(sink.location(TABLE), "_delta_log").glob("*.json"))
    old = [Path(sink.location(TABLE), orphan), lost, *others, temporary, *in_use]
    for path in old:
        os.utime(path, (time.time() - week + day,) * 2)
    sink.vacuum(TABLE)
    assert all(path.exists() for path in old)
    for path in old:
        os.utime(path, (time.time() - week - 10,) * 2)
    replace(sink, keep_seconds=10 * day).vacuum(TABLE)
    assert all(path.exists() for path in old if path != temporary), "versions are kept for longer"
    sink.vacuum(TABLE)
    assert [path.exists() for path in old] == [False, False, True, True, False, *(True for _ in in_use)]
    assert Path(sink.location(TABLE), late).exists()
    assert content(sink) == [(key, 0) for key in range(2000) if key % 3]


def test_old_files_stay_if_the_log_may_have_forgotten_that_they_were_removed_lately(sink: DeltaSink) -> None:
    """Another program has shortened the retention of tombstones, and a checkpoint has dropped them."""
    begin(sink, rows(*range(10)))
    [old] = files(sink)
    os.utime(Path(sink.location(TABLE), old), (time.time() - 30 * 86_400,) * 2)
    version = sink.version(TABLE)
    do(sink, *(update(key, 1) for key in range(10)))
    sink.open(TABLE).alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 hours"})
    sink.open(TABLE).create_checkpoint()
    sink.vacuum(TABLE)
    assert content(sink, version) == [(key, 0) for key in range(10)]


def test_a_vacuum_of_deltalake_and_ours_leave_what_the_other_needs(sink: DeltaSink) -> None:
    begin(sink, rows(*range(2000)), rows(5000))
    for number in range(3):
        do(sink, *(delete(key) for key in range(number, 2000, 4)), update(5000, number))
    expected = content(sink)
    sink.open(TABLE).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert content(sink) == expected
    replace(sink, keep_seconds=0).vacuum(TABLE)
    assert content(sink) == expected
    assert len(on_disk(sink, DIRECTORY)) == 1
    do(sink, update(3, 1))
    assert len(content(sink)) == len(expected)
