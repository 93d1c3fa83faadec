"""The stream, slot → committed Delta rows, compared with pg_recvlogical to /dev/null and a native subscription.

Run it with `python -m bench.stream [--server 15] [--rounds 3] [--small] [--only inserts mixed freshness growth]`, or
run all with `make bench`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import backlog, freshness
from bench.backlog import NATIVE, RECVLOGICAL
from bench.load import inserts, mixed
from bench.ours import Ours, warm
from bench.side_by_side import RESULTS, Report
from bench.source import native, options, source

RATE = 500


class Bench(backlog.Bench):
    """The parts that are not a backlog."""

    def freshness(self, seconds: int) -> None:
        """Time from the commit at the source until it is visible, at a constant rate of inserts and updates."""
        self.source.sql.execute("CREATE TABLE f (id bigint PRIMARY KEY, number bigint, sent timestamptz, note text)")
        self.source.sql.execute("INSERT INTO f SELECT -i, -1, now(), md5(i::text) FROM generate_series(1, 100000) i")
        self.source.sql.execute("CREATE PUBLICATION f FOR TABLE f")
        ours = Ours(self.source, self.scratch / "f", "f")
        with ours.following():
            with freshness.writing(self.source.server.dsn(), transaction, seconds * RATE, RATE) as written:
                sent = written.result()
            took = sent[-1] - sent[0]
            while ours.rows("f") != int(self.source.value("SELECT count(*) FROM f")):
                time.sleep(0.1)
        visible = freshness.visible(ours.path("f"), len(sent))
        delay = visible - sent
        median, high = np.percentile(delay, [50, 99])
        rate = len(sent) / took
        more = {"transactions": len(sent), "rate": round(rate), "max_seconds": round(float(delay.max()), 2)}
        name = f"freshness at {rate:.0f} transactions/s for {took:.0f} s"
        self.report.value(f"{name}, median", f"{median:.2f} s", "≤ 1 s", median <= 1, **more)
        self.report.value(f"{name}, 99th percentile", f"{high:.2f} s", "≤ 3 s", high <= 3, **more)
        freshness.plot(sent - sent[0], delay, RESULTS / "freshness.png")
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
        with ours.following() as batches:
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


def transaction(number: int) -> tuple[bytes, list[Any]]:
    """Two inserts, then an update."""
    if number % 3 < 2:
        return b"INSERT INTO f VALUES (%s, %s, now(), 'new')", [number + 1, number]
    return b"UPDATE f SET number = %s WHERE id = %s", [number, -1 - number * 7919 % 100000]


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
            bench.backlog(
                f"{transactions * 1000:,} inserts", inserts(transactions), {RECVLOGICAL: 0.8, NATIVE: 1.3}, subscriber
            )
        if "mixed" in arguments.only:
            rows, existing = 300_000 // scale, 1_000_000 // scale
            name = f"{rows:,} mixed one-row transactions on {existing:,} rows"
            bench.backlog(name, mixed(rows, existing), {RECVLOGICAL: 1.2}, subscriber)
        if "freshness" in arguments.only:
            bench.freshness(60 // min(scale, 6))
        if "growth" in arguments.only:
            bench.growth(10_000 // min(scale, 10), 10_000_000 // scale)
    report.finish()


if __name__ == "__main__":
    main()
