"""Replaces `pyspark.daemon`, the process that Spark's Python workers are forked from. It does four things first.

It removes Spark's own archives from the path. Each task calls `importlib.invalidate_caches`, after which each worker
reads the directories of these archives several times. This took longer than all the work of a small batch. The
archives are not needed if the same PySpark is installed beside Walmere.

It imports what tasks need once, instead of in every worker. It then freezes these objects: Spark runs the garbage
collector after every task, which took as long as a small task.

It lowers the priority of tasks on the machine of the receiver: what the receiver does not read in time, the source has
to keep.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import Final

MODULE: Final = "walmere.spark.daemon"
NICE: Final = "WALMERE_WORKER_NICE"
_VERSION: Final = "pyspark/version.py"
_SPARK_ARCHIVE: Final = re.compile(r"/(?:pyspark\.zip|py4j-[^/]*\.zip|spark-[^/]*\.jar)(?:/|$)")


def without_archives(path: list[str]) -> list[str]:
    """The path without zip files and jars, if the same PySpark can still be found on it."""
    kept = [place for place in path if not place.endswith((".zip", ".jar"))]
    installed = next((version for place in kept if (version := _version(place)) is not None), None)
    archived = next((version for place in path if place not in kept and (version := _version(place)) is not None), None)
    # an executor's Spark may be another one than the package beside Walmere
    return kept if installed is not None and archived in (None, installed) else path


def _version(place: str) -> bytes | None:
    """The file with the version of PySpark in a directory or a zip file; None: PySpark is not there."""
    try:
        if not place.endswith(".zip"):
            return Path(place, _VERSION).read_bytes()
        with zipfile.ZipFile(place) as archive:
            return archive.read(_VERSION)
    except (OSError, KeyError, zipfile.BadZipFile):
        return None


def keep_imports() -> None:
    """Save the same costs in the next tasks of this worker, if Spark's own daemon has forked it.

    Spark's archives stay on the path, and `zipimport` keeps their directories: only a new import reads them again.
    """
    if not gc.get_freeze_count():
        gc.freeze()
    for place in [place for place in sys.path_importer_cache if _SPARK_ARCHIVE.search(place)]:
        del sys.path_importer_cache[place]


def main() -> None:
    """Prepare the process, then run Spark's daemon in it."""
    os.nice(int(os.environ.get(NICE, "0")))
    sys.path[:] = without_archives(sys.path)
    for place in set(sys.path_importer_cache) - set(sys.path):
        del sys.path_importer_cache[place]

    # PyArrow imports pandas with the first array that it makes
    for module in ("walmere.spark.apply_task", "walmere.subscription.tablesync", "pandas"):
        importlib.import_module(module)
    daemon = importlib.import_module("pyspark.daemon")
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
