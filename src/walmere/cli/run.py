"""`walmere run`: puts source, Spark and target together."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from walmere.config import Config
from walmere.errors import ConfigError
from walmere.sinks.delta import DeltaSink
from walmere.spark.apply import Applied, Apply
from walmere.spark.session import session
from walmere.spark.tasks import SparkTasks
from walmere.subscription.launcher import Launcher
from walmere.subscription.state import to_json
from walmere.subscription.tables import Tables
from walmere.subscription.tablesync import TableSync

Tell = Callable[[Mapping[str, Any]], None]

_POLL: Final = 0.05


class Progress:
    """What `walmere run --json` tells: where every table is, whenever something has moved on.

    It looks from a thread of its own: tables may be in the lake before the apply query has started.
    """

    def __init__(self, tables: Tables, apply: Apply, tell: Tell) -> None:
        self._tables = tables
        self._apply = apply
        self._tell = tell
        self._applied: str | None = None
        self._changes: Counter[int] = Counter()
        self._told: Mapping[str, Any] = {}
        self._looking = threading.Lock()
        apply.on_batch = self._batch
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: the launcher will find that, too
            while True:
                self.poll()
                time.sleep(_POLL)

    def _batch(self, applied: list[Applied]) -> None:
        for each in applied:
            self._changes[each.oid] += each.changes
        self._applied = str(self._apply.applied)  # after the changes: who sees the LSN sees them, too

    def poll(self) -> None:
        """Look, and tell if it is new."""
        with self._looking:
            applied = self._applied
            changes = self._changes
            tables = [{"name": each.name, **to_json(each), "changes": changes[each.oid]} for each in self._tables]
            now = {"applied_lsn": applied, "tables": tables}
            if now != self._told:
                self._tell(now)
                self._told = now


def launcher(config: Config, file: Path, tell: Tell | None = None) -> Launcher:
    """Start Spark and make a launcher that is ready to run; `tell` learns how it gets on."""
    if config.target is None:
        raise ConfigError(f"reading {file}", "there is no [target]", 'add [target] with kind = "delta" and path = "…"')
    directory = config.subscription.directory
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING, stream=sys.stderr)
    spark = session(config.subscription.name, config.spark.master, config.spark.settings, directory / "spark.log")
    tables = Tables(directory)
    sink = DeltaSink(str(config.target.path), keep_seconds=config.target.keep_seconds)
    gather = config.target.gather_partitions
    sync = TableSync(config.source, config.subscription.name, tables, sink, SparkTasks(spark), gather=gather)
    apply = Apply(spark, directory, sink, tables, config.subscription.name)
    made = Launcher(config, file, tables, sync, apply)
    if tell is not None:
        made.on_poll = Progress(tables, apply, tell).poll
    return made
