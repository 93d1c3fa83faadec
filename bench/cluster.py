"""A subscription on a Spark cluster: a master and two workers on this machine, lake and change log in an S3 server.

    copy        copy of a table by two workers of one core each, compared with one such worker
    inserts     a backlog of inserts that is in the change log already, likewise
    driver      CPU time and memory of the driver per batch, at 1,000 rows and at 100,000
    freshness   source commit → visible in the lake, with uploads each second. On `local[2]`; the S3 server is moto

Workers, driver, S3 server and PostgreSQL share the machine, so two workers could not be faster than one on a machine
with two cores. Therefore each worker of `copy` and `inserts`, with its executor, may use only a part of a core
(`--cores`, a CPU quota of Linux), and all others what they need. Both sides have the same quota per worker.

Run it with `python -m bench.cluster [--server 15] [--rounds 3] [--small] [--only copy inserts driver freshness]`. It
needs root.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from bench import freshness
from bench.load import inserts
from bench.on_cluster import InBucket, LimitedCluster, copy_bucket
from bench.process_tree import usage
from bench.side_by_side import RESULTS, Report, Run, timed
from bench.snapshot import fill
from bench.source import Source, options, source
from bench.store import ENVIRONMENT, WALMERE, Bucket, s3
from bench.stream import RATE, transaction
from walmere.lsn import Lsn
from walmere.spark.jvm import JVM_OPTIONS
from walmere.testing.cluster import Cluster

WORKERS = (1, 2)
WARM_ROWS = 200_000
PERIOD = 6.0
"""Seconds between two batches of `driver`."""


@dataclass
class Bench:
    """A source, a cluster, an S3 server, a scratch directory, and the report."""

    source: Source
    cluster: LimitedCluster
    bucket: Callable[[], Bucket]
    scratch: Path
    report: Report
    rounds: int
    _number: int = field(default=0, init=False)

    def subscription(self, publication: str, bucket: Bucket, workers: int) -> InBucket:
        """On an empty machine."""
        self._number += 1
        directory = self.scratch / f"{publication}{self._number}"
        settings = self.cluster.settings(workers)
        return InBucket(self.source, directory, publication, bucket, self.cluster.cluster.url, settings)

    def prepare(self) -> None:
        """Create the table that warms up executors."""
        self.source.sql.execute("CREATE TABLE warm (id bigint PRIMARY KEY, note text)")
        self.source.sql.execute("CREATE PUBLICATION warm FOR TABLE warm")

    def session(self, workers: int) -> None:
        """Have a session with so many workers, and executors that have run each kind of task."""
        if not self.cluster.use(workers):
            return
        self.source.sql.execute("TRUNCATE warm")
        ours = self.subscription("warm", self.bucket(), workers)
        for first in range(0, 4 * WARM_ROWS, WARM_ROWS):  # a copy, then batches that are divided over all executors
            note = "SELECT string_agg(md5((i + j)::text), '') FROM generate_series(1, 5) j"  # segments are compressed
            rows = f"generate_series({first}, {first + WARM_ROWS - 1}) i"
            self.source.sql.execute(f"INSERT INTO warm SELECT i, ({note}) FROM {rows}".encode())
            ours.run("warm", self.source.end())
        assert ours.rows("warm") == 4 * WARM_ROWS
        ours.remove()
        self.source.drop("warm")

    def compare(self, name: str, run: Callable[[int], Run]) -> float:
        """Time a run with one worker and with two, in turn. Returns the median of the second."""
        throttled: dict[int, list[float]] = {1: [], 2: []}
        idle: list[float] = []
        of_source: list[float] = []
        seconds: list[float] = []

        def limited(workers: int) -> Run:
            self.session(workers)
            postgres = psutil.Process(int((self.source.server.data / "postmaster.pid").read_text().split()[0]))
            before, free = usage(postgres).cpu_seconds, psutil.cpu_times().idle
            with self.cluster.limited() as throttling:
                began = time.perf_counter()
                done = run(workers)
                took = time.perf_counter() - began
            busy = sorted(throttling, key=lambda each: each.periods)[-workers:]
            throttled[workers] += [each.throttled / max(1, each.periods) for each in busy]
            if workers == max(WORKERS):
                seconds.append(done.seconds)
                of_source.append((usage(postgres).cpu_seconds - before) / took)
                idle.append((psutil.cpu_times().idle - free) / took)
            return done

        one, two = WORKERS
        self.report.ratio(name, 0.6, "one worker", lambda: limited(one), lambda: limited(two), self.rounds)
        self.report.rows[-1] |= {
            "cores_per_worker": self.cluster.cores,
            "throttled_periods": {workers: round(statistics.mean(its), 2) for workers, its in throttled.items()},
            "idle_cores_with_two_workers": round(statistics.mean(idle), 2),
            "cores_of_the_source_with_two_workers": round(statistics.mean(of_source), 2),
        }
        return statistics.median(seconds)

    def copy(self, rows: int) -> None:
        """Copy a table."""
        fill(self.source, rows)

        def copy(workers: int) -> Run:
            ours = self.subscription("b", self.bucket(), workers)
            run = ours.run("b", self.source.end())
            assert ours.rows("b") == rows
            ours.remove()
            self.source.drop("b")
            return run

        took = self.compare(f"copy of {rows:,} rows, two workers", copy)
        alone = self.source.two_copies("b").seconds
        bar = alone <= took / 2
        self.report.value("the source alone: two COPYs to /dev/null", f"{alone:.1f} s", "≤ 0.5 × two workers", bar)

    def inserts(self, transactions: int) -> None:
        """Apply a backlog. All of it is received before, so that the source is no part of it."""
        load = inserts(transactions)
        load.prepare(self.source)
        kept = self.bucket()
        self.session(max(WORKERS))
        ours = self.subscription(load.table, kept, max(WORKERS))
        ours.run(load.table, self.source.end())
        print(f"making {transactions * 1000:,} inserts …")
        self.source.sql.execute(load.fill.encode())
        end = self.source.end()
        timed([WALMERE, "receive", "-c", ours.config_file(), "--until", end])
        ours.remove()

        def catch_up(workers: int) -> Run:
            bucket = self.bucket()
            copy_bucket(kept, bucket)
            ours = self.subscription(load.table, bucket, workers)
            ours.receives = False
            run = ours.run(load.table, end)
            assert ours.rows(load.table) == transactions * 1000
            ours.remove()
            return run

        self.compare(f"backlog of {transactions * 1000:,} inserts, two workers", catch_up)
        self.source.drop(load.table)

    def driver(self, sizes: tuple[int, int], count: int) -> None:
        """Measure the driver of a running subscription while batches of one size are applied, then of the other."""
        self.cluster.use(0)
        self.source.sql.execute("CREATE TABLE d (id bigint PRIMARY KEY, note text); CREATE PUBLICATION d FOR TABLE d")
        settings = self.cluster.settings(max(WORKERS))
        # the whole heap from the start: otherwise the JVM takes more of it with time, whatever the batches are
        heap = "-Xms512m -XX:+AlwaysPreTouch"
        settings |= {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": f"{JVM_OPTIONS} {heap}"}
        ours = InBucket(self.source, self.scratch / "d", "d", self.bucket(), self.cluster.cluster.url, settings)
        first = 0
        found: dict[int, tuple[float, int]] = {}

        def batch(process: psutil.Popen, rows: int) -> None:
            """One transaction, which is one batch. Ends after a period of time that is the same for all."""
            nonlocal first
            began = time.monotonic()
            lsn = self.source.mark()
            numbers = f"generate_series({first}, {first + rows - 1}) i"
            self.source.sql.execute(f"INSERT INTO d SELECT i, repeat(md5(i::text), 4) FROM {numbers}".encode())
            first += rows
            ours.wait(lsn, process)
            time.sleep(max(0.0, PERIOD - (time.monotonic() - began)))

        with ours.process() as process:
            for rows in 3 * sizes:  # executors and JIT warm up
                batch(process, rows)
            for rows in sizes:
                before = driver_usage(process)[0]
                for _ in range(count):
                    batch(process, rows)
                cpu, memory = driver_usage(process)
                found[rows] = (cpu - before) / count, memory
                print(f"  {rows:,} rows: {found[rows][0]:.3f} CPU s per batch, {memory >> 20} MB")
        (few_cpu, few_memory), (many_cpu, many_memory) = (found[rows] for rows in sizes)
        name = f"driver: a batch of {sizes[1]:,} rows, compared with {sizes[0]:,}"
        more = {"cpu_seconds": [round(few_cpu, 3), round(many_cpu, 3)], "mb": [few_memory >> 20, many_memory >> 20]}
        self.report.value(f"{name}: CPU time", round(many_cpu / few_cpu, 2), "≤ 1.3", many_cpu <= 1.3 * few_cpu, **more)
        grown = (many_memory - few_memory) >> 20
        self.report.value(f"{name}: memory", f"{grown:+} MB", "≤ +50 MB", grown <= 50, **more)
        self.source.drop("d")

    def freshness(self, seconds: int, bucket: Bucket) -> None:
        """Time from the commit at the source until it is visible, at a constant rate of inserts and updates."""
        self.cluster.use(0)
        self.source.sql.execute("CREATE TABLE f (id bigint PRIMARY KEY, number bigint, sent timestamptz, note text)")
        self.source.sql.execute("INSERT INTO f SELECT -i, -1, now(), md5(i::text) FROM generate_series(1, 100000) i")
        self.source.sql.execute("CREATE PUBLICATION f FOR TABLE f")
        ours = InBucket(self.source, self.scratch / "f", "f", bucket)
        count = seconds * RATE
        with ours.process() as process:
            ours.wait(Lsn(0), process)
            table = f"{bucket.url}/lake/public/f"
            # so that the rate is reached on a slow disk, too; the WAL is then sent up to 0.2 s later
            dsn = f"{self.source.server.dsn()}?options=-c%20synchronous_commit%3Doff"
            with (
                freshness.polling_commits(table, bucket.options, count, 5 * seconds + 60) as polled,
                freshness.writing(dsn, transaction, count, RATE) as written,
            ):
                sent, seen = written.result(), polled.result()
        delay = seen - sent
        median, high = np.percentile(delay, [50, 99])
        rate = count / (sent[-1] - sent[0])
        name = f"freshness on moto at {rate:.0f} transactions/s for {seconds} s"
        more = {"max_seconds": round(float(delay.max()), 2)}
        self.report.value(f"{name}, median", f"{median:.2f} s", "≤ 2.5 s", median <= 2.5, **more)
        self.report.value(f"{name}, 99th percentile", f"{high:.2f} s", "stated", True, **more)
        freshness.plot(sent - sent[0], delay, RESULTS / "freshness-store.png")
        self.source.drop("f")


def driver_usage(process: psutil.Popen) -> tuple[float, int]:
    """CPU seconds and memory of a driver with its JVM, without the receiver, which reads all rows."""
    total = usage(process).cpu_seconds
    memory = process.memory_info().rss
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if "receive" in each.cmdline():
                total -= usage(each).cpu_seconds
            else:
                memory += each.memory_info().rss
    return total, memory


@contextmanager
def limited_cluster(cores: float) -> Iterator[LimitedCluster]:
    """Two workers of one core each."""
    cluster = Cluster(workers=max(WORKERS), cores=1, memory="1g", variables=ENVIRONMENT)
    limits: LimitedCluster | None = None
    try:
        cluster.start()
        limits = LimitedCluster(cluster, cores)
        yield limits
    finally:
        cluster.remove()
        if limits is not None:
            limits.remove()


def main() -> None:
    """Run all parts, or those of `--only`."""
    parts = ("copy", "inserts", "driver", "freshness")
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--cores", type=float, default=0.25, help="what a worker of copy and inserts may use of a core")
    arguments = parser.parse_args()
    scale = 100 if arguments.small else 1
    with ExitStack() as stack:
        made = stack.enter_context(source(arguments.server))
        server = stack.enter_context(s3(moto=False))
        cluster = stack.enter_context(limited_cluster(arguments.cores))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="walmere-bench-")))
        facts = {"server": arguments.server, "small": arguments.small, "s3": type(server).__name__}
        report = Report("cluster", "a subscription on a Spark cluster", facts)
        bench = Bench(made, cluster, server.bucket, scratch, report, arguments.rounds)
        bench.prepare()
        if "copy" in arguments.only:
            bench.copy(5_000_000 // scale)
        if "inserts" in arguments.only:
            bench.inserts(2000 // scale)
        if "driver" in arguments.only:
            bench.driver((1000, 100_000), 12 // min(scale, 4))
        if "freshness" in arguments.only:
            with s3(moto=True) as moto:
                bench.freshness(60 // min(scale, 6), moto.bucket())
    report.finish()


if __name__ == "__main__":
    main()
