"""How many tasks run at the same time, on which executor a task should run, and the tags of our jobs.

An executor has caches: key indexes, and blocks of the change log. A table that always goes to the same executor finds
them there. So each task has a key, and prefers the executor that is first for this key in an order of its own. When an
executor joins or leaves, only the keys for which it is first move. No executor gets more than its share of a batch, and
a task waits only `WAIT` for its executor: after that, it runs on any other.
"""

from __future__ import annotations

import math
import pickle
import re
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from pyspark import RDD, SparkContext
from pyspark.serializers import CPickleSerializer

from walmere.spark.interpreters import is_local

SETTING: Final = "spark.locality.wait"
WAIT: Final = "100ms"
"""Spark waits this long for the executor that a task prefers; by default, for seconds."""
_REFRESH: Final = 5.0
"""Seconds between two looks at which executors there are."""
_OF_SIZE: Final = (
    "spark.default.parallelism",
    "spark.executor.cores",
    "spark.executor.instances",
    "spark.dynamicAllocation.enabled",
    "spark.dynamicAllocation.maxExecutors",
    "spark.cores.max",
)
"""The settings that say how large the application is."""
_EXECUTOR: Final = re.compile(r"BlockManagerId\(([^,]+), ([^,]+), ")


def parallelism(context: SparkContext) -> int:
    """How many tasks the cluster runs at the same time, also if its executors have not all started yet."""
    return max(context.defaultParallelism, 0 if is_local(context.master or "") else expected_cores(_settings(context)))


def expected_cores(settings: dict[str, str]) -> int:
    """The number of cores that the application asks for; 0: it does not say."""
    if "spark.default.parallelism" in settings:
        return 0  # Spark takes it
    cores = int(settings.get("spark.executor.cores", "1"))
    name = "spark.executor.instances"
    if settings.get("spark.dynamicAllocation.enabled") == "true":
        name = "spark.dynamicAllocation.maxExecutors"
    executors = settings.get(name, "")
    found = int(executors) * cores if executors.isdigit() else 0
    most = settings.get("spark.cores.max", "")
    return min(found, int(most)) if found and most.isdigit() else found


def _settings(context: SparkContext) -> dict[str, str]:
    """Those of `_OF_SIZE` that are set. To read all settings takes more than 20 ms."""
    found = {name: context._conf.get(name) for name in _OF_SIZE}
    return {name: value for name, value in found.items() if value is not None}


@contextmanager
def tagged(context: SparkContext, name: str) -> Iterator[str]:
    """Jobs that are started in this block have a tag of their own."""
    tag = f"walmere-{name}-{uuid.uuid4().hex}"
    context.addJobTag(tag)
    try:
        yield tag
    finally:
        context.removeJobTag(tag)


class Placement:
    """Places the tasks of jobs that repeat."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        # in a session of others, a task might wait for seconds
        self._places = not is_local(context.master or "") and context._conf.get(SETTING) == WAIT
        self._executors: list[str] = []
        self._looked = -math.inf

    def items(self, work: Sequence[tuple[str, Any]]) -> RDD[Any]:
        """One item for each task, with the task's key."""
        executors = self._alive() if self._places else []
        if not executors:
            return self._context.parallelize([item for _, item in work], len(work))
        jvm: Any = self._context._jvm
        places = place([key for key, _ in work], executors)
        pairs = [
            jvm.scala.Tuple2(bytearray(pickle.dumps(item)), jvm.PythonUtils.toSeq([where]))
            for (_, item), where in zip(work, places, strict=True)
        ]
        kind = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
        made = self._context._jsc.sc().makeRDD(jvm.PythonUtils.toSeq(pairs), kind)
        return RDD(made.toJavaRDD(), self._context, CPickleSerializer())

    def _alive(self) -> list[str]:
        """The executors, as Spark writes them in the preferred locations of a task."""
        if time.monotonic() - self._looked > _REFRESH:
            status = self._context._jsc.sc().env().blockManager().master().getMemoryStatus()
            found = _EXECUTOR.findall(status.keys().mkString(" "))
            self._executors = sorted(f"executor_{host}_{number}" for number, host in found if number != "driver")
            self._looked = time.monotonic()
        return self._executors


def place(keys: Sequence[str], executors: Sequence[str]) -> list[str]:
    """An executor for each key: the same one as before, if possible, and about as many keys for each."""
    share = -(-len(keys) // len(executors))
    taken = dict.fromkeys(executors, 0)
    found: dict[int, str] = {}
    for number in sorted(range(len(keys)), key=lambda number: keys[number]):
        order = sorted(executors, key=lambda executor: zlib.crc32(f"{executor} {keys[number]}".encode()))
        found[number] = next(executor for executor in order if taken[executor] < share)
        taken[found[number]] += 1
    return [found[number] for number in range(len(keys))]
