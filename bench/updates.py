"""Random updates of large tables: the lake's growth, bytes written, freshness, CPU time, and scans afterwards.

Spark's own Delta MERGE with deletion vectors (delta-spark) and a native subscription are compared in the same run.

Run it with `python -m bench.updates [--server 15] [--rounds 3] [--small] [--only steady merge scan sizes backlog mixed
tables]`, or run all with `make bench`. The temporary directory must be on a disk: bytes written to a tmpfs are not
counted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import psutil
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from psycopg.rows import dict_row

import walmere
from bench import backlog, freshness
from bench.backlog import NATIVE, RECVLOGICAL
from bench.delta_spark import DeltaSpark, delta_spark
from bench.load import Load, inserts, mixed, update, updates
from bench.ours import Ours, warm
from bench.plain_spark import plain_session, read_all
from bench.process_tree import Usage, usage
from bench.side_by_side import RESULTS, Report, Run
from bench.source import Native, native, options, source
from walmere.apply.worker import Applied
from walmere.lsn import Lsn

RATE = 100
TABLE = "u"
WARM_UP_SCANS = 4
AGGREGATES = (
    "count(*) AS rows, sum(id) AS id, sum(number) AS number, sum(customer) AS customer, sum(quantity) AS quantity, "
    "sum(amount) AS amount, max(changed) AS changed, sum(length(status)) AS status, sum(length(note)) AS note, "
    "sum(length(address)) AS address"
)
"""Of all columns, so that a scan reads them all."""


@dataclass(frozen=True)
class Reading:
    """The state of a subscription that runs in its own process."""

    at: float
    usage: Usage
    lake_bytes: int
    log_bytes: int  # of them, in _delta_log

    @classmethod
    def of(cls, ours: Ours, process: psutil.Popen) -> Reading:
        log = disk_bytes(ours.path(TABLE) / "_delta_log")
        return cls(time.time(), usage(process), disk_bytes(ours.lake), log)


def disk_bytes(directory: Path) -> int:
    """The size of all files below a directory on the disk, as `du` has it."""
    total = 0
    for root, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                total += Path(root, name).stat().st_blocks * 512
    return total


class Bench(backlog.Bench):
    """All parts. Those with `walmere run` in its own process come first, before this process has a JVM."""

    @property
    def dsn(self) -> str:
        return self.source.server.dsn()

    def _wait_for_copy(self, ours: Ours, process: psutil.Popen, rows: int) -> None:
        ours.wait(self.source.mark(), process)
        assert ours.rows(TABLE) == rows

    def steady(self, load: Load, rows: int, warm_up: int, seconds: int) -> None:
        """Single-row updates at a constant rate."""
        load.prepare(self.source)
        width = float(self.source.value(f"SELECT avg(pg_column_size({TABLE})) FROM {TABLE} WHERE id <= 10000"))
        ours = Ours(self.source, self.scratch / "steady", TABLE)
        with ours.process() as process:
            self._wait_for_copy(ours, process, rows)
            count = (warm_up + seconds) * RATE
            with freshness.writing(self.dsn, functools.partial(update, TABLE, rows, 1, 0), count, RATE) as written:
                time.sleep(warm_up)
                before = Reading.of(ours, process)
                sent = written.result()
                after = Reading.of(ours, process)
            ours.wait(self.source.mark(), process)
        self.source.drop(TABLE)
        delay = (freshness.visible(ours.path(TABLE), count) - sent)[sent >= before.at]
        self._report_steady(f"{RATE} updates/s on {rows:,} rows", before, after, delay, width)
        freshness.plot(sent[sent >= before.at] - before.at, delay, RESULTS / "freshness-updates.png")
        ours.remove()

    def _report_steady(self, name: str, before: Reading, after: Reading, delay: freshness.Times, width: float) -> None:
        wall = after.at - before.at
        used = after.usage - before.usage
        per_hour = 3600 / wall / 1e9
        growth = (after.lake_bytes - before.lake_bytes) * per_hour
        log = (after.log_bytes - before.log_bytes) * per_hour
        parts = {
            "log_gb_per_hour": round(log, 3),
            "data_gb_per_hour": round(growth - log, 3),
            "lake_bytes": after.lake_bytes,
        }
        self.report.value(f"{name}: growth of the lake", f"{growth:.2f} GB/hour", "≤ 3 GB/hour", growth <= 3, **parts)
        changed = len(delay) * width
        written = used.written_bytes / changed
        more = {"row_bytes": round(width), "changed_bytes": round(changed), "written_bytes": used.written_bytes}
        self.report.value(
            f"{name}: bytes written", f"{written:.0f} × changed bytes", "≤ 40 × changed bytes", written <= 40, **more
        )
        median, high = np.percentile(delay, [50, 99])
        times = {"updates": len(delay), "rate": round(len(delay) / wall), "max_seconds": round(float(delay.max()), 2)}
        self.report.value(f"{name}: freshness, median", f"{median:.2f} s", "≤ 1 s", median <= 1, **times)
        self.report.value(f"{name}: freshness, 99th percentile", f"{high:.2f} s", "≤ 3 s", high <= 3, **times)
        cores = used.cpu_seconds / wall
        self.report.value(f"{name}: CPU", f"{cores:.2f} cores", "≤ 0.7 cores", cores <= 0.7)

    def merge(self, load: Load, rows: int, count: int, warm_up: int) -> None:
        """A batch of updates, ours compared with Spark's MERGE, both warm."""
        load.prepare(self.source)
        ours = Ours(self.source, self.scratch / "merge", TABLE)
        directory = self.scratch / "delta_spark"
        theirs = directory / "table"
        with (
            ours.process() as process,
            delta_spark(directory, memory="4g") as spark,
            psycopg.connect(self.dsn, row_factory=dict_row) as writer,
        ):
            self._wait_for_copy(ours, process, rows)
            properties = "TBLPROPERTIES (delta.enableDeletionVectors = true)"
            copy = f"AS SELECT * FROM delta.`{ours.path(TABLE)}`"
            spark.sql(f"CREATE TABLE delta.`{theirs}` USING delta {properties} {copy}")
            numbers = itertools.count()

            def merge() -> Run:
                change = update(TABLE, rows, count, 0, next(numbers))
                return merge_rows(spark, theirs, update_rows(writer, change, ours))

            def apply() -> Run:
                """Commit the transaction that `merge` has taken the rows from."""
                [position] = writer.execute("SELECT pg_current_wal_insert_lsn()::text AS lsn").fetchall()
                before, began = usage(process), time.perf_counter()
                writer.commit()
                ours.wait(Lsn.parse(position["lsn"]), process)
                return Run(time.perf_counter() - began, (usage(process) - before).cpu_seconds, 0)

            for _ in range(warm_up):  # the JVM compiles for several rounds
                merge(), apply()
            name = f"a batch of {count:,} updates on {rows:,} rows"
            self.report.ratio(name, 0.15, "Spark's MERGE", merge, apply, self.rounds, cpu=True)
            assert delta_spark_scan(spark, ours.path(TABLE)) == delta_spark_scan(spark, theirs)
        self.source.drop(TABLE)
        ours.remove()

    def scan(self, load: Load, rows: int, transactions: int, each: int) -> None:
        """Full scans after updates, compared with the same rows freshly written."""
        load.prepare(self.source)
        updated = Ours(self.source, self.scratch / "updated", TABLE)
        with updated.process() as process:
            self._wait_for_copy(updated, process, rows)
            change = functools.partial(update, TABLE, rows, each, 0)
            with freshness.writing(self.dsn, change, transactions, RATE) as written:
                written.result()
            updated.wait(self.source.mark(), process)
        self.source.drop(TABLE)
        fresh = Ours(self.source, self.scratch / "fresh", TABLE)
        with fresh.process() as process:
            self._wait_for_copy(fresh, process, rows)
        self.source.drop(TABLE)
        name = f"scan of {rows:,} rows after {transactions * each:,} updates"
        with (
            delta_spark(self.scratch / "delta_spark") as with_jar,
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,  # another JVM
        ):
            engine, in_duckdb = duckdb_scan()
            scans: list[tuple[str, float | None, Callable[[Ours], object]]] = [
                (engine, 1.3, in_duckdb),
                ("Spark", 1.3, lambda ours: pool.submit(spark_scan, ours.lake).result()),
                ("Spark with delta-spark", None, lambda ours: delta_spark_scan(with_jar, ours.path(TABLE))),
            ]
            for engine, bar, run in scans:
                for _ in range(WARM_UP_SCANS):  # the JVM compiles for several rounds
                    assert run(fresh) == run(updated)
                both = functools.partial(timed_call, run, fresh), functools.partial(timed_call, run, updated)
                self.report.ratio(f"{name}, in {engine}", bar, "freshly written", *both, self.rounds)
        updated.remove()
        fresh.remove()

    def sizes(self, small: int, large: int, seconds: int) -> None:
        """The same rate of updates on a small and on a large table, in turn."""
        sizes = {"small": small, "large": large}
        for table, rows in sizes.items():
            updates(table, rows).prepare(self.source)
        self.source.sql.execute("CREATE PUBLICATION sizes FOR TABLE small, large")
        ours = Ours(self.source, self.scratch / "sizes", "sizes")
        ours.run("sizes", self.source.end())
        times: dict[str, list[float]] = {table: [] for table in sizes}
        sizes_of_batches: dict[str, list[float]] = {table: [] for table in sizes}
        with ours.following() as batches:
            for number in range(self.rounds + 1):
                for table, rows in sizes.items():
                    before, first = disk_bytes(ours.path(table)), len(batches)
                    change = functools.partial(update, table, rows, 1, number)
                    with freshness.writing(self.dsn, change, seconds * RATE, RATE) as written:
                        written.result()
                    done = wait_for_changes(batches, first, seconds * RATE)
                    if number:  # the first round is not counted
                        times[table] += [each.seconds for each in done]
                        sizes_of_batches[table].append((disk_bytes(ours.path(table)) - before) / len(done))
        name = f"{RATE} updates/s on {small:,} and {large:,} rows"
        for what, values in (("seconds", times), ("bytes", sizes_of_batches)):
            medians = {table: statistics.median(each) for table, each in values.items()}
            ratio = max(medians.values()) / min(medians.values())
            found = {f"{what}_{table}": round(median, 4) for table, median in medians.items()}
            batch = {f"batches_{table}": len(each) for table, each in times.items()}
            self.report.value(f"{name}: {what} per batch", round(ratio, 2), "≤ 1.3", ratio <= 1.3, **found, **batch)
        ours.remove()
        self.source.drop("sizes")
        self.source.sql.execute("DROP PUBLICATION sizes; DROP TABLE small, large")

    def tables(self, many: int, seconds: int) -> None:
        """Changes of three tables each second, in a subscription with three tables and in one with many."""
        print(f"making {many:,} tables …")
        for number in range(many):
            self.source.sql.execute(f"CREATE TABLE t{number} (id int PRIMARY KEY, number int)".encode())
            self.source.sql.execute(f"INSERT INTO t{number} SELECT i, -1 FROM generate_series(1, 100) i".encode())
        both = {}
        for publication, count in (("few", 3), ("many", many)):
            names = ", ".join(f"t{number}" for number in range(count))
            self.source.sql.execute(f"CREATE PUBLICATION {publication} FOR TABLE {names}".encode())
            both[publication] = Ours(self.source, self.scratch / publication, publication)
            both[publication].run(publication, self.source.end())
        times: dict[str, list[float]] = {publication: [] for publication in both}
        for _ in range(self.rounds):
            for publication, ours in both.items():
                with ours.following() as batches:
                    first = len(batches)
                    with freshness.writing(self.dsn, update_three, seconds, 1) as written:
                        written.result()
                    wait_for_changes(batches, first, seconds * 3)
                    times[publication] += ours.batch_seconds[-seconds // 2 :]  # the others warm up
        ratio = statistics.median(times["many"]) / statistics.median(times["few"])
        self.report.value(
            f"three tables that change each second: batch time with {many:,} tables, compared with 3",
            round(ratio, 2),
            "≤ 1.5",
            ratio <= 1.5,
            limit_seconds=[round(statistics.median(times["few"]), 3)],
            seconds=[round(statistics.median(times["many"]), 3)],
        )
        for publication, ours in both.items():
            ours.remove()
            self.source.drop(publication)


def update_rows(writer: psycopg.Connection[Any], change: tuple[bytes, list[Any]], ours: Ours) -> pa.Table:
    """Update rows, without a commit. Returns the new rows."""
    statement, parameters = change
    rows = writer.execute(statement + b" RETURNING *", parameters).fetchall()
    return pa.Table.from_pylist(rows, pa.schema(DeltaTable(ours.path(TABLE)).schema().to_arrow()))


def merge_rows(spark: DeltaSpark, table: Path, rows: pa.Table) -> Run:
    """Time a MERGE of these rows."""
    file = table.with_name("updates.parquet")
    pq.write_table(rows, file)
    done = spark.sql(
        f"MERGE INTO delta.`{table}` t USING parquet.`{file}` s ON t.id = s.id WHEN MATCHED THEN UPDATE SET *"
    )
    assert done.rows[0]["num_affected_rows"] == len(rows)
    [last] = spark.sql(f"DESCRIBE HISTORY delta.`{table}` LIMIT 1").rows
    assert last["operationMetrics"]["numTargetRowsCopied"] == "0"  # it has used deletion vectors
    return Run(done.seconds, done.cpu_seconds, 0)


def scan_query(table: str) -> str:
    return f"SELECT {AGGREGATES} FROM {table}"


def timed_call(run: Callable[[Ours], object], ours: Ours) -> Run:
    began = time.perf_counter()
    run(ours)
    return Run(time.perf_counter() - began, 0, 0)


def duckdb_scan() -> tuple[str, Callable[[Ours], object]]:
    """A scan in DuckDB: by its Delta extension, or by `Point.duckdb` if the extension cannot be installed."""
    connection = duckdb.connect()

    def by_extension(ours: Ours) -> object:
        return connection.sql(scan_query(f"delta_scan('{ours.path(TABLE)}')")).to_arrow_table()

    def by_point(ours: Ours) -> object:
        relation = walmere.lake(ours.lake).latest().duckdb(TABLE, connection)
        return relation.aggregate(AGGREGATES).to_arrow_table()

    try:
        connection.execute("INSTALL delta; LOAD delta")
    except duckdb.Error:
        return "DuckDB (Point.duckdb)", by_point
    return "DuckDB (delta_scan)", by_extension


def spark_scan(lake: Path) -> None:
    """Runs in a process of the pool, which keeps its session."""
    read_all(walmere.read(plain_session(2), lake, TABLE))


def delta_spark_scan(spark: DeltaSpark, table: Path) -> list[dict[str, Any]]:
    return spark.sql(scan_query(f"delta.`{table}`")).rows


def wait_for_changes(batches: list[list[Applied]], first: int, count: int) -> list[Applied]:
    """Wait until the batches from `first` on have applied this many changes. Returns the results with changes."""
    while True:
        done = [each for batch in batches[first:] for each in batch if each.changes]
        if sum(each.changes for each in done) >= count:
            return done
        time.sleep(0.02)


def update_three(number: int) -> tuple[bytes, list[Any]]:
    """A transaction that changes three tables."""
    one = "UPDATE t{} SET number = %s WHERE id = %s"
    statement = f"WITH a AS ({one.format(0)}), b AS ({one.format(1)}) {one.format(2)}"
    return statement.encode(), [number, 1 + number % 100] * 3


def main() -> None:
    """Run all parts, or those of `--only`."""
    bars = ("steady", "merge", "scan", "sizes", "backlog", "mixed", "tables")
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=bars, default=bars)
    arguments = parser.parse_args()
    scale = 100 if arguments.small else 1
    report = Report("updates", "random updates of large tables", {"server": arguments.server, "small": arguments.small})
    with (
        source(arguments.server) as made,
        native(made, arguments.server) as subscriber,
        tempfile.TemporaryDirectory(prefix="walmere-bench-") as directory,
    ):
        bench = Bench(made, Path(directory), report, arguments.rounds)
        rows = 10_000_000 // scale
        load = updates(TABLE, rows, 1_000_000 // scale)
        if "steady" in arguments.only:
            bench.steady(load, rows, 20 // min(scale, 4), 180 // min(scale, 9))
        if "merge" in arguments.only:
            bench.merge(load, rows, 10_000 // min(scale, 10), 10 // min(scale, 5))
        if "scan" in arguments.only:
            bench.scan(load, rows, 18_000 // scale, 20)
        if {"sizes", "backlog", "mixed", "tables"} & set(arguments.only):
            report.facts["spark_start_seconds"], report.facts["warm_up_seconds"] = warm(made, Path(directory))
        if "backlog" in arguments.only:
            bench.backlog(f"{1_000_000 // scale:,} updates on {rows:,} rows", load, {NATIVE: 1.5}, subscriber)
        if "mixed" in arguments.only:
            _inserts_and_mixed(bench, scale, subscriber)
        if "tables" in arguments.only:
            bench.tables(max(10, 1000 // scale), 20 // min(scale, 2))
        if "sizes" in arguments.only:  # last, since it needs the most space on the disk
            made.sql.execute(f"DROP TABLE IF EXISTS {TABLE}".encode())
            bench.sizes(1_000_000 // scale, 40_000_000 // scale, 30 // min(scale, 6))
    report.finish()


def _inserts_and_mixed(bench: Bench, scale: int, subscriber: Native) -> None:
    count, existing = 300_000 // scale, 1_000_000 // scale
    name = f"{count:,} mixed one-row transactions on {existing:,} rows"
    bench.backlog(name, mixed(count, existing), {RECVLOGICAL: 0.8}, subscriber)
    transactions = 2000 // scale
    bench.backlog(f"{transactions * 1000:,} inserts", inserts(transactions), {RECVLOGICAL: None}, subscriber)


if __name__ == "__main__":
    main()
