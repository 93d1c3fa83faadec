"""PostgreSQL logical replication whose subscriber is Apache Spark.

The names below are imported when they are first used: `from walmere import pgoutput` imports neither Spark nor a
database driver.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from walmere.errors import WalmereError
from walmere.lsn import Lsn
from walmere.version import __version__

if TYPE_CHECKING:
    from walmere import pgoutput
    from walmere.api import Subscription
    from walmere.reads.lake import Lake, Point, lake, read
    from walmere.source.format import register
    from walmere.source.session import session

__all__ = [
    "Lake",
    "Lsn",
    "Point",
    "Subscription",
    "WalmereError",
    "__version__",
    "lake",
    "pgoutput",
    "read",
    "register",
    "session",
]

_LATER = {
    "Lake": "reads.lake",
    "Point": "reads.lake",
    "Subscription": "api",
    "lake": "reads.lake",
    "read": "reads.lake",
    "register": "source.format",
    "session": "source.session",
}
"""The modules of the names that need more than the standard library."""


def __getattr__(name: str) -> Any:
    if name == "pgoutput":
        return import_module("walmere.pgoutput")
    if name in _LATER:
        return getattr(import_module(f"walmere.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
