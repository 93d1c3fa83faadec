"""Check that a table of the target has what was committed to it: commits may be lost, or rows changed by others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from walmere.lsn import INVALID_LSN, Lsn
from walmere.sinks.base import Standing


@dataclass(frozen=True, slots=True)
class Behind:
    """A table does not have what was committed to it."""

    why: str
    found: Standing | None  # None: the table does not exist
    apply_from: Lsn | None = None  # None: it has to be copied again


def compare(
    version: int | None, lsn: Lsn, found: Standing | None, changed_by_others: Callable[[int, int], str | None]
) -> Behind | None:
    """Compare a table with the last version that was committed, and its LSN. None: nothing is missing."""
    if found is None:
        return Behind("the target's table no longer exists", None)
    if version is None:
        return None  # an earlier version of Walmere did not record it
    reached = found.lsn or INVALID_LSN
    if reached < lsn:
        why = f"the target's table is at LSN {reached}, but {lsn} was committed: commits were lost, or it was restored"
        return Behind(why, found, reached or None)
    if found.version < version:
        why = f"the target's table is at version {found.version}, but {version} was committed: commits were lost"
        return Behind(why, found)
    if found.version > version and (what := changed_by_others(version, found.version)) is not None:
        return Behind(f"another program has changed rows of the target's table ({what})", found)
    return None
