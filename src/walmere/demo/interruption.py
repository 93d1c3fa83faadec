"""Handles Ctrl-C and other signals at any moment, so that no process is left running.

The first signal raises `Interrupted` in the main thread, and the context managers end what was started. A signal is
delayed while a resource is being started (otherwise, a process could be started that no context manager ends) and while
it is being ended. Signals after the first one are ignored: ending has its own timeouts.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Any, Final, TypeVar

Resource = TypeVar("Resource")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asks the demo to end. A BaseException, so that no handler of errors catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """The exit code that a shell shows for a command that was ended by a signal."""
        return 128 + self.number


class Interruptions(AbstractContextManager["Interruptions"]):
    """Raises `Interrupted` in the main thread when a signal arrives."""

    def __init__(self) -> None:
        self._arrived: int | None = None
        self._raised = False
        self._held = 0
        self._before: list[Any] = []

    def __enter__(self) -> Interruptions:
        self._before = [signal.signal(number, self._signal) for number in _SIGNALS]
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _signal(self, number: int, _: FrameType | None) -> None:
        self._arrived = self._arrived or number
        if not self._held:
            self._raise()

    def _raise(self) -> None:
        if self._arrived is not None and not self._raised:
            self._raised = True
            raise Interrupted(self._arrived)

    def _release(self) -> None:
        self._held -= 1
        if not self._held:
            self._raise()

    @contextmanager
    def guard(self, resource: AbstractContextManager[Resource]) -> Iterator[Resource]:
        """Enter and exit the resource without interruption; between them, signals raise `Interrupted`."""
        self._held += 1
        try:
            made = resource.__enter__()
        except BaseException:
            self._release()  # the signal may be the reason of the failure
            raise
        try:
            self._release()
            yield made
        finally:
            self._held += 1
            resource.__exit__(*sys.exc_info())
            self._release()
