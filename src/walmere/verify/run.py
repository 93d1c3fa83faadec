"""Compares the tables of a subscription: finds a point, compares them there, and retries some at a newer point."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from walmere.changelog.manifest_file import NAME
from walmere.config import Config
from walmere.errors import ChangeLogInUse, NotCompared, NotMirrored, SourceError, WalmereError
from walmere.ledger.file import Ledger
from walmere.lsn import Lsn
from walmere.running import spark
from walmere.shaping.rules import TableRules
from walmere.sinks.base import Sink
from walmere.spark.shuffle import SparkShuffle
from walmere.spark.tasks import SparkTasks
from walmere.subscription.requests import resync
from walmere.subscription.tables import Tables
from walmere.subscription.tablesync import source_of_tasks
from walmere.subscription.target.sink import sink_of
from walmere.verify.point import consistent_point
from walmere.verify.proof import OnProgress, OnVerdict, Proof, Prover, VerifyOptions

_POLL: Final = 0.05
_FIRST_TABLES: Final = 10.0
"""Seconds to wait for a new run to find the first tables."""
_SPARK_START: Final = 60.0
"""Seconds to wait for Spark to start, in addition to `wait`."""
_POINTS: Final = 3
"""Compare a table at up to this many points, if it is rewritten, truncated or altered meanwhile."""
_RETRY_AFTER: Final = 1.0
"""Seconds between two points."""


class RunnableSubscription(Protocol):
    """The part of `walmere.Subscription` that verify uses."""

    file: Path
    config: Config

    @property
    def directory(self) -> Path:
        """The directory of its state files."""

    @property
    def running(self) -> bool:
        """Whether a process runs it."""

    def run(self, until: Lsn) -> None:
        """Copy and apply, up to an LSN."""

    def receive(self, until: Lsn) -> Lsn:
        """Receive, up to an LSN."""

    def stop(self) -> None:
        """End `run`."""

    def source_position(self) -> Lsn:
        """Everything that is committed at the source now is before it."""


def verify(
    subscription: RunnableSubscription,
    names: Sequence[str],
    options: VerifyOptions | None,
    *,
    wait: float,
    on_progress: OnProgress,
    on_verdict: OnVerdict,
) -> Proof:
    """Compare these tables, or all: see `walmere.Subscription.verify`."""
    config, directory = subscription.config, subscription.directory
    target = sink_of(config, subscription.file)
    if not (config.changelog / NAME).exists():  # to run would create the subscription, and a slot at the source
        raise NotMirrored(
            "looking for tables to compare",
            f"there is no subscription in {directory}: it was dropped, or has never run",
            "`walmere run` starts it",
        )
    _settle(subscription, wait)
    found = resync.find(Tables(directory), names, "looking for tables to compare") if names else None
    wanted = None if found is None else {str(each) for each in found}
    request = _Request(options or VerifyOptions(), wait, on_progress, on_verdict)
    compare = functools.partial(_compare, subscription, target, request)
    made = compare(wanted, retries=True)
    proven = {each.name: each for each in made.tables}
    for attempt in range(2, _POINTS + 1):
        passing = {each.name for each in proven.values() if each.passing}
        if not passing:
            break
        time.sleep(_RETRY_AFTER)
        try:
            made = compare(passing, retries=attempt < _POINTS)
        except (NotCompared, SourceError):  # the results at earlier points count
            for name in sorted(passing):
                request.on_verdict(proven[name])
            break
        proven |= {each.name: each for each in made.tables}
    return Proof(made.lsn, tuple(proven[name] for name in sorted(proven)))


@dataclass(frozen=True, slots=True)
class _Request:
    """What `verify` was called with."""

    options: VerifyOptions
    wait: float
    on_progress: OnProgress
    on_verdict: OnVerdict


def _compare(
    subscription: RunnableSubscription,
    target: Sink,
    request: _Request,
    names: Collection[str] | None,
    *,
    retries: bool,
) -> Proof:
    """Compare tables at one point: these, or all."""
    config, directory = subscription.config, subscription.directory
    catch_up = functools.partial(_run, subscription, wait=request.wait)
    name, receive = config.subscription.name, subscription.receive
    with consistent_point(
        config.source, name, directory, target, catch_up=catch_up, receive=receive, wait=request.wait
    ) as at:
        started = spark(config)
        tasks = SparkTasks(started, "verify")
        prover = Prover(
            source_of_tasks(config.source, tasks),
            at,
            at.sink.portable() if tasks.remote else at.sink,
            tasks=tasks,
            shuffle=SparkShuffle(started, tasks),
            options=request.options,
            rules=TableRules.of(config),
            on_progress=request.on_progress,
            on_verdict=request.on_verdict,
            running=subscription.running,
            retries=retries,
        )
        tables = [each for each in Tables(directory) if each.published and not each.of_messages]
        chosen = [each for each in tables if names is None or each.name in names]
        return prover.prove(chosen, gather=config.target is not None and config.target.gather_partitions)


def _run(subscription: RunnableSubscription, until: Lsn, wait: float) -> None:
    """Run the subscription up to an LSN. An error of one table does not keep the others from being compared."""
    ended, stuck = threading.Event(), threading.Event()
    watch = threading.Thread(
        target=_stop_when_stuck, args=(subscription, wait + _SPARK_START, ended, stuck), daemon=True
    )
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
            f"nothing was copied or applied for {wait:g} s, before {until}",
            "see `walmere status`; or give it more time: --wait SECONDS",
        )


def _stop_when_stuck(
    subscription: RunnableSubscription, wait: float, ended: threading.Event, stuck: threading.Event
) -> None:
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


def _settle(subscription: RunnableSubscription, wait: float) -> None:
    """Wait until every table is copied, except those that were refused."""
    doing, first_tables = "looking for tables to compare", time.monotonic() + _FIRST_TABLES
    deadline = time.monotonic() + wait
    while True:
        tables = [each for each in Tables(subscription.directory) if each.published and not each.of_messages]
        waiting = [each for each in tables if not each.follows and each.error is None]
        if tables and not waiting:
            break
        if not subscription.running:
            with contextlib.suppress(ChangeLogInUse):  # a run has started meanwhile
                _run(subscription, subscription.source_position(), wait)
                tables = [each for each in Tables(subscription.directory) if each.published and not each.of_messages]
                break
        if (not tables and time.monotonic() > first_tables) or time.monotonic() > deadline:
            break
        time.sleep(_POLL)
    if not tables:
        raise NotMirrored(doing, "the publications have no tables", "ALTER PUBLICATION … ADD TABLE …")
    if not any(each.follows for each in tables):
        raise NotMirrored(doing, tables[0].error or "no table is copied yet", "see `walmere status`")
