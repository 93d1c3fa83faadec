"""For commands that end within a second: Python's search for garbage in cycles would take a fifth of their time."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Do not search inside, and not when the process ends."""
    enabled = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)  # Python would search everything that was imported once more
    try:
        yield
    finally:
        if enabled:
            gc.enable()
