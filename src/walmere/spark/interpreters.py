"""Which Python runs where.

Three kinds of Python processes take part in a job:

    the driver                  the process of `walmere run`; it runs already
    planners beside the driver  Spark starts them for a data source, on the driver's machine
    workers of the executors    Spark starts them for tasks

With a local master, workers and planners run the driver's interpreter. On a cluster, the driver's paths mean nothing:
workers run what `spark.pyspark.python` or PYSPARK_PYTHON says (a path on the executors, or one inside an unpacked
archive of `spark.archives`), or else the executor's own `python3`.

PySpark has only one setting for both, `SparkContext.pythonExec`. So our data source is registered with the driver's
interpreter, and its partitions are not read on the executors: see `planned` in `reference_source`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.udf import _wrap_function

_WRAPPER: Final = Path(__file__).with_name("python")
_EXECUTORS_OWN: Final = "python3"
SETTING: Final = "spark.pyspark.python"


def is_local(master: str) -> bool:
    """Whether tasks run in the driver's process."""
    return master.startswith("local")


def driver_python() -> str:
    """The interpreter of this process, for processes on this machine; not the first python3 on the PATH."""
    installed = Path(pyspark.__file__).is_file()  # False: PySpark is imported from Spark's archive
    if SparkContext._gateway is not None or not installed or not os.access(_WRAPPER, os.X_OK):
        return sys.executable
    os.environ["WALMERE_PYTHON"] = sys.executable  # read by the JVM that is started now
    return str(_WRAPPER)


def worker_python(master: str, settings: Mapping[str, str]) -> str:
    """The interpreter of the executors' workers."""
    default = driver_python() if is_local(master) else _EXECUTORS_OWN
    return settings.get(SETTING) or os.environ.get("PYSPARK_PYTHON") or default


@contextmanager
def variables(master: str, settings: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The settings of the interpreters. A session that is created in this block has them."""
    workers = worker_python(master, settings)
    wanted = {"PYSPARK_PYTHON": workers}  # PySpark reads only this variable
    if not is_local(master):
        wanted["PYSPARK_DRIVER_PYTHON"] = driver_python()  # with which the JVM looks up data sources
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield {SETTING: workers} | ({"spark.executorEnv.WALMERE_PYTHON": sys.executable} if is_local(master) else {})
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _OnThisMachine:
    """A SparkContext whose functions run with the driver's interpreter."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self.pythonExec = context.pythonExec if is_local(context.master or "") else driver_python()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def register(spark: SparkSession, source: type[DataSource]) -> None:
    """What `spark.dataSource.register` does, for a source whose processes all run beside the driver."""
    context = spark.sparkContext
    wrapped = _wrap_function(_OnThisMachine(context), source)  # type: ignore[arg-type]
    make = "org.apache.spark.sql.execution.datasources.v2.python.UserDefinedPythonDataSource"
    made = getattr(context._jvm, make)(wrapped)
    spark._jsparkSession.dataSource().registerPython(source.name(), made)
