"""The command `walmere`: its commands, from the modules of this package.

Each command reads the configuration, calls `walmere.api`, and prints with `output`. A command imports what it alone
needs: `receive` and `status` are started often and must start fast. `failures` has the exit codes.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from typing import Annotated, Final

import typer

import walmere
from walmere.cli import failures, looking, running, serving, setup, topics
from walmere.cli.init import init
from walmere.cli.options import Verbose, with_verbose

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # to draw boxes, it would import rich, which takes longer than all the rest
    context_settings={"help_option_names": ["-h", "--help"]},
    help="PostgreSQL logical replication whose subscriber is Apache Spark.",
)

COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "init": init,
    "check": setup.check,
    "run": running.run,
    "status": looking.status,
    "verify": looking.verify,
    "dashboard": serving.dashboard,
    "log": looking.log,
    "pause": running.pause,
    "resume": running.resume,
    "resync": running.resync,
    "skip": running.skip,
    "receive": running.receive,
    "drop": setup.drop,
    "warm": setup.warm,
    "demo": setup.demo,
    "help": topics.show_topic,
}
"""In the order of `walmere --help`."""

for _name, _command in COMMANDS.items():
    app.command(_name)(with_verbose(_command))


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Verbose = False,
) -> None:
    if verbose:
        failures.set_verbose(True)
    if version:
        print(walmere.__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())
    else:
        return
    raise typer.Exit


def main() -> None:
    """Run a command. An error becomes a message on stderr and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # do not fail on a terminal that is not UTF-8
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    failures.set_log_format("walmere: %(message)s")
    failures.set_verbose(False)  # a command before may have set it in this process
    try:
        code = app(prog_name="walmere", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        code = failures.show(error)
    sys.exit(code or 0)
