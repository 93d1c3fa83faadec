"""A request to leave out one transaction: `walmere skip`, as ALTER SUBSCRIPTION … SKIP.

The request is a file with the commit LSN of the transaction. It is deleted when a batch has passed that LSN.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from walmere import paths
from walmere.lsn import Lsn
from walmere.storage import write_durably


def request(directory: Path, lsn: Lsn) -> None:
    """Leave out the transaction with this commit LSN."""
    write_durably(directory / paths.SKIP, f"{lsn}\n")


def requested(directory: Path) -> Lsn | None:
    """The commit LSN of the transaction to leave out; None: there is none."""
    with suppress(FileNotFoundError, ValueError):
        return Lsn.parse((directory / paths.SKIP).read_text().strip())
    return None


def passed(directory: Path, end_lsn: Lsn) -> None:
    """A batch up to this LSN is applied."""
    lsn = requested(directory)
    if lsn is not None and lsn < end_lsn:
        (directory / paths.SKIP).unlink(missing_ok=True)
