"""Runs a function over items on Spark's executors, one task per item."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, Final, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import RDD, Accumulator, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from walmere.errors import WalmereError
from walmere.spark.executors import Versions, require_same
from walmere.spark.failures import Failure, Failures, attempts, from_spark, raise_first, result_or_failure
from walmere.spark.interpreters import is_local
from walmere.spark.jvm import require_alive
from walmere.spark.late_session import LateSession
from walmere.spark.placement import parallelism, tagged
from walmere.spark.sealing import Secrets

_POLL: Final = 0.5
"""Seconds between two checks of the progress of a job."""
_TREE_SIZE: Final = 64
"""Add up at most this many results on the driver; if there are more, tasks add them up first."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class SparkTasks:
    """Runs tasks. Spark retries a task that fails; the result of one attempt is used."""

    def __init__(self, spark: SparkSession | LateSession, name: str) -> None:
        """`name` says what the tasks do. It is part of the tag of their jobs."""
        self._spark = spark
        self._name = name
        self._tags: set[str] = set()

    @cached_property
    def _context(self) -> SparkContext:
        return (self._spark.get() if isinstance(self._spark, LateSession) else self._spark).sparkContext

    @property
    def parallelism(self) -> int:
        """How many tasks run at the same time."""
        return parallelism(self._context)

    @property
    def remote(self) -> bool:
        """Whether tasks run on other machines."""
        return not is_local(self._context.master or "")

    def map(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        on_progress: Callable[[int, int], None] | None = None,
        counted: Callable[[Result], int] | None = None,
    ) -> list[Result]:
        """The function's result for each item, in the order of the items.

        `on_progress` is called regularly with the number of finished items and of all items. `counted`: add up this
        number of each result instead of 1.
        """
        if not items:
            return []
        found: list[Result] = self._run(function, items, lambda results: list(results.collect()), on_progress, counted)
        return found

    def add(
        self, function: Callable[[Any], Any], items: Sequence[Any], zero: Any, on_progress: Callable[[int, int], None]
    ) -> Any:
        """The sum of the function's results. Tasks add up many results first, because the driver may lack memory."""
        if len(items) <= _TREE_SIZE:
            return sum(self.map(function, items, on_progress), zero)
        return self._run(function, items, lambda results: results.treeReduce(operator.add), on_progress)

    def _run(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        take: Callable[[RDD[Any]], Any],
        on_progress: Callable[[int, int], None] | None,
        counted: Callable[[Any], int] | None = None,
    ) -> Any:
        done = self._context.accumulator(0)
        secrets = Secrets()
        sealed = secrets.seal(items)
        with self.job() as failures:
            run = _task(function, secrets, attempts(self._context), failures, done, counted)
            ended = threading.Event()
            if on_progress is not None:
                arguments = (on_progress, done, len(items), ended)
                threading.Thread(target=_watch_progress, args=arguments, daemon=True).start()
            try:
                return take(self._context.parallelize(sealed, len(sealed)).flatMap(run))
            finally:
                ended.set()

    @contextmanager
    def job(self) -> Iterator[Accumulator[list[Failure]]]:
        """Run a job in this block. It is cancelled as soon as a task has failed.

        Tasks add their failures to the accumulator that is returned. The first of them is raised at the end.
        """
        failures: Accumulator[list[Failure]] = self._context.accumulator([], Failures())
        ended = threading.Event()
        try:
            with tagged(self._context, self._name) as tag:
                self._tags.add(tag)
                threading.Thread(target=self._cancel_after_failure, args=(tag, failures, ended), daemon=True).start()
                try:
                    yield failures
                finally:
                    self._tags.discard(tag)
        except (Py4JJavaError, PySparkException) as error:
            raise_first(failures.value)
            raise from_spark(error) from None
        except (Py4JError, OSError) as error:
            require_alive(seconds=_POLL)
            raise WalmereError("running a job on Spark", str(error) or repr(error)) from None
        except Exception:  # also PySpark's own, if all tasks have failed and there is nothing to reduce
            raise_first(failures.value)
            raise
        finally:
            ended.set()
        raise_first(failures.value)

    def cancel(self) -> None:
        """Cancel the jobs of this object. Their callers get an error."""
        for tag in list(self._tags):
            self._context.cancelJobsWithTag(tag)

    def _cancel_after_failure(self, tag: str, failures: Accumulator[list[Failure]], ended: threading.Event) -> None:
        """Cancel the job after a failure, because its other tasks may take hours."""
        while not ended.wait(_POLL):
            if failures.value:
                with suppress(Py4JError, OSError):  # the JVM has ended, and the job with it
                    self._context.cancelJobsWithTag(tag)
                return


def _task(
    function: Callable[[Any], Any],
    secrets: Secrets,
    tries: int,
    failures: Accumulator[list[Failure]],
    done: Accumulator[int],
    counted: Callable[[Any], int] | None,
) -> Callable[[bytes], list[Any]]:
    driver = Versions.here()

    def open_and_run(sealed: bytes) -> Any:
        require_same(driver)  # first: an item of another version may not be readable
        return function(secrets.open(sealed))

    def run(sealed: bytes) -> list[Any]:
        result = result_or_failure(tries, open_and_run, sealed)
        if isinstance(result, Failure):
            failures.add([result])
            return []
        done.add(1 if counted is None else counted(result))
        return [result]

    return run


def _watch_progress(
    on_progress: Callable[[int, int], None], done: Accumulator[int], count: int, ended: threading.Event
) -> None:
    while not ended.wait(_POLL):
        on_progress(done.value, count)
