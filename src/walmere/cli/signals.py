"""What SIGINT and SIGTERM do to a command, and a closed pipe."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from walmere.api import Subscription

_STOP_TIMEOUT: Final = 9.0
"""Seconds that a command has to end after the first signal."""


def end_as_by_ctrl_c() -> None:
    """SIGTERM ends the command as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextlib.contextmanager
def silent_when_closed() -> Iterator[None]:
    """End the block if nobody reads stdout any more, as in `walmere log | head`."""
    try:
        yield
    except BrokenPipeError:  # the rest of the buffer cannot be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def stopped_by_signals(worker: Subscription) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops the worker within `_STOP_TIMEOUT`; the second one exits at once.

    Exiting at any point is safe, as with `kill -9`: confirmed changes are durable, and others are received again.
    """
    wanted = (signal.SIGINT, signal.SIGTERM)
    signals = 0

    def exit_now(code: int) -> None:
        worker.abandon()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def give_up() -> None:
        print(f"walmere: some work did not stop within {_STOP_TIMEOUT:.0f} s; exiting anyway", file=sys.stderr)
        exit_now(0)

    watchdog = threading.Timer(_STOP_TIMEOUT, give_up)
    watchdog.daemon = True

    def handle(number: int, _: object) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            exit_now(128 + number)
        watchdog.start()
        worker.stop()

    before = [signal.signal(number, handle) for number in wanted]
    try:
        yield
    finally:
        watchdog.cancel()
        if not signals:  # otherwise the command is ending, and a second signal must still exit at once
            for number, handler in zip(wanted, before, strict=True):
                signal.signal(number, handler)
