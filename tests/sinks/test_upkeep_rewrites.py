"""Upkeep beside batches: rows stay what they are, whatever is committed while files are rewritten."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delta_rows import read_delta
from sinks.histories import Change, rows_of
from sinks.upkeep import (
    ALL,
    BY_ID,
    SCHEMA,
    TABLE,
    TRUNCATE,
    begin,
    content,
    delete,
    do,
    files,
    insert,
    on_disk,
    rewritten,
    rows,
    update,
)
from walmere.errors import SinkConflict
from walmere.lsn import Lsn
from walmere.sinks.base import Upkeep
from walmere.sinks.delta import maintenance
from walmere.sinks.delta.files.vectors import DIRECTORY
from walmere.sinks.delta.log import commit
from walmere.sinks.delta.maintenance import JOIN_FILES, Rewritten, Work
from walmere.sinks.delta.sink import DeltaSink


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"), index=str(tmp_path / "index"))


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
