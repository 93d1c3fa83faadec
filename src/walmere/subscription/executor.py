"""Threads for work that may wait for the source. They do not delay the end of the process.

The threads of `concurrent.futures` do: Python joins them before it exits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


class DaemonExecutor(Executor):
    """An executor of daemon threads."""

    def __init__(self, threads: int, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = threads
        for number in range(threads):
            threading.Thread(target=self._run, name=f"walmere-{name}-{number}", daemon=True).start()

    def submit(self, function: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        future: Future[Result] = Future()
        self._work.put((future, lambda: function(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002  never waits
        """Let the threads end after the work that was submitted."""
        for _ in range(self._threads):
            self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
