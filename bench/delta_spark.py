"""Spark with the Delta jar, delta-spark, as another writer and reader of Delta tables. Also for tests.

It runs in its own process, with its own JVM: a process has only one SparkContext, and Walmere's sessions have no jar.

    with delta_spark(directory) as spark:
        spark.sql(f"SELECT count(*) AS rows FROM delta.`{path}`").rows        # [{"rows": 1000}]
        spark.load(path, readChangeFeed="true", startingVersion="3").rows

The process reads a line of JSON per command and writes a line of JSON per result. It keeps its session, so a command
can be timed when the JVM is warm. The first start downloads the jars from Maven Central; later ones find them in Ivy's
cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
from pyspark.sql import SparkSession

from bench.process_tree import usage

PACKAGE = "io.delta:delta-spark_4.1_2.13:4.4.0"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Result:
    """What a command returned. A value that JSON does not have, like a decimal, is text."""

    rows: list[dict[str, Any]]
    seconds: float
    cpu_seconds: float  # of the process and its JVM


class DeltaSpark:
    """Sends commands to the process."""

    def __init__(self, process: psutil.Popen, log: Path) -> None:
        self._process = process
        self._log = log

    def sql(self, statement: str) -> Result:
        """Run a statement, and fetch all rows."""
        return self._send({"sql": statement})

    def load(self, path: str | Path, **options: str) -> Result:
        """Read a Delta table with these options: all rows."""
        return self._send({"load": str(path), "options": options})

    def _send(self, command: dict[str, Any]) -> Result:
        before = usage(self._process).cpu_seconds
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            log = self._log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"Spark with {PACKAGE} ended with {code}:\n{log}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return Result(reply["rows"], reply["seconds"], usage(self._process).cpu_seconds - before)


@contextlib.contextmanager
def delta_spark(directory: Path, cores: int = 2, memory: str = "2g") -> Iterator[DeltaSpark]:
    """Start the process. Its log is `delta_spark.log` in the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "delta_spark.log"
    with path.open("ab") as log:
        process = psutil.Popen(
            [sys.executable, "-m", "bench.delta_spark", str(directory.absolute()), str(cores), memory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
        )
    made = DeltaSpark(process, path)
    try:
        made.sql("SELECT 1")  # fails if Spark could not start
        yield made
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # the end of the commands
        try:
            process.wait(30)
        except psutil.TimeoutExpired:
            for each in (*process.children(recursive=True), process):
                each.kill()
        process.stdout.close()


def main() -> None:
    """Run the commands of stdin."""
    directory, cores, memory = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # what the JVM prints goes to the log
        _serve(replies, directory, cores, memory)


def _serve(replies: IO[str], directory: str, cores: str, memory: str) -> None:
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {
        "spark.jars.packages": PACKAGE,
        "spark.jars.ivySettings": str(Path(__file__).with_name("ivysettings.xml")),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.driver.memory": memory,
        "spark.sql.warehouse.dir": str(Path(directory, "warehouse")),
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # the defaults, 200 and 50, are for clusters, and slow on one machine
        "spark.sql.shuffle.partitions": cores,
        "spark.databricks.delta.snapshotPartitions": cores,
    }
    builder = SparkSession.builder.appName("delta-spark").master(f"local[{cores}]")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    for line in sys.stdin:
        command = json.loads(line)
        began = time.perf_counter()
        try:
            if "sql" in command:
                frame = spark.sql(command["sql"])
            else:
                frame = spark.read.format("delta").options(**command["options"]).load(command["load"])
            rows = [row.asDict(recursive=True) for row in frame.collect()]
            reply = {"rows": rows, "seconds": time.perf_counter() - began}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply, default=str) + "\n")
        replies.flush()
    spark.stop()


if __name__ == "__main__":
    main()
