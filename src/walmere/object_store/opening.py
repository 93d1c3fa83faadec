"""Open a store by its URL."""

from __future__ import annotations

from collections.abc import Mapping

from walmere.object_store.base import ObjectStore
from walmere.object_store.options import is_url, locate

__all__ = ["is_url", "open_store"]


def open_store(url: str, options: Mapping[str, str] | None = None) -> ObjectStore:
    """The store below a URL. Nothing is connected yet. Raises ConfigError for a wrong URL or option."""
    # here: most processes use no store, but all read the options of one
    if locate(url).kind == "file":
        from walmere.object_store.directory import DirectoryStore  # noqa: PLC0415

        return DirectoryStore(url, options or {})
    from walmere.object_store.remote import RemoteStore  # noqa: PLC0415

    return RemoteStore(url, options or {})
