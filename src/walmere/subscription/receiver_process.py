"""`walmere receive` as a child process of the launcher.

    it reports an error         the error ends the run; the child writes it to `receiver-error.json`, with its class
    it is killed, or crashes    it is started again after a pause, with a warning
    another process receives    the run uses what that process receives; the child is started again later

A receiver that an earlier launcher has left running is stopped, because no other process would stop it. With a store,
it ends by itself, see `shared.orphan`: on another machine, a standby may wait for its slot.

The child logs to `receiver.log`; its warnings are repeated on stderr of the launcher. It logs to a file and not to a
pipe, because it continues if the launcher is killed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from walmere import paths
from walmere.changelog import manifest
from walmere.changelog.manifest import Manifest
from walmere.config import Config
from walmere.errors import ChangeLogInUse, SourceError
from walmere.lsn import Lsn
from walmere.storage import Lock, read_error, reserve_error
from walmere.subscription.backoff import Backoff
from walmere.units import how_it_ended

_log = logging.getLogger(__name__)

RETRY_INTERVAL: Final = 5.0
"""Seconds before the receiver is started again if another process receives."""
MAX_CRASHES: Final = 5
"""A run with `until` fails after this many crashes of the receiver in a row. Other runs have no limit."""
_BACKOFF: Final = (0.5, 30.0)
_STABLE_SECONDS: Final = 60.0
"""A receiver that ran this many seconds resets the count of crashes."""
_KILL_AFTER: Final = 5.0
"""Kill the receiver if it has not ended after this many seconds. Nothing is lost by that."""
_POLL: Final = 0.05
_WARNING: Final = re.compile(rb"^\S+ \S+ (?:WARNING|ERROR|CRITICAL) (.*)$", re.MULTILINE)


class ReceiverProcess:
    """The receiver's process."""

    def __init__(self, config_file: Path, config: Config, until: Lsn | None) -> None:
        self._changelog = config.changelog
        directory = config.subscription.directory
        self._log, self._pids = directory / paths.RECEIVER_LOG, directory / paths.RECEIVER_PIDS
        self._error, self._report = directory / paths.RECEIVER_ERROR, directory / paths.RECEIVER
        self._command = [sys.executable, "-m", "walmere", "receive", "-c", str(config_file)]
        self._command += ["--error-file", str(self._error)]
        if config.subscription.store is not None:
            self._command += ["--launcher", str(os.getpid())]
        self.until = until
        """Receive until this LSN; None: until stopped. May be increased later."""
        self._backoff = Backoff(*_BACKOFF)
        self._start_at: float | None = None  # when to start it again; None: not planned
        self._repeated = 0  # bytes of the log whose warnings were repeated
        directory.mkdir(parents=True, exist_ok=True)
        self._stop_orphan()
        self._log.write_bytes(b"")
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._runs_until, self._start_at = self.until, None
        self._reached = False
        reserve_error(self._error)
        if (
            Lock.holder(self._changelog) is None
        ):  # what a process has left that was killed; its number may be used again
            self._report.unlink(missing_ok=True)
        command = [*self._command, *(["--until", str(self.until)] if self.until is not None else [])]
        self._started = time.monotonic()
        with self._log.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._pids.write_text(f"{process.pid} {os.getpid()}")
        return process

    def _stop_orphan(self) -> None:
        """Stop the receiver of a launcher that was killed."""
        holder = Lock.holder(self._changelog)
        if holder is None or not self._pids.exists():
            return
        pids = self._pids.read_text().split()
        receiver, launcher = map(int, pids) if len(pids) == 2 else (0, 0)  # torn by a crash
        if receiver == holder and not _is_alive(launcher):  # it has the lock, so its number was not reused
            with suppress(ProcessLookupError):
                os.kill(receiver, signal.SIGTERM)
            deadline = time.monotonic() + _KILL_AFTER
            while Lock.holder(self._changelog) == receiver:
                if time.monotonic() > deadline:
                    with suppress(ProcessLookupError):
                        os.kill(receiver, signal.SIGKILL)
                time.sleep(_POLL)

    def __enter__(self) -> ReceiverProcess:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_AFTER)
        self.kill()
        self._process.wait()
        self._repeat_warnings()

    def terminate(self) -> None:
        """Request its end."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it at once. Everything that it has confirmed is durable."""
        if self._process.poll() is None:
            self._process.kill()

    def check(self) -> None:
        """Start it again if it was killed. Raises the error that it reported, if there is one."""
        self._repeat_warnings()
        if (code := self._process.poll()) is None or (code == 0 and self._has_reached()):
            return
        now = time.monotonic()
        if code == 0 and self._runs_until != self.until:
            self._process = self._start()
        elif self._start_at is None:
            self._start_at = now + self._pause(code)
        elif now >= self._start_at:
            self._process = self._start()

    def has_slot(self) -> bool:
        """Whether a receiver on this machine streams from the slot, or this one has received everything."""
        if self._process.poll() == 0 and self._has_reached():
            return True
        with suppress(OSError, ValueError, KeyError):
            found = json.loads(self._report.read_bytes())
            return bool(found["connected"]) and found["pid"] == Lock.holder(self._changelog)
        return False

    def _has_reached(self) -> bool:
        """Whether it ended because the log has reached `until`, and not because it was stopped."""
        if self.until is None or self._runs_until != self.until:
            return False
        if not self._reached:
            with Manifest(self._changelog) as log:
                self._reached = manifest.summarise(log).end_lsn >= self.until
        return self._reached

    def _pause(self, code: int) -> float:
        """Seconds before it is started again. Raises the error that it reported."""
        error = read_error(self._error)
        if isinstance(error, ChangeLogInUse) or (error is not None and Lock.holder(self._changelog) is not None):
            return RETRY_INTERVAL
        if error is not None:
            raise error
        if time.monotonic() - self._started >= _STABLE_SECONDS:
            self._backoff.reset()
        ended = how_it_ended(code)
        pause = self._backoff.next(None if self.until is None else MAX_CRASHES)
        if pause is None:
            raise SourceError("receiving", f"the receiver {ended}, {MAX_CRASHES} times in a row", f"see {self._log}")
        _log.warning("the receiver %s; starting it again in %.1f s", ended, pause)
        return pause

    def _repeat_warnings(self) -> None:
        """Repeat the warnings of new lines of its log; only complete lines, because one may be half written."""
        lines = b""
        with suppress(FileNotFoundError), self._log.open("rb") as log:
            if log.seek(0, os.SEEK_END) < self._repeated:  # the file was truncated
                self._repeated = 0
            log.seek(self._repeated)
            lines = log.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        self._repeated += len(lines)
        for text in _WARNING.findall(lines):
            _log.warning("receiver: %s", text.decode(errors="replace"))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
