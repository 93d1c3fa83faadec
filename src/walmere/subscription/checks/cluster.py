"""Whether the executors of a cluster reach what they need: the target, and the change log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from walmere.config import Config, DeltaTarget
from walmere.errors import ConfigError
from walmere.object_store.options import is_url, locate
from walmere.publisher.finding import Finding, Level

_HINT: Final = (
    "use object stores; or set [spark] shared_directory = true, if all executors have the same files under these paths"
)


def not_shared(config: Config) -> Iterator[str]:
    """What the executors of a cluster cannot reach."""
    if config.spark.shared_directory:
        return
    if isinstance(config.target, DeltaTarget) and _is_local(str(config.target.path)):
        yield f"target.path {config.target.path} is a directory of this machine"
    store = config.subscription.store
    if store is not None and _is_local(store):
        yield f"subscription.store {store} is a directory of this machine"
    elif store is None:
        directory = config.subscription.directory
        yield f"the change log is in subscription.directory {directory}, a directory of this machine"


def _is_local(place: str) -> bool:
    return not is_url(place) or locate(place).kind == "file"


def require_shared(config: Config) -> None:
    """Raise ConfigError if the executors of a cluster cannot reach all that they need."""
    if wrong := list(not_shared(config)):
        raise ConfigError(f"running on {config.spark.master or 'a cluster'}", "; ".join(wrong), _HINT)


def check_cluster(config: Config) -> Iterator[Finding]:
    """The part of `walmere check` for a cluster."""
    wrong = list(not_shared(config))
    for each in wrong:
        yield Finding("cluster", Level.PROBLEM, f"{each}, which the executors of the cluster do not have", _HINT)
    if not wrong:
        yield Finding("cluster", Level.OK, "the executors of the cluster can reach the target and the change log")
