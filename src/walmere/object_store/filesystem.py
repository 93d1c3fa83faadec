"""A store as PyArrow's file system, to read and write data files.

Opening a file to read gets its last bytes, and with them its size: the end of a Parquet file has its metadata, and most
files of a batch are not larger than that. Everything else is read by ranges. Writing is a put, or for a large file a
multipart upload. Nothing is visible before the file is closed.
"""

from __future__ import annotations

import io
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs as pafs

from walmere.object_store.base import ObjectStore, StoredObject
from walmere.object_store.remote import RemoteStore
from walmere.object_store.translate import translated

_TAIL: Final = 64 << 10
"""Bytes to get when a file is opened: PyArrow looks for a file's metadata in so many at its end."""
_PART: Final = 8 << 20
"""Bytes of a part of a multipart upload; a smaller file is one put."""
_UPLOADS: Final = 4
"""Parts that are uploaded at the same time."""


def file_system(store: ObjectStore) -> Any:
    """PyArrow's file system of a store."""
    if not isinstance(store, RemoteStore):
        raise TypeError(f"{store} is a directory")
    return pafs.PyFileSystem(StoreFileSystem(store))


class StoreFileSystem(pafs.FileSystemHandler):  # type: ignore[misc]
    """The objects of a store as files. Directories exist while they have objects."""

    def __init__(self, store: RemoteStore) -> None:
        self.store = store

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreFileSystem) and self.store == other.store

    def __hash__(self) -> int:
        return hash(self.store)

    def get_type_name(self) -> str:
        return "walmere"

    def normalize_path(self, path: str) -> str:
        return path.strip("/")

    def get_file_info(self, paths: list[str]) -> list[Any]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> Any:
        found = self.store.head(path) if path else None
        if found is not None:
            return _file(found)
        is_directory = next(self.store.list(path), None) is not None
        return pafs.FileInfo(path, pafs.FileType.Directory if is_directory else pafs.FileType.NotFound)

    def get_file_info_selector(self, selector: Any) -> list[Any]:
        if selector.recursive:
            return [_file(each) for each in self.store.list(selector.base_dir)]
        files, directories = self.store.list_directory(selector.base_dir)
        found = [*map(_file, files), *(pafs.FileInfo(name, pafs.FileType.Directory) for name in directories)]
        if not found and selector.base_dir and not selector.allow_not_found:
            raise FileNotFoundError(selector.base_dir)
        return found

    def create_dir(self, path: str, recursive: bool) -> None:
        """Do nothing: a directory exists when it has an object."""

    def delete_dir(self, path: str) -> None:
        self.store.delete([each.name for each in self.store.list(path)])

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:  # noqa: ARG002
        self.delete_dir(path)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError("deleting everything")

    def delete_file(self, path: str) -> None:
        self.store.delete([path])

    def move(self, src: str, dest: str) -> None:
        raise NotImplementedError("moving an object")

    def copy_file(self, src: str, dest: str) -> None:
        raise NotImplementedError("copying an object")

    def open_input_stream(self, path: str) -> Any:
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> Any:
        return pa.PythonFile(_Input(self.store, path), mode="r")

    def open_output_stream(self, path: str, metadata: Any) -> Any:  # noqa: ARG002
        return pa.PythonFile(_Output(self.store, path), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError("appending to an object")


def _file(found: StoredObject) -> Any:
    return pafs.FileInfo(found.name, pafs.FileType.File, size=found.size, mtime_ns=round(found.modified * 1e9))


class _Input:
    """An object to read."""

    def __init__(self, store: RemoteStore, name: str) -> None:
        self._store = store
        self._name = name
        self._tail, self._size = store.get_tail(name, _TAIL)
        self._at = 0
        self.closed = False

    def size(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, length: int = -1) -> bytes:
        left = max(self._size - self._at, 0)
        length = left if length is None or length < 0 else min(length, left)
        start, tail_at = self._at, self._size - len(self._tail)
        if start >= tail_at:
            content = self._tail[start - tail_at : start - tail_at + length]
        else:
            content = self._store.get_range(self._name, start, length)
        self._at += len(content)
        return content

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class _Output:
    """An object to write."""

    def __init__(self, store: RemoteStore, name: str) -> None:
        import obstore  # noqa: PLC0415

        self._doing = f"writing {store.url}/{name}"
        self._at = 0
        self.closed = False
        with translated(self._doing):
            self._writer = obstore.open_writer(
                store.client, store.path(name), buffer_size=_PART, max_concurrency=_UPLOADS
            )

    def tell(self) -> int:
        return self._at

    def write(self, content: Any) -> int:
        copied = bytes(content)  # the writer keeps what it is given, and PyArrow may use its memory again
        with translated(self._doing):
            self._writer.write(copied)
        self._at += len(copied)
        return len(copied)

    def flush(self) -> None:
        """Do nothing: what is written becomes visible at the end."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with translated(self._doing):
                self._writer.close()
