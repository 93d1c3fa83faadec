"""A directory of files that is local or in an object store: a table, a ledger."""

from __future__ import annotations

import functools
import itertools
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import pyarrow.fs as pafs

from walmere.object_store import ObjectStore, is_url, open_store
from walmere.storage import sync_directory

Item = TypeVar("Item")
Result = TypeVar("Result")

_REQUESTS: Final = 16
"""Requests to a store at the same time."""

Stamp: TypeAlias = tuple[Any, ...]
"""Changes when a file is replaced."""


class Directory:
    """A directory of files, such as a table: a local path, or a URL of an object store.

    What does not answer is a StoreError, and a missing file is a FileNotFoundError, also in a store.
    """

    def __init__(self, location: str, options: Mapping[str, str] | None = None) -> None:
        self.location = location
        self.options = options
        self.local = not is_url(location)

    @functools.cached_property
    def store(self) -> ObjectStore:
        """The object store, if the directory is in one."""
        return open_store(self.location, self.options)

    @functools.cached_property
    def filesystem(self) -> Any:
        """The directory as PyArrow's file system."""
        if self.local:
            return pafs.SubTreeFileSystem(self.location, pafs.LocalFileSystem())
        from walmere.object_store.filesystem import file_system  # noqa: PLC0415  only for an object store

        return file_system(self.store)

    def below(self, name: str) -> Directory:
        """A subdirectory. It need not exist yet."""
        directory = Directory(f"{self.location.rstrip('/')}/{name}", self.options)
        if self.local:
            directory.filesystem = pafs.SubTreeFileSystem(name, self.filesystem)
        return directory

    def sync(self, *names: str) -> None:
        """fsync files and directories by their names relative to this one; an empty name is the directory itself."""
        if not self.local:
            return  # an object store makes objects durable itself
        for name in names:
            _fsync(os.path.join(self.location, name))  # noqa: PTH118

    def read(self, name: str) -> bytes | None:
        """Read a small file; None if it does not exist."""
        if not self.local:
            found = self.store.get(name)
            return None if found is None else found[0]
        try:
            with self.filesystem.open_input_file(name) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def read_stamped(self, name: str) -> tuple[bytes, Stamp] | None:
        """Read a small file, with its stamp; None if it does not exist."""
        if not self.local:
            found = self.store.get(name)
            return None if found is None else (found[0], (found[1],))
        # the stamp first: a file that is replaced after it was read has another one
        if (stamp := self.stamp(name)) is None or (content := self.read(name)) is None:
            return None
        return content, stamp

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """A part of a file; shorter if the file ends before. Raises FileNotFoundError."""
        if not self.local:
            return self.store.get_range(name, start, length)
        with self.filesystem.open_input_file(name) as stream:
            stream.seek(start)
            return bytes(stream.read(length))

    def replace(self, name: str, content: bytes) -> None:
        """Replace a small file atomically: a reader, also after a crash, sees the old content or the new content."""
        if not self.local:
            self.store.put(name, content)
            return
        self._write(f"{name}.tmp", content)
        self.sync(f"{name}.tmp")
        self.filesystem.move(f"{name}.tmp", name)
        self.sync("")

    def write(self, name: str, content: bytes) -> None:
        """Write a new small file, durably. Nobody reads it before this returns."""
        if not self.local:
            self.store.put(name, content)
            return
        self._write(name, content)
        self.sync(name, str(Path(name).parent))

    def _write(self, name: str, content: bytes) -> None:
        with self.filesystem.open_output_stream(name, buffer_size=len(content) + 1) as stream:
            stream.write(content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file durably, unless there is one of this name. Returns whether it was written.

        Of several processes that create the same file at once, one succeeds, and no reader sees a part of the file.
        In a store, a file of the same content counts as written: see `ObjectStore.create`.
        """
        if not self.local:
            return self.store.create(name, content)
        path = Path(self.location, name)
        temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            try:
                path.hardlink_to(temporary)
            except FileExistsError:
                return False
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(path.parent)
        return True

    def stamp(self, name: str) -> Stamp | None:
        """Changes when the file is replaced; None if the file does not exist."""
        if not self.local:
            found = self.store.head(name)
            return None if found is None else (found.etag,)
        try:
            status = Path(self.location, name).stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def append(self, name: str, content: bytes) -> None:
        """Append to a small file that exists. An object is written again as a whole."""
        if not self.local:
            self.replace(name, (self.read(name) or b"") + content)
            return
        with open(os.path.join(self.location, name), "ab") as file:  # noqa: PTH118, PTH123
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def make(self) -> None:
        """Create the directory and its parents, durably."""
        if self.local and not os.path.isdir(self.location):  # noqa: PTH112
            Directory(os.path.dirname(self.location)).make()  # noqa: PTH120
            os.makedirs(self.location, exist_ok=True)  # noqa: PTH103
            self.sync("..")

    def directories(self, name: str) -> list[str]:
        """The names of the directories in a subdirectory; empty if that does not exist."""
        if not self.local:
            return sorted(each.rpartition("/")[2] for each in self.store.list_directory(name)[1])
        return sorted(entry.base_name for entry in self._entries(name) if entry.type is pafs.FileType.Directory)

    def files(self, name: str) -> dict[str, float]:
        """The names of the files in a subdirectory, each with when it was written; empty if that does not exist."""
        if not self.local:
            return {each.name.rpartition("/")[2]: each.modified for each in self.store.list_directory(name)[0]}
        return {
            entry.base_name: entry.mtime_ns / 1e9 for entry in self._entries(name) if entry.type is pafs.FileType.File
        }

    def files_between(self, name: str, after: str, before: str) -> list[str]:
        """The names of the files in a subdirectory of a store, after a name and before another.

        A store lists by name, a thousand at a time, so this costs what is listed.
        """
        listed = (each.name.removeprefix(f"{name}/") for each in self.store.list(name, f"{name}/{after}"))
        return [each for each in itertools.takewhile(lambda each: each < before, listed) if "/" not in each]

    def _entries(self, name: str) -> list[Any]:
        try:
            return list(self.filesystem.get_file_info(pafs.FileSelector(name, allow_not_found=True)))
        except FileNotFoundError:
            return []

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """The function's result for each item. In a store, several at a time: each waits for answers."""
        wanted = list(items)
        if self.local or len(wanted) < 2:
            return [function(each) for each in wanted]
        with ThreadPoolExecutor(min(len(wanted), _REQUESTS)) as pool:
            return list(pool.map(function, wanted))

    def remove(self, *names: str) -> None:
        """Delete files, if they exist."""
        if not self.local:
            self.store.delete(names)
            return
        for name in names:
            with suppress(FileNotFoundError):
                self.filesystem.delete_file(name)


def _fsync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
