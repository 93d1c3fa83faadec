"""Commands around a subscription: check before it, drop after it; `warm` and `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import walmere
from walmere.cli import failures, output
from walmere.cli.options import DEFAULT, AsJson, ConfigFile


def check(config: ConfigFile = DEFAULT, json: AsJson = False) -> None:
    """Check the source and this machine. Each problem and warning comes with its fix. Exits with 1 on a problem."""
    from walmere.libpq import describe

    subscription = walmere.Subscription(config)
    report = subscription.check()
    output.findings(describe(subscription.config.source), report, as_json=json)
    if any(finding.level == "problem" for finding in report):
        raise typer.Exit(failures.FAILED)


def warm() -> None:
    """Make the next starts of Spark faster.

    Archives its classes in the user's cache directory, once.
    """
    from walmere.spark import class_data
    from walmere.spark.session import require_java

    print(class_data.make(require_java()))


def drop(
    config: ConfigFile = DEFAULT,
    keep_slot: Annotated[bool, typer.Option(help="Do not connect to the source: it or the slot is gone.")] = False,
) -> None:
    """Drop the slot, and delete the change log and all state.

    The target's tables stay as they are.
    """
    for line in walmere.Subscription(config).drop(keep_slot=keep_slot):
        print(line)


def demo(
    directory: Annotated[Path, typer.Option(help="The directory for all files of the demo.")] = Path("walmere-demo"),
    rows: Annotated[int, typer.Option(min=1000, help="Rows to load before the copy.")] = 300_000,
    seconds: Annotated[float, typer.Option(min=1, help="How long the writers run.")] = 30,
    target: Annotated[
        Literal["delta", "postgres"], typer.Option(help="Mirror to Delta tables, or to a second PostgreSQL server.")
    ] = "delta",
    json: AsJson = False,
) -> None:
    """Show Walmere at work, with a PostgreSQL server of its own.

    Starts a server with a small shop and live writers, mirrors it, and compares both.
    """
    from walmere.demo.app import DemoOptions, main

    raise typer.Exit(main(DemoOptions(directory, rows, seconds, json, target)))
