"""Class data sharing: an archive of Spark's classes, from which a JVM starts in half of the time.

Most of Spark's start is loading some ten thousand classes. Java can write those that it has loaded to an archive at its
end (`-XX:ArchiveClassesAtExit`), and map them into memory at the next start. `make` does that once, for the Java and
the Spark of this machine; it takes about 15 seconds, and 140 MB in the user's cache directory. A JVM ignores an archive
that is not of its version and its class path.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyspark
from pyspark import SparkContext
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from walmere.errors import SparkError
from walmere.local_cache import user_cache
from walmere.spark.jvm import JVM_OPTIONS

_TIMEOUT: Final = 300.0
"""Seconds for the JVM to write the archive."""
_UNUSED_SECONDS: Final = 30 * 86_400.0
_VARIABLE: Final = "WALMERE_WARM"
_QUIET: Final = "-Xlog:cds=off -Xlog:cds+dynamic=off"
_DOING: Final = "archiving Spark's classes"
_EXERCISE: Final = 2
"""Raise this when `_exercise` uses other parts of Spark: then a new archive is made."""


def archive(java: str) -> Path:
    """The archive for this Java (what `require_java` returns) and this Spark. It may not exist."""
    home = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)
    jars = sorted((each.name, each.stat().st_size) for each in (home / "jars").glob("*.jar"))
    name = hashlib.sha256(repr((java, str(home), jars, _EXERCISE)).encode()).hexdigest()[:16]
    return user_cache() / f"spark-{name}.jsa"


def options(java: str) -> str:
    """The options of a JVM that uses the archive, if there is one."""
    found = archive(java)
    try:
        os.utime(found)  # one that is not used for long is deleted
    except OSError:
        return ""
    return f"-XX:SharedArchiveFile={found} {_QUIET}"


def make_later(java: str) -> None:
    """Make the archive in a process of its own, at low priority, unless it exists, or WALMERE_WARM is 0."""
    if not archive(java).is_file() and os.environ.get(_VARIABLE) != "0":
        subprocess.Popen(
            ["nice", "-n", "19", sys.executable, "-m", "walmere", "warm"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def make(java: str) -> Path:
    """Make the archive, unless it exists: a process starts Spark, and uses what runs use of it."""
    made = archive(java)
    made.parent.mkdir(parents=True, exist_ok=True)
    with (made.parent / "lock").open("w") as lock:  # another process may be making it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file():
            _make(made)
    return made


def _make(made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent, prefix=".making-") as directory:
        file = Path(directory, made.name)
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, str(file)],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
                check=False,
                cwd=directory,
            )
        except subprocess.TimeoutExpired:
            raise SparkError(_DOING, f"it took longer than {_TIMEOUT:.0f} s", "try again on a quiet machine") from None
        if not file.is_file():
            last = (done.stderr.strip().splitlines() or ["Java has written none"])[-1]
            raise SparkError(_DOING, last, "runs work without an archive; they only start more slowly")
        file.rename(made)
    with contextlib.suppress(OSError):
        for old in made.parent.glob("spark-*.jsa"):
            if old.stat().st_mtime < time.time() - _UNUSED_SECONDS:
                old.unlink()


class _Ticks(DataSource, DataSourceStreamReader):
    """A stream of one row per batch, which uses the same classes as format `pgoutput`."""

    @classmethod
    def name(cls) -> str:
        return "ticks"

    def schema(self) -> str:
        return "n long"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return self

    def initialOffset(self) -> dict[str, int]:
        return {"n": 0}

    def latestOffset(self) -> dict[str, int]:
        return {"n": 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition(1)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        yield (partition.value,)


def _use(rows: DataFrame, _: int) -> None:
    """Do what programs do with a batch: aggregate and shuffle it."""
    rows.count()
    rows.groupBy("n").agg({"n": "sum"}).collect()


def _exercise(file: Path) -> None:
    """Start Spark and do what runs and programs do, so that Java loads their classes, and archives them at its end."""
    from walmere.spark.session import session  # noqa: PLC0415  it imports this module
    from walmere.spark.tasks import SparkTasks  # noqa: PLC0415

    settings = {"spark.driver.extraJavaOptions": f"{JVM_OPTIONS} -XX:ArchiveClassesAtExit={file}"}
    spark = session("class data", "local[1]", settings)
    SparkTasks(spark, "class data").map(str, [1])
    spark.dataSource.register(_Ticks)
    with tempfile.TemporaryDirectory() as checkpoint:
        writer = spark.readStream.format("ticks").load().writeStream.foreachBatch(_use)
        query = writer.option("checkpointLocation", checkpoint).start()
        query.processAllAvailable()
        query.stop()
    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    spark.stop()
    if gateway is not None and process is not None:
        gateway.shutdown()
        process.stdin.close()
        process.wait(_TIMEOUT)


if __name__ == "__main__":
    _exercise(Path(sys.argv[1]))
