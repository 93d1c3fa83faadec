"""Which Python runs where.

Three kinds of Python processes take part in a job:

    the driver                  the process of `walmere run`; it runs already
    planners beside the driver  Spark starts them for a data source, on the driver's machine
    workers of the executors    Spark starts them for tasks

With a local master, workers and planners run the driver's interpreter. On a cluster, the driver's paths mean nothing:
workers run what `spark.pyspark.python` or PYSPARK_PYTHON says (a path on the executors, or one inside an unpacked
archive of `spark.archives`), or else the executor's own `python3`.

A session that a program has created itself runs the first `python3` on the PATH, unless PYSPARK_PYTHON was set before.
That is often not the program's own interpreter: `.venv/bin/python program.py`. `use_driver_python` corrects it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyspark
from pyspark import SparkContext

from walmere.errors import ConfigError

_WRAPPER: Final = Path(__file__).with_name("python")
_VARIABLE: Final = "WALMERE_PYTHON"  # read by the wrapper
_EXECUTORS_OWN: Final = "python3"
_DEFAULT: Final = "python3"  # of PySpark, if PYSPARK_PYTHON is not set
SETTING: Final = "spark.pyspark.python"


def is_local(master: str) -> bool:
    """Whether tasks run in the driver's process."""
    return master.startswith("local")


def driver_python() -> str:
    """The interpreter of this process, for processes on this machine; not the first python3 on the PATH."""
    if SparkContext._gateway is not None or not _wrapper_works():
        return sys.executable
    os.environ[_VARIABLE] = sys.executable  # read by the JVM that is started now
    return str(_WRAPPER)


def _wrapper_works() -> bool:
    installed = Path(pyspark.__file__).is_file()  # False: PySpark is imported from Spark's archive
    return installed and os.access(_WRAPPER, os.X_OK)


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
        # planners of format pgoutput run `python3`, too, but on this machine; the PATH of executors is not changed
        wanted["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    with environment(wanted):
        yield {SETTING: workers} | ({f"spark.executorEnv.{_VARIABLE}": sys.executable} if is_local(master) else {})


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process in this block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def require_python_here() -> None:
    """Raise ConfigError if the executors' Python cannot be run on this machine, too.

    PySpark has one setting for both: Spark plans the reads of a Python data source with it, beside the driver.
    """
    context = SparkContext._active_spark_context
    if context is not None and shutil.which(context.pythonExec) is None:
        raise ConfigError(
            "registering format pgoutput",
            f"Spark plans its reads with {context.pythonExec} on this machine, which is not there",
            f"set {SETTING} to a path that executors and this machine have; a link on this machine is enough",
        )


def use_driver_python() -> None:
    """Let the Python functions of a local session run this interpreter, if nobody has set another one.

    What Spark looks up by itself (`format` of a source that is not registered) is not changed: the JVM has read its
    environment when it was started.
    """
    context = SparkContext._active_spark_context  # None with Spark Connect, whose server is another process
    if context is not None and context.pythonExec == _DEFAULT and is_local(context.master or ""):
        context.environment[_VARIABLE] = sys.executable  # passed on with each function
        context.pythonExec = str(_WRAPPER) if _wrapper_works() else sys.executable
