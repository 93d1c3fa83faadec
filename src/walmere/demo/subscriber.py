"""The subscription: `walmere run --json` as a child, as a user would start it, and what it says of itself.

It has a session of its own, so that Ctrl-C in the terminal comes to the demo alone, which then ends it and sees that
everything in its process group is gone: Spark's JVM is no child of ours. (Spark's Python workers have groups of their
own and end with the JVM.) What it and Spark write to stderr goes to a file, and not across the display.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

from walmere.errors import WalmereError
from walmere.lsn import INVALID_LSN, Lsn
from walmere.subscription.state import Phase, TableState, from_json

_ENDING: Final = 15.0
"""Seconds to end in, when asked to."""
_AFTERMATH: Final = 5.0
"""And for the JVM, after that."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """What the subscription has said last."""

    time: float = 0.0
    applied: Lsn = INVALID_LSN
    tables: tuple[TableState, ...] = ()
    changes: Mapping[str, int] | None = None

    @classmethod
    def parse(cls, line: bytes) -> RunReport:
        """Read a line."""
        said: dict[str, Any] = json.loads(line)
        tables = tuple(from_json(each) for each in said["tables"])
        changes = {each["name"]: each["changes"] for each in said["tables"]}
        return cls(said["time"], Lsn.parse(said["applied_lsn"] or "0/0"), tables, changes)

    @property
    def started(self) -> bool:
        """Whether Spark is there."""
        return self.time > 0

    @property
    def copied(self) -> bool:
        """Whether all tables are."""
        return bool(self.tables) and all(table.phase.copied for table in self.tables)

    @property
    def ready(self) -> bool:
        """Whether all tables follow together."""
        return bool(self.tables) and all(table.phase is Phase.READY for table in self.tables)

    @property
    def rows_copied(self) -> int:
        """Of all tables."""
        return sum(table.rows_copied for table in self.tables)

    @property
    def changes_applied(self) -> int:
        """To all tables."""
        return sum((self.changes or {}).values())

    def includes(self, lsn: Lsn) -> bool:
        """Whether everything before it is in every table."""
        return self.copied and self.applied >= lsn and all(table.applied_lsn >= lsn for table in self.tables)


class MirrorProcess:
    """The child, from when the context is entered until it is left."""

    def __init__(self, config_file: Path, log: Path) -> None:
        self._command = [sys.executable, "-m", "walmere", "run", "-c", str(config_file), "--json"]
        self._log = log
        self._process: subprocess.Popen[bytes]
        self._ending = False
        self.began = 0.0
        self.progress = RunReport()

    def __enter__(self) -> MirrorProcess:
        self.began = time.time()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=own_environment(),
            )
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.end()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING)
        if self._process.poll() is None or not self._group_ended():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """Ask it to end, and do not wait."""
        if not self._ending and self._process.poll() is None:
            self._process.terminate()
        self._ending = True

    def check(self) -> None:
        """Raise what ended it, if it ended before it was asked to."""
        if self._ending or self._process.poll() is None:
            return
        said = self._log.read_text(errors="replace")
        _, found, last = said.rpartition("walmere: ")
        wrong, _, hint = (last if found else said[-1000:]).strip().partition("\n  hint: ")
        code = self._process.returncode
        raise WalmereError("running the subscription", wrong or f"it ended with {code}", hint or f"see {self._log}")

    def _listen(self, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                if line.startswith(b"{"):  # the JVM has the same stdout, and may have something to say
                    self.progress = RunReport.parse(line)

    def _group_ended(self) -> bool:
        deadline = time.monotonic() + _AFTERMATH
        while time.monotonic() < deadline:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        return False


def own_environment() -> dict[str, str]:
    """Ours, without what would lead to another source or another lake: the demo's are its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("WALMERE_", "PG"))}
