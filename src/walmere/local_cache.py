"""Directories of this machine for caches: what is in them can be made again at any time.

`user_cache` outlives processes. `local_cache` does not: on the executors of a cluster, it is below Spark's local
directory, which Spark deletes with the executor; or where `[spark] cache_directory` says. In a process that Spark has
not started, it is a temporary directory of the process.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

VARIABLE: Final = "WALMERE_CACHE_DIRECTORY"
"""Has `[spark] cache_directory` in the executors' processes."""
_SPARK: Final = "SPARK_LOCAL_DIRS"


def user_cache() -> Path:
    """The user's cache directory for Walmere. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "walmere")


def local_cache() -> Path:
    """The directory. It may not exist yet."""
    return shared_cache() or _of_process(os.getpid())


def shared_cache() -> Path | None:
    """The same, if the other processes of the executor have the same one; None otherwise."""
    if configured := os.environ.get(VARIABLE):
        return Path(configured)
    if (spark := os.environ.get(_SPARK, "").partition(",")[0]) and os.access(spark, os.W_OK):
        return Path(spark, "walmere")
    return None


@functools.cache
def _of_process(pid: int) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="walmere-"))

    def remove() -> None:
        if os.getpid() == pid:  # not in a process that was forked
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory
