"""Ctrl-C at any moment, and nothing is left running.

The first signal raises `Interrupted` in the main thread, wherever that is, and the way out ends what was started. Two
moments are protected from it: while a resource is being made (a process that was started but is not yet known to anyone
would be nobody's to end) and while it is being ended. A signal that comes then waits until it is over. All that come
after the first are ignored: the way out has its own limits of time.
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
    """Somebody wants us to end. No error, so nothing that handles errors may stop it on its way."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """As a shell has it of a command that was ended by a signal."""
        return 128 + self.number


class Interruptions(AbstractContextManager["Interruptions"]):
    """Turns signals into `Interrupted`, in the main thread."""

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

    def _let_go(self) -> None:
        self._held -= 1
        if not self._held:
            self._raise()

    @contextmanager
    def guard(self, resource: AbstractContextManager[Resource]) -> Iterator[Resource]:
        """Enter and leave the resource without interruption; inside, be interruptible."""
        self._held += 1
        try:
            made = resource.__enter__()
        except BaseException:
            self._let_go()  # what failed may have failed because the signal was for it, too
            raise
        try:
            self._let_go()
            yield made
        finally:
            self._held += 1
            resource.__exit__(*sys.exc_info())
            self._let_go()
