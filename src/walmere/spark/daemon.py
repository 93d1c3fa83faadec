"""The process that Spark's Python workers are forked from, in place of `pyspark.daemon`, with three things done before.

Spark puts its own archives first on the path of its workers, and has every task look through the path anew
(`importlib.invalidate_caches`): each time, each worker reads the directories of these archives again, several times
over, which is more than all the work of a small batch. Where PySpark is installed beside us they are not needed, and
go.

What a task needs is imported once, here, instead of in every worker.

And on the machine of the receiver, tasks stand back behind it: what it does not take, the source has to keep.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Final

NICE: Final = "WALMERE_WORKER_NICE"


def without_archives(path: list[str]) -> list[str]:
    """The path without zip files and jars, if PySpark can still be found on it."""
    lean = [place for place in path if not place.endswith((".zip", ".jar"))]
    return lean if any(Path(place, "pyspark", "daemon.py").exists() for place in lean) else path


def main() -> None:
    """Be Spark's daemon."""
    os.nice(int(os.environ.get(NICE, "0")))
    sys.path[:] = without_archives(sys.path)
    for place in set(sys.path_importer_cache) - set(sys.path):
        del sys.path_importer_cache[place]

    for module in ("walmere.spark.apply", "walmere.subscription.tablesync"):
        importlib.import_module(module)
    importlib.import_module("pyspark.daemon").manager()


if __name__ == "__main__":
    main()
