"""Commands that only look: status, log, verify."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

import walmere
from walmere.cli import failures, output
from walmere.cli.garbage import without_garbage_collection
from walmere.cli.options import DEFAULT, AsJson, ConfigFile, lsn
from walmere.cli.signals import end_as_by_ctrl_c, silent_when_closed
from walmere.errors import ConfigError
from walmere.lsn import INVALID_LSN, Lsn


def status(
    config: ConfigFile = DEFAULT,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again every second, until Ctrl-C.")] = False,
    json: AsJson = False,
) -> None:
    """Show slot, positions, lag and tables. Exits with 1 if the source does not answer."""
    if watch:
        from walmere.cli import watching

        subscription = walmere.Subscription(config)
        end_as_by_ctrl_c()
        with contextlib.suppress(KeyboardInterrupt), silent_when_closed():
            watching.watch(subscription, as_json=json)
        return
    with without_garbage_collection():
        subscription = walmere.Subscription(config)
        state = subscription.status()
        if json:
            output.print_json(state)
        else:
            from walmere.cli import status_view

            status_view.status(state, subscription.advice(state))
    if state["error"] is not None:
        raise typer.Exit(failures.FAILED)


def verify(
    config: ConfigFile = DEFAULT,
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

    Exits with 0 if they are equal, 1 if not, and 3 if something could not be compared, or after an error.
    """
    from walmere.cli import comparing
    from walmere.verify.proof import VerifyOptions

    subscription = walmere.Subscription(config)
    options = VerifyOptions(sample=sample, show_values=show_values, examples=examples)
    end_as_by_ctrl_c()
    try:
        with comparing.progress_display() as display:
            proof = subscription.verify(
                table or (), options, wait=wait, on_progress=display.progress, on_verdict=display.verdict
            )
        with silent_when_closed():
            comparing.proof(proof, as_json=json)
            sys.stdout.flush()
    except ConfigError:
        raise
    except Exception as error:  # not 1: that would say that something differs
        failures.fail(error, failures.NOT_COMPARED)
    if proof.equal is not True:
        raise typer.Exit(failures.FAILED if proof.equal is False else failures.NOT_COMPARED)


def log(
    config: ConfigFile = DEFAULT,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more transactions.")] = False,
    table: Annotated[str | None, typer.Option(help="Only changes of this table: table or schema.table.")] = None,
    start: Annotated[
        Lsn | None, typer.Option("--from", parser=lsn, metavar="LSN", help="Only what committed at or after this LSN.")
    ] = None,
    values: Annotated[
        bool, typer.Option("--values", help="Show the values of the rows, as PostgreSQL's text.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Show the transactions of the change log.

    The values of the rows are shown only with --values.
    """
    from walmere.cli import transactions

    end_as_by_ctrl_c()
    found = walmere.Subscription(config).transactions(start or INVALID_LSN, table, follow)
    with contextlib.suppress(KeyboardInterrupt), silent_when_closed():
        for transaction in found:
            transactions.transaction(transaction, values=values, as_json=json)
