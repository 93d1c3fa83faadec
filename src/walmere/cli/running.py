"""Commands that run a subscription, or ask something of the process that runs it."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import walmere
from walmere.cli import failures, logs, output, serving
from walmere.cli.options import DEFAULT, AsJson, ConfigFile, lsn
from walmere.cli.signals import stopped_by_signals
from walmere.lsn import Lsn

if TYPE_CHECKING:
    from walmere.api import Subscription

_WARM_AFTER: Final = 60.0
"""Seconds after which a run without an end makes the next starts faster: not while it copies its first tables."""


def receive(
    config: ConfigFile = DEFAULT,
    until: Annotated[Lsn | None, typer.Option(parser=lsn, metavar="LSN", help="Stop when this LSN is durable.")] = None,
    once: Annotated[bool, typer.Option(help="Stop when everything that is committed now is durable.")] = False,
    json: AsJson = False,
    metrics: serving.Metrics = None,
    allow_host: serving.AllowHost = None,
    token_file: serving.TokenFile = None,
    log_format: logs.LogFormatOption = logs.LogFormat.TEXT,
    error_file: Annotated[Path | None, typer.Option(hidden=True)] = None,  # `run` reads the error from there
    launcher: Annotated[int | None, typer.Option(hidden=True)] = None,  # the process of `run`, with a store
) -> None:
    """Receive the publication into the change log, until stopped."""
    logging.getLogger().setLevel(logging.INFO)
    failures.set_log_format("%(asctime)s %(levelname)s %(message)s")
    with failures.write_error_to(error_file):
        subscription = walmere.Subscription(config)
        with contextlib.ExitStack() as open_:
            if log_format is logs.LogFormat.JSON:
                open_.enter_context(logs.as_json(subscription.config.subscription.name))
            if metrics is not None:
                options = serving.ServingOptions(metrics, allow_host or (), token_file)
                open_.enter_context(serving.metrics_of_receiver(subscription, options))
            open_.enter_context(stopped_by_signals(subscription))
            if launcher is not None:
                from walmere.subscription.shared.orphan import end_with

                end_with(launcher, subscription.stop)
            durable = subscription.receive(until, once=once)
    place = subscription.config.subscription.store or subscription.config.changelog
    ended = f"everything before {durable} is durable in {place}"
    if json:
        output.print_json({"durable_lsn": str(durable), "log": str(place)})
    elif log_format is logs.LogFormat.JSON:
        logs.log_event("ended", ended, lsn=str(durable))
    else:
        print(ended, file=sys.stderr)


def run(
    config: ConfigFile = DEFAULT,
    until: Annotated[Lsn | None, typer.Option(parser=lsn, metavar="LSN", help="Stop when this LSN is applied.")] = None,
    once: Annotated[bool, typer.Option(help="Stop when everything that is committed now is applied.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON whenever a table has changed.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take over tables of the target that belong to another subscription.")
    ] = False,
    no_receiver: Annotated[
        bool, typer.Option("--no-receiver", help="Apply what `walmere receive` on another machine puts into the store.")
    ] = False,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Show a live page, as `walmere dashboard`.")] = False,
    listen: serving.Listen = serving.ADDRESS,
    metrics: serving.Metrics = None,
    allow_host: serving.AllowHost = None,
    token_file: serving.TokenFile = None,
    log_format: logs.LogFormatOption = logs.LogFormat.TEXT,
) -> None:
    """Copy the tables, then apply changes, until stopped."""
    subscription = walmere.Subscription(config)
    as_json = log_format is logs.LogFormat.JSON
    served = serving.ServedBesideRun(
        page=serving.ServingOptions(listen, allow_host or (), token_file) if dashboard else None,
        metrics=None if metrics is None else serving.ServingOptions(metrics, allow_host or (), token_file),
        announce=_announce_in_log if as_json else serving.announce,
    )
    with contextlib.ExitStack() as open_:
        on_progress: list[serving.OnProgress] = []
        if as_json:
            open_.enter_context(logs.as_json(subscription.config.subscription.name))
            on_progress.append(logs.ProgressLog())
        counters = open_.enter_context(served.opened(subscription))
        if counters is not None:
            on_progress.append(counters.progress)
        open_.enter_context(stopped_by_signals(subscription))
        open_.enter_context(_warming(at_end=once or until is not None))
        if json:
            on_progress.append(output.progress)
        elif not quiet and not as_json:
            on_progress.append(open_.enter_context(_displayed(subscription)))
        subscription.run(
            until,
            once=once,
            on_progress=serving.together(on_progress),
            on_batch_end=(lambda _: None) if counters is None else counters.batch_ended,
            on_retry=(lambda _: None) if counters is None else counters.retried,
            take_over=take_over,
            receives=not no_receiver,
        )


@contextlib.contextmanager
def _displayed(subscription: Subscription) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Show what a run does."""
    from walmere.cli.run_display import RunDisplay
    from walmere.subscription.requests.pausing import is_paused
    from walmere.subscription.source_status import SourceReader
    from walmere.subscription.status import lag

    config = subscription.config
    with contextlib.closing(SourceReader(config)) as reader:
        display = RunDisplay(sys.stdout, lambda: lag(config, reader), lambda: is_paused(subscription.directory))
        with display.shown():
            yield display.progress


def _announce_in_log(url: str) -> None:
    logs.log_event("dashboard", f"the dashboard is at {url}", url=url)


@contextlib.contextmanager
def _warming(*, at_end: bool) -> Iterator[None]:
    """Make the next starts faster, after a run that ends by itself, or while one goes on that does not."""

    def warm() -> None:
        from walmere.spark import class_data
        from walmere.spark.jvm import require_java

        class_data.make_later(require_java())

    later = threading.Timer(_WARM_AFTER, warm)
    later.daemon = True
    if not at_end:
        later.start()
    try:
        yield
    finally:
        later.cancel()
    if at_end:
        warm()


def resync(
    tables: Annotated[list[str], typer.Argument(metavar="TABLE…", help="table or schema.table")],
    config: ConfigFile = DEFAULT,
    wait: Annotated[bool, typer.Option(help="Wait until the new copies are complete.")] = True,
    json: AsJson = False,
) -> None:
    """Copy tables again.

    Until a new copy is complete, readers see the old one; the other tables go on.
    """
    subscription = walmere.Subscription(config)
    running = subscription.running
    with contextlib.nullcontext() if running else stopped_by_signals(subscription):
        found = [str(each) for each in subscription.resync(tables, wait=wait)]
    if not wait:
        done = "will be copied again by the running process, or by the next `walmere run`"
    else:
        done = "copied again by the running process" if running else "copied again"
    output.done(f"{', '.join(found)}: {done}", as_json=json, tables=found, copied=wait)


def skip(
    position: Annotated[Lsn, typer.Argument(parser=lsn, metavar="LSN", help="The commit LSN of the transaction.")],
    config: ConfigFile = DEFAULT,
    json: AsJson = False,
) -> None:
    """Leave out a transaction, as ALTER SUBSCRIPTION … SKIP.

    Only if the target is a database, and the transaction cannot be applied there.
    """
    walmere.Subscription(config).skip(position)
    done = f"the transaction with the commit LSN {position} will be left out"
    output.done(done, as_json=json, skip=str(position))


def pause(config: ConfigFile = DEFAULT, json: AsJson = False) -> None:
    """Copy and apply nothing until `walmere resume`. Receiving goes on.

    So no WAL piles up at the source: the changes wait in the change log. It stays paused across restarts.
    """
    _set_paused(config, True, as_json=json)


def resume(config: ConfigFile = DEFAULT, json: AsJson = False) -> None:
    """Continue after `walmere pause`."""
    _set_paused(config, False, as_json=json)


def _set_paused(config: Path, paused: bool, *, as_json: bool) -> None:
    subscription = walmere.Subscription(config)
    (subscription.pause if paused else subscription.resume)()
    running = subscription.running
    done = "paused: changes are received, and not applied" if paused else "resumed"
    if not running:
        done = f"{done}; no process on this machine runs it"
    output.done(done, as_json=as_json, subscription=subscription.config.subscription.name, paused=paused)
