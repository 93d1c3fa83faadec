"""How a command ends: what an error prints, and the exit codes.

An error is one line on stderr, and a second one with a hint. The traceback is printed only with `-v`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

from typer import Abort, TyperException

from walmere.errors import ConfigError, WalmereError

FAILED: Final = 1
"""An error, or something is wrong: a problem found by `check`, a difference found by `verify`."""
UNUSABLE: Final = 2
"""The configuration or the arguments are not usable, and nothing was started."""
NOT_COMPARED: Final = 3
"""`verify` could not compare, for whatever reason."""
INTERRUPTED: Final = 130
"""Ended by Ctrl-C."""


class _Detail:
    """How much is printed."""

    verbose = False
    shown = False  # the error was written to the log, as JSON


def set_verbose(verbose: bool) -> None:
    """Whether the command has the option -v."""
    _Detail.verbose, _Detail.shown = verbose, False
    logging.getLogger("walmere").setLevel(logging.INFO if verbose else logging.NOTSET)


def already_shown() -> None:
    """The error that ends the command is in its log, and need not be printed."""
    _Detail.shown = True


def show(error: BaseException) -> int:
    """Print an error. Returns the exit code."""
    if _Detail.verbose:
        traceback.print_exception(error)
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED
        case Abort():
            return _print("nothing was done")
        case TyperException():
            return _usage(error)
        case WalmereError():
            return _print(str(error), UNUSABLE if isinstance(error, ConfigError) else FAILED)
        case OSError():
            return _print(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error))
    wrong = " ".join(f"{type(error).__name__}: {error}".split())
    return _print(f"an unexpected error: {wrong}\n  hint: this is a bug; -v shows the traceback")


def fail(error: Exception, code: int) -> NoReturn:
    """Print an error and end."""
    show(error)
    sys.exit(code)


def _usage(error: TyperException) -> int:
    message = error.format_message()
    context = getattr(error, "ctx", None)
    command = "walmere" if context is None else context.command_path
    shows = "lists the commands" if command == "walmere" else "shows the arguments"
    return _print(f"{message[:1].lower()}{message[1:]}\n  hint: {command} -h {shows}", error.exit_code)


def _print(text: str, code: int = FAILED) -> int:
    if not _Detail.shown:
        print(f"walmere: {text}", file=sys.stderr)
    return code


@contextlib.contextmanager
def write_error_to(path: Path | None) -> Iterator[None]:
    """Write an error to a file too, with its class."""
    try:
        yield
    except (WalmereError, OSError) as error:
        if path is not None:
            from walmere.storage import write_error

            known = error if isinstance(error, WalmereError) else WalmereError("receiving", str(error))
            write_error(path, known)
        raise


class _OneLine(logging.Formatter):
    """One line for each warning."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if _Detail.verbose else " ".join(text.split("\n")[:2])  # the second line is a hint


def set_log_format(pattern: str) -> None:
    """Log in this format."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_OneLine(pattern))
