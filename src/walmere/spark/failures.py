"""Tasks return errors as values: with their class and all their fields, and without Java's stack trace.

A task returns an error at once if it would be the same again, such as a value that cannot be a key. After an error that
may pass (a transient one, one of the target, which another executor may reach, or an unexpected one) Spark retries the
task, and the last attempt returns it. A task whose process was killed returns nothing: then there is only Spark's
exception.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from pyspark import SparkContext, TaskContext
from pyspark.accumulators import AccumulatorParam

from walmere.errors import SinkError, SinkMismatch, StoreError, WalmereError
from walmere.sinks.base import full_or
from walmere.spark import executors
from walmere.spark.spark_log import OWN_LOGGER

_log = logging.getLogger(OWN_LOGGER)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a task returns instead of its result."""

    error: WalmereError
    traceback: str = ""  # of an unexpected exception


class Failures(AccumulatorParam[list[Failure]]):
    """An accumulator, which has a failure as soon as its task has ended."""

    def zero(self, value: list[Failure]) -> list[Failure]:  # noqa: ARG002
        return []

    def addInPlace(self, value1: list[Failure], value2: list[Failure]) -> list[Failure]:  # noqa: N802
        return [*value1, *value2]


def attempts(context: SparkContext) -> int:
    """How many times Spark runs a task that fails."""
    if local := re.fullmatch(r"local(?:\[[^,\]]+(?:,\s*(\d+))?\])?", context.master or ""):
        return int(local[1] or 1)
    return int(context._conf.get("spark.task.maxFailures") or "4")


def result_or_failure(tries: int, function: Callable[..., Result], *arguments: Any) -> Result | Failure:
    """In a task: the function's result, or its error as a value. Raises an error after which Spark should retry."""
    try:
        return function(*arguments)
    except WalmereError as error:
        of_target = isinstance(error, SinkError | StoreError) and not isinstance(error, SinkMismatch)
        may_pass = error.transient or of_target
        if may_pass and not _is_last(tries):
            raise
        return Failure(error)
    except Exception as error:
        if not _is_last(tries):
            raise
        wrong = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
        return Failure(WalmereError("running a task on Spark", wrong), traceback.format_exc())


def _is_last(tries: int) -> bool:
    task = TaskContext.get()
    return task is None or task.attemptNumber() + 1 >= tries


def raise_first(failures: Iterable[Failure]) -> None:
    """On the driver: raise the first error of a task, and log its traceback."""
    for failure in failures:
        if failure.traceback:
            _log_lines(f"{failure.error.doing}: {failure.error.wrong}\n{failure.traceback}")
        raise full_or(failure.error, failure.traceback)


def from_spark(error: Exception) -> WalmereError:
    """The error of a job whose tasks returned none: the first line of Spark's exception."""
    _log_lines(f"a job failed\n{error}")
    java = getattr(error, "java_exception", None)
    text = str(java.getMessage() if java is not None else error).strip()
    if (unsuitable := executors.translate(text)) is not None:
        return unsuitable
    return full_or(WalmereError("running a job on Spark", text.partition("\n")[0] or repr(error)), text)


def log_traceback(error: Exception) -> None:
    """Log the traceback of an unexpected error."""
    _log_lines("".join(traceback.format_exception(error)))


def _log_lines(text: str) -> None:
    """One record for each line: a log has one line for each record."""
    for line in text.splitlines():
        _log.error("%s", line)
