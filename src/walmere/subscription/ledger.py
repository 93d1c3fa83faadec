"""The ledger: for each applied batch its end, its newest commit, and the versions of tables that belong together.

A batch is entered when all its tables are committed; one that was entered twice after a crash says the same twice. What
the lines look like, and how long they stay: `walmere.sinks.points`. The sink publishes the same in the target, for its
readers. This one is in the subscription's own directory: a restart relies on it, and on nothing in the target.

The running subscription is the only one to write it. Others read it meanwhile, also from other processes.
"""

from __future__ import annotations

from pathlib import Path

from walmere.sinks.history import KEEP_SECONDS, History
from walmere.sinks.parquet import Directory
from walmere.sinks.points import Entry

__all__ = ["Entry", "Ledger"]


class Ledger(History):
    """A file of entries. Whoever appends first becomes its writer, and is to be the only one."""

    def __init__(self, directory: Path, keep_seconds: float = KEEP_SECONDS) -> None:
        super().__init__(Directory(str(directory)), keep_seconds)
