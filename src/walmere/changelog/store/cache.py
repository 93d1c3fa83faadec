"""The local copy of the log in a store: its manifest, and those segments that this machine has written.

The manifest is made from the store whenever a receiver or a follower starts, so nothing in the directory has to survive
a crash. Segment files are kept if the manifest names them: reading them is faster than a ranged get.

A segment file that was never put may have the name of one that another receiver has put since, with other content. So
files that the manifest of before does not name are deleted first.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

from walmere.changelog import manifest_file
from walmere.changelog.records import Header
from walmere.changelog.recovery import data_files
from walmere.changelog.search import ManifestSearch
from walmere.changelog.store.log_store import Head, LogStore, read_head, store_of, write_marker
from walmere.changelog.store.objects import LogObject, read_manifest, read_object, read_objects
from walmere.errors import ChangeLogError
from walmere.lsn import Lsn
from walmere.object_store import ObjectStore
from walmere.storage import write_lines_durably

_FILE: Final = re.compile(rb'"file":"([^"]+)"')


class Cache:
    """A directory that has a copy of the log's manifest. The caller holds the directory's Lock."""

    def __init__(self, store: ObjectStore, directory: Path) -> None:
        self.store = store
        self.directory = directory
        self.head: Head
        self.log: LogStore
        self.number = 0
        """Of the next object."""
        self._epoch = 0  # the highest one of all objects before

    @property
    def _path(self) -> Path:
        return self.directory / manifest_file.NAME

    def fill(self) -> bool:
        """Make the manifest equal to the log in the store. Returns False if there is none."""
        while (found := read_head(self.store)) is not None:
            self.head = found[0]
            self.log = LogStore(self.store, self.head.generation)
            lines = read_manifest(self.log, self.head.manifest)
            if lines is None:
                continue  # retention has replaced it meanwhile
            self.number, self._epoch = self.head.number, self.head.manifest_epoch
            parts = [lines, *filter(None, (self._accept(each) for each in read_objects(self.log, self.number)))]
            self._write(b"".join(parts))
            return True
        self._clear()
        return False

    def _clear(self) -> None:
        """There is no log in the store: delete what is left of one that was dropped."""
        if self._path.exists() and store_of(self.directory) is not None:
            self._path.unlink()
            self._keep_files(b"")

    @property
    def local_only(self) -> bool:
        """Whether the directory has a log that was received without a store."""
        return self._path.exists() and store_of(self.directory) is None

    def _require_has_local(self, content: bytes) -> None:
        """Refuse to replace a log that was received without a store, if the store does not have all of it."""
        temporary = self.directory / "from-store"
        temporary.mkdir(exist_ok=True)
        (temporary / manifest_file.NAME).write_bytes(content)
        with ManifestSearch(temporary) as stored, ManifestSearch(self.directory) as local:
            same = _source(stored.header) == _source(local.header)
            has_all = same and stored.header.start_lsn <= local.end_lsn <= stored.end_lsn
        shutil.rmtree(temporary)
        if not has_all:
            raise ChangeLogError(
                f"opening the change log in {self.directory}",
                f"it was received without a store, and is not a part of the one in {self.store.url}",
                "set subscription.directory to an empty directory, or correct subscription.store",
            )

    def _write(self, content: bytes) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        before = self._path.read_bytes() if self._path.exists() else b""
        if self.local_only:
            self._require_has_local(content)
            write_marker(self.directory, self.log)
        marked = store_of(self.directory)
        self._keep_files(before if marked == self.log else b"")
        if marked != self.log:
            write_marker(self.directory, self.log)
        if content.startswith(before) and before:
            self._append(content[len(before) :])
        else:
            write_lines_durably(self._path, [content])
        self._keep_files(content)

    def _keep_files(self, lines: bytes) -> None:
        """Delete segment files that these lines do not name."""
        named = {name.decode() for name in _FILE.findall(lines)}
        for file in data_files(self.directory) - named:
            (self.directory / file).unlink(missing_ok=True)

    def _append(self, lines: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            written = 0
            while written < len(lines):
                written += os.write(file.fileno(), lines[written:])

    @property
    def end_lsn(self) -> Lsn:
        """Everything that committed before this LSN is in the log, as far as it was read."""
        with ManifestSearch(self.directory) as log:
            return log.end_lsn

    def follow(self) -> bool:
        """Append the next object to the manifest. Returns False if it is not there yet."""
        found = read_object(self.log, self.number)
        if found is None:
            return False
        self._append(self._accept(found))
        return True

    def _accept(self, found: LogObject) -> bytes:
        """The lines of the next object; none, if it is void."""
        self.number = found.header.number + 1
        if found.header.epoch < self._epoch:
            return b""
        self._epoch = found.header.epoch
        return found.lines

    def refresh(self) -> bool:
        """Fill the cache again if the log has another manifest. Returns whether it has."""
        found = read_head(self.store)
        if found is not None and found[0].manifest == self.head.manifest:
            return False
        self.fill()
        return True


def _source(header: Header) -> tuple[str, str, str]:
    return header.system_identifier, header.database, header.slot
