"""Sinks whose tasks fail, die or wait where it matters, by Spark's own count of attempts; and a Spark that speculates.

Run as a program, it is `walmere run --until` on a cluster of two hosts, where a task that waits gets a second attempt
while the first goes on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark import SparkConf, SparkContext, TaskContext
from pyspark.java_gateway import launch_gateway

from walmere import config as configuration
from walmere import running as run
from walmere.errors import SinkError
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import APPEND, OVERWRITE, Mode, Net, StagedFile
from walmere.sinks.delta.merge import Found
from walmere.sinks.delta.sink import DeltaSink
from walmere.subscription.target import sink

_LONGEST = 90.0


def seen(lake: Path) -> list[str]:
    """Which attempts there were: what they did, to which table, and their number."""
    return sorted(file.name for file in (lake.parent / "attempts").glob("*"))


def _attempt(sink: DeltaSink, did: str, table: TableName) -> int:
    """Spark's number of this attempt of its task, noted where the test sees it; any attempt of a task counts from 0."""
    context = TaskContext.get()
    assert context is not None, "this is no task of Spark's"
    number = context.attemptNumber()
    _note(sink, f"{did} {table.name} {context.partitionId()} {number}")
    return number


def _note(sink: DeltaSink, what: str) -> None:
    directory = Path(sink.path).parent / "attempts"
    directory.mkdir(exist_ok=True)
    (directory / what).touch()


class FailsWhenStaged(DeltaSink):
    """The first attempt of each task writes its files, and fails then."""

    def stage(
        self,
        table: TableName,
        batches: Iterable[pa.RecordBatch],
        schema: pa.Schema | None = None,
        identity: Identity | None = None,
    ) -> list[StagedFile]:
        staged = super().stage(table, batches, schema)
        if _attempt(self, "stage", table) == 0:
            raise SinkError("staging", "the first attempt fails")
        return staged

    def stage_changes(self, table: TableName, net: Net, identity: Identity, after: Lsn | None = None) -> Found:
        found = super().stage_changes(table, net, identity, after)
        if _attempt(self, "stage", table) == 0:
            raise SinkError("staging", "the first attempt fails")
        return found


class DiesWhenApplied(DeltaSink):
    """The first attempt of each task commits its batch, and its process dies before it can say so."""

    def apply(self, table: TableName, net: Net, lsn: Lsn, identity: Identity, after: Lsn | None = None) -> int:
        version = super().apply(table, net, lsn, identity, after)
        if _attempt(self, "apply", table) == 0:
            os._exit(1)
        return version


class MeetsItsTwin(DeltaSink):
    """Each of the first two attempts waits for the other before it commits."""

    def apply(self, table: TableName, net: Net, lsn: Lsn, identity: Identity, after: Lsn | None = None) -> int:
        _attempt(self, "apply", table)
        deadline = time.monotonic() + _LONGEST
        while len(seen(Path(self.path))) < 2:
            if time.monotonic() > deadline:
                raise SinkError("waiting for another attempt", "there was none")
            time.sleep(0.002)
        return super().apply(table, net, lsn, identity, after)


class FailsBeforeTheCopyIsCommitted(DeltaSink):
    """The driver fails once when everything is staged, and the rejects are committed."""

    def commit(
        self,
        table: TableName,
        staged: Sequence[StagedFile],
        lsn: Lsn,
        mode: Mode = APPEND,
        schema: pa.Schema | None = None,
        after: Lsn | None = None,
    ) -> int:
        if mode is OVERWRITE and not seen(Path(self.path)):
            _note(self, "commit")
            raise SinkError("committing", "the first attempt fails")
        return super().commit(table, staged, lsn, mode, schema, after)


def speculating(directory: Path) -> SparkContext:
    """Spark on two hosts. On one it never speculates; so here are a master and two workers, at two addresses."""
    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.minTaskRuntime": "200ms",
        "spark.speculation.task.duration.threshold": "200ms",
    }
    conf = SparkConf().setAll(list(settings.items()))
    gateway = launch_gateway(conf)  # type: ignore[no-untyped-call]
    deploy, scala = gateway.jvm.org.apache.spark.deploy, gateway.jvm.scala
    java_conf = gateway.jvm.org.apache.spark.SparkConf().set("spark.master.rest.enabled", "false")
    master = deploy.master.Master.startRpcEnvAndEndpoint("127.0.0.1", 0, 0, java_conf)
    urls = gateway.new_array(gateway.jvm.java.lang.String, 1)
    urls[0] = f"spark://127.0.0.1:{master._1().address().port()}"
    for number, host in enumerate(("127.0.0.1", "127.0.0.2"), 1):
        place, some, none = str(directory / f"worker{number}"), scala.Some(number), scala.Option.empty()
        deploy.worker.Worker.startRpcEnvAndEndpoint(host, 0, 0, 1, 512, urls, place, some, java_conf, none)
    return SparkContext(gateway=gateway, conf=conf.setMaster(urls[0]).setAppName("speculating"))


if __name__ == "__main__":
    file = Path(sys.argv[1])
    speculating(file.parent / "spark")
    import attempts  # by its name, not as __main__: that is how tasks know its classes

    setattr(sink, "DeltaSink", attempts.MeetsItsTwin)  # noqa: B010
    run.launcher(configuration.load(file), file).run(Lsn.parse(sys.argv[2]))
