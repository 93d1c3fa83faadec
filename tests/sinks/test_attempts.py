"""Several attempts at one batch, at once or late, by processes that have found its rows at different versions."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from delta_rows import read_delta
from sinks.histories import Change, rows_of, typed
from walmere.apply.fold import fold
from walmere.directory import Directory
from walmere.errors import SinkConflict, SinkMismatch, WalmereError
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import OVERWRITE, Net, Upkeep
from walmere.sinks.delta.files import key_index
from walmere.sinks.delta.files.key_index import KeyIndex
from walmere.sinks.delta.sink import DeltaSink

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("text", pa.string())])
BY_ID = Identity("d", ("id",))
FULL = Identity("f")
K, O = ord("K"), ord("O")  # noqa: E741


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"), index=str(tmp_path / "index"))


def rows(*ids: int) -> pa.Table:
    return pa.table([list(ids), [0] * len(ids), ["x"] * len(ids)], schema=SCHEMA)


def begin(sink: DeltaSink, *parts: pa.Table) -> None:
    sink.create(TABLE, SCHEMA)
    staged = [file for part in parts for file in sink.stage(TABLE, part.to_batches(), identity=BY_ID)]
    sink.commit(TABLE, staged, Lsn(100), OVERWRITE)


def net(*changes: Change, identity: Identity = BY_ID) -> Net:
    return fold(typed(changes, SCHEMA), identity)


def do(sink: DeltaSink, *changes: Change, lsn: int, identity: Identity = BY_ID) -> int:
    return sink.apply(TABLE, net(*changes, identity=identity), Lsn(lsn), identity)


def update(key: int, n: int) -> Change:
    return Change("U", (key, n, "x"))


def delete(key: int) -> Change:
    return Change("D", None, (key, None, None), K)


def insert(key: int) -> Change:
    return Change("I", (key, 0, "x"))


def content(sink: DeltaSink) -> list[tuple[Any, ...]]:
    return sorted((row[0], row[1]) for row in rows_of(read_delta(sink.open(TABLE))))


ROUNDS = 8
KEYS = 40


def batch(number: int) -> list[Change]:
    """Updates of all files, a delete and an insert."""
    return [*(update(key, number) for key in range(number % 3, KEYS, 3)), delete(1000 + number), insert(2000 + number)]


def racer(pickled: bytes, gate: Any, out: Any) -> None:
    sink: DeltaSink = pickle.loads(pickled)
    for number in range(ROUNDS):
        gate.wait()
        try:
            if number % 2:
                parts = [
                    sink.stage_changes(TABLE, net(*some), BY_ID) for some in (batch(number)[::2], batch(number)[1::2])
                ]
                out.put((number, sink.commit_changes(TABLE, parts, Lsn(200 + number))))
            else:
                out.put((number, do(sink, *batch(number), lsn=200 + number)))
        except WalmereError as error:
            out.put((number, str(error)))


@pytest.mark.long
def test_four_processes_that_apply_one_batch_at_once_have_one_effect(sink: DeltaSink) -> None:
    begin(sink, rows(*range(20)), rows(*range(20, KEYS)), rows(*range(1000, 1000 + ROUNDS)))
    first = sink.version(TABLE)
    processes = multiprocessing.get_context("spawn")
    gate, out = processes.Barrier(4), processes.Queue()
    racers = [processes.Process(target=racer, args=(pickle.dumps(sink), gate, out)) for _ in range(4)]
    for process in racers:
        process.start()
    results = [out.get(timeout=120) for _ in range(4 * ROUNDS)]
    for process in racers:
        process.join(30)
        assert process.exitcode == 0
    for number in range(ROUNDS):
        versions = [result for round_number, result in results if round_number == number]
        assert versions == [first + 1 + number] * 4
    assert sink.version(TABLE) == first + ROUNDS
    expected = dict.fromkeys(range(KEYS), 0)
    for number in range(ROUNDS):
        expected |= dict.fromkeys(range(number % 3, KEYS, 3), number)
    assert content(sink) == sorted({**expected, **{2000 + number: 0 for number in range(ROUNDS)}}.items())


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], object]], Callable[[], Any]]]:
    """Runs a function in a thread, up to its commit. Returns a function that lets it go on, and returns its result."""
    reached, go_on = threading.Event(), threading.Event()
    real = Directory.create
    zombies: list[threading.Thread] = []

    def create(self: Directory, name: str, content: bytes) -> bool:
        if threading.current_thread() in zombies and not go_on.is_set():
            reached.set()
            assert go_on.wait(60)
        return real(self, name, content)

    monkeypatch.setattr(Directory, "create", create)

    def pause(function: Callable[[], object]) -> Callable[[], Any]:
        results: list[Any] = []

        def run() -> None:
            try:
                results.append(function())
            except WalmereError as error:
                results.append(error)

        zombies.append(threading.Thread(target=run))
        zombies[0].start()
        assert reached.wait(60)

        def wake() -> Any:
            go_on.set()
            zombies[0].join(60)
            return results[0]

        return wake

    yield pause
    go_on.set()


Pause = Callable[[Callable[[], object]], Callable[[], Any]]


def test_a_zombie_that_has_found_rows_and_written_its_vectors_commits_late_and_changes_nothing(
    sink: DeltaSink, paused: Pause
) -> None:
    begin(sink, rows(*range(10)))
    zombie = replace(sink)
    wake = paused(lambda: do(zombie, update(1, 5), delete(2), insert(50), lsn=200))
    do(sink, update(1, 5), delete(2), insert(50), lsn=200)
    do(sink, update(1, 6), insert(2), lsn=300)
    expected, version = content(sink), sink.version(TABLE)
    assert wake() == version
    assert (content(sink), sink.version(TABLE), sink.applied(TABLE)) == (expected, version, Lsn(300))


def test_an_attempt_that_is_overtaken_by_upkeep_finds_its_rows_again(sink: DeltaSink, paused: Pause) -> None:
    begin(sink, *(rows(key) for key in range(10)))
    late = replace(sink)
    wake = paused(lambda: do(late, update(1, 5), delete(2), Change("U", (3, 7, "y")), lsn=200))
    assert sink.optimize(TABLE, BY_ID, Upkeep(deleted_share=0)) is not None
    assert wake() == sink.version(TABLE)
    assert content(sink) == [(0, 0), (1, 5), (3, 7), *((key, 0) for key in range(4, 10))]
    info = json.loads(Path(sink.location(TABLE), "_delta_log", f"{wake():020d}.json").read_text().splitlines()[0])
    metrics = info["commitInfo"]["operationMetrics"]
    assert metrics == {"numRowsInserted": "0", "numRowsUpdated": "2", "numRowsDeleted": "1"}


def test_an_attempt_of_a_longer_batch_is_not_committed_over_a_shorter_one(sink: DeltaSink) -> None:
    """The zombie has found the rows at LSN 100. Then batches end elsewhere, and the next one is applied to 150."""
    begin(sink, rows(*range(10)))
    parts = [
        sink.stage_changes(TABLE, net(update(1, 5), insert(50)), BY_ID),
        sink.stage_changes(TABLE, net(delete(2)), BY_ID),
    ]
    do(sink, update(1, 4), lsn=150)
    with pytest.raises(SinkConflict, match="other changes were applied") as caught:
        sink.commit_changes(TABLE, parts, Lsn(200))
    assert caught.value.transient
    assert content(sink) == [(0, 0), (1, 4), *((key, 0) for key in range(2, 10))]
    again = [sink.stage_changes(TABLE, net(update(1, 5), insert(50), delete(2)), BY_ID)]
    sink.commit_changes(TABLE, again, Lsn(200))
    assert content(sink) == [(0, 0), (1, 5), *((key, 0) for key in range(3, 10)), (50, 0)]


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize(
    "changes", [[insert(50), insert(51)], [update(1, 5), insert(50)], [Change("T"), insert(50)]], ids=str
)
def test_a_longer_batch_is_not_applied_over_a_shorter_one(
    sink: DeltaSink, paused: Pause, changes: list[Change], vectors: bool
) -> None:
    """Both begin at LSN 100. The shorter one, which ends at 150, is committed while the longer one is applied."""
    sink = replace(sink, deletion_vectors=vectors)
    begin(sink, rows(*range(10)))
    wake = paused(lambda: replace(sink).apply(TABLE, net(*changes), Lsn(200), BY_ID, after=Lsn(100)))
    sink.apply(TABLE, net(*changes[:1]), Lsn(150), BY_ID, after=Lsn(100))
    expected = content(sink)
    error = wake()
    assert isinstance(error, SinkConflict)
    assert error.transient
    assert (content(sink), sink.applied(TABLE)) == (expected, Lsn(150))
    sink.apply(TABLE, net(*changes[1:]), Lsn(200), BY_ID, after=Lsn(150))
    assert (50, 0) in content(sink)
    assert sink.apply(TABLE, net(*changes), Lsn(200), BY_ID, after=Lsn(100)) == sink.version(TABLE)  # it is done


def test_a_part_is_not_staged_for_a_table_that_another_batch_has_changed(sink: DeltaSink) -> None:
    """Its changes were chosen by the LSN that the table had before."""
    begin(sink, rows(*range(10)))
    do(sink, insert(50), lsn=150)
    for changes in ([insert(50), insert(51)], [update(1, 5), insert(50)]):
        with pytest.raises(SinkConflict, match="other changes were applied"):
            sink.stage_changes(TABLE, net(*changes), BY_ID, after=Lsn(100))
    sink.commit_changes(TABLE, [sink.stage_changes(TABLE, net(insert(51)), BY_ID, after=Lsn(150))], Lsn(200))
    assert content(sink) == [*((key, 0) for key in range(10)), (50, 0), (51, 0)]


def test_a_shorter_batch_does_not_take_the_version_of_a_longer_one_for_its_own(sink: DeltaSink) -> None:
    begin(sink, rows(*range(10)))
    parts = [sink.stage_changes(TABLE, net(insert(50)), BY_ID, after=Lsn(100))]
    staged = sink.stage(TABLE, rows(50).to_batches())
    do(sink, insert(50), insert(51), lsn=200)
    attempts: list[Callable[[], int]] = [
        lambda: sink.apply(TABLE, net(insert(50)), Lsn(150), BY_ID, after=Lsn(100)),
        lambda: sink.commit(TABLE, staged, Lsn(150), after=Lsn(100)),
        lambda: sink.commit_changes(TABLE, parts, Lsn(150)),
    ]
    for attempt in attempts:
        with pytest.raises(SinkConflict, match="other changes were applied"):
            attempt()
    assert content(sink) == [*((key, 0) for key in range(10)), (50, 0), (51, 0)]


@pytest.mark.parametrize("changes", [[insert(50)], [update(1, 5)]], ids=["append", "update"])
def test_rows_that_were_written_before_the_columns_changed_are_not_committed(
    sink: DeltaSink, paused: Pause, changes: list[Change]
) -> None:
    """The LSN stays when columns change."""
    begin(sink, rows(*range(10)))
    parts = [sink.stage_changes(TABLE, net(*changes), BY_ID, after=Lsn(100))]
    wake = paused(lambda: replace(sink).apply(TABLE, net(*changes), Lsn(200), BY_ID, after=Lsn(100)))
    renamed = pa.schema([SCHEMA.field("id"), SCHEMA.field("n"), ("renamed", pa.string())])
    sink.evolve(TABLE, renamed, ["id", "n", "text"])
    assert isinstance(wake(), SinkConflict)
    with pytest.raises(SinkConflict):
        sink.commit_changes(TABLE, parts, Lsn(200))
    assert content(sink) == [(key, 0) for key in range(10)]


def test_staged_rows_are_not_committed_over_a_shorter_batch(sink: DeltaSink) -> None:
    """So are logical messages and rejects."""
    sink.create(TABLE, SCHEMA)
    longer = sink.stage(TABLE, rows(1, 2).to_batches())
    sink.commit(TABLE, sink.stage(TABLE, rows(1).to_batches()), Lsn(150), after=INVALID_LSN)
    with pytest.raises(SinkConflict, match="other changes were applied"):
        sink.commit(TABLE, longer, Lsn(200), after=INVALID_LSN)
    sink.commit(TABLE, sink.stage(TABLE, rows(2).to_batches()), Lsn(200), after=Lsn(150))
    assert content(sink) == [(1, 0), (2, 0)]


def test_parts_of_a_batch_whose_files_upkeep_has_replaced_are_retried(sink: DeltaSink) -> None:
    begin(sink, *(rows(key) for key in range(10)))
    parts = [sink.stage_changes(TABLE, net(*some), BY_ID) for some in ([update(1, 5), insert(50)], [delete(2)])]
    sink.optimize(TABLE, BY_ID, Upkeep(deleted_share=0))
    with pytest.raises(SinkConflict, match="replaced its files"):
        sink.commit_changes(TABLE, parts, Lsn(200))
    assert sink.applied(TABLE) == Lsn(100)
    # a part that only has new rows does not depend on files
    sink.commit_changes(TABLE, [sink.stage_changes(TABLE, net(insert(60)), BY_ID)], Lsn(200))
    assert content(sink) == [*((key, 0) for key in range(10)), (60, 0)]


def test_parts_of_a_batch_are_one_commit_and_none_when_they_come_again(sink: DeltaSink) -> None:
    begin(sink, rows(*range(20)), rows(*range(20, 40)))
    some = [[update(key, 1) for key in range(part, 40, 4)] for part in range(4)]
    parts = pickle.loads(
        pickle.dumps([sink.stage_changes(TABLE, net(*each, insert(100 + i)), BY_ID) for i, each in enumerate(some)])
    )
    version = sink.commit_changes(TABLE, parts, Lsn(200))
    assert sink.commit_changes(TABLE, parts, Lsn(200)) == version == 2
    assert content(sink) == [*((key, 1) for key in range(40)), *((100 + key, 0) for key in range(4))]


def test_a_zombie_of_a_multiset_does_not_delete_a_second_equal_row(sink: DeltaSink, paused: Pause) -> None:
    begin(sink, rows(*[1] * 10, 2))
    gone = Change("D", None, (1, 0, "x"), O)
    wake = paused(lambda: do(replace(sink), gone, gone, lsn=200, identity=FULL))
    do(sink, gone, gone, lsn=200, identity=FULL)
    wake()
    assert content(sink) == [(1, 0)] * 8 + [(2, 0)]
    do(sink, gone, lsn=300, identity=FULL)
    assert content(sink) == [(1, 0)] * 7 + [(2, 0)]


def test_an_attempt_that_is_overtaken_by_a_truncation_of_the_same_batch_has_no_effect(
    sink: DeltaSink, paused: Pause
) -> None:
    begin(sink, rows(*range(10)))
    wake = paused(lambda: do(replace(sink), update(1, 5), lsn=200))
    do(sink, Change("T"), insert(3), lsn=250)
    wake()
    assert content(sink) == [(3, 0)]


def test_an_attempt_that_is_overtaken_by_new_columns_is_retried(sink: DeltaSink, paused: Pause) -> None:
    begin(sink, rows(*range(5)))
    wake = paused(lambda: do(replace(sink), update(1, 5), lsn=200))
    wider = SCHEMA.append(pa.field("more", pa.int64()))
    sink.evolve(TABLE, wider, [*SCHEMA.names, pa.scalar(None, pa.int64())])
    assert isinstance(wake(), SinkConflict)
    assert (sink.applied(TABLE), content(sink)) == (Lsn(100), [(key, 0) for key in range(5)])


def replace_and_delete_files(sink: DeltaSink) -> None:
    """Upkeep, and a vacuum that keeps nothing."""
    sink.optimize(TABLE, BY_ID, Upkeep(deleted_share=0))
    replace(sink, keep_seconds=0).vacuum(TABLE)


def many(first: int) -> list[Change]:
    """So many that their vector is in a file."""
    return [delete(key) for key in range(first, 900, 3)]


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_batch_whose_files_are_replaced_and_deleted_while_it_reads_them_is_retried(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch, in_parts: bool
) -> None:
    sink = replace(sink, index=None)
    begin(sink, rows(*range(900)))
    do(sink, *many(0), lsn=200)
    real = KeyIndex.find
    calls: list[int] = []

    def find(self: KeyIndex, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            replace_and_delete_files(sink)
        return real(self, *args)

    monkeypatch.setattr(KeyIndex, "find", find)
    if in_parts:
        with pytest.raises(SinkConflict, match="does not exist") as caught:
            sink.stage_changes(TABLE, net(*many(1)), BY_ID)
        assert caught.value.transient
        sink.commit_changes(TABLE, [sink.stage_changes(TABLE, net(*many(1)), BY_ID)], Lsn(300))
    else:
        do(sink, *many(1), lsn=300)
    assert content(sink) == [(key, 0) for key in range(2, 900, 3)]


@pytest.mark.parametrize("which", ["data", "vector"])
def test_a_file_that_was_deleted_by_somebody_is_named(sink: DeltaSink, which: str) -> None:
    sink = replace(sink, index=None)
    begin(sink, rows(*range(900)))
    do(sink, *many(0), lsn=200)
    [file] = sink.current(TABLE).files
    name = file.name if which == "data" else file.vector.path if file.vector else None
    assert name is not None
    key_index._open.__init__()  # type: ignore[misc]  # as in another process
    Path(sink.location(TABLE), name).unlink()
    attempts: list[Callable[[], object]] = [
        lambda: do(sink, *many(1), lsn=300),
        lambda: sink.stage_changes(TABLE, net(*many(1)), BY_ID),
        lambda: do(replace(sink, deletion_vectors=False), *many(1), lsn=300),
    ]
    for attempt in attempts:
        with pytest.raises(SinkMismatch, match=name) as caught:
            attempt()
        assert "copy the table again" in str(caught.value)
