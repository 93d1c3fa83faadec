"""The data source as Spark meets it: found by its name, and light to look at."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from pyspark.sql.datasource import DataSource

import walmere
from walmere.source.format import PgoutputSource
from walmere.source.options import default_directory


def test_spark_finds_it_where_it_looks() -> None:
    source = import_module("pyspark_pgoutput").DefaultSource
    assert issubclass(source, DataSource)
    assert source is PgoutputSource
    assert source.name() == "pgoutput"
    assert pickle.loads(pickle.dumps(source)) is source
    assert callable(walmere.register)


def test_looking_it_up_imports_nothing_that_is_only_needed_for_reading() -> None:
    # every session does so at its first use of any data source
    script = """
import pyspark.sql.datasource, sys
before = set(sys.modules)
import pyspark_pgoutput
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("_")))
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert set(said) == {
        *("pyspark_pgoutput", "walmere", "walmere.errors", "walmere.lsn"),
        *("walmere.source", "walmere.source.format", "walmere.version"),
    }


def test_its_state_is_where_state_belongs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_directory("s") == tmp_path / "walmere" / "s"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_directory("s") == Path.home() / ".local/state/walmere/s"


def test_planning_a_read_of_a_log_imports_no_driver_and_no_pandas() -> None:
    # each read has a process for it; it took most of a second for them alone
    script = """
import sys
import pyspark.sql.worker.plan_data_source_read
import walmere.source.query
print(*sorted({"pandas", "psycopg", "psycopg2", "pydantic"} & set(sys.modules)))
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.split() == []
