"""The process that Spark's Python workers are forked from, in place of `pyspark.daemon`, with four things done before.

Spark puts its own archives first on the path of its workers, and has every task look through the path anew
(`importlib.invalidate_caches`): each time, each worker reads the directories of these archives again, several times
over, which is more than all the work of a small batch. Where PySpark is installed beside us they are not needed, and
go.

What a task needs is imported once, here, instead of in every worker. And then taken out of the sight of the garbage
collector: Spark has it run after every task, over all modules there are, which took as long as a small task.

And on the machine of the receiver, tasks stand back behind it: what it does not take, the source has to keep.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Final

NICE: Final = "WALMERE_WORKER_NICE"
_SPARKS_OWN: Final = re.compile(r"/(?:pyspark\.zip|py4j-[^/]*\.zip|spark-[^/]*\.jar)(?:/|$)")


def without_archives(path: list[str]) -> list[str]:
    """The path without zip files and jars, if PySpark can still be found on it."""
    lean = [place for place in path if not place.endswith((".zip", ".jar"))]
    return lean if any(Path(place, "pyspark", "daemon.py").exists() for place in lean) else path


def keep_imports() -> None:
    """Where Spark's own daemon forks the workers: have the next tasks of this one do without both.

    Spark's archives stay on the path, and what was read of them is kept by `zipimport`: only a new import looks at them
    again. What was imported stays, so it is frozen once.
    """
    if not gc.get_freeze_count():
        gc.freeze()
    for place in [place for place in sys.path_importer_cache if _SPARKS_OWN.search(place)]:
        del sys.path_importer_cache[place]


def main() -> None:
    """Be Spark's daemon."""
    os.nice(int(os.environ.get(NICE, "0")))
    sys.path[:] = without_archives(sys.path)
    for place in set(sys.path_importer_cache) - set(sys.path):
        del sys.path_importer_cache[place]

    for module in ("walmere.spark.apply_query", "walmere.subscription.tablesync"):
        importlib.import_module(module)
    daemon = importlib.import_module("pyspark.daemon")
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
