"""Commands around a subscription: check before it, drop after it; `warm` and `demo`."""

from __future__ import annotations

import sys
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


def warm(json: AsJson = False) -> None:
    """Make the next starts of Spark faster.

    Archives its classes in the user's cache directory, once.
    """
    from walmere.spark import class_data
    from walmere.spark.jvm import require_java

    made = class_data.make(require_java())
    output.done(str(made), as_json=json, archive=str(made))


def drop(
    config: ConfigFile = DEFAULT,
    keep_slot: Annotated[bool, typer.Option(help="Do not connect to the source: it or the slot is gone.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask on a terminal.")] = False,
    json: AsJson = False,
) -> None:
    """Drop the slot, and delete the change log and all state.

    The target's tables stay as they are.
    """
    subscription = walmere.Subscription(config)
    if not yes and sys.stdin.isatty():
        settings = subscription.config
        slot = "" if keep_slot else f"drop slot {settings.source.slot}, and "
        place = settings.subscription.store or subscription.directory
        question = f"{slot}delete the change log and all state of {settings.subscription.name} in {place}?"
        typer.confirm(f"{question[:1].upper()}{question[1:]}", abort=True, err=True)
    done = subscription.drop(keep_slot=keep_slot)
    output.done("\n".join(done), as_json=json, subscription=subscription.config.subscription.name, done=done)


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
