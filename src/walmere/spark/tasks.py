"""Work for Spark's executors: a function over items, one task each."""

from __future__ import annotations

import operator
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import RDD
from pyspark.sql import SparkSession

from walmere import errors
from walmere.errors import WalmereError
from walmere.sinks.base import full_or
from walmere.spark.session import require_alive

_LOOK: Final = 0.5
_TOGETHER: Final = 64
"""Results that are added up in one place."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class SparkTasks:
    """Runs tasks. Spark retries one that fails; what it returns counts once, whichever attempt it came from."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext

    @property
    def parallelism(self) -> int:
        """How many tasks run at once."""
        return int(self._context.defaultParallelism)

    def map(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        tell: Callable[[int, int], None] | None = None,
    ) -> list[Result]:
        """The function's result for each item, in their order. `tell` hears now and then how many are done, of all."""
        return self._run(function, items, lambda results: list(results.collect()), tell) if items else []

    def add(
        self, function: Callable[[Any], Any], items: Sequence[Any], zero: Any, tell: Callable[[int, int], None]
    ) -> Any:
        """The sum of the function's results. Of very many, tasks add some up first: all of them may be too much."""
        if len(items) <= _TOGETHER:
            return sum(self.map(function, items, tell), zero)
        return self._run(function, items, lambda results: results.treeReduce(operator.add), tell)

    def _run(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        take: Callable[[RDD[Any]], Any],
        tell: Callable[[int, int], None] | None,
    ) -> Any:
        ended = threading.Event()
        if tell is not None:
            done = self._context.accumulator(0)
            function = _counting(function, done)
            threading.Thread(target=_watch, args=(tell, done, len(items), ended), daemon=True).start()
        try:
            return take(self._context.parallelize(items, len(items)).map(function))
        except Py4JJavaError as error:
            raise failure(error) from None
        except (Py4JError, OSError) as error:
            require_alive(seconds=_LOOK)
            raise WalmereError("running a task on Spark", str(error) or repr(error)) from None
        finally:
            ended.set()

    def cancel(self) -> None:
        """End what is running; its callers get an error."""
        self._context.cancelAllJobs()


def _counting(function: Callable[[Item], Result], done: Any) -> Callable[[Item], Result]:
    def run(item: Item) -> Result:
        result = function(item)
        done.add(1)
        return result

    return run


def _watch(tell: Callable[[int, int], None], done: Any, count: int, ended: threading.Event) -> None:
    while not ended.wait(_LOOK):
        tell(done.value, count)


def failure(error: Exception) -> WalmereError:
    """What went wrong in a task: the error that it raised, without the stack traces of two languages around it."""
    return full_or(_failure(error), str(error))


def _failure(error: Exception) -> WalmereError:
    said = [line.strip() for line in str(error).splitlines()]
    for number, line in reversed(list(enumerate(said))):
        if found := re.match(r"(?:walmere\.)?errors\.(\w+): (.*?): (.*)", line):
            kind = getattr(errors, found[1], WalmereError)
            hint = said[number + 1] if number + 1 < len(said) else ""
            return kind(found[2], found[3], hint.removeprefix("hint: ") if hint.startswith("hint: ") else "")
    causes = [line.removeprefix(": ").removeprefix("Caused by: ") for line in said]
    raised = [line for line in causes if re.match(r"[\w.$]+(Error|Exception): ", line)]
    own = [line for line in raised if "spark" not in line and "py4j" not in line]
    return WalmereError("running a task on Spark", (own or raised or [said[0] if said else repr(error)])[-1])
