"""Story 8: tasks are tried again, tried twice at once, repeated after crashes: every change is in its table once."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import attempts
from conftest import Database
from delta_rows import read_delta
from mirror import Mirror
from processes import eventually, walmere
from receiving import receive_all, summary
from walmere.apply.jobs import ApplyJob
from walmere.apply.worker import apply_table, commit_staged
from walmere.errors import SinkError, WalmereError
from walmere.ledger.entry import Entry
from walmere.ledger.file import Ledger
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.delta.tables import APP_ID
from walmere.spark.session import session
from walmere.spark.tasks import SparkTasks
from walmere.subscription import batches as planning
from walmere.subscription.batches import Batches
from walmere.subscription.state import TableState
from walmere.subscription.tables import Tables
from walmere.subscription.target import sink as subscription_sink
from workload import Transfers


def batches_since(mirror: Mirror, table: str, version: int) -> int:
    """How many batches were committed after a version. Upkeep may have committed too."""
    history = [each for each in mirror.delta(table).history() if each["version"] > version]
    assert {each["operation"] for each in history} <= {"APPLY", "OPTIMIZE"}
    return sum(each["operation"] == "APPLY" for each in history)


@contextmanager
def writing_by(sink: type[DeltaSink], mirror: Mirror) -> Iterator[None]:
    """Runs write to the lake by this sink, which Spark's workers import."""
    context = session("test", mirror.config.spark.master, mirror.config.spark.settings).sparkContext
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(context.environment, "PYTHONPATH", str(Path(attempts.__file__).parent))
        patch.setattr(subscription_sink, "DeltaSink", sink)
        yield


def planner(mirror: Mirror, tasks: int = 1, *, spread: bool = False) -> Batches:
    """A planner of batches, as the next run has it."""
    directory = mirror.config.subscription.directory
    return Batches(directory, Tables(directory), lambda: tasks, spread=spread)


def next_job(mirror: Mirror) -> ApplyJob:
    """The only job of the next batch, which may wait for more changes."""
    with closing(planner(mirror)) as batches:
        eventually(lambda: (end := batches.next_end()) is not None and batches.plan(end)[1])
        _, [[job]] = batches.plan(batches.log_end)
        return job


def insert_position(database: Database) -> Lsn:
    return Lsn.parse(database.value("SELECT pg_current_wal_insert_lsn()::text"))


def transactions(mirror: Mirror, table: str) -> list[int]:
    """The LSN of every commit that changes rows: it is in the commit itself, as its only app transaction."""
    log = Path(mirror.delta(table).table_uri.removeprefix("file://")) / "_delta_log"
    found = []
    for file in sorted(log.glob("*[0-9].json")):
        actions = [json.loads(line) for line in file.read_text().splitlines()]
        files = [action.get("add") or action.get("remove") for action in actions]
        stored = [action["txn"] for action in actions if "txn" in action]
        if stored or any(each["dataChange"] for each in files if each):
            [transaction] = stored
            assert transaction["appId"] == APP_ID
            found.append(transaction["version"])
    return found


def rejects(mirror: Mirror, table: str, schema: str = "public") -> list[dict[str, Any]]:
    return list(read_delta(mirror.delta(table, f"_rejects.{schema}")).sort_by("lsn").to_pylist())


def test_a_task_that_fails_when_its_work_is_done_is_tried_again_and_doubles_nothing(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 10000) i",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    mirror = Mirror(database, tmp_path)
    with writing_by(attempts.FailsWhenStaged, mirror):
        mirror.run_once()
    assert attempts.seen(tmp_path / "lake") == ["stage t 0 0", "stage t 0 1", "stage t 1 0", "stage t 1 1"]
    staged = list((tmp_path / "lake/public/t").glob("*.parquet"))
    assert len(staged) == 4, "the files of the first attempts are there"
    assert len(mirror.delta("t").file_uris()) == 2, "and nobody's"
    mirror.assert_equal("t")
    database.execute(  # in one transaction, and so in one batch
        "BEGIN; INSERT INTO t SELECT -i FROM generate_series(1, 100) i; UPDATE t SET v = 'x' WHERE id % 2 = 0; COMMIT"
    )
    before = mirror.delta("t").version()
    with writing_by(attempts.DiesWhenApplied, mirror):
        mirror.run_once()
    assert {name[-1] for name in attempts.seen(tmp_path / "lake") if name.startswith("apply t")} == {"0"}, (
        "the second attempt found it done, and came no further"
    )
    assert batches_since(mirror, "t", before) == 1
    lsns = transactions(mirror, "t")
    assert lsns == sorted(set(lsns))
    mirror.assert_equal("t")


@pytest.mark.long
def test_tasks_that_share_a_large_batch_are_tried_again_and_are_one_commit(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database, tmp_path)
    # many segments, so that there is something to share
    mirror.file.write_text(mirror.file.read_text().replace("[target]", "segment_bytes = 1048576\n[target]"))
    mirror.run_once()
    before = mirror.delta("t").version()
    incompressible = " || ".join(f"encode(sha512(({number} + i)::text::bytea), 'hex')" for number in (0, 1_000_000))
    database.execute(f"INSERT INTO t SELECT i, {incompressible} FROM generate_series(1, 80000) i")
    with writing_by(attempts.FailsWhenStaged, mirror):
        mirror.run_once()
    tried = attempts.seen(tmp_path / "lake")
    assert len(tried) == 4, "two tasks, two attempts each"
    assert [name[-1] for name in tried] == ["0", "1", "0", "1"]
    assert batches_since(mirror, "t", before) == 1
    lsns = transactions(mirror, "t")
    assert lsns == sorted(set(lsns))
    mirror.assert_equal("t")


def test_two_tasks_that_apply_one_batch_at_once_are_one_commit(database18: Database, tmp_path: Path) -> None:
    """As a task and its speculative copy, which wait for each other before they commit."""
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i FROM generate_series(1, 1000) i",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    before = mirror.delta("t").version()
    database.execute("BEGIN; INSERT INTO t VALUES (0, 'new'); UPDATE t SET v = 'x' WHERE id % 2 = 0; COMMIT")
    receive_all(database, mirror.config)
    with writing_by(attempts.MeetsItsTwin, mirror):
        sink = attempts.MeetsItsTwin(str(tmp_path / "lake"))
        job = next_job(mirror)
        tasks = SparkTasks(session("test", mirror.config.spark.master, {}), "test")
        results = tasks.map(functools.partial(apply_table, sink=sink), [job, job])
    assert len(attempts.seen(tmp_path / "lake")) == 2
    assert {each.version for each in results} == {before + 1}
    mirror.run_once()
    assert batches_since(mirror, "t", before) == 1
    mirror.assert_equal("t")


def test_inserts_of_a_batch_that_is_too_large_for_its_tasks_are_taken_in_parts_and_are_one_commit(
    database18: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    before = mirror.delta("t").version()
    for first in range(0, 1600, 200):
        database.execute(f"INSERT INTO t SELECT i, md5(i::text) FROM generate_series({first}, {first + 199}) i")
        receive_all(database, mirror.config)
    monkeypatch.setattr(planning, "MAX_BATCH_BYTES", 20_000)  # of more than 80,000
    monkeypatch.setattr(planning, "MIN_TASK_BYTES", 1)
    batches = planner(mirror, tasks=2, spread=True)
    batch, tasks = batches.plan(batches.log_end)
    assert [len(task) for task in tasks] == [4, 4]
    jobs = [job for task in tasks for job in task]
    assert [len(job.blocks.refs) for job in jobs] == [1] * 8
    sink = DeltaSink(str(tmp_path / "lake"))
    results = [apply_table(job, sink) for job in jobs]
    assert mirror.delta("t").version() == before, "nothing is visible yet"
    [done] = commit_staged(sink, results, batch.end_lsn)
    assert (done.changes, done.version) == (1600, before + 1)
    mirror.run_once()
    assert batches_since(mirror, "t", before) == 1
    mirror.assert_equal("t")


def test_a_shorter_batch_of_a_lost_driver_is_not_applied_after_a_batch_without_effect(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database, tmp_path)
    mirror.run_once()

    database.execute("INSERT INTO t VALUES (1)")
    receive_all(database, mirror.config)
    shorter = next_job(mirror)
    database.execute("DELETE FROM t")
    receive_all(database, mirror.config)
    longer = next_job(mirror)
    sink = DeltaSink(str(tmp_path / "lake"))
    done = apply_table(longer, sink)
    assert (done.changes, done.lsn, sink.applied(longer.target)) == (2, longer.end_lsn, longer.end_lsn)
    again = apply_table(shorter, sink)
    assert (again.changes, again.version, again.lsn) == (0, done.version, longer.end_lsn)
    mirror.run_once()
    mirror.assert_equal("t")


@pytest.mark.long
@pytest.mark.timeout(480)
def test_two_attempts_at_once_by_speculation_are_one_commit(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, at date)",
        "INSERT INTO t SELECT i FROM generate_series(1, 1000) i",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    before = mirror.delta("t").version()
    database.execute(
        "INSERT INTO t SELECT -i FROM generate_series(1, 100) i",
        "UPDATE t SET v = 'x' WHERE id % 2 = 0",
        "INSERT INTO t VALUES (0, 'rejected', 'infinity')",
    )
    mirror.set("spark", shared_directory=True)
    command = [sys.executable, attempts.__file__, str(mirror.file), str(insert_position(database))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [name[-1] for name in attempts.seen(tmp_path / "lake")] == ["0", "1"]
    assert batches_since(mirror, "t", before) == 1
    lsns = transactions(mirror, "t")
    assert lsns == sorted(set(lsns))
    assert len(rejects(mirror, "t")) == 1
    mirror.assert_equal("t", columns="id, v, NULLIF(at, 'infinity')")


class Records:
    """What we and Spark have written down about a run, apart from the tables themselves."""

    def __init__(self, mirror: Mirror, *names: str) -> None:
        self._names = names
        self._directory = mirror.config.subscription.directory
        self._copy = self._directory.parent / "records"

    def keep(self) -> None:
        shutil.rmtree(self._copy, ignore_errors=True)
        self._copy.mkdir()
        for name in self._names:
            self._transfer(self._directory / name, self._copy / name)

    def bring_back(self) -> None:
        for name in self._names:
            self._transfer(self._copy / name, self._directory / name)

    @staticmethod
    def _transfer(source: Path, target: Path) -> None:
        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        elif source.exists():
            shutil.copy(source, target)


def two_tables(database: Database) -> None:
    database.execute(
        "CREATE TABLE appended (id serial PRIMARY KEY, v int)",
        "CREATE TABLE changed (id int PRIMARY KEY, v int)",
        "INSERT INTO appended (v) SELECT generate_series(1, 100)",
        "INSERT INTO changed SELECT i, 0 FROM generate_series(1, 100) i",
        "CREATE PUBLICATION pub FOR TABLE appended, changed",
    )


def change(database: Database) -> None:
    database.execute(
        "INSERT INTO appended (v) SELECT generate_series(1, 10)",
        "UPDATE changed SET v = v + 1",
        "UPDATE changed SET id = -id WHERE id % 3 = 0",
        "DELETE FROM changed WHERE id IN (SELECT max(id) FROM changed)",
    )


def versions(mirror: Mirror) -> list[int]:
    return [mirror.delta(table).version() for table in ("appended", "changed")]


def test_a_batch_that_was_committed_but_not_recorded_is_repeated_and_changes_nothing(
    database18: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = database18
    two_tables(database)
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    before = versions(mirror)

    def crash_when_committed(tables: Tables, changes: Any) -> list[TableState]:
        if versions(mirror) != before:
            raise RuntimeError("crashed")
        return move(tables, changes)

    move = Tables.change
    change(database)
    with monkeypatch.context() as patch:
        patch.setattr(Tables, "change", crash_when_committed)
        with pytest.raises(WalmereError):
            mirror.run_once()
    after = versions(mirror)
    assert after == [version + 1 for version in before]
    mirror.run_once()
    assert versions(mirror) == after
    mirror.assert_equal("appended", "changed")


@pytest.mark.long
def test_a_batch_repeated_with_another_end_applies_only_what_the_table_does_not_have(
    database18: Database, tmp_path: Path
) -> None:
    """A restored backup of the state, for example."""
    database = database18
    two_tables(database)
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    records = Records(mirror, "tables.json", "ledger.jsonl")
    records.keep()
    change(database)
    mirror.run_once()
    records.bring_back()
    change(database)
    mirror.run_once()
    mirror.assert_equal("appended", "changed")


@pytest.mark.long
def test_at_every_entry_of_the_ledger_the_tables_agree_and_no_lsn_is_confirmed_before_it_is_durable(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    Transfers.create(database)
    mirror = Mirror(database, tmp_path)
    config = mirror.config
    ledger = Ledger(config.subscription.directory)

    def entries() -> list[Entry]:
        return [entry for entry in ledger.entries() if len(entry.versions) == 2]

    def confirmed() -> Lsn | None:
        query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
        found = database.rows(query, database.slot)
        return Lsn.parse(found[0][0]) if found and found[0][0] else None

    def enough() -> bool:
        before = confirmed()
        if before is not None and (config.changelog / "manifest.jsonl").exists():
            assert before <= summary(config).end_lsn
        return len({entry.versions["public.giro"] for entry in entries()}) >= 5

    with Transfers(database), mirror.following():
        eventually(enough, 90)
    mirror.run_once()
    assert (last := confirmed()) is not None
    assert last <= summary(config).end_lsn
    sink = DeltaSink(str(tmp_path / "lake"))
    for entry in entries():
        total = 0
        for name, version in entry.versions.items():
            opened = sink.open(TableName(*name.split(".")), version)
            reached = opened.transaction_version(APP_ID)
            assert reached is not None
            assert reached <= entry.lsn
            total += sum(read_delta(opened)["amount"].to_pylist())
        assert total == Transfers.TOTAL, entry
    for table in ("giro", "savings"):
        lsns = transactions(mirror, table)
        assert lsns == sorted(set(lsns))
    mirror.assert_equal("giro", "savings")


def test_what_the_target_cannot_hold_is_null_there_and_kept_in_the_rejects(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (a int, b text, day date, stamp timestamp, zoned timestamptz, n numeric(10, 2), free numeric,"
        " PRIMARY KEY (a, b))",
        "INSERT INTO t VALUES (1, 'x', 'infinity', '-infinity', '0044-03-15 12:00 BC', 'NaN', 'NaN')",
        "INSERT INTO t VALUES (2, 'x', '2026-01-01', '2026-01-01', '2026-01-01', 1, 1)",
        "CREATE PUBLICATION pub FOR TABLE t",
        "SET timezone = 'UTC'",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    between = insert_position(database)
    database.execute(
        "UPDATE t SET day = '0044-03-15 BC' WHERE a = 2",
        "INSERT INTO t VALUES (3, 'ü', NULL, 'infinity', NULL, 'NaN', 'NaN')",
    )
    mirror.run_once()
    end = insert_position(database)
    mirror.assert_equal(
        "t",
        columns="a, b, CASE WHEN a = 3 THEN day END, CASE WHEN a = 2 THEN stamp END, CASE WHEN a = 2 THEN zoned END,"
        " NULLIF(n, 'NaN'), free::text",
    )
    kept = rejects(mirror, "t")
    assert {(row["key"], row["column"], row["value"]) for row in kept} == {
        ('{"a": "1", "b": "x"}', "day", "infinity"),
        ('{"a": "1", "b": "x"}', "stamp", "-infinity"),
        ('{"a": "1", "b": "x"}', "zoned", "0044-03-15 12:00:00+00 BC"),
        ('{"a": "1", "b": "x"}', "n", "NaN"),
        ('{"a": "2", "b": "x"}', "day", "0044-03-15 BC"),
        ('{"a": "3", "b": "ü"}', "stamp", "infinity"),
        ('{"a": "3", "b": "ü"}', "n", "NaN"),
    }
    assert len(kept) == 7
    [table] = mirror.tables()
    assert {row["lsn"] for row in kept if '"1"' in row["key"]} == {table.snapshot_lsn}
    assert all(between <= row["lsn"] < end for row in kept if '"1"' not in row["key"])
    status = json.loads(walmere("status", "-c", mirror.file, "--json").stdout)
    assert status["tables"][0]["rejects"] == 7


@pytest.mark.long
def test_rejects_are_counted_once_however_often_their_task_is_tried(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY, day date)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute("INSERT INTO t VALUES (1, 'infinity')")
    with writing_by(attempts.DiesWhenApplied, mirror):
        mirror.run_once()
    mirror.assert_equal("t", columns="id, NULL")
    assert len(rejects(mirror, "t")) == 1
    assert [table.rejects for table in mirror.tables()] == [1]


@pytest.mark.long
def test_the_rejects_of_a_copy_that_was_cut_off_are_not_kept_twice(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, day date)",
        "INSERT INTO t VALUES (1, 'infinity')",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    mirror = Mirror(database, tmp_path)
    with writing_by(attempts.FailsBeforeTheCopyIsCommitted, mirror):
        with pytest.raises(SinkError):
            mirror.run_once()
        mirror.run_once()
    mirror.assert_equal("t", columns="id, NULL")
    assert len(rejects(mirror, "t")) == 1


def test_rejects_of_a_table_with_the_longest_name_have_a_place(database18: Database, tmp_path: Path) -> None:
    database = database18
    name = "é" * 31
    database.execute(
        f"CREATE SCHEMA {name}",
        f"CREATE TABLE {name}.{name} (id int PRIMARY KEY, day date)",
        f"INSERT INTO {name}.{name} VALUES (1, 'infinity')",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    mirror.assert_equal(name, schema=name, columns="id, NULL")
    assert len(rejects(mirror, name, name)) == 1
