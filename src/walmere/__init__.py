"""PostgreSQL logical replication whose subscriber is Apache Spark."""

from walmere.errors import WalmereError
from walmere.lsn import Lsn

__all__ = ["Lsn", "WalmereError", "__version__"]

__version__ = "0.1.0"
