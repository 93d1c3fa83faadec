"""PostgreSQL logical replication whose subscriber is Apache Spark.

The names below are imported when they are first used: `from walmere import pgoutput` brings neither Spark nor Java nor
a database driver.
"""

import importlib
from typing import TYPE_CHECKING, Any

from walmere.errors import WalmereError
from walmere.lsn import Lsn

if TYPE_CHECKING:
    from walmere import pgoutput
    from walmere.api import Subscription

__all__ = ["Lsn", "Subscription", "WalmereError", "__version__", "pgoutput"]

__version__ = "0.1.0"

_LATER = {"Subscription": "walmere.api"}


def __getattr__(name: str) -> Any:
    if name == "pgoutput":
        return importlib.import_module("walmere.pgoutput")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'walmere' has no attribute {name!r}")
