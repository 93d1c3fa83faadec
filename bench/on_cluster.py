"""A subscription for benchmarks whose tasks run on a cluster, and whose lake and change log are in a bucket."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

import walmere
from bench.cpu_quota import CpuQuota, Throttling
from bench.ours import OurSubscription
from bench.source import Source
from bench.store import Bucket, with_store
from walmere import config as configuration
from walmere.errors import LakeError
from walmere.lsn import INVALID_LSN, Lsn
from walmere.object_store import open_store
from walmere.running import launcher
from walmere.spark.apply import OnBatch
from walmere.subscription.launcher import Launcher
from walmere.testing.cluster import Cluster

LOCAL = "local[2]"


class InBucket(OurSubscription):
    """A subscription whose lake and log are in a bucket."""

    receives = True

    def __init__(
        self,
        source: Source,
        directory: Path,
        publication: str,
        bucket: Bucket,
        master: str = LOCAL,
        spark: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(source, directory, publication)
        self.bucket = bucket
        self.target = f'path = "{bucket.url}/lake"'
        lines = "".join(f'"{name}" = "{value}"\n' for name, value in (spark or {}).items())
        self._spark = f'master = "{master}"\n{lines}'

    def config_file(self, slot: str | None = None) -> Path:
        file = super().config_file(slot)
        file.write_text(re.sub(r'master = "local.*"\n', self._spark, file.read_text()))
        return with_store(file, self.bucket)

    def launcher(self, slot: str, on_batch: OnBatch = lambda *_: None) -> Launcher:
        file = self.config_file(slot)
        return launcher(configuration.load(file), file, on_batch=on_batch, receives=self.receives)

    def rows(self, table: str) -> int:
        delta = DeltaTable(f"{self.bucket.url}/lake/public/{table}", storage_options=self._options)
        counted = QueryBuilder().register("t", delta).execute("SELECT count(*) AS n FROM t")
        return int(pa.table(counted)["n"][0].as_py())

    def point(self) -> Lsn:
        """The LSN of the newest point; 0/0 if there is none."""
        try:
            return walmere.lake(f"{self.bucket.url}/lake", storage_options=self.bucket.options).latest().lsn
        except LakeError:
            return INVALID_LSN

    def wait(self, lsn: Lsn, process: psutil.Popen) -> None:
        """Wait until the process has applied what committed after this LSN."""
        while self.point() <= lsn:
            time.sleep(0.02)
            assert process.poll() is None

    @property
    def _options(self) -> dict[str, str]:
        return {**self.bucket.options, "allow_http": "true"}


def copy_bucket(of: Bucket, to: Bucket) -> None:
    """Put all objects of a bucket into another one."""
    source, target = (open_store(each.url, each.options) for each in (of, to))
    for each in source.list():
        found = source.get(each.name)
        assert found is not None
        target.put(each.name, found[0])


class LimitedCluster:
    """A cluster whose workers, each with its executor, may use a part of a core."""

    def __init__(self, cluster: Cluster, cores: float) -> None:
        self.cluster = cluster
        self.cores = cores
        self.workers = 0  # of the session of this process; 0: there is no session
        self.quotas = [CpuQuota(f"worker{number}") for number in range(len(cluster.workers))]
        for worker, quota in zip(cluster.workers, self.quotas, strict=True):
            for pid in worker.pids:
                quota.add(pid)

    def settings(self, workers: int) -> dict[str, str]:
        """Settings of a driver with one executor of one core on each of so many workers."""
        return {**self.cluster.settings, "spark.cores.max": str(workers), "spark.executor.cores": "1"}

    def use(self, workers: int) -> bool:
        """End the session of this process, if it has another number of workers. Returns whether there is none now."""
        if self.workers == workers:
            return False
        if (active := SparkSession.getActiveSession()) is not None:
            active.stop()
        self.workers = workers
        return True

    @contextmanager
    def limited(self) -> Iterator[list[Throttling]]:
        """Limit the workers while the block runs. Yields a list that has their throttling at the end."""
        found: list[Throttling] = []
        for quota in self.quotas:
            quota.limit(self.cores)
        before = [quota.throttling() for quota in self.quotas]
        try:
            yield found
        finally:
            found += [quota.throttling() - its for quota, its in zip(self.quotas, before, strict=True)]
            for quota in self.quotas:
                quota.limit(None)

    def remove(self) -> None:
        """Call it when the processes of the cluster have ended."""
        for quota in self.quotas:
            quota.remove()
