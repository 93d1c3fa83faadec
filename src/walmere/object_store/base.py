"""The contract of a store.

**An answer can be lost.** The put took place, but its answer did not arrive; or the library sent the request again, and
was told that the object exists. So after a timeout, a lost connection or a refusal, the object is read and compared: if
it has our content, our put took place. For this, contents must differ between writers. Put a unique identifier into
everything that two writers may want to put under one name.

**No secrets.** A store has its URL and options, and options with secrets are refused. So neither its pickle nor its
repr has any. Credentials are read where the store is used: from the environment, or the role of the machine.

Names are relative to the URL, with `/` between their parts. Every error is a StoreError or a ConfigError; of these,
StoreUnavailable is transient. Each request is retried for up to a minute before that.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from walmere.errors import StoreUnavailable, StoreUnsuitable
from walmere.object_store.options import Location, checked, locate

_TRIES: Final = 4
_NO_CONDITION: Final = "use a store that supports conditional puts (If-None-Match), or update its server"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a listing says about an object."""

    name: str
    size: int
    modified: float  # seconds since 1970
    etag: str | None  # None: only reading the object gives it


class ObjectStore(ABC):
    """The objects below a URL."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self.location: Location = locate(url)
        self.options = checked(self.location, options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[type[ObjectStore], tuple[str, Mapping[str, str]]]:
        return type(self), (self.url, self.options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectStore) and (self.url, self.options) == (other.url, other.options)

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def url(self) -> str:
        """Its URL, without a slash at the end."""
        return self.location.url

    @abstractmethod
    def create(self, name: str, content: bytes) -> bool:
        """Put an object, unless there is one. Returns whether it has this content because of this call.

        Of several callers with different contents, one gets True. An object of the same content counts as ours.
        """

    @abstractmethod
    def replace_if(self, name: str, content: bytes, etag: str) -> str | None:
        """Replace an object, if it still has this e-tag. Returns the new e-tag; None if another one has replaced it."""

    @abstractmethod
    def put(self, name: str, content: bytes) -> str:
        """Put an object, whether there is one or not. Returns its e-tag."""

    @abstractmethod
    def get(self, name: str) -> tuple[bytes, str] | None:
        """The content and e-tag of an object; None if there is none."""

    @abstractmethod
    def get_range(self, name: str, start: int, length: int) -> bytes:
        """A part of an object; shorter, or empty, if the object ends before. Raises FileNotFoundError if there is none.

        This is the one error that is not a StoreError, because a caller may expect it.
        """

    @abstractmethod
    def head(self, name: str) -> StoredObject | None:
        """Size, time and e-tag of an object; None if there is none."""

    @abstractmethod
    def list(self, prefix: str = "", after: str = "") -> Iterator[StoredObject]:
        """The objects below a prefix, sorted by name; only those whose names come after a name.

        A prefix is a whole part of a name: `a` has `a/1`, not `ab`.
        """

    @abstractmethod
    def list_directory(self, prefix: str = "") -> tuple[Sequence[StoredObject], Sequence[str]]:
        """The objects directly below a prefix, and the prefixes below it, each as a full name."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete objects. One that does not exist is deleted already."""

    @abstractmethod
    def _put_raw(self, name: str, content: bytes, etag: str | None) -> bool:
        """Put if absent, or if it has this e-tag: one request, not compared. Returns False if it was refused."""

    def probe(self, *, replaces: bool = False) -> None:
        """Refuse a store that cannot be written, or that ignores the condition of a put. Leaves nothing there.

        `replaces`: also refuse a store without compare-and-set, which `replace_if` needs.
        """
        doing = f"testing the object store at {self.url}"
        name = f"_walmere_probe/{uuid.uuid4().hex}"
        if not self.create(name, b"first " + name.encode()):
            raise StoreUnsuitable(doing, "the store refused to create an object whose name was free", _NO_CONDITION)
        try:
            if self._replaces(name, b"second " + name.encode(), None):
                wrong = "the store let a second put replace an object that was to be created only once"
                raise StoreUnsuitable(
                    doing, f"{wrong}: two writers could overwrite each other's commits", _NO_CONDITION
                )
            found = self.get(name)
            if found is None or not found[0].startswith(b"first "):
                raise StoreUnsuitable(doing, "the store does not return the object that was just put", _NO_CONDITION)
            if replaces:
                self._probe_replaces(doing, name, found[1])
            if not any(each.name == name for each in self.list("_walmere_probe")):
                raise StoreUnsuitable(doing, "the store does not list an object that was just put", "use another store")
        finally:
            self.delete([name])

    def _replaces(self, name: str, content: bytes, etag: str | None) -> bool:
        """Whether a put takes place although its condition does not hold."""
        for _ in range(_TRIES - 1):
            try:
                return self._put_raw(name, content, etag)
            except StoreUnavailable:  # its answer may be lost
                found = self.get(name)
                if found is not None and found[0] == content:
                    return True
        return self._put_raw(name, content, etag)

    def _probe_replaces(self, doing: str, name: str, etag: str) -> None:
        if self.replace_if(name, b"third " + name.encode(), etag) is None:
            wrong = "the store refused to replace an object that nobody else has changed"
            raise StoreUnsuitable(doing, wrong, _NO_CONDITION.replace("If-None-Match", "If-Match"))
        if self._replaces(name, b"fourth " + name.encode(), etag):
            wrong = "the store let a put replace an object that had changed since: it ignores If-Match"
            raise StoreUnsuitable(doing, wrong, _NO_CONDITION.replace("If-None-Match", "If-Match"))
