"""kill -9, and a crash of the machine, at every step of a batch, a copy, upkeep, vacuum, a checkpoint and the rest.

After each one, the table is as before or as after, for us and for `deltalake`; a retry brings it to the state after,
once; and every version that can be read is still there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from delta_rows import read_delta
from sinks import killing
from sinks.histories import Change, rows_of, typed
from walmere.apply.fold import fold
from walmere.errors import SinkConflict
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import OVERWRITE, Upkeep
from walmere.sinks.delta.log import actions, commit, replay
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.delta.tables import PROPERTIES

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("text", pa.string())])
BY_ID = Identity("d", ("id",))
K = ord("K")

Rows = list[tuple[Any, ...]]
Scenario = Callable[[DeltaSink], None]


def rows(*ids: int, n: int = 0) -> pa.Table:
    return pa.table([list(ids), [n] * len(ids), [f"text {i}" for i in ids]], schema=SCHEMA)


def do(sink: DeltaSink, *changes: Change, lsn: int) -> int:
    return sink.apply(TABLE, fold(typed(changes, sink.current(TABLE).arrow_schema), BY_ID), Lsn(lsn), BY_ID)


def update(key: int, n: int) -> Change:
    return Change("U", (key, n, f"text {key}"))


def delete(key: int) -> Change:
    return Change("D", None, (key, None, None), K)


def insert(key: int) -> Change:
    return Change("I", (key, 0, f"text {key}"))


def content(location: str, version: int | None = None) -> Rows:
    return sorted(rows_of(read_delta(DeltaTable(location, version))))


# What is killed. Each can be called again.


def apply(sink: DeltaSink) -> None:
    """Its vectors are in a file, one data file loses all rows, and a new one is added."""
    gone = [delete(key) for key in range(0, 600, 3)]
    do(sink, *gone, *(update(key, 7) for key in (1, 2, 401, 5000, 5001)), insert(9000), lsn=900)


def apply_without_indexes(sink: DeltaSink) -> None:
    assert sink.index is not None
    shutil.rmtree(sink.index, ignore_errors=True)
    apply(sink)


def append(sink: DeltaSink) -> None:
    do(sink, insert(9000), insert(9001), lsn=900)


def truncate(sink: DeltaSink) -> None:
    do(sink, Change("T"), insert(9000), lsn=900)


def apply_in_parts(sink: DeltaSink) -> None:
    changes = [[delete(key) for key in range(first, 600, 3)] + [insert(9000 + first)] for first in (0, 1)]
    parts = [sink.stage_changes(TABLE, fold(typed(some, SCHEMA), BY_ID), BY_ID) for some in changes]
    sink.commit_changes(TABLE, parts, Lsn(900))


def copy(sink: DeltaSink) -> None:
    wider = SCHEMA.append(pa.field("more", pa.int64()))
    sink.create(TABLE, wider)
    table = rows(1, 2, 3).append_column("more", pa.array([1, 2, 3]))
    staged = [file for part in (table, table) for file in sink.stage(TABLE, part.to_batches(), wider, BY_ID)]
    sink.commit(TABLE, staged, Lsn(900), OVERWRITE, wider)


def upkeep(sink: DeltaSink) -> None:
    sink.optimize(TABLE, BY_ID, Upkeep(deleted_share=0))


def vacuum(sink: DeltaSink) -> None:
    sink.vacuum(TABLE)


def create(sink: DeltaSink) -> None:
    sink.create(TableName("new schema", "new"), SCHEMA)


def checkpoint(sink: DeltaSink) -> None:
    """The commit is followed by a checkpoint, and by the deletion of older commits."""
    do(sink, update(1, 7), insert(9000), lsn=900)


def add_column(sink: DeltaSink) -> None:
    sink.evolve(TABLE, SCHEMA.append(pa.field("more", pa.int64())), [*SCHEMA.names, pa.scalar(None, pa.int64())])


def drop_column(sink: DeltaSink) -> None:
    sink.evolve(TABLE, pa.schema([("id", pa.int64())]), ["id"])


def rewriting(sink: DeltaSink) -> None:
    """Also switches vectors off."""
    apply(replace(sink, deletion_vectors=False))


SCENARIOS: dict[str, Scenario] = {
    each.__name__: each
    for each in (
        apply,
        apply_without_indexes,
        append,
        truncate,
        apply_in_parts,
        copy,
        upkeep,
        vacuum,
        create,
        checkpoint,
        add_column,
        drop_column,
        rewriting,
    )
}
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["sinks.test_killed"])  # a process begins with all modules
OLD = 4
"""The versions before this one are too old to be read when vacuum has run."""
LAST = 8


@dataclass(frozen=True)
class Prepared:
    """A table, and what it has at each version; and after a scenario."""

    path: Path
    before: dict[int, Rows]
    after: Rows
    version: int
    files: set[str]  # on disk, after it


def sink_at(path: Path) -> DeltaSink:
    properties = {**PROPERTIES, "delta.checkpointInterval": "9"}
    return DeltaSink(str(path / "lake"), index=str(path / "index"), keep_seconds=3600, properties=properties)


def disk(path: Path) -> set[str]:
    table = path / "lake/public/t"
    return {str(each.relative_to(table)) for each in [*table.glob("*.*"), *table.glob("_dv/*")] if each.is_file()}


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Rows]]:
    """A table at version 8, and what it has at each version."""
    path = tmp_path_factory.mktemp("history")
    sink = sink_at(path)
    with pytest.MonkeyPatch.context() as patch:
        long_ago = int((time.time() - 5 * 3600) * 1000)

        class Then:
            """Removes files longer ago than they are kept."""

            def __getattr__(self, name: str) -> Any:
                return getattr(actions, name)

            @staticmethod
            def remove(found: Any, now: int, *, data_change: bool) -> Any:
                return actions.remove(found, long_ago, data_change=data_change)

        patch.setattr(commit, "actions", Then())
        sink.create(TABLE, SCHEMA)
        parts = (rows(*range(400)), rows(*range(400, 800)), rows(5000, 5001))
        staged = [file for part in parts for file in sink.stage(TABLE, part.to_batches(), identity=BY_ID)]
        sink.commit(TABLE, staged, Lsn(1), OVERWRITE)
        do(sink, *(delete(key) for key in range(1, 500, 3)), lsn=2)
        do(sink, *(delete(key) for key in range(2, 400, 3)), lsn=3)
        do(sink, *(delete(key) for key in range(2, 400, 3)), update(799, 1), lsn=4)
    do(sink, *(update(key, 2) for key in range(700, 780, 3)), lsn=5)
    sink.optimize(TABLE, BY_ID, Upkeep(deleted_share=0.3))
    do(sink, *(delete(key) for key in range(600, 700)), insert(6000), lsn=6)
    do(sink, update(798, 2), lsn=7)
    assert sink.version(TABLE) == LAST
    return path, {version: content(sink.location(TABLE), version) for version in range(1, LAST + 1)}


def prepare(history: tuple[Path, dict[int, Rows]], path: Path, scenario: Scenario) -> Prepared:
    copied = path / "before"
    shutil.copytree(history[0], copied)
    before = dict(history[1])
    sink = sink_at(copied)
    if scenario is checkpoint:  # all commits are older than the log is kept
        for each in Path(sink.location(TABLE), "_delta_log").iterdir():
            os.utime(each, (time.time() - 9 * 86_400,) * 2)
    else:  # the commit is not to be followed by a checkpoint
        sink.open(TABLE).alter.set_table_properties({"delta.checkpointInterval": "100"})
        before[LAST + 1] = before[LAST]
    shutil.copytree(copied, path / "after")
    done = sink_at(path / "after")
    scenario(done)
    return Prepared(copied, before, content(done.location(TABLE)), done.version(TABLE), disk(path / "after"))


def run_and_kill(scenario: Scenario, path: Path, kill_at: int) -> bool:
    """Run a scenario in a process that is killed at a step. Returns whether it survived."""
    args = (pickle.dumps((scenario, sink_at(path))), str(path / "journal"), kill_at)
    process = PROCESSES.Process(target=killing.run, args=args)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def names_of(sink: DeltaSink, version: int) -> set[str]:
    """The data files and vector files of a version."""
    files = replay.at(sink.directory(TABLE), version).files
    return {file.name for file in files} | {file.vector.path for file in files if file.vector and file.vector.path}


def check(prepared: Prepared, path: Path, scenario: Scenario, step: str) -> None:
    sink = sink_at(path)
    location = sink.location(TABLE)
    last = max(prepared.before)
    states = {last: prepared.before[last], prepared.version: prepared.after}
    version = DeltaTable(location).version()
    assert version in states, step
    assert content(location) == states[version], step
    assert (sink.version(TABLE), sink.count(TABLE)) == (version, len(states[version])), step
    scenario(sink)
    assert (sink.version(TABLE), DeltaTable(location).version()) == (prepared.version,) * 2, step
    assert content(location) == prepared.after, step
    # vacuum, and the cleaning of the log after a checkpoint, remove versions that are too old
    first = OLD if scenario is vacuum else last if scenario is checkpoint else 1
    for version in range(first, last + 1):
        assert all(Path(location, name).exists() for name in names_of(sink, version)), (step, version)
    for version in {first, last}:
        assert content(location, version) == prepared.before[version], (step, version)
    if scenario is vacuum:
        assert disk(path) == prepared.files, step
    if scenario is create:
        new = TableName("new schema", "new")
        assert (DeltaTable(sink.location(new)).version(), sink.version(new)) == (0, 0), step
    if sink.current(TABLE).arrow_schema == SCHEMA:  # what the killed process has left does not matter later
        do(sink, update(797, 5), insert(9999), lsn=1000)
        upkeep(sink)
        vacuum(sink)
        found = [row for row in content(location) if row[0] in (797, 9999)]
        assert found == [(797, 5, "text 797"), (9999, 0, "text 9999")], step
        assert content(location, prepared.version) == prepared.after, step


def kill_at_steps(prepared: Prepared, scenario: Scenario, path: Path, every: int, power: str | None = None) -> None:
    """Kill it at every so-manyth step, each time on a fresh copy."""
    whole = path / "whole"
    shutil.copytree(prepared.path, whole)
    assert run_and_kill(scenario, whole, 0)
    steps = killing.steps(whole / "journal")
    assert len(steps) >= 4
    if power is not None:  # what has returned is durable
        killing.lose_power(whole / "journal", prepared.path, whole, entries_survive=power == "entries survive")
        location = sink_at(whole).location(TABLE)
        assert (DeltaTable(location).version(), content(location)) == (prepared.version, prepared.after)
    every = min(every, len(steps) // 2)
    for number in range(every // 2 + 1, len(steps) + 1, every):
        now = path / f"killed at {number}"
        shutil.copytree(prepared.path, now)
        assert not run_and_kill(scenario, now, number)
        if power is not None:
            killing.lose_power(now / "journal", prepared.path, now, entries_survive=power == "entries survive")
        check(prepared, now, scenario, f"{number}: {steps[number - 1]}")
        shutil.rmtree(now)


History = tuple[Path, dict[int, Rows]]


@pytest.mark.parametrize("name", ["apply", "upkeep", "vacuum", "checkpoint"])
def test_kill_9_at_some_steps(tmp_path: Path, history: History, name: str) -> None:
    kill_at_steps(prepare(history, tmp_path, SCENARIOS[name]), SCENARIOS[name], tmp_path, every=17)


@pytest.mark.parametrize("name", ["apply"])
def test_a_crash_of_the_machine_at_some_steps(tmp_path: Path, history: History, name: str) -> None:
    prepared = prepare(history, tmp_path, SCENARIOS[name])
    kill_at_steps(prepared, SCENARIOS[name], tmp_path, every=23, power="entries are lost")


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_kill_9_at_every_step(tmp_path: Path, history: History, name: str) -> None:
    kill_at_steps(prepare(history, tmp_path, SCENARIOS[name]), SCENARIOS[name], tmp_path, every=1)


@pytest.mark.long
@pytest.mark.parametrize("power", ["entries are lost", "entries survive"])
@pytest.mark.parametrize("name", ["apply", "apply_in_parts", "copy", "upkeep", "create", "checkpoint", "rewriting"])
def test_a_crash_of_the_machine_at_every_step(tmp_path: Path, history: History, name: str, power: str) -> None:
    kill_at_steps(prepare(history, tmp_path, SCENARIOS[name]), SCENARIOS[name], tmp_path, every=1, power=power)


def batch(number: int) -> list[Change]:
    """Deletes, updates and an insert, by the number of the batch alone."""
    changes = [update(key, number) for key in range(number % 7, 400, 7)]
    return [*changes, insert(10_000 + number), *([delete(10_000 + number - 3)] if number > 3 else [])]


def after_batches(count: int) -> Rows:
    model = dict.fromkeys(range(400), 0)
    for number in range(1, count + 1):
        model |= dict.fromkeys(range(number % 7, 400, 7), number)
        model[10_000 + number] = 0
        model.pop(10_000 + number - 3, None)
    return sorted((key, n, f"text {key}") for key, n in model.items())


def batches_without_end(sink: DeltaSink, begun: Any) -> None:
    begun.wait()
    while True:
        number = int(sink.applied(TABLE) or 0) + 1
        do(sink, *batch(number), lsn=number)


def upkeep_without_end(sink: DeltaSink, begun: Any) -> None:
    begun.wait()
    while True:
        with contextlib.suppress(SinkConflict):
            upkeep(sink)
            replace(sink, keep_seconds=0).vacuum(TABLE)


@pytest.mark.long
@pytest.mark.parametrize("interval", ["100", "4"], ids=["few checkpoints", "many checkpoints"])
def test_kill_9_at_random_moments_of_batches_and_upkeep_that_keeps_nothing(tmp_path: Path, interval: str) -> None:
    path = tmp_path / "killed"
    sink = replace(sink_at(path), properties={**PROPERTIES, "delta.checkpointInterval": interval})
    sink.create(TABLE, SCHEMA)
    sink.commit(TABLE, sink.stage(TABLE, rows(*range(400)).to_batches()), Lsn(0), OVERWRITE)
    moments = random.Random(1)
    for _ in range(25):
        begun = PROCESSES.Barrier(3)
        both = (batches_without_end, upkeep_without_end)
        running = [PROCESSES.Process(target=each, args=(sink, begun)) for each in both]
        for process in running:
            process.start()
        begun.wait(60)
        for process in moments.sample(running, 2):
            time.sleep(moments.uniform(0.05, 1.5))
            assert process.exitcode is None
            process.kill()
            process.join(30)
        applied = int(sink.applied(TABLE) or 0)
        assert content(sink.location(TABLE)) == after_batches(applied)
    assert applied > 50
    batches_left = [do(sink, *batch(number), lsn=number) for number in range(applied + 1, applied + 4)]
    assert len(batches_left) == 3
    assert content(sink.location(TABLE)) == after_batches(applied + 3)
