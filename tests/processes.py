"""`walmere` as a process of its own, and a receiver in a thread: none of them outlives its test."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from walmere.cli import main
from walmere.config import Config
from walmere.lsn import Lsn
from walmere.subscription.receiver import Receiver


def eventually(
    condition: Callable[[], Any], seconds: float = 30, why: Callable[[], str] = lambda: "", every: float = 0.02
) -> None:
    """Wait for what others do in their own time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come to pass: {why()}"
        time.sleep(every)


def write_config(config: Config, path: Path, **source: str) -> Path:
    """The configuration as a file; `source` are more of its keys, as TOML."""
    keys = {
        "dsn": f"'{config.source.dsn.get_secret_value()}'",
        "publications": str(list(config.source.publications)),
        "slot": f"'{config.source.slot}'",
        "two_phase": str(config.source.two_phase).lower(),
        "streaming": str(config.source.streaming).lower(),
        **source,
    }
    lines = "\n".join(f"{key} = {value}" for key, value in keys.items())
    its = config.subscription
    subscription = f"name = '{its.name}'\ndirectory = '{its.directory}'\nsegment_bytes = {its.segment_bytes}"
    path.write_text(f"[source]\n{lines}\n[subscription]\n{subscription}\n")
    return path


class Here:
    """Runs commands in this process: starting one takes longer than what most tests are about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["walmere", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        atexit.unregister(gc.freeze)  # for a process that ends with its command
        out, err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err


def walmere(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(_command(arguments), capture_output=True, text=True, timeout=120, check=False, env=env)


@contextlib.contextmanager
def running(
    *arguments: str | Path, output: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that goes on, with its children in a session of its own; what it says goes to a file."""
    with output.open("ab") as file:
        process = subprocess.Popen(_command(arguments), stdout=file, stderr=file, env=env, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _command(arguments: tuple[str | Path, ...]) -> list[str]:
    return [sys.executable, "-m", "walmere", *map(str, arguments)]


class Background:
    """A receiver in a thread. What it ended with is in `error`; it is stopped at the end of the block."""

    def __init__(self, config: Config, until: Lsn | None = None) -> None:
        self.receiver = Receiver(config)
        self.error: BaseException | None = None
        self._until = until
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.receiver.run(self._until)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.receiver.stop()
        self._thread.join(30)
        assert not self._thread.is_alive(), "it does not end"

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, seconds: float = 30) -> BaseException | None:
        """Wait until it ends by itself; returns what it ended with."""
        self._thread.join(seconds)
        assert self.ended, "it goes on and on"
        return self.error
