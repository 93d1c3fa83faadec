"""PostgreSQL logical replication whose subscriber is Apache Spark."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from walmere.errors import WalmereError
from walmere.lsn import Lsn

if TYPE_CHECKING:
    from walmere.reads import Lake, Point, lake, read

__all__ = ["Lake", "Lsn", "Point", "WalmereError", "__version__", "lake", "read"]

__version__ = "0.1.0"

_LATER = {"Lake": "reads", "Point": "reads", "lake": "reads", "read": "reads"}
"""Where names are that need more than the standard library: their modules are imported when they are asked for."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"walmere.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
