"""The data source as Spark meets it: found by its name, and light to look at."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module

from pyspark.sql.datasource import DataSource

import walmere
from walmere.spark.pgoutput import PgoutputSource


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
        *("walmere.spark", "walmere.spark.pgoutput"),
    }
