"""A Spark session for programs that use format `pgoutput`."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

from walmere.source.format import register
from walmere.spark.executors import require_suitable
from walmere.spark.session import program_session, stopped_after_error


def session(
    master: str | None = None, settings: Mapping[str, str | int | bool] | None = None, *, name: str = "walmere"
) -> SparkSession:
    """A Spark session that knows format `pgoutput`, and starts fast (`walmere help start-up`).

    The active session of this process is used as it is, if there is one. `master`: that of spark-submit, or `local[*]`,
    if it is None. `settings`: any of Spark; they come before those that are set here.

    The JVM maps Spark's classes from the archive of `walmere warm`, if there is one, and uses only Java's first
    compiler. Give a program that computes for hours in the JVM another `spark.driver.extraJavaOptions`. Spark's UI is
    off, unless `spark.ui.enabled` is set.
    """
    given = {
        key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in (settings or {}).items()
    }
    with stopped_after_error():
        found = program_session(name, master, given)
        require_suitable(found.sparkContext)
        register(found)
    return found
