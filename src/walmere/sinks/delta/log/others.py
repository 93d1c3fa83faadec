"""Find commits of other programs that have changed rows, in the log of a Delta table.

Walmere's commits have an entry `walmere.…` in their `commitInfo`. Other programs may rewrite the table without changing
rows (OPTIMIZE), vacuum it, and set properties. A commit that adds or removes files with `dataChange` has changed rows.
RESTORE does so too, and keeps the app transaction with the LSN.
"""

from __future__ import annotations

import json
from typing import Any

from walmere.directory import Directory
from walmere.sinks.delta.log.names import MARK, log_file


def changed_by_others(directory: Directory, after: int, upto: int) -> str | None:
    """The first commit after a version, up to another, in which another program changes rows; None: none does.

    A commit that is no longer in the log counts too, because it may have changed rows.
    """
    for version in range(after + 1, upto + 1):
        content = directory.read(log_file(version))
        if content is None:
            return f"version {version}, which is no longer in its log"
        operation = _foreign_change(content)
        if operation is not None:
            return f"version {version}, {operation}"
    return None


def _foreign_change(content: bytes) -> str | None:
    """The operation of a commit, if it is another program's and changes rows."""
    operation, changes = "by an unknown operation", False
    for line in content.splitlines():
        if not line.strip():
            continue
        action: dict[str, Any] = json.loads(line)
        if (info := action.get("commitInfo")) is not None:
            if any(key.startswith(MARK) for key in info):
                return None
            operation = str(info.get("operation", operation))
        for kind in ("add", "remove"):
            changes |= bool(action.get(kind, {}).get("dataChange", False))
    return operation if changes else None
