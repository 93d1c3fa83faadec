"""What the log of a Delta table says of its commits: which are ours, and whether others have changed rows.

Our commits have an entry `walmere.…` in their `commitInfo`. Others may rewrite the table without changing its rows
(OPTIMIZE), vacuum it, and set properties. A commit of theirs that adds or removes files with `dataChange` has changed
rows; RESTORE does that, too, and leaves the app transaction with our LSN as it was.
"""

from __future__ import annotations

import json
from typing import Any, Final

from walmere.storage import Directory

MARK: Final = "walmere."
"""What the keys begin with that our commits have in their `commitInfo`."""


def changed_by_others(directory: Directory, after: int, upto: int) -> str | None:
    """The first commit after one version, up to another, that is not ours and changes rows; None if there is none.

    A commit that the log does not have any more may have changed anything.
    """
    for version in range(after + 1, upto + 1):
        content = directory.read(f"_delta_log/{version:020d}.json")
        if content is None:
            return f"version {version}, which is no longer in its log"
        operation = _foreign_change(content)
        if operation is not None:
            return f"version {version}, {operation}"
    return None


def _foreign_change(content: bytes) -> str | None:
    """The operation of a commit, if it is not ours and changes rows."""
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
