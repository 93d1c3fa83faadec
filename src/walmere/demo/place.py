"""The directory of the demo. Files of an earlier demo are replaced; a directory with other files is refused."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Final

from walmere import config as configuration
from walmere.config import Config
from walmere.demo.shop import PUBLICATION
from walmere.errors import ConfigError

MARK: Final = "# Made by `walmere demo`, which replaces it, lake/, subscription/ and run.log whenever it runs.\n"

_CONFIG: Final = """{mark}
[source]
dsn = "{dsn}"   # ran only during the demo
publications = ["{publication}"]
slot = "walmere_demo"

[subscription]
name = "demo"
directory = "subscription"

[target]
kind = "delta"
path = "lake"

[spark]
master = "local[*]"
"""


class Place:
    """The directory, locked while the context is open. The files stay."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config_file = directory / "walmere.toml"
        self.lake = directory / "lake"
        self.log = directory / "run.log"
        self._descriptor = -1

    def __enter__(self) -> Place:
        doing = f"preparing {self.directory}"
        if self.directory.exists() and not self._is_ours():
            raise ConfigError(
                doing,
                "it has files that are not from a demo",
                "name another directory with --directory, or move the files",
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise ConfigError(
                doing, "another demo is running there", "wait until it ends, or name another directory with --directory"
            ) from None
        self.config_file.write_text(MARK)
        for old in (self.lake, self.directory / "subscription"):
            shutil.rmtree(old, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.close(self._descriptor)

    def _is_ours(self) -> bool:
        if not self.directory.is_dir():
            return False
        if self.config_file.is_file():
            return self.config_file.read_bytes().startswith(MARK.encode())
        return not any(self.directory.iterdir())

    def configure(self, dsn: str) -> Config:
        """Write `walmere.toml` and read it."""
        self.config_file.write_text(_CONFIG.format(mark=MARK, dsn=dsn, publication=PUBLICATION))
        return configuration.load(self.config_file, {})
