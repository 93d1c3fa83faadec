"""Whether the executors of a cluster can run our tasks: they need Walmere, in the versions that the driver has.

This is checked twice. When a run starts, executors start their Python once, outside of PySpark: this names all that is
missing, also the interpreter itself. But executors may join later, with another environment. So each worker compares
versions at the start of its first task.
"""

from __future__ import annotations

import functools
import json
import logging
import platform
import re
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext

from walmere.errors import ExecutorUnsuitable, SparkError
from walmere.spark.daemon import MODULE
from walmere.spark.interpreters import is_local
from walmere.spark.placement import tagged
from walmere.version import __version__

_log = logging.getLogger(__name__)

_WAIT: Final = 15.0
"""Warn after this many seconds without an executor."""
_DOING: Final = "starting Python on the executors"
_GUIDE: Final = "`walmere help cluster`, section Python on the executors"
_CANNOT_RUN: Final = re.compile(r'Cannot run program "([^"]*)"[^\n]*')
_DAEMON: Final = re.compile(rf"{re.escape(MODULE)}'s (?:stdout|standard output)")
_OTHER_PYTHON: Final = re.compile(r"PYTHON_VERSION_MISMATCH\] ([^\n]*)")
_NO_WALMERE: Final = re.compile(r"No module named 'walmere\b")
_PROGRAM: Final = """
import importlib.util, json, os, platform, sys

def installed(name):
    try:
        from importlib.metadata import version
        return version(name)
    except Exception:
        return None

def walmere():
    found = importlib.util.find_spec("walmere")
    if found is None or found.origin is None:
        return None
    names = {}
    with open(os.path.join(os.path.dirname(found.origin), "version.py")) as file:
        exec(file.read(), names)
    return names["__version__"]

found = {"walmere": walmere(), "pyarrow": installed("pyarrow"), "python": "%d.%d" % sys.version_info[:2]}
print(json.dumps(dict(found, host=platform.node(), executable=sys.executable)))
"""
"""Runs with any Python 3. The executor may not have Walmere."""


@dataclass(frozen=True, slots=True)
class Versions:
    """What driver and executors must have in common."""

    walmere: str
    python: str  # major.minor: functions are sent as bytecode
    pyarrow: str  # major

    @staticmethod
    def here() -> Versions:
        """The versions of this process."""
        return Versions(__version__, "{}.{}".format(*sys.version_info[:2]), _major(metadata.version("pyarrow")))


def require_same(driver: Versions) -> None:
    """In a task: raise ExecutorUnsuitable if the versions of this worker are not the driver's."""
    here = _here()
    if here != driver:
        raise _unsuitable(platform.node(), sys.executable, here, driver)


@functools.cache
def _here() -> Versions:
    return Versions.here()


def require_suitable(context: SparkContext) -> None:
    """On the driver: raise ExecutorUnsuitable if executors lack Walmere or have other versions. Waits for executors."""
    if is_local(context.master or ""):
        return
    driver = Versions.here()
    for text in _ask(context):
        found: dict[str, Any] = json.loads(text)
        if found["walmere"] is None or found["pyarrow"] is None:
            missing = "Walmere" if found["walmere"] is None else "pyarrow"
            wrong = f"{found['executable']} on {found['host']} does not have {missing}"
            raise ExecutorUnsuitable(_DOING, wrong, _hint(driver))
        has = Versions(found["walmere"], found["python"], _major(found["pyarrow"]))
        if has != driver:
            raise _unsuitable(found["host"], found["executable"], has, driver)


def _ask(context: SparkContext) -> Iterable[str]:
    """What the Python of executors says about itself."""
    waiting = threading.Timer(_WAIT, _log.warning, ["waiting for %s to provide executors", context.master])
    waiting.daemon = True
    waiting.start()
    tasks = max(2, context.defaultParallelism)
    items = context._jsc.parallelize(list(range(tasks)), tasks)
    try:
        with tagged(context, "check"):
            return list(items.pipe([context.pythonExec, "-c", _PROGRAM], context.environment).collect())
    except Py4JJavaError as error:
        text = str(error.java_exception)
        raise translate(text) or SparkError(_DOING, text.partition("\n")[0]) from None
    finally:
        waiting.cancel()


def translate(text: str) -> ExecutorUnsuitable | None:
    """The error of a job, by Spark's text, if the Python of an executor could not run; None: it is another error."""
    driver = Versions.here()
    if found := _CANNOT_RUN.search(text):
        wrong = f"an executor cannot run {found[1]}: {found[0].rpartition('error=')[2]}"
        return ExecutorUnsuitable(_DOING, wrong, f"set spark.pyspark.python to a Python of the executors: {_GUIDE}")
    if _DAEMON.search(text) or _NO_WALMERE.search(text):
        wrong = "the Python of an executor does not have Walmere, or cannot import it"
        return ExecutorUnsuitable(_DOING, wrong, f"{_hint(driver)}; the log of the executor has the error of Python")
    if found := _OTHER_PYTHON.search(text):
        return ExecutorUnsuitable(_DOING, found[1], _hint(driver))
    return None


def _unsuitable(host: str, executable: str, has: Versions, driver: Versions) -> ExecutorUnsuitable:
    names = {"walmere": "Walmere", "python": "Python", "pyarrow": "pyarrow"}
    differ = [field for field in names if getattr(has, field) != getattr(driver, field)]
    there, here = (", ".join(f"{names[field]} {getattr(which, field)}" for field in differ) for which in (has, driver))
    return ExecutorUnsuitable(_DOING, f"{executable} on {host} has {there}; the driver has {here}", _hint(driver))


def _hint(driver: Versions) -> str:
    return f"install walmere {driver.walmere} for Python {driver.python} on every executor, or use an archive: {_GUIDE}"


def _major(version: str) -> str:
    return version.partition(".")[0]
