"""The commands. Each reads the configuration, does its work elsewhere, and prints through `output`.

Exit codes: 0 fine; 1 something is wrong, at the source, in the log, or found by `check`; 2 the configuration or the
arguments are not usable, and nothing was started.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import walmere
from walmere import config as configuration
from walmere.config import Config
from walmere.errors import ConfigError, WalmereError
from walmere.lsn import INVALID_LSN, Lsn

if TYPE_CHECKING:
    from walmere.subscription.launcher import Launcher
    from walmere.subscription.receiver import Receiver

# What a command needs beyond this is imported when it runs: `receive` is started often and should start fast.

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="PostgreSQL logical replication whose subscriber is Apache Spark.",
)

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="walmere.toml", show_default=True)]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]
_DEFAULT = Path("walmere.toml")


def main() -> None:
    """Run a command; errors become one message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 is no reason to fail
    try:
        app()
    except ConfigError as error:
        _fail(error, 2)
    except (WalmereError, OSError) as error:
        _fail(error, 1)


def _fail(error: WalmereError | OSError, code: int) -> NoReturn:
    print(f"walmere: {error}", file=sys.stderr)
    sys.exit(code)


def _load(path: Path) -> Config:
    from walmere.publisher.connect import check_dsn

    config = configuration.load(path)
    check_dsn(config.source)
    return config


def _lsn(text: str) -> Lsn:
    try:
        return Lsn.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False) -> None:
    if version:
        print(walmere.__version__)
        raise typer.Exit


@app.command()
def demo(
    directory: Annotated[Path, typer.Option(help="Where to put everything.")] = Path("walmere-demo"),
    rows: Annotated[int, typer.Option(min=1000, help="To load into the shop at first.")] = 300_000,
    seconds: Annotated[float, typer.Option(min=1, help="How long the writers write.")] = 30,
    json: AsJson = False,
) -> None:
    """See it work: a PostgreSQL of its own, a shop with live writers, its mirror, and the proof that both are equal."""
    from walmere.demo.app import Options, main

    raise typer.Exit(main(Options(directory, rows, seconds, json)))


@app.command()
def check(config: ConfigFile = _DEFAULT, json: AsJson = False) -> None:
    """Look whether the source can be received from, and say what to do where it cannot."""
    from walmere.cli import output
    from walmere.publisher.check import check as preflight
    from walmere.publisher.connect import describe

    source = _load(config).source
    report = preflight(source)
    output.findings(describe(source), report, as_json=json)
    if any(finding.level == "problem" for finding in report):
        raise typer.Exit(1)


@app.command()
def receive(
    config: ConfigFile = _DEFAULT,
    until: Annotated[Lsn | None, typer.Option(parser=_lsn, metavar="LSN", help="End when this LSN is durable.")] = None,
    once: Annotated[bool, typer.Option(help="End when all that the source has now is durable.")] = False,
) -> None:
    """Receive the publication into the change log, until stopped."""
    from walmere.subscription.receiver import Receiver

    loaded = _load(config)
    until = _until(loaded, until, once)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    receiver = Receiver(loaded)
    with _stopped_by_signals(receiver):
        durable = receiver.run(until)
    print(f"everything before {durable} is durable in {loaded.changelog}", file=sys.stderr)


@app.command()
def run(
    config: ConfigFile = _DEFAULT,
    until: Annotated[Lsn | None, typer.Option(parser=_lsn, metavar="LSN", help="End when this LSN is applied.")] = None,
    once: Annotated[bool, typer.Option(help="End when all that the source has now is applied.")] = False,
    json: Annotated[bool, typer.Option("--json", help="For machines: a line whenever something has moved on.")] = False,
) -> None:
    """Copy what is not copied yet into the target, then apply changes, until stopped."""
    from walmere.cli import output
    from walmere.cli.run import launcher

    loaded = _load(config)
    until = _until(loaded, until, once)
    made = launcher(loaded, config, output.progress if json else None)
    with _stopped_by_signals(made):
        made.run(until)
    made.on_poll()  # what the last batch brought


@app.command()
def resync(
    tables: Annotated[list[str], typer.Argument(metavar="TABLE…", help="Name, or schema.name.")],
    config: ConfigFile = _DEFAULT,
    wait: Annotated[bool, typer.Option(help="Until the new copies are there.")] = True,
) -> None:
    """Copy tables again. Until a new copy is complete, readers see the old one; the other tables go on."""
    from walmere.changelog.writer import Lock
    from walmere.subscription import requests
    from walmere.subscription.tables import Tables

    loaded = _load(config)
    directory = loaded.subscription.directory
    wanted = requests.find(Tables(directory), tables)
    requests.ask(directory, wanted)
    names = ", ".join(map(str, wanted))
    if not wait:
        print(f"{names}: to be copied again by the run that is there, or the next")
    elif Lock.holder(directory / "run") is None:
        run(config, once=True)
        print(f"{names}: copied again")
    else:
        requests.wait(directory, wanted)
        print(f"{names}: copied again by the run that is there")


def _until(config: Config, until: Lsn | None, once: bool) -> Lsn | None:
    """Where to end: what the source has committed now is all before its insert position."""
    if not once:
        return until
    if until is not None:
        raise ConfigError("reading the arguments", "--once and --until cannot be given together")
    from walmere.publisher import catalog
    from walmere.publisher.connect import connect, speaking

    doing = speaking(config.source, "asking the source where its WAL ends")
    with doing, connect(config.source, "walmere") as connection:
        return catalog.insert_position(connection)


@contextlib.contextmanager
def _stopped_by_signals(worker: Receiver | Launcher) -> Iterator[None]:
    wanted = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: worker.stop()) for number in wanted]
    try:
        yield
    finally:
        for number, handler in zip(wanted, before, strict=True):
            signal.signal(number, handler)


@app.command()
def log(
    config: ConfigFile = _DEFAULT,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as more arrives.")] = False,
    table: Annotated[str | None, typer.Option(help="Only changes of this table: name, or schema.name.")] = None,
    start: Annotated[
        Lsn | None, typer.Option("--from", parser=_lsn, metavar="LSN", help="Only what committed at or after this LSN.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show the transactions of the change log."""
    from walmere.changelog.reader import Reader
    from walmere.cli import output

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does, at any point
    wanted = (
        None if table is None else lambda relation: table in (relation.name, f"{relation.namespace}.{relation.name}")
    )
    try:
        with Reader(_load(config).changelog) as reader:
            for transaction in reader.transactions(start or INVALID_LSN, wanted=wanted, follow=lambda: follow):
                output.transaction(transaction, as_json=json)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # `walmere log | head`: nobody reads on, not even what is still in the buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command()
def status(config: ConfigFile = _DEFAULT, json: AsJson = False) -> None:
    """Show where the source is, and where we are."""
    from walmere.cli import output
    from walmere.subscription.status import status as status_of

    output.status(status_of(_load(config)), as_json=json)


@app.command()
def drop(
    config: ConfigFile = _DEFAULT,
    keep_slot: Annotated[bool, typer.Option(help="Leave the source alone: it is gone, or the slot is.")] = False,
) -> None:
    """Drop the replication slot, and delete the change log and all state. The target's tables stay as they are."""
    from walmere.changelog.writer import Lock

    loaded = _load(config)
    directory = loaded.subscription.directory
    lock = Lock(loaded.changelog) if loaded.changelog.exists() else None
    if keep_slot:
        print(f"left slot {loaded.source.slot} alone")
    else:
        _drop_slot(loaded)
    # Out of the way in one step: a receiver that starts now makes a new log, and its files are not deleted with ours
    dropped = loaded.changelog.with_suffix(".dropped")
    _delete(dropped)
    if lock is None:
        print(f"there is no change log in {directory}")
        return
    loaded.changelog.rename(dropped)
    for file in ("receiver.json", "receiver.log", "receiver.pids", "spark.log", "tables.json", "ledger.jsonl"):
        (directory / file).unlink(missing_ok=True)
    _delete(directory / "origins")
    _delete(directory / "run")
    _delete(directory / "resync")
    _delete(directory / "checkpoint")
    _delete(dropped)
    lock.release()
    with contextlib.suppress(OSError):
        directory.rmdir()  # if nothing else is in it
    print(f"deleted the change log in {directory}")


def _delete(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)


def _drop_slot(config: Config) -> None:
    from walmere.publisher import slot
    from walmere.publisher.connect import connect, speaking

    source = config.source
    with connect(source, "walmere drop") as connection:
        with speaking(source, f"looking at replication slot {source.slot}"):
            found = slot.read(connection, source.slot)
        if found is None:
            print(f"there is no slot {source.slot} on the source")
            return
        slot.require_ours(found, connection.info.dbname)
    with connect(source, "walmere drop", replication=True) as connection:
        slot.drop(connection, source)
    print(f"dropped slot {source.slot}")
