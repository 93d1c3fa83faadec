"""The file of a manifest: open it, and read its lines. `manifest` reads all entries, `search` finds some of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from walmere.changelog.records import parse_header, parse_line
from walmere.errors import ChangeLogDamaged

NAME: Final = "manifest.jsonl"


class ManifestFile:
    """An open manifest, and its header."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        try:
            self._file: BinaryIO = self.path.open("rb")
        except FileNotFoundError:
            raise ChangeLogDamaged(
                f"opening the change log in {directory}", "there is no change log", "`walmere receive` creates it"
            ) from None
        self.position = 0
        try:
            line = self._line()
            if line is None:
                raise self._damaged("its first line is incomplete")
            self.header = parse_header(self.path, line)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def replaced(self) -> bool:
        """Whether retention has replaced the file, or `walmere drop` has removed it."""
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return True

    def _line(self) -> dict[str, Any] | None:
        self._file.seek(self.position)
        line = self._file.readline()
        if not line.endswith(b"\n"):
            return None
        content = parse_line(line)
        if content is None:
            if self._file.read(1):
                raise self._damaged(f"the line at byte {self.position} fails its checksum")
            return None  # torn by a crash: it was never confirmed
        self.position += len(line)
        return content

    def _damaged(self, wrong: str) -> ChangeLogDamaged:
        return ChangeLogDamaged(
            f"reading the manifest {self.path}", wrong, "run `walmere drop`, then start the subscription again"
        )
