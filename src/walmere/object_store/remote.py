"""S3, GCS and Azure, by `obstore`.

All stores of a process with the same bucket and options share one client, and with it its connections. It is made when
it is first used, because Spark forks its Python workers, and a client does not survive a fork.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from walmere.errors import StoreError, StoreRefused, StoreUnavailable
from walmere.object_store.aws_profile import require_role, settings_of_profile
from walmere.object_store.base import ObjectStore, StoredObject
from walmere.object_store.options import VARIABLES, client_settings, locate, store_settings
from walmere.object_store.translate import out_of_range, translated

_TRIES: Final = 4
"""Try a put so many times, if its object is not there afterwards. The client tries several times in each of these."""
_PAUSE: Final = 0.1
"""Seconds between two of these, at first."""
_RETRY: Final[Any] = {
    "max_retries": 10,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 2},
}


@functools.lru_cache(maxsize=64)
def _client(root: str, options: frozenset[tuple[str, str]]) -> Any:
    from obstore.store import from_url  # noqa: PLC0415  commands without a store do not need it

    given = dict(options)
    location = locate(root)
    profile: dict[str, Any] = {}
    if location.kind == "s3" and given.get("skip_signature") != "true":
        profile = settings_of_profile()
        if "credential_provider" not in profile:
            require_role(given.get("metadata_endpoint"))
    settings: Any = {**profile, **store_settings(location, given), "client_options": client_settings(given)}
    try:
        with translated(f"opening the object store {root}"):
            return from_url(root, retry_config=_RETRY, **settings)
    except StoreUnavailable as error:
        # no request was sent yet: the same happens again until somebody corrects it
        hint = f"correct [storage], or {VARIABLES[location.kind]} in the environment"
        raise StoreRefused(error.doing, error.wrong, hint) from None


class RemoteStore(ObjectStore):
    """See ObjectStore."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        super().__init__(url, options)
        # GCS compares generations, the others e-tags
        self._tag: str = "version" if self.location.kind == "gs" else "e_tag"

    @property
    def client(self) -> Any:
        """The store of `obstore`, at the root of the bucket."""
        return _client(self.location.root, frozenset(self.options.items()))

    def path(self, name: str) -> str:
        """The path of an object in its bucket."""
        return f"{self.location.prefix}/{name}".strip("/")

    def create(self, name: str, content: bytes) -> bool:
        return self._put_if(name, content, None) is not None

    def replace_if(self, name: str, content: bytes, etag: str) -> str | None:
        return self._put_if(name, content, etag)

    def _put_if(self, name: str, content: bytes, etag: str | None) -> str | None:
        """Put if absent, or if the object has this e-tag. Returns the new e-tag; None if it was refused."""
        for attempt in range(_TRIES):
            time.sleep(_PAUSE * (2**attempt - 1))
            failure: StoreUnavailable | None = None
            try:
                put = self._put(name, content, _mode(self._tag, etag))
                if put is not None:
                    return put
            except StoreUnavailable as error:
                failure = error
            found = self.get(name)
            if found is not None and found[0] == content:
                return found[1]  # its answer was lost, or the client has sent it again
            unchanged = found is None if etag is None else found is not None and found[1] == etag
            if not unchanged:
                return None
            # Not there. It may still arrive: then the next put is refused, and compared. If it was refused, another put
            # was in progress (409), or its object was deleted.
        if failure is not None:
            raise failure
        return None

    def _put_raw(self, name: str, content: bytes, etag: str | None) -> bool:
        return self._put(name, content, _mode(self._tag, etag)) is not None

    def put(self, name: str, content: bytes) -> str:
        tag = self._put(name, content, "overwrite")
        if tag is None:
            raise StoreError(f"writing {self.url}/{name}", "the store refused a put without a condition")
        return tag

    def _put(self, name: str, content: bytes, mode: Any) -> str | None:
        """One put; None if its condition does not hold."""
        import obstore  # noqa: PLC0415

        refusals = (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError)
        try:
            with translated(f"writing {self.url}/{name}"):
                # a multipart upload has no condition
                result: Any = obstore.put(self.client, self.path(name), content, mode=mode, use_multipart=False)
        except refusals:
            return None
        except FileNotFoundError:  # an object that is to be replaced
            return None
        return str(result[self._tag] or "")

    def get(self, name: str) -> tuple[bytes, str] | None:
        import obstore  # noqa: PLC0415

        try:
            with translated(f"reading {self.url}/{name}"):
                result = obstore.get(self.client, self.path(name))
                meta: Any = result.meta
                return bytes(result.bytes()), str(meta[self._tag] or "")
        except FileNotFoundError:
            return None

    def get_range(self, name: str, start: int, length: int) -> bytes:
        import obstore  # noqa: PLC0415

        if length <= 0:
            return b""
        with translated(f"reading {self.url}/{name}"):
            try:
                return bytes(obstore.get_range(self.client, self.path(name), start=start, length=length))
            except obstore.exceptions.BaseError as error:
                if out_of_range(error):
                    return b""
                raise

    def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
        """The last bytes of an object that is not empty, and the size of the object. Raises FileNotFoundError."""
        import obstore  # noqa: PLC0415

        if self.location.kind == "az":  # it has no ranges from the end
            found = self.head(name)
            if found is None:
                raise FileNotFoundError(f"{self.url}/{name}")
            start = max(found.size - length, 0)
            return self.get_range(name, start, found.size - start), found.size
        with translated(f"reading {self.url}/{name}"):
            result = obstore.get(self.client, self.path(name), options={"range": {"suffix": length}})
            return bytes(result.bytes()), result.meta["size"]

    def head(self, name: str) -> StoredObject | None:
        import obstore  # noqa: PLC0415

        try:
            with translated(f"reading {self.url}/{name}"):
                return self._stored(obstore.head(self.client, self.path(name)))
        except FileNotFoundError:
            return None

    def list(self, prefix: str = "", after: str = "") -> Iterator[StoredObject]:
        import obstore  # noqa: PLC0415

        place = self.path(prefix)
        offset = self.path(after) if after else None
        with translated(f"listing {self.url}/{prefix}".rstrip("/")):
            # sorted by the store: all three list by name. Not every Azure server knows the offset.
            for chunk in obstore.list(self.client, place or None, offset=offset):
                yield from (self._stored(each) for each in chunk if offset is None or each["path"] > offset)

    def list_directory(self, prefix: str = "") -> tuple[Sequence[StoredObject], Sequence[str]]:
        import obstore  # noqa: PLC0415

        with translated(f"listing {self.url}/{prefix}".rstrip("/")):
            found = obstore.list_with_delimiter(self.client, self.path(prefix) or None)
        return [self._stored(each) for each in found["objects"]], [
            self._name(each) for each in found["common_prefixes"]
        ]

    def delete(self, names: Iterable[str]) -> None:
        import obstore  # noqa: PLC0415

        paths = [self.path(name) for name in names]
        doing = f"deleting objects of {self.url}"
        try:
            if paths:
                with translated(doing):
                    obstore.delete(self.client, paths)
        except FileNotFoundError:  # not from S3
            for path in paths:
                with suppress(FileNotFoundError), translated(doing):
                    obstore.delete(self.client, [path])

    def _name(self, path: str) -> str:
        return path.removeprefix(self.location.prefix).lstrip("/")

    def _stored(self, meta: Any) -> StoredObject:
        tag = meta[self._tag]
        return StoredObject(
            self._name(meta["path"]), meta["size"], meta["last_modified"].timestamp(), None if tag is None else str(tag)
        )


def _mode(tag: str, etag: str | None) -> Any:
    """The condition of a put. A key with the value None would be a TypeError."""
    return "create" if etag is None else {tag: etag}
