"""A Spark session with Spark's defaults, as a user has it."""

from __future__ import annotations

import os
import sys
import time

from pyspark.sql import DataFrame, SparkSession


def plain_session(cores: int) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(f"local[{cores}]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").config("spark.driver.memory", "2g").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def read_all(frame: DataFrame) -> float:
    """Read all rows and columns, and discard them. Returns the seconds that this took."""
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began
