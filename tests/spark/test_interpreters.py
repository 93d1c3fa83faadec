"""Which Python runs Spark's functions, in a session that a program has made itself."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark import SparkContext

from walmere.spark.interpreters import use_driver_python


@pytest.mark.parametrize(
    ("master", "python", "changed"),
    [
        ("local[2]", "python3", True),
        ("local[2]", "/opt/python/bin/python", False),  # PYSPARK_PYTHON
        ("spark://master:7077", "python3", False),  # a path of this machine means nothing there
    ],
)
def test_a_local_session_gets_the_interpreter_of_the_program(
    monkeypatch: pytest.MonkeyPatch, master: str, python: str, changed: bool
) -> None:
    context = SimpleNamespace(master=master, pythonExec=python, environment={})
    monkeypatch.setattr(SparkContext, "_active_spark_context", context)
    use_driver_python()
    if changed:
        assert Path(context.pythonExec).is_relative_to(Path(sys.modules["walmere.spark"].__path__[0]))
        assert context.environment == {"WALMERE_PYTHON": sys.executable}
    else:
        assert (context.pythonExec, context.environment) == (python, {})


def test_without_a_session_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    use_driver_python()
