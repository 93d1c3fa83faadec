"""The Spark session, local or on a cluster, with what our tasks need of it. No jars are downloaded."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pyspark
from pyspark import SparkContext
from pyspark.accumulators import AccumulatorTCPServer
from pyspark.sql import SparkSession

from walmere.errors import ConfigError, NotConfigured, SparkEnded, SparkUnavailable
from walmere.spark.daemon import NICE
from walmere.subscription.receiver_process import how_it_ended

_JAVA: Final = 17
_PYTHON: Final = Path(__file__).with_name("python")
_ATTEMPTS: Final = 4  # of a task, as on a cluster
_REACHING: Final = 5.0
"""Seconds that a master has to accept a connection. Spark itself would try for more than a minute."""
_MASTER: Final = re.compile(r"(?:spark|k8s)://(?:https?://)?([^/]+)")
_PORTS: Final = {"spark": 7077, "k8s": 443}
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
    require_master(master)
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
            with _stderr_to(path), _own_signals():
                spark = builder.getOrCreate()
        except Exception as error:
            wrong = _reason(path.read_text(errors="replace"), error)
            path.unlink()
            if made:
                path.parent.rmdir()
            raise ConfigError(f"starting Spark at {master}", wrong, "correct [spark]") from None
    if log is not None:
        _log_to(log)
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def require_master(master: str) -> None:
    """Refuse a master at an address where nobody answers."""
    found = _MASTER.match(master)
    addresses = found[1].split(",") if found else []
    wrong = []
    for address in addresses:
        host, _, port = address.rpartition(":") if re.search(r":\d+$", address) else (address, "", "")
        try:
            number = int(port) if port else _PORTS[master.partition(":")[0]]
            socket.create_connection((host.strip("[]"), number), _REACHING / len(addresses)).close()
            return
        except (OSError, ValueError, OverflowError) as error:
            wrong.append(f"{address}: {getattr(error, 'strerror', None) or error}")
    if wrong:
        hint = "start it, or correct spark.master"
        raise SparkUnavailable("starting Spark", f"the master {master} does not answer ({'; '.join(wrong)})", hint)


def require_alive(log: Path | None = None, seconds: float = 0.0) -> None:
    """Raise SparkEnded if the JVM has ended that was started here, or does so within these seconds."""
    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    hint = "start again; nothing is lost" + (f". If it happens again, see {log}" if log is not None else "")
    raise SparkEnded("running Spark", f"Spark's JVM {how_it_ended(code)}", hint)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """PySpark takes SIGINT for itself: it would raise KeyboardInterrupt wherever the main thread is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


class _LogFile(logging.FileHandler):
    """A log whose directory may be gone, after `walmere drop`, or whose disk may be full: then nothing is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            super().emit(record)


def _log_to(path: Path) -> None:
    """Have PySpark and py4j log beside the JVM. They log tracebacks of what we report in one line."""
    for name in ("py4j", "pyspark"):
        logger = logging.getLogger(name)
        for handler in [each for each in logger.handlers if isinstance(each, logging.FileHandler)]:
            logger.removeHandler(handler)
            handler.close()
        handler = _LogFile(path, delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    for each in logging.getLogger().handlers:
        each.addFilter(_not_from_py4j)  # a function: added once, however often
    # it prints a traceback when a worker or the JVM is gone
    setattr(AccumulatorTCPServer, "handle_error", _log_error)  # noqa: B010


def _not_from_py4j(record: logging.LogRecord) -> bool:
    """Some of it py4j logs in nobody's name."""
    if "py4j" not in Path(record.pathname).parts:
        return True
    if record.name == "root":
        logging.getLogger("py4j").handle(record)
    return False


def _log_error(*_: object) -> None:
    logging.getLogger("pyspark").exception("receiving an accumulator")


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
