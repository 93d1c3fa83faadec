"""A line of a terminal that is written again and again, below what is printed meanwhile."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, TextIO

_CLEAR: Final = "\r\x1b[K"


class StatusLine:
    """The last line of a terminal. If the stream is not a terminal, `show` does nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = False
        self._lock = threading.Lock()
        self.terminal = stream.isatty()

    def show(self, text: str) -> None:
        """Replace the line."""
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1  # a longer one would not be replaced, but moved up
            self._write(f"{_CLEAR}{text if len(text) <= width else text[: width - 1] + '…'}", shown=True)

    def print(self, text: str) -> None:
        """Print a line that stays."""
        self._write(f"{_CLEAR if self._shown else ''}{text}\n", shown=False)

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            self._write(_CLEAR, shown=False)

    def _write(self, text: str, *, shown: bool) -> None:
        with self._lock, suppress(OSError, ValueError):  # nobody reads it any more
            self._stream.write(text)
            self._stream.flush()
            self._shown = shown

    @contextmanager
    def below_the_log(self) -> Iterator[None]:
        """Remove the line before a warning is logged. The next `show` brings it back."""

        def clear(_: logging.LogRecord) -> bool:
            self.clear()
            return True

        handlers = list(logging.getLogger().handlers)
        for handler in handlers:
            handler.addFilter(clear)
        try:
            yield
        finally:
            self.clear()
            for handler in handlers:
                handler.removeFilter(clear)
