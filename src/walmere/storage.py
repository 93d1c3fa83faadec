"""Files that have to outlive a crash: durable writes, small state files, the lock of a directory, and directories."""

from __future__ import annotations

import copy
import fcntl
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow.fs as pafs

from walmere.errors import ChangeLogError, ChangeLogInUse, StateDamaged, WalmereError, from_dict

Content = TypeVar("Content")

_ERROR_BYTES: Final = 4096


def write_durably(path: Path, text: str) -> None:
    """Put a small file in its place, whole: after a crash there is the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path, parse: Callable[[Any], Content], way_out: str) -> Content:
    """What `parse` makes of the JSON in a file. Raises StateDamaged, with the way out, if that cannot be done."""
    data = path.read_bytes()
    doing = f"reading {path}"
    if not data.strip(b"\0 \t\r\n"):
        raise StateDamaged(doing, "it is empty", way_out)
    try:
        content = json.loads(data)
    except UnicodeDecodeError:
        raise StateDamaged(doing, "it is not UTF-8 text", way_out) from None
    except (ValueError, RecursionError):
        raise StateDamaged(doing, "it is not JSON", way_out) from None
    try:
        return parse(content)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise StateDamaged(doing, "it does not have the content that it should have", way_out) from None


def reserve_error(path: Path) -> None:
    """Make a file that another process writes its error to. The space is reserved: the error may be a full disk."""
    path.write_bytes(b" " * _ERROR_BYTES)


def write_error(path: Path, error: WalmereError) -> None:
    """Write an error to a file that was reserved for it."""
    with suppress(OSError), path.open("r+b") as file:
        file.write(json.dumps(error.to_dict()).encode())


def read_error(path: Path) -> WalmereError | None:
    """The error that was written there; None if there is none."""
    try:
        return from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class Lock:
    """The right to write a log. The operating system gives it back when the process ends, however it ends."""

    def __init__(self, directory: Path) -> None:
        while not self._take(directory):
            pass
        with suppress(OSError):  # on a full disk nobody learns who it is, but `walmere drop` can still make room
            os.truncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def _take(self, directory: Path) -> bool:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ChangeLogError(f"opening {directory}", error.strerror or str(error)) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(self._descriptor, 20).decode().strip() or "(unknown)"
            os.close(self._descriptor)
            raise ChangeLogInUse(
                f"opening {directory} for writing",
                f"process {pid} is writing there",
                "one receiver is enough; end the other",
            ) from None
        try:
            same = os.path.samestat(os.fstat(self._descriptor), (directory / "lock").stat())
        except FileNotFoundError:
            same = False
        if not same:  # `walmere drop` has deleted it meanwhile: a lock on a file without a name keeps nobody out
            os.close(self._descriptor)
        return same

    @staticmethod
    def holder(directory: Path) -> int | None:
        """The process that has the right; None if nobody has."""
        try:
            with (directory / "lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return None
        except BlockingIOError:
            return int((directory / "lock").read_text().strip() or 0)
        return None

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


class Directory:
    """Where files are, such as those of a table: a local path, or a URL for whatever object store `deltalake` knows."""

    def __init__(self, location: str, options: Mapping[str, str] | None = None) -> None:
        self.location = location
        self.local = "://" not in location
        if self.local:
            self.filesystem: Any = pafs.SubTreeFileSystem(location, pafs.LocalFileSystem())
        else:
            from deltalake.fs import DeltaStorageHandler  # noqa: PLC0415  a receiver, which writes locally, does without

            handler: Any = DeltaStorageHandler(location, None if options is None else dict(options))
            self.filesystem = pafs.PyFileSystem(handler)

    def below(self, name: str) -> Directory:
        """One in this one, that need not be there yet."""
        directory = copy.copy(self)
        directory.location = f"{self.location.rstrip('/')}/{name}"
        directory.filesystem = pafs.SubTreeFileSystem(name, self.filesystem)
        return directory

    def sync(self, *names: str) -> None:
        """Make files, by their names below the directory, and the names themselves durable. A name may be empty."""
        if not self.local:
            return  # an object is durable, or it is not there
        for name in names:
            _fsync(os.path.join(self.location, name))  # noqa: PTH118

    def read(self, name: str) -> bytes | None:
        """A small file, as it is now; None if there is none."""
        try:
            while True:
                with self.filesystem.open_input_file(name) as stream:
                    content = bytes(stream.read())
                # deltalake asks for the size first: of an object that is replaced then it would have the beginning
                if self.local or self.filesystem.get_file_info(name).size == len(content):
                    return content
        except FileNotFoundError:
            return None

    def replace(self, name: str, content: bytes) -> None:
        """Put a small file in its place, whole: whoever reads, also after a crash, has the old one or the new one."""
        written = f"{name}.tmp" if self.local else name  # an object comes into being as a whole
        # the buffer holds it all: deltalake's streams take what comes out of one, but not what goes around it
        with self.filesystem.open_output_stream(written, buffer_size=len(content) + 1) as stream:
            stream.write(content)
        if self.local:
            self.sync(written)
            self.filesystem.move(written, name)
            self.sync("")

    def append(self, name: str, content: bytes) -> None:
        """Add to a small file that is there. What was there before stays whole; an object is written anew."""
        if not self.local:
            self.replace(name, (self.read(name) or b"") + content)
            return
        with open(os.path.join(self.location, name), "ab") as file:  # noqa: PTH118, PTH123
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def make(self) -> None:
        """Make the directory, durably, and those above it that are not there."""
        if self.local and not os.path.isdir(self.location):  # noqa: PTH112
            Directory(os.path.dirname(self.location)).make()  # noqa: PTH120
            os.makedirs(self.location, exist_ok=True)  # noqa: PTH103
            self.sync("..")

    def directories(self, name: str) -> list[str]:
        """The names of the directories in one of this directory's own; none if there is no such."""
        found = self.filesystem.get_file_info(pafs.FileSelector(name, allow_not_found=True))
        return sorted(each.base_name for each in found if each.type is pafs.FileType.Directory)


def _fsync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
