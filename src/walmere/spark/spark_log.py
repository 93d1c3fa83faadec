"""The log of Spark's JVM, PySpark and py4j, in a file: they log tracebacks, and users see one line for each error."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pyspark.accumulators import AccumulatorTCPServer

OWN_LOGGER: Final = "pyspark.walmere"
"""Gets the tracebacks of errors in jobs."""


class _LogFile(logging.FileHandler):
    """Ignores errors: the directory may be deleted by `walmere drop`, and the disk may be full."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            super().emit(record)


def log_to(path: Path) -> None:
    """Write the logs of PySpark and py4j to the JVM's log."""
    for name in (OWN_LOGGER, "py4j", "pyspark"):
        _redirect(name, path)
    for each in logging.getLogger().handlers:
        each.addFilter(_not_from_py4j)  # a function is added only once
    # by default it prints a traceback when a worker or the JVM has ended
    setattr(AccumulatorTCPServer, "handle_error", _log_error)  # noqa: B010


def log_own_to(path: Path) -> None:
    """Write the tracebacks of Walmere to a file, and change no other log: the session belongs to somebody else."""
    _redirect(OWN_LOGGER, path)


def _redirect(name: str, path: Path) -> None:
    logger = logging.getLogger(name)
    for handler in [each for each in logger.handlers if isinstance(each, logging.FileHandler)]:
        logger.removeHandler(handler)
        handler.close()
    handler = _LogFile(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


def _not_from_py4j(record: logging.LogRecord) -> bool:
    """Filter records of py4j, which logs some of them with the root logger."""
    if "py4j" not in Path(record.pathname).parts:
        return True
    if record.name == "root":
        logging.getLogger("py4j").handle(record)
    return False


def _log_error(*_: object) -> None:
    logging.getLogger("pyspark").exception("receiving an accumulator")


@contextlib.contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Redirect stderr to this file. A child that is started meanwhile keeps it as its stderr."""
    kept = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
