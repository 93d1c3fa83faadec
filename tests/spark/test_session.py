"""Which Python Spark's processes are started with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark import SparkContext

from walmere.spark import interpreters


def test_a_jvm_that_runs_already_is_not_told_of_what_it_cannot_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WALMERE_PYTHON", raising=False)
    monkeypatch.setattr(SparkContext, "_gateway", object())
    assert interpreters.driver_python() == sys.executable
    assert "WALMERE_PYTHON" not in os.environ
    monkeypatch.setattr(SparkContext, "_gateway", None)
    assert interpreters.driver_python() == str(Path(interpreters.__file__).with_name("python"))
    assert os.environ["WALMERE_PYTHON"] == sys.executable


def test_processes_have_the_path_without_sparks_archives() -> None:
    places = ["/spark/python/lib/pyspark.zip", "/a b", "/spark/python/lib/py4j-0.10.9.9-src.zip", "/c*", "/my.zip"]
    program = "import os, sys; print(os.environ['PYTHONPATH'], sys.argv[1:])"
    started = subprocess.run(
        [Path(interpreters.__file__).with_name("python"), "-c", program, "an argument", ""],
        env={**os.environ, "PYTHONPATH": ":".join(places), "WALMERE_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    assert started.stdout.strip() == "/a b:/c*:/my.zip ['an argument', '']"
