"""Options that several commands have, and the option `-v`, which all of them have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from walmere.cli import failures
from walmere.lsn import Lsn

DEFAULT: Final = Path("walmere.toml")

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="The configuration file.", show_default=True)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more, and show the traceback of an error.")]


def lsn(text: str) -> Lsn:
    """Parse an LSN, as the `parser` of an option."""
    try:
        return Lsn.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def with_verbose(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the option -v."""

    @functools.wraps(command)
    def run(*, verbose: bool = False, **arguments: Any) -> None:
        if verbose:  # it may be given before the command, too
            failures.set_verbose(True)
        command(**arguments)

    own = inspect.signature(command, eval_str=True)
    more = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Verbose)
    signature = own.replace(parameters=[*own.parameters.values(), more])
    run.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
    return run
