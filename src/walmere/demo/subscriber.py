"""The subscription of the demo: `walmere run --json` as a child process, and its reports.

It has its own session, so that Ctrl-C in the terminal is sent only to the demo. The demo then ends it, and checks that
all processes of its group have ended, because Spark's JVM is not a child of the demo. (Spark's Python workers have
their own groups and end with the JVM.) Its stderr, with that of Spark, is written to a file.
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

_STOP_TIMEOUT: Final = 15.0
"""Seconds that `walmere run` has to end."""
_JVM_TIMEOUT: Final = 5.0
"""Seconds that the JVM has to end after that."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """The last line of `walmere run --json`."""

    time: float = 0.0
    applied: Lsn = INVALID_LSN
    tables: tuple[TableState, ...] = ()
    changes: Mapping[str, int] | None = None

    @classmethod
    def parse(cls, line: bytes) -> RunReport:
        """Parse a line."""
        content: dict[str, Any] = json.loads(line)
        tables = tuple(from_json(table) for table in content["tables"])
        changes = {table["name"]: table["changes"] for table in content["tables"]}
        return cls(content["time"], Lsn.parse(content["applied_lsn"] or "0/0"), tables, changes)

    @property
    def started(self) -> bool:
        """Whether Spark has started."""
        return self.time > 0

    @property
    def copied(self) -> bool:
        """Whether all tables are copied."""
        return bool(self.tables) and all(table.phase.copied for table in self.tables)

    @property
    def ready(self) -> bool:
        """Whether all tables are in the phase ready."""
        return bool(self.tables) and all(table.phase is Phase.READY for table in self.tables)

    @property
    def rows_copied(self) -> int:
        """Copied rows of all tables."""
        return sum(table.rows_copied for table in self.tables)

    @property
    def changes_applied(self) -> int:
        """Applied changes of all tables."""
        return sum((self.changes or {}).values())

    def includes(self, lsn: Lsn) -> bool:
        """Whether everything before the LSN is in every table."""
        return self.copied and self.applied >= lsn and all(table.applied_lsn >= lsn for table in self.tables)


class MirrorProcess:
    """The child process. It runs while the context is open."""

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
            self._process.wait(_STOP_TIMEOUT)
        if self._process.poll() is None or not self._group_ended():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """Send SIGTERM, and do not wait."""
        if not self._ending and self._process.poll() is None:
            self._process.terminate()
        self._ending = True

    def check(self) -> None:
        """Raise the error of the process if it has ended without `end`."""
        if self._ending or self._process.poll() is None:
            return
        text = self._log.read_text(errors="replace")
        _, found, last = text.rpartition("walmere: ")
        wrong, _, hint = (last if found else text[-1000:]).strip().partition("\n  hint: ")
        code = self._process.returncode
        raise WalmereError(
            "running the subscription", wrong or f"it ended with exit code {code}", hint or f"see {self._log}"
        )

    def _listen(self, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                if line.startswith(b"{"):  # the JVM writes to the same stdout
                    self.progress = RunReport.parse(line)

    def _group_ended(self) -> bool:
        deadline = time.monotonic() + _JVM_TIMEOUT
        while time.monotonic() < deadline:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        return False


def own_environment() -> dict[str, str]:
    """The environment without variables that would select another source or lake."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("WALMERE_", "PG"))}
