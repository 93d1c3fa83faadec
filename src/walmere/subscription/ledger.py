"""The ledger: for each applied batch its end, its newest commit, and the version of every table it changed.

Tables are committed one by one, so their newest versions need not belong together. The ledger says which do: everything
before an entry's LSN is in its versions, in all tables, and nothing after. A batch is entered when all its tables are
committed; one that was entered twice after a crash says the same twice.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from walmere.lsn import Lsn


@dataclass(frozen=True, slots=True)
class Entry:
    """A point at which all tables are consistent."""

    lsn: Lsn
    commit_time: int | None  # microseconds of Unix time, of the newest transaction
    versions: Mapping[str, int]  # of every table of the subscription that has been copied


class Ledger:
    """An append-only file of entries."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "ledger.jsonl"
        if self._path.exists() and not (content := self._path.read_bytes()).endswith(b"\n"):
            os.truncate(self._path, content.rfind(b"\n") + 1)  # torn by a crash; its batch is applied again

    def append(self, entry: Entry) -> None:
        """Enter a batch, durably."""
        line = json.dumps({"lsn": str(entry.lsn), "commit_time": entry.commit_time, "versions": dict(entry.versions)})
        with self._path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def entries(self) -> Iterator[Entry]:
        """All entries, oldest first."""
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                content = json.loads(line)
                yield Entry(Lsn.parse(content["lsn"]), content["commit_time"], content["versions"])

    def at(self, lsn: Lsn) -> Entry | None:
        """The entry of exactly this LSN."""
        return next((entry for entry in self.entries() if entry.lsn == lsn), None)

    def last(self) -> Entry | None:
        """The newest entry."""
        newest = deque(self.entries(), maxlen=1)
        return newest[0] if newest else None
