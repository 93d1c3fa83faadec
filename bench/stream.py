"""The stream, slot → committed Delta rows, compared with pg_recvlogical to /dev/null and a native subscription.

Freshness is measured without queries: every transaction writes its number, and the time just before it is sent is
recorded. Afterwards, each version of the Delta table shows which numbers it has, and its commit file when it was
written.

Run it with `python -m bench.stream [--server 15] [--rounds 3] [--small] [--only inserts mixed freshness growth]`, or
run all with `make bench`.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import psycopg
from matplotlib import pyplot

from bench.load import Load, inserts, mixed
from bench.ours import Ours, warm
from bench.side_by_side import RESULTS, Report, Run
from bench.source import Native, Source, native, options, source
from walmere.apply.worker import Applied
from walmere.names import TableName

RATE = 500
mpl.use("agg")


@dataclass(frozen=True)
class Bench:
    """A source, a scratch directory, and the report."""

    source: Source
    scratch: Path
    report: Report
    rounds: int

    def backlog(self, name: str, load: Load, bar: float, to_native: float | None, subscriber: Native) -> None:
        """Copy the table, write a backlog after the slot, then let all tools apply it in turn."""
        load.prepare(self.source)
        ours = Ours(self.source, self.scratch / load.table, load.table)
        ours.run(load.table, self.source.end())
        restore = ours.keep()
        with self.source.copy_of(load.table, f"{load.table}_kept") as kept:
            self.source.drop(load.table)
            print(f"making {name} …")
            self.source.sql.execute(load.fill.encode())
            end = self.source.end()
            rows = int(self.source.value(f"SELECT count(*) FROM {load.table}"))

            def catch_up() -> Run:
                restore()
                with self.source.copy_of(kept, load.table) as slot:
                    run = ours.run(slot, end)
                assert ours.rows(load.table) == rows
                return run

            def pg_recvlogical() -> Run:
                return self.source.recvlogical(kept, load.table, end)

            def subscription() -> Run:
                return subscriber.catch_up(load.table, load.create, load.existing, kept, end)

            self.report.ratio(name, bar, "pg_recvlogical", pg_recvlogical, catch_up, self.rounds)
            if to_native is not None:
                self.report.ratio(name, to_native, "native subscription", subscription, catch_up, self.rounds)
        ours.remove()

    @contextmanager
    def following(self, ours: Ours) -> Iterator[list[list[Applied]]]:
        """Run a subscription while the block runs. Yields the results of its batches."""
        batches: list[list[Applied]] = []
        made = ours.launcher(ours.publication, lambda applied, _: batches.append(applied))
        thread = threading.Thread(target=made.run)
        thread.start()
        try:
            while not batches:
                time.sleep(0.05)
                assert thread.is_alive()
            yield batches
        finally:
            made.stop()
            thread.join()

    def freshness(self, seconds: int) -> None:
        """Time from the commit at the source until it is visible, at a constant rate of inserts and updates."""
        self.source.sql.execute("CREATE TABLE f (id bigint PRIMARY KEY, number bigint, sent timestamptz, note text)")
        self.source.sql.execute("INSERT INTO f SELECT -i, 0, now(), md5(i::text) FROM generate_series(1, 100000) i")
        self.source.sql.execute("CREATE PUBLICATION f FOR TABLE f")
        ours = Ours(self.source, self.scratch / "f", "f")
        with self.following(ours):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # no lock shared with the driver
                sent = pool.submit(write, self.source.server.dsn(), seconds).result()
            took = sent[-1] - sent[0]
            while ours.rows("f") != int(self.source.value("SELECT count(*) FROM f")):
                time.sleep(0.1)
        visible = _visible(Path(ours.sink().location(TableName("public", "f"))), len(sent))
        delay = visible - sent
        median, high = np.percentile(delay, [50, 99])
        rate = len(sent) / took
        more = {"transactions": len(sent), "rate": round(rate), "max_seconds": round(float(delay.max()), 2)}
        name = f"freshness at {rate:.0f} transactions/s for {took:.0f} s"
        self.report.value(f"{name}, median", f"{median:.2f} s", "≤ 1 s", median <= 1, **more)
        self.report.value(f"{name}, 99th percentile", f"{high:.2f} s", "≤ 3 s", high <= 3, **more)
        _plot(sent - sent[0], delay, RESULTS / "freshness.png")
        ours.remove()
        self.source.drop("f")

    def growth(self, small: int, large: int) -> None:
        """Time 1,000 inserts into a small and into a large table, in turn."""
        for table, rows in (("small", small), ("large", large)):
            self.source.sql.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, customer int, note text)".encode())
            fill = f"INSERT INTO {table} SELECT i, i % 777, md5(i::text) FROM generate_series(1, {rows}) i"
            self.source.sql.execute(fill.encode())
        self.source.sql.execute("CREATE PUBLICATION growth FOR TABLE small, large")
        ours = Ours(self.source, self.scratch / "growth", "growth")
        ours.run("growth", self.source.end())
        seconds: dict[str, list[float]] = {"small": [], "large": []}
        with self.following(ours) as batches:
            for number in range(12):
                for table, times in seconds.items():
                    first = 20_000_000 + number * 1000
                    more = f"INSERT INTO {table} SELECT i, 0, 'new' FROM generate_series({first}, {first + 999}) i"
                    before = len(batches)
                    self.source.sql.execute(more.encode())
                    while not (done := [each for batch in batches[before:] for each in batch if each.changes]):
                        time.sleep(0.01)
                    assert sum(each.changes for each in done) == 1000
                    if number >= 2:
                        times.append(sum(each.seconds for each in done))
        medians = {table: statistics.median(times) for table, times in seconds.items()}
        ratio = medians["large"] / medians["small"]
        self.report.value(
            f"1,000 inserts into {large:,} rows, compared with {small:,}",
            round(ratio, 2),
            "≤ 1.3",
            ratio <= 1.3,
            limit_seconds=[round(each, 3) for each in seconds["small"]],
            seconds=[round(each, 3) for each in seconds["large"]],
        )
        ours.remove()
        self.source.drop("growth")


def write(dsn: str, seconds: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One transaction every 2 ms, numbered in commit order: two inserts, then an update. Returns the time of each."""
    sent = np.empty(seconds * RATE)
    began = time.time()
    with psycopg.connect(dsn, autocommit=True) as connection:
        for number in range(len(sent)):
            time.sleep(max(0.0, began + number / RATE - time.time()))
            sent[number] = time.time()
            if number % 3 < 2:
                connection.execute("INSERT INTO f VALUES (%s, %s, now(), 'new')", [number + 1, number])
            else:
                connection.execute("UPDATE f SET number = %s WHERE id = %s", [number, -1 - number * 7919 % 100000])
    return sent


def _visible(table: Path, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The time at which each transaction became visible: that of the first version with its number or a later one."""
    when = np.full(count, np.inf)
    done = 0
    for commit in sorted((table / "_delta_log").glob("*.json")):
        adds = [action["add"] for line in commit.read_text().splitlines() if "add" in (action := json.loads(line))]
        newest = max((json.loads(add["stats"])["maxValues"].get("number", -1) for add in adds), default=-1)
        if newest >= done and newest > 0:
            when[done : newest + 1] = commit.stat().st_mtime
            done = newest + 1
    return when


def _plot(sent: np.ndarray, delay: np.ndarray, path: Path) -> None:
    figure, (over_time, spread) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=[2, 1], layout="constrained")
    over_time.plot(sent, delay, ".", markersize=1)
    over_time.set(xlabel="seconds since the first transaction", ylabel="source commit → visible, s", ylim=(0, None))
    spread.plot(np.sort(delay), np.arange(1, len(delay) + 1) / len(delay) * 100)
    spread.set(xlabel="source commit → visible, s", ylabel="% of transactions", xlim=(0, None))
    for axes in (over_time, spread):
        axes.grid(alpha=0.3)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"  plotted to {path}")


def main() -> None:
    """Run all parts, or those of `--only`."""
    bars = ("inserts", "mixed", "freshness", "growth")
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=bars, default=bars)
    arguments = parser.parse_args()
    scale = 100 if arguments.small else 1
    report = Report("stream", "slot → committed Delta", {"server": arguments.server, "small": arguments.small})
    with (
        source(arguments.server) as made,
        native(made, arguments.server) as subscriber,
        tempfile.TemporaryDirectory(prefix="walmere-bench-") as directory,
    ):
        report.facts["spark_start_seconds"], report.facts["warm_up_seconds"] = warm(made, Path(directory))
        bench = Bench(made, Path(directory), report, arguments.rounds)
        if "inserts" in arguments.only:
            transactions = 2000 // scale
            bench.backlog(f"{transactions * 1000:,} inserts", inserts(transactions), 0.8, 1.3, subscriber)
        if "mixed" in arguments.only:
            rows, existing = 300_000 // scale, 1_000_000 // scale
            name = f"{rows:,} mixed one-row transactions on {existing:,} rows"
            bench.backlog(name, mixed(rows, existing), 1.2, None, subscriber)
        if "freshness" in arguments.only:
            bench.freshness(60 // min(scale, 6))
        if "growth" in arguments.only:
            bench.growth(10_000 // min(scale, 10), 10_000_000 // scale)
    report.finish()


if __name__ == "__main__":
    main()
