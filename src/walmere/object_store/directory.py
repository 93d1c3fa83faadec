"""A directory as a store: `file://`. For a mount that several machines share, and for tests.

Everything is fsynced. `create` is a hard link, which fails if the name exists; compare-and-set takes a lock of the
file system, `.lock` in the directory. The e-tag of a file is the hash of its content.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from uuid import uuid4

from walmere.errors import StoreError
from walmere.object_store.base import ObjectStore, StoredObject

_LOCK: Final = ".lock"
_TEMPORARY: Final = ".tmp"


class DirectoryStore(ObjectStore):
    """See ObjectStore."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        super().__init__(url, options)
        self.root = Path(self.location.prefix)

    def create(self, name: str, content: bytes) -> bool:
        if self._put_raw(name, content, None):
            return True
        found = self.get(name)
        return found is not None and found[0] == content

    def replace_if(self, name: str, content: bytes, etag: str) -> str | None:
        return _etag(content) if self._put_raw(name, content, etag) else None

    def _put_raw(self, name: str, content: bytes, etag: str | None) -> bool:
        with self._translated(f"writing {self.url}/{name}"):
            if etag is None:
                return self._write(name, content, replace=False)
            with self._locked():
                found = self.get(name)
                return found is not None and found[1] == etag and self._write(name, content, replace=True)

    def put(self, name: str, content: bytes) -> str:
        with self._translated(f"writing {self.url}/{name}"), self._locked():
            self._write(name, content, replace=True)
        return _etag(content)

    def _write(self, name: str, content: bytes, *, replace: bool) -> bool:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{uuid4().hex}{_TEMPORARY}")
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                temporary.rename(path)
            else:
                try:
                    path.hardlink_to(temporary)
                except FileExistsError:
                    return False
        finally:
            temporary.unlink(missing_ok=True)
        for place in (path.parent, *path.parent.parents):  # a new directory is durable when its parent is
            _fsync(place)
            if place == self.root:
                break
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / _LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def get(self, name: str) -> tuple[bytes, str] | None:
        with self._translated(f"reading {self.url}/{name}"):
            try:
                content = (self.root / name).read_bytes()
            except FileNotFoundError:
                return None
        return content, _etag(content)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        with self._translated(f"reading {self.url}/{name}"), (self.root / name).open("rb") as file:
            return os.pread(file.fileno(), max(length, 0), start)

    def head(self, name: str) -> StoredObject | None:
        with self._translated(f"reading {self.url}/{name}"):
            try:
                found = (self.root / name).stat()
            except FileNotFoundError:
                return None
        return StoredObject(name, found.st_size, found.st_mtime, None)

    def list(self, prefix: str = "", after: str = "") -> Iterator[StoredObject]:
        with self._translated(f"listing {self.url}/{prefix}".rstrip("/")):
            names = [
                Path(place, file).relative_to(self.root).as_posix()
                for place, _, files in os.walk(self.root / prefix)
                for file in files
                if file != _LOCK and not (file.startswith(".") and file.endswith(_TEMPORARY))
            ]
        for name in sorted(names):
            if name > after and (found := self.head(name)) is not None:
                yield found

    def list_directory(self, prefix: str = "") -> tuple[Sequence[StoredObject], Sequence[str]]:
        depth = prefix.count("/") + 1 if prefix else 0
        found = list(self.list(prefix))
        below = {"/".join(each.name.split("/")[: depth + 1]) for each in found if each.name.count("/") > depth}
        return [each for each in found if each.name.count("/") == depth], sorted(below)

    def delete(self, names: Iterable[str]) -> None:
        with self._translated(f"deleting objects of {self.url}"):
            for name in names:
                (self.root / name).unlink(missing_ok=True)

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            hint = f"make sure that {self.root} is a writable directory"
            raise StoreError(doing, error.strerror or str(error), hint) from None


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
