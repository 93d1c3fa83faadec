"""The directory of the demo. Files of an earlier demo are replaced; a directory with other files is refused."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from walmere import config as configuration
from walmere.config import Config
from walmere.demo.shop import PUBLICATION
from walmere.errors import ConfigError

MARK: Final = (
    "# Made by `walmere demo`, which replaces it, lake/, target/, subscription/ and run.log whenever it runs.\n"
)
_OURS: Final = b"# Made by `walmere demo`"

_CONFIG: Final = """{mark}
[source]
dsn = "{dsn}"   # ran only during the demo
publications = ["{publication}"]
slot = "walmere_demo"

[subscription]
name = "demo"
directory = "subscription"

[target]
{target}
[spark]
master = "local[*]"
"""
_LAKE: Final = """kind = "delta"
path = "lake"
"""
_DATABASE: Final = """kind = "postgres"
dsn = "{dsn}"   # stopped when the demo ends
create_tables = true
"""


class Place:
    """The directory, locked while the context is open. The files stay."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config_file = directory / "walmere.toml"
        self.lake = directory / "lake"
        self.cluster = directory / "target"  # of the target's server, with --target postgres
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
        self._require_stopped(doing)
        self.config_file.write_text(MARK)
        for old in (self.lake, self.cluster, self.directory / "subscription"):
            shutil.rmtree(old, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.close(self._descriptor)

    def _is_ours(self) -> bool:
        if not self.directory.is_dir():
            return False
        if self.config_file.is_file():
            return self.config_file.read_bytes().startswith(_OURS)
        return not any(self.directory.iterdir())

    def _require_stopped(self, doing: str) -> None:
        """Refuse to remove the cluster of an earlier demo while its server runs."""
        with suppress(OSError, ValueError):
            pid = int((self.cluster / "postmaster.pid").read_text().split("\n")[0])
            os.kill(pid, 0)
            os.close(self._descriptor)
            raise ConfigError(
                doing,
                f"the target's server of an earlier demo is running there, as process {pid}",
                f"stop it: kill -INT {pid}",
            )

    def configure(self, dsn: str, target: str | None = None) -> Config:
        """Write `walmere.toml` and read it. `target`: the DSN of a database as the target; None: a lake."""
        section = _LAKE if target is None else _DATABASE.format(dsn=target)
        self.config_file.write_text(_CONFIG.format(mark=MARK, dsn=dsn, publication=PUBLICATION, target=section))
        return configuration.load(self.config_file, {})
