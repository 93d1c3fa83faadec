"""A command in a pseudo terminal: what a person sees and types."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from processes import eventually


class Terminal:
    """`walmere` in a terminal of 120 columns. It is killed at the end of the block."""

    def __init__(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        command = [sys.executable, "-m", "walmere", *map(str, arguments)]
        environment = {**os.environ, **(env or {}), "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.output = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

    @property
    def text(self) -> str:
        """What was written, without colours and movements."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.output).replace("\r", "\n")

    def expect(self, text: str, seconds: float = 30) -> None:
        """Wait until the text is there."""
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert self._read(deadline), f"no {text!r} in:\n{self.text}"

    def forget(self) -> None:
        """Expect only what is written from now on."""
        self.output = ""

    def send(self, text: str) -> None:
        """Type a line."""
        os.write(self._master, f"{text}\n".encode())

    def send_secret(self, text: str) -> None:
        """Type a line when what is typed is not shown. What was typed before that is lost."""
        eventually(lambda: not termios.tcgetattr(self._master)[3] & termios.ECHO)
        self.send(text)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def wait(self, seconds: float = 30) -> int:
        """Wait for the end. Returns the exit code."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, deadline: float) -> bool:
        """Read what comes; False at the end, or after the deadline."""
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # the command has ended
            return False
        self.output += data.decode(errors="replace")
        return bool(data)
