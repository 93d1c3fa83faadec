"""Open a store by its URL."""

from __future__ import annotations

from collections.abc import Mapping

from walmere.object_store.base import ObjectStore
from walmere.object_store.directory import DirectoryStore
from walmere.object_store.options import is_url, locate
from walmere.object_store.remote import RemoteStore

__all__ = ["is_url", "open_store"]


def open_store(url: str, options: Mapping[str, str] | None = None) -> ObjectStore:
    """The store below a URL. Nothing is connected yet. Raises ConfigError for a wrong URL or option."""
    if locate(url).kind == "file":
        return DirectoryStore(url, options or {})
    return RemoteStore(url, options or {})
