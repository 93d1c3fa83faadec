"""What the history of a table says about a commit: its `commitInfo`.

| operation | parameters | metrics |
|---|---|---|
| `CREATE TABLE`, `CLAIM` | | |
| `COPY` | `toLsn` | rows inserted, and rows of an earlier copy deleted |
| `APPLY`: a batch | `fromLsn`, `toLsn`, `truncate` | rows inserted, updated and deleted |
| `ADD COLUMNS`, `REPLACE COLUMNS` | `columns`: the new ones, or all | |
| `OPTIMIZE` | | files and bytes removed and added, deleted rows purged |

Spark's DESCRIBE HISTORY shows parameters and metrics, but not the keys that are Walmere's own (`MARK`). By these,
`others` recognises Walmere's commits, and `recorded_size` knows how large the table is.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any, Final

from walmere.sinks.delta.log import recorded_size
from walmere.sinks.delta.log.names import MARK
from walmere.sinks.table_size import TableSize
from walmere.version import __version__

ENGINE: Final = f"walmere/{__version__}"

INSERTED: Final = "numRowsInserted"
UPDATED: Final = "numRowsUpdated"
DELETED: Final = "numRowsDeleted"
FROM: Final = "fromLsn"
TO: Final = "toLsn"


def rows(inserted: int = 0, updated: int = 0, deleted: int = 0) -> dict[str, int]:
    """The metrics of a commit that changes rows."""
    return {INSERTED: inserted, UPDATED: updated, DELETED: deleted}


def commit_info(
    operation: str, parameters: Mapping[str, str], metrics: Mapping[str, int], marks: Mapping[str, str]
) -> dict[str, Any]:
    """The action. `marks` are Walmere's own keys."""
    return {
        "commitInfo": {
            "timestamp": time.time_ns() // 1_000_000,
            "operation": operation,
            "operationParameters": dict(parameters),
            "operationMetrics": {name: str(value) for name, value in metrics.items()},
            "engineInfo": ENGINE,
            "txnId": str(uuid.uuid4()),  # no two commits are equal: see `walmere.object_store.base`
            **_own(marks),
        }
    }


def with_size(info: Mapping[str, Any], size: TableSize) -> dict[str, Any]:
    """The action, with the size of the table after the commit."""
    return {"commitInfo": {**info["commitInfo"], **_own(recorded_size.marks(size))}}


def _own(marks: Mapping[str, str]) -> dict[str, str]:
    return {f"{MARK}{name}": value for name, value in marks.items()}
