"""Where Spark looks for data sources: top-level modules called `pyspark_…` that have a `DefaultSource`."""

from walmere.source.format import PgoutputSource as DefaultSource

__all__ = ["DefaultSource"]
