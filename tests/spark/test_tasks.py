"""An error of a task is the error that the caller gets, whatever Spark writes around it."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest

from walmere.errors import SinkError, SourceUnavailable, WalmereError
from walmere.spark.daemon import without_archives
from walmere.spark.tasks import failure

AROUND = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times
  File "pyspark/worker.py", line 1, in main
{error}

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:645)
"""


@pytest.mark.parametrize(
    ("text", "kind", "doing", "wrong", "hint"),
    [
        (
            f"walmere.errors.SinkError: {SinkError('writing t', 'disk: full', 'make room')}",
            *(SinkError, "writing t", "disk: full", "make room"),
        ),
        (
            f"walmere.errors.SourceUnavailable: {SourceUnavailable('copying t', 'gone')}",
            *(SourceUnavailable, "copying t", "gone", ""),
        ),
        ("ValueError: odd", WalmereError, "running a task on Spark", "ValueError: odd", ""),
        (
            "\tat org.apache.spark.Here.now(Here.scala:1)",  # nothing in Python went wrong
            *(WalmereError, "running a task on Spark"),
            "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times",
            "",
        ),
    ],
)
def test_the_error_of_a_task_comes_back(text: str, kind: type[WalmereError], doing: str, wrong: str, hint: str) -> None:
    error = failure(RuntimeError(AROUND.format(error=text)))
    assert type(error) is kind
    assert (error.doing, error.wrong, error.hint) == (doing, wrong, hint)


def test_archives_leave_the_path_only_if_pyspark_is_found_without_them() -> None:
    site = str(Path(pyspark.__file__).parents[1])
    assert without_archives(["/spark/pyspark.zip", "/spark/core.jar", site]) == [site]
    assert without_archives(["/spark/pyspark.zip", "/nowhere"]) == ["/spark/pyspark.zip", "/nowhere"]
