"""Rewrite files in a thread of low priority, so that batches come first on a machine whose cores are all in use."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from walmere.sinks.base import Sink

_NICE: Final = 10


@dataclass(frozen=True, slots=True)
class LowPriority:
    """Rewrites files in a thread of low priority. The thread ends with the task, which cannot raise its own again."""

    sink: Sink

    def __call__(self, work: Any) -> Any:
        results: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with suppress(OSError, AttributeError):  # only Linux has priorities of threads
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
                results.append(self.sink.rewrite_files(work))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]
