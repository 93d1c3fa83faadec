"""Files that must survive a crash: durable writes, small state files, the lock of a directory."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from walmere.errors import ChangeLogError, ChangeLogInUse, StateDamaged, WalmereError, from_dict

Content = TypeVar("Content")

_ERROR_BYTES: Final = 4096
"""Reserve this many bytes for an error."""


def write_durably(path: Path, text: str) -> None:
    """Replace a small file atomically: after a crash, the file has the old content or the new content."""
    write_lines_durably(path, [text.encode()])


def write_lines_durably(path: Path, lines: Iterable[bytes]) -> None:
    """The same for a file that is written line by line."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """fsync a directory, so that new and renamed files in it survive a crash."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path, parse: Callable[[Any], Content], hint: str) -> Content:
    """Read JSON from a file and convert it with `parse`. Raises StateDamaged with `hint` if that fails."""
    data = path.read_bytes()
    doing = f"reading {path}"
    if not data.strip(b"\0 \t\r\n"):
        raise StateDamaged(doing, "the file is empty", hint)
    try:
        content = json.loads(data)
    except UnicodeDecodeError:
        raise StateDamaged(doing, "the file is not UTF-8 text", hint) from None
    except (ValueError, RecursionError):
        raise StateDamaged(doing, "the file is not JSON", hint) from None
    try:
        return parse(content)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise StateDamaged(doing, "the JSON does not have the expected content", hint) from None


def reserve_error(path: Path) -> None:
    """Create the file that another process writes its error to, and reserve space: the disk may be full then."""
    path.write_bytes(b" " * _ERROR_BYTES)


def write_error(path: Path, error: WalmereError) -> None:
    """Write an error to a file that `reserve_error` created."""
    with suppress(OSError), path.open("r+b") as file:
        file.write(json.dumps(error.to_dict()).encode().ljust(_ERROR_BYTES))  # over all of an earlier error


def read_error(path: Path) -> WalmereError | None:
    """Read the error that another process wrote; None if it wrote none."""
    try:
        return from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class Lock:
    """The exclusive right to write to a directory. The operating system releases it when the process ends."""

    def __init__(self, directory: Path) -> None:
        while not self._take(directory):
            pass
        with suppress(OSError):  # the disk is full: the lock has no process ID, but `walmere drop` can still free space
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
            pid = os.read(self._descriptor, 20).decode().strip()
            os.close(self._descriptor)
            raise ChangeLogInUse(
                f"locking {directory}",
                f"process {pid or '(unknown)'} holds the lock",
                "stop the `walmere run`, `walmere receive` or query that uses this directory"
                + (f"; if it is a receiver whose `walmere run` was killed: kill {pid}" if pid else ""),
            ) from None
        try:
            same = os.path.samestat(os.fstat(self._descriptor), (directory / "lock").stat())
        except FileNotFoundError:
            same = False
        if not same:  # `walmere drop` deleted the file meanwhile, and another process may lock the new one
            os.close(self._descriptor)
        return same

    @staticmethod
    def holder(directory: Path) -> int | None:
        """The ID of the process that holds the lock; None if no process does."""
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
