"""Puts source, Spark and target together, for a run and for a proof. Importing this imports Spark."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from walmere.config import Config
from walmere.errors import ChangeLogInUse, ConfigError, NotMirrored, WalmereError
from walmere.lsn import Lsn
from walmere.sinks.base import Sink
from walmere.sinks.delta import DeltaSink
from walmere.spark.apply import Applied, Apply
from walmere.spark.session import session
from walmere.spark.shuffle import SparkShuffle
from walmere.spark.tasks import SparkTasks
from walmere.subscription import requests
from walmere.subscription.launcher import Launcher
from walmere.subscription.ledger import Ledger
from walmere.subscription.state import to_json
from walmere.subscription.tables import Tables
from walmere.subscription.tablesync import TableSync
from walmere.verify.point import consistent_point
from walmere.verify.proof import Options, Proof, Prover, Verdict

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from walmere.api import Subscription

Tell = Callable[[Mapping[str, Any]], None]

_POLL: Final = 0.05
_PATIENCE: Final = 10.0
"""Seconds that a run has to find the first tables."""


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
        self._ended = threading.Event()
        apply.on_batch = self._batch
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: the launcher will find that, too
            while not self._ended.wait(_POLL):
                self.poll()

    def end(self) -> None:
        """Tell what the last batch brought, and no more."""
        self._ended.set()
        self.poll()

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


def spark(config: Config) -> SparkSession:
    """Spark as the configuration wants it: started, or found running in this process."""
    log = config.subscription.directory / "spark.log"
    return session(config.subscription.name, config.spark.master, config.spark.settings, log)


def sink(config: Config, file: Path) -> Sink:
    """The target."""
    if config.target is None:
        raise ConfigError(f"reading {file}", "there is no [target]", 'add [target] with kind = "delta" and path = "…"')
    return DeltaSink(str(config.target.path), keep_seconds=config.target.keep_seconds)


def launcher(config: Config, file: Path, tell: Tell | None = None) -> Launcher:
    """Start Spark and make a launcher that is ready to run; `tell` learns how it gets on."""
    target = sink(config, file)
    directory = config.subscription.directory
    tables = Tables(directory)  # first: it is refused if it is damaged, and Spark takes seconds to start
    started = spark(config)
    gather = config.target is not None and config.target.gather_partitions
    sync = TableSync(config.source, config.subscription.name, tables, target, SparkTasks(started), gather=gather)
    apply = Apply(started, directory, target, tables, config.subscription.name)
    made = Launcher(config, file, tables, sync, apply)
    if tell is not None:
        progress = Progress(tables, apply, tell)
        made.on_poll, made.on_end = progress.poll, progress.end
    return made


def verify(
    subscription: Subscription,
    names: Sequence[str],
    options: Options | None,
    progress: Callable[[str, int, int], None] | None,
    verdict: Callable[[Verdict], None] | None,
) -> Proof:
    """See `Subscription.verify`."""
    config, directory = subscription.config, subscription.directory
    target = sink(config, subscription.file)
    _settle(subscription)
    wanted = requests.find(Tables(directory), names, "looking for tables to compare") if names else None
    catch_up = functools.partial(_run, subscription)
    with consistent_point(config.source, config.subscription.name, directory, catch_up) as at:
        started = spark(config)
        prover = Prover(
            config.source,
            at,
            target,
            tasks=SparkTasks(started),
            shuffle=SparkShuffle(started),
            options=options or Options(),
        )
        prover.tell = progress or prover.tell
        prover.told = verdict or prover.told
        tables = [each for each in Tables(directory) if each.published and each.oid]
        chosen = [each for each in tables if wanted is None or each.table in wanted]
        return prover.prove(chosen, gather=config.target is not None and config.target.gather_partitions)


def _run(subscription: Subscription, until: Lsn) -> None:
    """Up to there. That a table cannot be mirrored is no reason not to compare the others."""
    try:
        subscription.run(until)
    except WalmereError:
        last = Ledger(subscription.directory).last()
        if last is None or last.lsn < until:
            raise


def _settle(subscription: Subscription) -> None:
    """Wait until every table is copied; but for those that were refused: the proof will say so."""
    doing, patience = "looking for tables to compare", time.monotonic() + _PATIENCE
    while True:
        tables = [each for each in Tables(subscription.directory) if each.published and each.oid]
        waiting = [each for each in tables if not each.follows and each.error is None]
        if tables and not waiting:
            break
        if not subscription.running:
            with contextlib.suppress(ChangeLogInUse):  # somebody was faster
                _run(subscription, subscription.source_position())
                tables = [each for each in Tables(subscription.directory) if each.published and each.oid]
                break
        if not tables and time.monotonic() > patience:
            break
        time.sleep(_POLL)
    if not tables:
        raise NotMirrored(doing, "the publications have none", "ALTER PUBLICATION … ADD TABLE …")
    if not any(each.follows for each in tables):
        raise NotMirrored(doing, tables[0].error or "none is copied", "see `walmere status`")
