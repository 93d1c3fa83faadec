"""The Spark session, local or on a cluster, with what our tasks need of it. No jars are downloaded."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

from walmere.errors import ConfigError, NotConfigured
from walmere.spark.daemon import NICE

_JAVA: Final = 17
_PYTHON: Final = Path(__file__).with_name("python")
_ATTEMPTS: Final = 4  # of a task, as on a cluster
_DEFAULTS: Final = {
    "spark.ui.enabled": "false",
    # a big table's copy must not hold up the batches of the others
    "spark.scheduler.mode": "FAIR",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # how often the source is asked for more while it has nothing; an answer takes two processes
    "spark.sql.streaming.pollingDelay": "25ms",
    # a task holds a few segments of the log in Arrow, outside the JVM; the JVM itself only schedules
    "spark.driver.memory": "1g",
    # and it runs for a minute as often as for a month: quick to start, with little memory and few threads
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    # workers keep their imports and their open Delta tables from batch to batch
    "spark.python.worker.reuse": "true",
    "spark.python.daemon.module": "walmere.spark.daemon",
    # and the memory that one piece of a copy or batch took, for the next: giving it back and asking for it anew is a
    # fifth of a copy's time
    "spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL": "system",
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
}


def session(name: str, master: str, settings: Mapping[str, str], log: Path | None = None) -> SparkSession:
    """Start Spark, or find it running in this process. What the JVM has to say goes to the log, if there is one."""
    require_java()
    python = settings.get("spark.pyspark.python") or _python()
    os.environ.setdefault("PYSPARK_PYTHON", python)  # that alone is what PySpark goes by
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # nobody else has to reach it
        master = re.sub(r"^local\[([^,\]]+)\]$", rf"local[\1,{_ATTEMPTS}]", master)  # else no task is tried again
    builder = SparkSession.builder.appName(f"walmere {name}").master(master)
    defaults = {**_DEFAULTS, f"spark.executorEnv.{NICE}": "10"} if master.startswith("local") else _DEFAULTS
    ours = {"spark.pyspark.python": python, "spark.executorEnv.WALMERE_PYTHON": sys.executable}
    for key, value in {**defaults, **ours, **settings}.items():
        builder = builder.config(key, value)
    with tempfile.TemporaryDirectory() as directory:
        path = log or Path(directory, "spark.log")
        made = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _stderr_to(path):
                spark = builder.getOrCreate()
        except Exception as error:
            wrong = _reason(path.read_text(errors="replace"), error)
            path.unlink()
            if made:
                path.parent.rmdir()
            raise ConfigError("starting Spark", wrong, "correct [spark]") from None
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _python() -> str:
    """What Python processes are to be started with: with ours, and not with the first python3 on the PATH."""
    installed = Path(pyspark.__file__).is_file()  # not from Spark's archive, which would be missed then
    if SparkContext._gateway is not None or not installed or not os.access(_PYTHON, os.X_OK):
        return sys.executable
    os.environ["WALMERE_PYTHON"] = sys.executable  # for the JVM that is started now; one that runs would not know it
    return str(_PYTHON)


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """A child that is started meanwhile has this file as its stderr for good."""
    kept = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _reason(said: str, error: Exception) -> str:
    """What the JVM complained of, or else what PySpark made of it; without the class names in front."""
    lines = [line.strip() for text in (said, str(error)) for line in text.splitlines()]
    complaints = [line for line in lines if re.search(r"Exception: |Error: |^Invalid ", line)]
    wrong = (complaints or [line for line in lines if line] or [repr(error)])[0]
    return re.sub(r"^.*?(Exception|Error): ", "", wrong)


def require_java() -> None:
    """Say at once what is missing, instead of what py4j says about it."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    version = 0
    if java and Path(java).exists():
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
        if found := re.search(r'version "(\d+)', said):
            version = int(found[1])
    if version < _JAVA:
        has = f"Java {version} was found" if version else "no Java was found"
        raise NotConfigured(
            "starting Spark", f"it needs Java {_JAVA} or later, {has}", "apt-get install openjdk-17-jre-headless"
        )
