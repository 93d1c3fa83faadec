"""The commit protocol: how two attempts at the same commit take effect once.

Every commit carries its LSN as an app transaction, and is a compare-and-set: it becomes the version right after the one
at which the LSN was read, or it fails. Of two attempts one wins. The other one reads the LSN again, and finds that
nothing is left to do.

`max_commit_retries=0` makes it so. By default `deltalake` would check whether the commit can go after the others, and
refuse it if one of them has the same app id.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from walmere.errors import SinkConflict
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.sinks.base import APPEND, Mode, StagedFile
from walmere.sinks.delta import log_retention
from walmere.sinks.delta.log import MARK
from walmere.sinks.delta.rewrite import DataFile
from walmere.sinks.delta.schema import delta_schema
from walmere.sinks.delta.tables import DeltaTables, log_file

ATTEMPTS: Final = 10


@dataclass(frozen=True, slots=True)
class Change:
    """What a commit does to a table."""

    added: Sequence[StagedFile]
    removed: Sequence[DataFile] = ()
    mode: Mode = APPEND
    schema: pa.Schema | None = None  # new columns; None: they stay


def commit(tables: DeltaTables, table: TableName, lsn: Lsn, change: Callable[[DeltaTable], Change]) -> int:
    """Commit what `change` returns for the newest version, unless the table has reached the LSN."""
    for attempt in range(ATTEMPTS):
        time.sleep(0.01 * attempt)
        opened = tables.open(table)
        tables.require_owner(table, opened)
        reached = tables.lsn_of(opened)
        if reached is not None and reached >= lsn:
            return opened.version()
        _keep_log(tables, table, opened)
        version = try_commit(tables, table, opened, change(opened), lsn)
        if version is not None:
            return version
    raise SinkConflict(
        f"committing to the Delta table {table}",
        f"another program committed first, {ATTEMPTS} times in a row",
        "if another program writes to the table, stop it: a mirror has one writer",
    )


def try_commit(
    tables: DeltaTables, table: TableName, opened: DeltaTable, change: Change, lsn: Lsn | None
) -> int | None:
    """Commit the version right after the opened one; None if another commit has taken its place.

    Without an LSN, the table keeps the one that it has.
    """
    now = time.time_ns() // 1_000_000
    data_change = lsn is not None or change.schema is not None
    actions: list[AddAction | RemoveAction] = [
        AddAction(file.path, file.size, {}, now, data_change, file.stats) for file in change.added
    ]
    actions += [RemoveAction(file.path, data_change, now, file.size, {}) for file in change.removed]
    try:
        opened.create_write_transaction(
            actions,
            change.mode.value,
            opened.schema() if change.schema is None else delta_schema(change.schema),
            commit_properties=CommitProperties(
                custom_metadata={f"{MARK}tidy": "true"} if lsn is None else {f"{MARK}lsn": str(lsn)},
                max_commit_retries=0,
                app_transactions=None if lsn is None else [Transaction(tables.app_id, int(lsn), now)],
            ),
        )
    except CommitFailedError:
        return None
    except DeltaError as error:
        raise tables.not_writable(f"committing to the Delta table {table}", error) from error
    version = opened.version() + 1
    tables.directory(table).sync(log_file(version), "_delta_log")
    return version


def _keep_log(tables: DeltaTables, table: TableName, opened: DeltaTable) -> None:
    """Extend the log retention of a table that was created with a shorter `keep_seconds`. It is never shortened."""
    too_short = log_retention.too_short(opened.metadata().configuration, tables.keep_hours)
    if too_short:
        with contextlib.suppress(DeltaError):  # another commit was first: then the caller's commit fails too
            opened.alter.set_table_properties(too_short)
            tables.directory(table).sync(log_file(opened.version()), "_delta_log")
