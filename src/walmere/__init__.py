"""PostgreSQL logical replication whose subscriber is Apache Spark."""

from __future__ import annotations

from typing import Any

from walmere.errors import WalmereError
from walmere.lsn import Lsn

__all__ = ["Lsn", "WalmereError", "__version__", "register"]

__version__ = "0.1.0"


def register(spark: Any) -> None:
    """Make format `pgoutput` known to a Spark session that does not find it by itself."""
    from walmere.spark.pgoutput import register  # noqa: PLC0415  only here is Spark needed

    register(spark)
