"""Where Spark looks for data sources: top-level modules called `pyspark_…` that have a `DefaultSource`."""

from walmere.spark.pgoutput import PgoutputSource as DefaultSource

__all__ = ["DefaultSource"]
