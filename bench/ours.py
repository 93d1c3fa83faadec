"""A subscription for benchmarks. Spark is already running: its start-up time is reported separately."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from bench.side_by_side import Run
from bench.source import Source, scratch_config
from walmere import config as configuration
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.running import launcher
from walmere.sinks.delta.sink import DeltaSink
from walmere.spark.apply_query import OnBatch
from walmere.subscription.launcher import Launcher


class Ours:
    """A subscription with its directory and lake."""

    def __init__(self, source: Source, directory: Path, publication: str) -> None:
        self.source = source
        self.directory = directory
        self.publication = publication
        directory.mkdir(exist_ok=True)

    def launcher(self, slot: str, on_batch: OnBatch = lambda *_: None) -> Launcher:
        file = scratch_config(self.source.server, self.directory, self.publication, slot)
        return launcher(configuration.load(file), file, on_batch=on_batch)

    def run(self, slot: str, end: str) -> Run:
        """Do what `walmere run --until` does, without starting Spark."""
        began = time.perf_counter()
        self.launcher(slot).run(Lsn.parse(end))
        return Run(time.perf_counter() - began, 0, 0)

    def sink(self) -> DeltaSink:
        return DeltaSink(str(self.directory / "lake"))

    def rows(self, table: str) -> int:
        return int(self.sink().open(TableName("public", table)).to_pyarrow_dataset().count_rows())

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


def warm(source: Source, directory: Path) -> tuple[float, float]:
    """Start Spark, and run a small subscription once. Returns the seconds that each took."""
    began = time.perf_counter()
    source.sql.execute("CREATE TABLE warm (id int PRIMARY KEY); CREATE PUBLICATION warm FOR TABLE warm")
    source.sql.execute("INSERT INTO warm SELECT generate_series(1, 1000)")
    ours = Ours(source, directory / "warm", "warm")
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
