"""The Spark session, local or on a cluster, with the settings that tasks need. No jars are downloaded."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from walmere.errors import ConfigError, SparkUnavailable
from walmere.spark import class_data, interpreters, placement
from walmere.spark.daemon import MODULE, NICE
from walmere.spark.jvm import JVM_OPTIONS, require_alive, require_java
from walmere.spark.spark_log import log_own_to, log_to, stderr_to

_LOCAL: Final = "local[*]"
_ATTEMPTS: Final = 4  # of a task, as on a cluster
_CONNECT_TIMEOUT: Final = 5.0
"""Wait this many seconds for a master to accept a connection. Spark itself would try for more than a minute."""
_MASTER: Final = re.compile(r"(?:spark|k8s)://(?:https?://)?([^/]+)")
_PORTS: Final = {"spark": 7077, "k8s": 443}
_OF_PROGRAMS: Final = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
_OF_RUNS: Final = {
    **_OF_PROGRAMS,
    # the copy of a big table must not delay the batches of the others
    "spark.scheduler.mode": "FAIR",
    # a task holds a few segments of the log in Arrow, outside the JVM; the JVM itself only schedules
    "spark.driver.memory": "1g",
    # workers keep their imports and their open Delta tables from batch to batch
    "spark.python.worker.reuse": "true",
    "spark.python.daemon.module": MODULE,
    # they also keep memory for the next piece of a copy or batch: freeing and allocating it again takes a fifth of the
    # time of a copy
    "spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL": "system",
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
    placement.SETTING: placement.WAIT,
}
_NAMED_HERE: Final = ("spark.master", "spark.app.name")
"""What spark-submit always sets, and a session here is named by its caller."""
_NO_KEYS_ON_YARN: Final = {
    f"spark.hadoop.fs.{name}": ""
    for name in (
        *(f"{scheme}.{key}" for scheme in ("s3", "s3n") for key in ("awsAccessKeyId", "awsSecretAccessKey")),
        *(f"s3a.{key}" for key in ("access.key", "secret.key", "session.token")),
    )
}
"""Spark copies the driver's AWS_… variables to these settings of Hadoop, and on YARN writes them to files of nodes."""


def session(name: str, master: str | None, settings: Mapping[str, str], log: Path | None = None) -> SparkSession:
    """Start Spark for a run, or use the session of this process as it is. `log` gets the JVM's stderr.

    `settings` come first, then those of spark-submit, then ours. `master`: None: that of spark-submit, or local.
    """
    if master is not None:
        require_master(master)  # also if there is a session: it may be of another master
    if (active := active_session()) is not None:
        if log is not None:
            (log_to if active.sparkContext is _Started.context else log_own_to)(log)
        return active
    master = master_of(master)
    ours = dict(_OF_RUNS)
    if interpreters.is_local(master):
        ours[f"spark.executorEnv.{NICE}"] = "10"
        # otherwise Spark would not retry tasks
        master = re.sub(r"^local\[([^,\]]+)\]$", rf"local[\1,{_ATTEMPTS}]", master)
    with _builder(f"walmere {name}", master, settings, ours) as builder:
        started = _start(builder, master, log)
    _Started.context = started.sparkContext
    return started


class _Started:
    """What was started here. All other sessions belong to somebody else, and nothing of them is changed."""

    context: SparkContext | None = None


def program_session(name: str, master: str | None, settings: Mapping[str, str]) -> SparkSession:
    """Start Spark for a program of a user, or use the session of this process as it is: only a short start is set."""
    master = master or settings.get("spark.master")
    if master is not None:
        require_master(master)
    if (active := active_session()) is not None:
        return active
    master = master_of(master)
    with _builder(name, master, {**settings, "spark.master": master}, _OF_PROGRAMS) as builder:
        try:
            return builder.getOrCreate()
        except Exception as error:
            raise _not_started(master, "", error, "correct master or settings") from None


def active_session() -> SparkSession | None:
    """The session of this process; None: there is none."""
    active = SparkContext._active_spark_context
    return None if active is None or active._jsc is None else SparkSession.builder.getOrCreate()


@contextlib.contextmanager
def stopped_after_error() -> Iterator[None]:
    """Stop the session that was started in this block if it ends with an error: the next one may have others."""
    had_one = active_session() is not None
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):  # the JVM may have ended
            if not had_one and (started := active_session()) is not None:
                started.stop()
        if isinstance(error, Py4JError | OSError):
            require_alive(seconds=2.0)  # its connections are lost somewhat before its process has ended
        raise


@contextlib.contextmanager
def _builder(
    name: str, master: str, settings: Mapping[str, str], defaults: Mapping[str, str]
) -> Iterator[SparkSession.Builder]:
    """The builder of a new session. It has to be used in this block."""
    given = {name: value for name, value in _from_spark_submit().items() if name not in _NAMED_HERE}
    java_options = f"{JVM_OPTIONS} {class_data.options(require_java())}".strip()
    ours = {**defaults, "spark.driver.extraJavaOptions": java_options}
    if master == "yarn":
        ours |= _NO_KEYS_ON_YARN
    variables = {"SPARK_LAUNCHER_OPTS": JVM_OPTIONS}  # of the JVM that puts Spark's command line together
    if interpreters.is_local(master):
        variables["SPARK_LOCAL_IP"] = "127.0.0.1"  # no other machine connects to it
    missing = {variable: value for variable, value in variables.items() if variable not in os.environ}
    builder = SparkSession.builder.appName(name).master(master)
    with (
        interpreters.environment(missing),
        interpreters.variables(master, {**given, **settings}) as pythons,
    ):
        for key, value in {**ours, **given, **pythons, **settings}.items():
            builder = builder.config(key, value)
        yield builder


def master_of(configured: str | None) -> str:
    """The master of a session: of the active one, or the configured one, or that of spark-submit, or local."""
    active = SparkContext._active_spark_context
    if active is not None and active.master:
        return str(active.master)
    return configured or _from_spark_submit().get("spark.master", _LOCAL)


def _from_spark_submit() -> dict[str, str]:
    """The settings that spark-submit was called with; empty: this process was not started by it."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def _start(builder: SparkSession.Builder, master: str, log: Path | None) -> SparkSession:
    with tempfile.TemporaryDirectory() as directory:
        path = log or Path(directory, "spark.log")
        created = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with stderr_to(path), _own_signals():
                spark = builder.getOrCreate()
        except Exception as error:
            text = path.read_text(errors="replace")
            path.unlink()
            if created:
                path.parent.rmdir()
            raise _not_started(master, text, error, "correct [spark]") from None
    if log is not None:
        log_to(log)
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def require_master(master: str) -> None:
    """Raise SparkUnavailable if the master does not accept connections."""
    found = _MASTER.match(master)
    addresses = found[1].split(",") if found else []
    wrong = []
    for address in addresses:
        host, _, port = address.rpartition(":") if re.search(r":\d+$", address) else (address, "", "")
        try:
            number = int(port) if port else _PORTS[master.partition(":")[0]]
            socket.create_connection((host.strip("[]"), number), _CONNECT_TIMEOUT / len(addresses)).close()
            return
        except (OSError, ValueError, OverflowError) as error:
            wrong.append(f"{address}: {getattr(error, 'strerror', None) or error}")
    if wrong:
        hint = "start the master, or correct spark.master"
        raise SparkUnavailable("starting Spark", f"the master {master} does not answer ({'; '.join(wrong)})", hint)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the handler of SIGINT, which PySpark replaces by one that raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _not_started(master: str, jvm_log: str, error: Exception, hint: str) -> ConfigError:
    """The JVM's error, or else PySpark's, without the class names in front."""
    lines = [line.strip() for text in (jvm_log, str(error)) for line in text.splitlines()]
    errors = [line for line in lines if re.search(r"Exception: |Error: |^Invalid ", line)]
    wrong = (errors or [line for line in lines if line] or [repr(error)])[0]
    reason = re.sub(r"^.*?(Exception|Error): ", "", wrong)
    return ConfigError(f"starting Spark at {master}", reason, hint)
