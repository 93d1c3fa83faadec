"""Puts source, Spark and target together, for a run and for a proof. Importing this imports Spark."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from walmere.changelog.manifest import NAME
from walmere.config import Config
from walmere.errors import ChangeLogInUse, ConfigError, NotCompared, NotMirrored, SourceError, WalmereError
from walmere.lsn import Lsn
from walmere.sinks.base import Sink
from walmere.sinks.delta import DeltaSink
from walmere.spark.apply import Applied, Apply
from walmere.spark.session import require_alive, session
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
_START: Final = 60.0
"""Seconds that Spark has to start, besides."""
_POINTS: Final = 3
"""Points at which a table is tried to be compared: it may be rewritten, truncated or altered meanwhile."""
_AGAIN: Final = 1.0
"""Seconds until the next of them."""


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
    made.require_spark = functools.partial(require_alive, directory / "spark.log")
    if tell is not None:
        progress = Progress(tables, apply, tell)
        made.on_poll, made.on_end = progress.poll, progress.end
    return made


def verify(
    subscription: Subscription,
    names: Sequence[str],
    options: Options | None,
    *,
    wait: float,
    progress: Callable[[str, int, int], None] | None,
    verdict: Callable[[Verdict], None] | None,
) -> Proof:
    """See `Subscription.verify`."""
    config, directory = subscription.config, subscription.directory
    target = sink(config, subscription.file)
    if not (config.changelog / NAME).exists():  # a run would begin the subscription, with a slot at the source
        raise NotMirrored(
            "looking for tables to compare",
            f"there is no subscription in {directory}: it was dropped, or has never run",
            "`walmere run` begins it",
        )
    _settle(subscription, wait)
    found = requests.find(Tables(directory), names, "looking for tables to compare") if names else None
    wanted = None if found is None else {str(each) for each in found}
    request = _Request(options or Options(), wait, progress or (lambda *_: None), verdict or (lambda _: None))
    compare = functools.partial(_compare, subscription, target, request)
    made = compare(wanted, tries_again=True)
    proven = {each.name: each for each in made.tables}
    for attempt in range(2, _POINTS + 1):
        passing = {each.name for each in proven.values() if each.passing}
        if not passing:
            break
        time.sleep(_AGAIN)
        try:
            made = compare(passing, tries_again=attempt < _POINTS)
        except (NotCompared, SourceError):  # what was found at the points before counts
            for name in sorted(passing):
                request.verdict(proven[name])
            break
        proven |= {each.name: each for each in made.tables}
    return Proof(made.lsn, tuple(proven[name] for name in sorted(proven)))


@dataclass(frozen=True, slots=True)
class _Request:
    """How to compare, and who learns how it gets on."""

    options: Options
    wait: float
    progress: Callable[[str, int, int], None]
    verdict: Callable[[Verdict], None]


def _compare(
    subscription: Subscription,
    target: Sink,
    request: _Request,
    names: Collection[str] | None,
    *,
    tries_again: bool,
) -> Proof:
    """Compare tables at one point: these, or all."""
    config, directory = subscription.config, subscription.directory
    catch_up = functools.partial(_run, subscription, wait=request.wait)
    name, receive = config.subscription.name, subscription.receive
    with consistent_point(config.source, name, directory, catch_up=catch_up, receive=receive, wait=request.wait) as at:
        started = spark(config)
        tasks, shuffle = SparkTasks(started), SparkShuffle(started)
        prover = Prover(config.source, at, target, tasks=tasks, shuffle=shuffle, options=request.options)
        prover.tell, prover.told = request.progress, request.verdict
        prover.tries_again, prover.others_run = tries_again, subscription.running
        tables = [each for each in Tables(directory) if each.published and each.oid]
        chosen = [each for each in tables if names is None or each.name in names]
        return prover.prove(chosen, gather=config.target is not None and config.target.gather_partitions)


def _run(subscription: Subscription, until: Lsn, wait: float) -> None:
    """Up to there. That a table cannot be mirrored is no reason not to compare the others."""
    ended, stuck = threading.Event(), threading.Event()
    watch = threading.Thread(target=_stop_when_stuck, args=(subscription, wait + _START, ended, stuck), daemon=True)
    watch.start()
    try:
        subscription.run(until)
    except WalmereError:
        last = Ledger(subscription.directory).last()
        if last is None or last.lsn < until:
            raise
    finally:
        ended.set()
        watch.join()
    if stuck.is_set():
        raise NotCompared(
            "bringing the tables to a point to compare at",
            f"nothing was copied or applied for {wait:g} s, and {until} is wanted",
            "see `walmere status`; or give it more time: --wait SECONDS",
        )


def _stop_when_stuck(subscription: Subscription, wait: float, ended: threading.Event, stuck: threading.Event) -> None:
    seen: object = None
    deadline = time.monotonic() + wait
    while not ended.wait(_POLL * 10):
        last = Ledger(subscription.directory).last()
        with contextlib.suppress(FileNotFoundError):
            if (now := (Tables.changed(subscription.directory), last and last.lsn)) != seen:
                seen, deadline = now, time.monotonic() + wait
        if time.monotonic() > deadline:
            stuck.set()
            subscription.stop()
            return


def _settle(subscription: Subscription, wait: float) -> None:
    """Wait until every table is copied; but for those that were refused: the proof will say so."""
    doing, patience = "looking for tables to compare", time.monotonic() + _PATIENCE
    deadline = time.monotonic() + wait
    while True:
        tables = [each for each in Tables(subscription.directory) if each.published and each.oid]
        waiting = [each for each in tables if not each.follows and each.error is None]
        if tables and not waiting:
            break
        if not subscription.running:
            with contextlib.suppress(ChangeLogInUse):  # somebody was faster
                _run(subscription, subscription.source_position(), wait)
                tables = [each for each in Tables(subscription.directory) if each.published and each.oid]
                break
        if (not tables and time.monotonic() > patience) or time.monotonic() > deadline:
            break
        time.sleep(_POLL)
    if not tables:
        raise NotMirrored(doing, "the publications have none", "ALTER PUBLICATION … ADD TABLE …")
    if not any(each.follows for each in tables):
        raise NotMirrored(doing, tables[0].error or "none is copied", "see `walmere status`")
