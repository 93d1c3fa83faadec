"""Ends a receiver whose launcher was killed, if the change log is in a store.

Without a store, such a receiver goes on: only this machine has the log, and the source need not keep its WAL. With a
store, another machine may be waiting for the slot, to go on with receiving and applying.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)

GRACE: Final = 30.0
"""Seconds in which a supervisor may start the launcher again. The new launcher stops the receiver itself."""
_POLL: Final = 1.0


def end_with(launcher: int, stop: Callable[[], None], grace: float = GRACE) -> None:
    """Call `stop` so many seconds after this process is no longer a child of the launcher."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_POLL)
        _log.warning("the process that has started this receiver was killed; ending in %.0f s", grace)
        time.sleep(grace)
        stop()

    threading.Thread(target=watch, name="walmere-orphan", daemon=True).start()
