"""A subscription for benchmarks. Spark is already running: its start-up time is reported separately."""

from __future__ import annotations

import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

import walmere
from bench.side_by_side import Run
from bench.source import Source, scratch_config
from walmere import config as configuration
from walmere.apply.worker import Applied
from walmere.errors import LakeError
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import TableName
from walmere.running import launcher
from walmere.sinks.delta.sink import DeltaSink
from walmere.spark.apply import OnBatch
from walmere.subscription.launcher import Launcher


class OurSubscription:
    """A subscription with its directory."""

    target = 'path = "lake"'
    """The section [target] of its configuration."""

    def __init__(self, source: Source, directory: Path, publication: str) -> None:
        self.source = source
        self.directory = directory
        self.publication = publication
        self.batch_seconds: list[float] = []
        """How long each batch took."""
        directory.mkdir(exist_ok=True)

    def config_file(self, slot: str | None = None) -> Path:
        """Write the configuration. The slot has the name of the publication by default."""
        slot = slot or self.publication
        return scratch_config(self.source.server, self.directory, self.publication, slot, target=self.target)

    def launcher(self, slot: str, on_batch: OnBatch = lambda *_: None) -> Launcher:
        file = self.config_file(slot)
        return launcher(configuration.load(file), file, on_batch=on_batch, on_batch_end=self.batch_seconds.append)

    def run(self, slot: str, end: str) -> Run:
        """Do what `walmere run --until` does, without starting Spark. The time is that of the last commit of changes.

        A run that ends by itself then does a round of upkeep, and stops its processes. That is only printed.
        """
        committed: list[float] = []
        began = time.perf_counter()
        self.launcher(slot, lambda *_: committed.append(time.perf_counter())).run(Lsn.parse(end))
        ended = time.perf_counter()
        if committed:
            print(f"    batches committed after {' '.join(f'{each - began:.1f}' for each in committed)} s")
            print(f"    upkeep and the end of the run took {ended - committed[-1]:.2f} s more")
        return Run((committed or [ended])[-1] - began, 0, 0)

    @contextmanager
    def following(self) -> Iterator[list[list[Applied]]]:
        """Run it in this process while the block runs. Yields the results of its batches."""
        batches: list[list[Applied]] = []
        made = self.launcher(self.publication, lambda applied, _: batches.append(applied))
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

    @contextmanager
    def process(self) -> Iterator[psutil.Popen]:
        """Have `walmere run` in its own process while the block runs."""
        subscription = walmere.Subscription(self.config_file())
        process = psutil.Popen([sys.executable, "-m", "walmere", "run", "-c", str(subscription.file)])
        try:
            while not subscription.running:
                time.sleep(0.05)
                assert process.poll() is None
            yield process
        finally:
            process.terminate()
            process.wait()

    def rows(self, table: str) -> int:
        """The number of rows in the target."""
        raise NotImplementedError

    def keep(self) -> Callable[[], None]:
        """Save all files as they are now. The returned function restores them."""
        kept = self.directory.with_name(self.directory.name + ".kept")
        shutil.copytree(self.directory, kept)

        def restore() -> None:
            shutil.rmtree(self.directory)
            shutil.copytree(kept, self.directory)

        return restore

    def remove(self) -> None:
        shutil.rmtree(self.directory)


class Ours(OurSubscription):
    """A subscription whose target is a lake, in the same directory."""

    def wait(self, lsn: Lsn, process: psutil.Popen) -> None:
        """Wait until the process has applied what committed after this LSN."""
        while self.point() <= lsn:
            time.sleep(0.01)
            assert process.poll() is None

    @property
    def lake(self) -> Path:
        return self.directory / "lake"

    def point(self) -> Lsn:
        """The LSN of the newest point; 0/0 if there is none."""
        try:
            return walmere.lake(self.lake).latest().lsn
        except LakeError:
            return INVALID_LSN

    def path(self, table: str) -> Path:
        return Path(self.sink().location(TableName("public", table)))

    def sink(self) -> DeltaSink:
        return DeltaSink(str(self.lake))

    def rows(self, table: str) -> int:
        counted = QueryBuilder().register("t", DeltaTable(self.path(table))).execute("SELECT count(*) AS n FROM t")
        return int(pa.table(counted)["n"][0].as_py())


def warm(
    source: Source, directory: Path, make: Callable[[Source, Path, str], OurSubscription] = Ours
) -> tuple[float, float]:
    """Start Spark, and run a small subscription once. Returns the seconds that each took."""
    began = time.perf_counter()
    source.sql.execute("CREATE TABLE warm (id int PRIMARY KEY); CREATE PUBLICATION warm FOR TABLE warm")
    source.sql.execute("INSERT INTO warm SELECT generate_series(1, 1000)")
    ours = make(source, directory / "warm", "warm")
    made = ours.launcher("warm")
    started = time.perf_counter() - began
    made.run(Lsn.parse(source.end()))
    source.sql.execute("INSERT INTO warm SELECT generate_series(1001, 2000); UPDATE warm SET id = -id")
    ours.run("warm", source.end())
    assert ours.rows("warm") == 2000
    ours.remove()
    source.drop("warm")
    return started, time.perf_counter() - began - started


def median(runs: list[Run]) -> float:
    return statistics.median(run.seconds for run in runs)
