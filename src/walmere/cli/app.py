"""The commands. Each reads the configuration, calls `walmere.api`, and prints with `output`.

Exit codes: 0 success; 1 an error, or a problem found by `check`; 2 the configuration or the arguments are not usable,
and nothing was started; 3 `verify` could not compare.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NoReturn

import typer

import walmere
from walmere.errors import ConfigError, NotCompared, WalmereError
from walmere.lsn import INVALID_LSN, Lsn

# Other modules are imported by the commands that need them: `receive` is started often and must start fast.
if TYPE_CHECKING:
    from walmere.api import Subscription

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="PostgreSQL logical replication whose subscriber is Apache Spark.",
)

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="The configuration file.", show_default=True)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_DEFAULT = Path("walmere.toml")
_WARM_AFTER: Final = 60.0
"""Seconds after which a run without an end makes the next starts faster: not while it copies its first tables."""
_STOP_TIMEOUT: Final = 9.0
"""Seconds that a command has to end after the first signal."""


def main() -> None:
    """Run a command. An error becomes a message on stderr and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # do not fail on a terminal that is not UTF-8
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    _set_log_format("walmere: %(message)s")
    try:
        app()
    except ConfigError as error:
        _fail(error, 2)
    except (WalmereError, OSError) as error:
        _fail(error, 1)


def _fail(error: WalmereError | OSError, code: int) -> NoReturn:
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    print(f"walmere: {text}", file=sys.stderr)
    sys.exit(code)


class _OneLine(logging.Formatter):
    """One line for each warning."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).split("\n")[:2])  # the second line is a hint; the others are a traceback


def _set_log_format(pattern: str) -> None:
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_OneLine(pattern))


def _lsn(text: str) -> Lsn:
    try:
        return Lsn.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(walmere.__version__)
        raise typer.Exit


@app.command()
def demo(
    directory: Annotated[Path, typer.Option(help="The directory for all files of the demo.")] = Path("walmere-demo"),
    rows: Annotated[int, typer.Option(min=1000, help="Rows to load before the copy.")] = 300_000,
    seconds: Annotated[float, typer.Option(min=1, help="How long the writers run.")] = 30,
    target: Annotated[
        Literal["delta", "postgres"], typer.Option(help="Mirror to Delta tables, or to a second PostgreSQL server.")
    ] = "delta",
    json: AsJson = False,
) -> None:
    """Show Walmere at work: start a PostgreSQL server with a small shop and live writers, mirror it, compare both."""
    from walmere.demo.app import DemoOptions, main

    raise typer.Exit(main(DemoOptions(directory, rows, seconds, json, target)))


@app.command()
def check(config: ConfigFile = _DEFAULT, json: AsJson = False) -> None:
    """Check the source and this machine. Each problem and warning comes with its fix. Exits with 1 on a problem."""
    from walmere.cli import output
    from walmere.libpq import describe

    subscription = walmere.Subscription(config)
    report = subscription.check()
    output.findings(describe(subscription.config.source), report, as_json=json)
    if any(finding.level == "problem" for finding in report):
        raise typer.Exit(1)


@app.command()
def receive(
    config: ConfigFile = _DEFAULT,
    until: Annotated[
        Lsn | None, typer.Option(parser=_lsn, metavar="LSN", help="Stop when this LSN is durable.")
    ] = None,
    once: Annotated[bool, typer.Option(help="Stop when everything that is committed now is durable.")] = False,
    error_file: Annotated[Path | None, typer.Option(hidden=True)] = None,  # `run` reads the error from there
) -> None:
    """Receive the publication into the change log, until stopped."""
    logging.getLogger().setLevel(logging.INFO)
    _set_log_format("%(asctime)s %(levelname)s %(message)s")
    with _write_error_to(error_file):
        subscription = walmere.Subscription(config)
        with _stopped_by_signals(subscription):
            durable = subscription.receive(until, once=once)
    place = subscription.config.subscription.store or subscription.config.changelog
    print(f"everything before {durable} is durable in {place}", file=sys.stderr)


@app.command()
def run(
    config: ConfigFile = _DEFAULT,
    until: Annotated[
        Lsn | None, typer.Option(parser=_lsn, metavar="LSN", help="Stop when this LSN is applied.")
    ] = None,
    once: Annotated[bool, typer.Option(help="Stop when everything that is committed now is applied.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON whenever a table has changed.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take over tables of the target that belong to another subscription.")
    ] = False,
    no_receiver: Annotated[
        bool, typer.Option("--no-receiver", help="Apply what `walmere receive` on another machine puts into the store.")
    ] = False,
) -> None:
    """Copy tables that are not copied yet to the target, then apply changes, until stopped."""
    from walmere.cli import output

    subscription = walmere.Subscription(config)
    with _stopped_by_signals(subscription), _warming(at_end=once or until is not None):
        subscription.run(
            until,
            once=once,
            on_progress=output.progress if json else None,
            take_over=take_over,
            receives=not no_receiver,
        )


@app.command()
def warm() -> None:
    """Make the next starts of Spark faster: archive its classes in the user's cache directory, once."""
    from walmere.spark import class_data
    from walmere.spark.session import require_java

    print(class_data.make(require_java()))


@app.command()
def resync(
    tables: Annotated[list[str], typer.Argument(metavar="TABLE…", help="table or schema.table")],
    config: ConfigFile = _DEFAULT,
    wait: Annotated[bool, typer.Option(help="Wait until the new copies are complete.")] = True,
) -> None:
    """Copy tables again. Until a new copy is complete, readers see the old one; the other tables go on."""
    subscription = walmere.Subscription(config)
    running = subscription.running
    with contextlib.nullcontext() if running else _stopped_by_signals(subscription):
        names = ", ".join(map(str, subscription.resync(tables, wait=wait)))
    if not wait:
        print(f"{names}: will be copied again by the running process, or by the next `walmere run`")
    else:
        print(f"{names}: copied again by the running process" if running else f"{names}: copied again")


@app.command()
def skip(
    lsn: Annotated[Lsn, typer.Argument(parser=_lsn, metavar="LSN", help="The commit LSN of the transaction.")],
    config: ConfigFile = _DEFAULT,
) -> None:
    """Leave out a transaction that cannot be applied to the target, as ALTER SUBSCRIPTION … SKIP."""
    walmere.Subscription(config).skip(lsn)
    print(f"the transaction with the commit LSN {lsn} will be left out")


@app.command()
def verify(
    config: ConfigFile = _DEFAULT,
    table: Annotated[list[str] | None, typer.Option(help="Only this table: table or schema.table. Repeatable.")] = None,
    sample: Annotated[
        float | None, typer.Option(min=0.001, max=100, metavar="PERCENT", help="Compare only this part of each table.")
    ] = None,
    show_values: Annotated[bool, typer.Option(help="Show the values of rows that differ.")] = False,
    examples: Annotated[int, typer.Option(min=0, help="How many different rows to list for each table.")] = 20,
    wait: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="Limit of the wait for open transactions, or for progress."),
    ] = 60,
    json: AsJson = False,
) -> None:
    """Compare source and target, every row and column, at one LSN.

    Exits with 0 if they are equal, 1 if not, and 3 if nothing differs but something could not be compared.
    """
    from walmere.cli import comparing
    from walmere.verify.proof import VerifyOptions

    subscription = walmere.Subscription(config)
    options = VerifyOptions(sample=sample, show_values=show_values, examples=examples)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the command as Ctrl-C does
    try:
        with comparing.progress_display() as display:
            proof = subscription.verify(
                table or (), options, wait=wait, on_progress=display.progress, on_verdict=display.verdict
            )
    except NotCompared as error:
        _fail(error, 3)
    comparing.proof(proof, as_json=json)
    if proof.equal is not True:
        raise typer.Exit(1 if proof.equal is False else 3)


@contextlib.contextmanager
def _warming(*, at_end: bool) -> Iterator[None]:
    """Make the next starts faster, after a run that ends by itself, or while one goes on that does not."""

    def warm() -> None:
        from walmere.spark import class_data
        from walmere.spark.session import require_java

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


@contextlib.contextmanager
def _write_error_to(path: Path | None) -> Iterator[None]:
    """Write an error to a file too, with its class."""
    try:
        yield
    except (WalmereError, OSError) as error:
        if path is not None:
            from walmere.storage import write_error

            known = error if isinstance(error, WalmereError) else WalmereError("receiving", str(error))
            write_error(path, known)
        raise


@contextlib.contextmanager
def _stopped_by_signals(worker: Subscription) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops the worker within `_STOP_TIMEOUT`; the second one exits at once.

    Exiting at any point is safe, as with `kill -9`: confirmed changes are durable, and others are received again.
    """
    wanted = (signal.SIGINT, signal.SIGTERM)
    signals = 0

    def exit_now(code: int) -> None:
        worker.abandon()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def give_up() -> None:
        print(f"walmere: some work did not stop within {_STOP_TIMEOUT:.0f} s; exiting anyway", file=sys.stderr)
        exit_now(0)

    watchdog = threading.Timer(_STOP_TIMEOUT, give_up)
    watchdog.daemon = True

    def handle(number: int, _: object) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            exit_now(128 + number)
        watchdog.start()
        worker.stop()

    before = [signal.signal(number, handle) for number in wanted]
    try:
        yield
    finally:
        watchdog.cancel()
        if not signals:  # otherwise the command is ending, and a second signal must still exit at once
            for number, handler in zip(wanted, before, strict=True):
                signal.signal(number, handler)


@app.command()
def log(
    config: ConfigFile = _DEFAULT,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more transactions.")] = False,
    table: Annotated[str | None, typer.Option(help="Only changes of this table: table or schema.table.")] = None,
    start: Annotated[
        Lsn | None, typer.Option("--from", parser=_lsn, metavar="LSN", help="Only what committed at or after this LSN.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show the transactions of the change log."""
    from walmere.cli import output

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the command as Ctrl-C does
    try:
        for transaction in walmere.Subscription(config).transactions(
            start or INVALID_LSN, table, follow=lambda: follow
        ):
            output.transaction(transaction, as_json=json)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # `walmere log | head`: the pipe is closed, so the rest of the buffer cannot be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command()
def status(config: ConfigFile = _DEFAULT, json: AsJson = False) -> None:
    """Show slot, positions, lag and tables. Exits with 1 if the source does not answer."""
    from walmere.cli import output

    state = walmere.Subscription(config).status()
    output.status(state, as_json=json)
    if state["error"] is not None:
        raise typer.Exit(1)


@app.command()
def drop(
    config: ConfigFile = _DEFAULT,
    keep_slot: Annotated[bool, typer.Option(help="Do not connect to the source: it or the slot is gone.")] = False,
) -> None:
    """Drop the replication slot, and delete the change log and all state. The target's tables stay as they are."""
    for line in walmere.Subscription(config).drop(keep_slot=keep_slot):
        print(line)
