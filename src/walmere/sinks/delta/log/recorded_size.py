"""How large a table is, by its newest commit: without a replay of the log.

A replay reads checkpoints with Arrow, and to import that takes longer than all the rest of `walmere status`. So every
commit of Walmere has in its `commitInfo`, which is its first line, how large the table is after it. The commits of
other programs, and of earlier versions of Walmere, do not have it: then the log must be replayed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from walmere.sinks.delta.log.names import COMMIT, LOG, MARK
from walmere.sinks.table_size import TableSize


class NotRecorded(LookupError):
    """The newest commit does not say how large the table is."""


def marks(size: TableSize) -> dict[str, str]:
    """The size as keys of `commitInfo`, without their prefix."""
    return {"files": str(size.files), "bytes": str(size.bytes), "deleted_rows": str(size.deleted)}


def recorded_size(table: Path) -> TableSize | None:
    """The size of the newest version of a local table; None if there is no table. Raises NotRecorded."""
    try:
        with os.scandir(table / LOG) as entries:
            names = [entry.name for entry in entries if entry.name[0].isdigit()]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotRecorded from error
    # names begin with the version. If there is only a checkpoint of the newest one, it is not a commit
    newest = max(names, default=None)
    if newest is None:
        return None
    if not COMMIT.match(newest):
        raise NotRecorded
    try:
        with (table / LOG / newest).open("rb") as file:
            info = json.loads(file.readline())["commitInfo"]
        return TableSize(*(int(info[f"{MARK}{name}"]) for name in ("files", "bytes", "deleted_rows")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotRecorded from error
