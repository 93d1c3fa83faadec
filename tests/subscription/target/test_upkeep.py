"""Upkeep beside the stream: which tables it looks at, its budget, and its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from walmere.apply.rejects import Rejects
from walmere.config import Maintenance
from walmere.definition import Definition, Layout, PublishedColumn
from walmere.errors import SinkError, SparkEnded
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.sinks.base import OVERWRITE
from walmere.sinks.delta.sink import DeltaSink
from walmere.subscription.executor import DaemonExecutor
from walmere.subscription.state import Phase, TableState
from walmere.subscription.tables import Tables
from walmere.subscription.target import pace, upkeep
from walmere.subscription.target.low_priority import LowPriority
from walmere.subscription.target.pace import Pace
from walmere.subscription.target.upkeep import UpkeepScheduler
from walmere.subscription.target.upkeep_record import read_status

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64())])
DEFINITION = Definition((PublishedColumn(1, "id", 20, -1, is_key=True),), 1, Layout(), "")


class Tasks:
    """Runs tasks in this process."""

    remote = False

    def __init__(self, parallelism: int = 2) -> None:
        self.parallelism = parallelism
        self.ran: list[Any] = []
        self.cancelled = False

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        self.ran += items
        return [function(item) for item in items]

    def cancel(self) -> None:
        self.cancelled = True


class Run:
    """A subscription with one table of many small files."""

    def __init__(self, directory: Path, settings: Maintenance) -> None:
        self.directory = directory
        self.sink = DeltaSink(str(directory / "lake"), index=str(directory / "index"))
        self.tables = Tables(directory / "subscription")
        self.tasks = Tasks()
        self.settings = settings
        self.new_process()
        self.add_table(TABLE, 7)

    def add_table(self, table: TableName, oid: int) -> None:
        self.sink.create(table, SCHEMA)
        self.sink.commit(table, [], Lsn(1), OVERWRITE)
        self.batches(10, table, oid)

    def new_process(self) -> None:
        subscription = self.directory / "subscription"
        self.upkeep = UpkeepScheduler(subscription, self.tables, self.tasks, self.settings, self.replace)

    def batches(self, count: int, table: TableName = TABLE, oid: int = 7) -> None:
        first = self.sink.count(table)
        for number in range(first, first + count):
            rows = pa.table([pa.array([number])], schema=SCHEMA)
            version = self.sink.commit(table, self.sink.stage(table, rows.to_batches()), Lsn(10 + number))
        state = TableState(table, oid, Phase.READY, applied_lsn=Lsn(5), definition=DEFINITION, version=version)
        self.tables.put(state)

    def replace(self, known: TableState, done: Sequence[Any]) -> None:
        self.sink.replace_files(known.table, done)

    @property
    def files(self) -> int:
        found = self.sink.extent(TABLE)
        assert found is not None
        return found.files


def test_a_round_joins_files_of_tables_that_have_changed_and_no_others(tmp_path: Path) -> None:
    run = Run(tmp_path, Maintenance())
    run.upkeep.round(run.sink)
    assert (run.files, len(run.tasks.ran)) == (1, 1)
    run.upkeep.round(run.sink)
    assert len(run.tasks.ran) == 1, "nothing has changed"
    run.batches(10)
    run.upkeep.round(run.sink)
    assert run.files < 4
    [found] = read_status(tmp_path / "subscription").values()
    assert found["written_bytes_per_hour"] > 0
    assert found["upkeep_waits_for"] is None


def test_without_a_budget_nothing_is_rewritten_and_status_says_what_it_waits_for(tmp_path: Path) -> None:
    run = Run(tmp_path, Maintenance(bytes_per_hour=0))
    for _ in range(2):
        run.upkeep.round(run.sink)
        assert (run.files, run.tasks.ran) == (10, [])
        assert read_status(tmp_path / "subscription")[str(TABLE)]["upkeep_waits_for"] == "[maintenance] bytes_per_hour"


def test_with_one_core_no_task_of_upkeep_takes_it_from_the_batches(tmp_path: Path) -> None:
    run = Run(tmp_path, Maintenance())
    run.tasks = Tasks(1)
    run.new_process()
    run.upkeep.round(run.sink)
    assert (run.files, run.tasks.ran) == (1, [])


def test_after_stop_nothing_is_committed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, Maintenance())
    version = run.sink.version(TABLE)
    run.upkeep.stop()
    run.upkeep.round(run.sink)
    assert run.tasks.cancelled
    assert run.sink.version(TABLE) == version
    assert not caplog.records


def test_a_failure_is_a_warning_and_a_later_round_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, Maintenance())

    def full(*_: Any) -> None:
        raise SinkError("writing a file", "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(DeltaSink, "rewrite_files", full)
        run.upkeep.round(run.sink)
    assert "No space left on device" in caplog.text
    later = time.monotonic() + 300
    monkeypatch.setattr(time, "monotonic", lambda: later)
    run.upkeep.round(run.sink)
    assert run.files == 1
    assert read_status(tmp_path / "subscription")[str(TABLE)]["upkeep_waits_for"] is None


@pytest.mark.parametrize("damage", ["data", "log"])
def test_a_table_that_cannot_be_rewritten_or_vacuumed_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    run = Run(tmp_path, Maintenance())
    run.tasks.parallelism = 4  # both tables are rewritten in one job
    bad = TableName("public", "bad")
    run.add_table(bad, 8)
    found = run.sink.current(bad)
    if damage == "data":
        Path(run.sink.location(bad), found.files[0].name).unlink()
    else:
        Path(run.sink.location(bad), "_delta_log", f"{found.version:020d}.json").write_text("{")
    now, later = time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with caplog.at_level(logging.WARNING):
        run.upkeep.round(run.sink)
        assert run.files == 1
        for _ in range(4):
            now += run.sink.keep_seconds
            later += run.sink.keep_seconds
            run.upkeep.round(run.sink)
    assert len(list(Path(run.sink.location(TABLE)).glob("*.parquet"))) == 1, "old files are deleted"
    first = [
        each.message for each in caplog.records if "rewriting files of table public.bad has failed" in each.message
    ]
    assert len(first) == 1, "one warning, not one each round"
    assert all("public.bad" in each.message for each in caplog.records)
    status = read_status(tmp_path / "subscription")
    assert "a retry after an error: " in status[str(bad)]["upkeep_waits_for"]
    assert status[str(TABLE)]["upkeep_waits_for"] is None


def test_rounds_go_on_after_any_number_of_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, Maintenance())
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def dead(*_: Any) -> None:
        raise SparkEnded("running a job on Spark", "it has ended")

    with monkeypatch.context() as patch:
        patch.setattr(Tasks, "map", dead)
        for _ in range(1100):
            run.upkeep.round(run.sink)
    with DaemonExecutor(1, "test") as executor:

        def poll() -> Future[None] | None:
            run.upkeep.poll(run.sink, executor)
            return run.upkeep._round

        assert poll() is None, "not right after a start"
        now += 10
        first = poll()
        assert first is not None
        first.result(60)
        run.upkeep._failures = 1100
        assert poll() is None
        now += 600
        second = poll()
        assert second is not None
        second.result(60)
    assert run.files == 1


def test_short_runs_one_after_the_other_delete_replaced_files_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, Maintenance())
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)

    def on_disk() -> int:
        return len(list(Path(run.sink.location(TABLE)).glob("*.parquet")))

    run.upkeep.round(run.sink)
    assert (run.files, on_disk()) == (1, 11)
    for seconds in (300, 400, run.sink.keep_seconds):  # a process each; the table has no more changes
        now += seconds
        assert on_disk() == 11
        run.new_process()
        run.upkeep.round(run.sink)
    now += 700
    run.upkeep.round(run.sink)
    assert on_disk() == 1
    vacuums = run.tasks.ran.count(TABLE)
    run.upkeep.round(run.sink, rewrite=False)
    assert run.tasks.ran.count(TABLE) == vacuums, "it is not time yet"
    now += run.sink.keep_seconds + upkeep.VACUUM_INTERVAL
    for _ in range(2):
        run.upkeep.round(run.sink, rewrite=False)
        now += 1e6
    assert run.tasks.ran.count(TABLE) == vacuums + 1, "a table that rests is left alone"


def test_small_files_of_rejects_are_joined_too(tmp_path: Path) -> None:
    run = Run(tmp_path, Maintenance())
    rejects = Rejects.table(TABLE)
    run.sink.create(rejects, Rejects.SCHEMA)
    for number in range(10):
        rows = pa.table([[number], ["{}"], ["at"], ["infinity"]], schema=Rejects.SCHEMA)
        run.sink.commit(rejects, run.sink.stage(rejects, rows.to_batches()), Lsn(10 + number))
    run.tables.put(replace(run.tables[7], rejects=10))
    run.upkeep.round(run.sink)
    found = run.sink.extent(rejects)
    assert found is not None
    assert (found.files, found.rows, run.files) == (1, 10, 1)


def test_an_error_in_the_thread_of_low_priority_is_raised_in_the_task(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        LowPriority(DeltaSink(str(tmp_path)))("not work")


def test_the_budget_outlives_the_process_and_what_is_larger_is_done_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, Maintenance(bytes_per_hour=1))
    run.upkeep.round(run.sink)
    assert run.files == 1, "nothing was rewritten within the hour"
    run.batches(10)
    run.new_process()
    run.upkeep.round(run.sink)
    assert run.files == 11
    found = read_status(tmp_path / "subscription")[str(TABLE)]
    assert found["upkeep_waits_for"] == "[maintenance] bytes_per_hour"


class Killed(BaseException):
    """The process is killed."""


def test_the_budget_holds_for_a_process_that_is_killed_while_it_rewrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, Maintenance(bytes_per_hour=1))
    written = []

    def killed(*_: Any) -> None:
        written.append(1)
        raise Killed

    monkeypatch.setattr(DeltaSink, "rewrite_files", killed)
    with pytest.raises(Killed):
        run.upkeep.round(run.sink)
    run.new_process()
    run.upkeep.round(run.sink)
    assert written == [1]
    assert read_status(tmp_path / "subscription")[str(TABLE)]["upkeep_waits_for"] == "[maintenance] bytes_per_hour"


def test_the_bytes_of_the_last_hour_are_counted_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    run = Run(tmp_path, Maintenance())
    run.upkeep.round(run.sink)
    run.batches(10)
    run.upkeep.round(run.sink)
    written = read_status(tmp_path / "subscription")[str(TABLE)]["written_bytes_per_hour"]
    assert written
    for seconds, expected in ((1800, written), (3600, 0)):
        now += seconds
        run.new_process()
        run.tables.put(replace(run.tables[7], applied_lsn=Lsn(seconds)))
        run.upkeep.round(run.sink)
        assert read_status(tmp_path / "subscription")[str(TABLE)]["written_bytes_per_hour"] == expected


def test_batches_that_rewrite_more_than_the_limit_wait_also_after_a_restart(tmp_path: Path) -> None:
    limited = Pace(tmp_path, 3600)
    limited.batch_wrote(100)
    assert pace.next_batch(tmp_path) is None, "some minutes may be written at once"
    limited.batch_wrote(1 << 20)
    waits_until = pace.next_batch(tmp_path)
    assert waits_until is not None
    Pace(tmp_path, 3600).batch_wrote(3600)
    assert pace.next_batch(tmp_path) == pytest.approx(waits_until + 3600)
    pace.reset(tmp_path)
    assert pace.next_batch(tmp_path) is None


def test_a_higher_limit_of_rewriting_holds_at_once_for_what_was_written_before(tmp_path: Path) -> None:
    Pace(tmp_path, 1 << 30).batch_wrote(50 << 30)
    waits_until = pace.next_batch(tmp_path)
    assert waits_until is not None
    assert waits_until > time.time() + 49 * 3600
    Pace(tmp_path, 1 << 35)
    waits_until = pace.next_batch(tmp_path)
    assert waits_until is not None
    assert waits_until == pytest.approx(time.time() + 50 / 32 * 3600 - 300, abs=60)
    Pace(tmp_path, 1 << 50)
    assert pace.next_batch(tmp_path) is None
