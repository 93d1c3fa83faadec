"""Compact small files of a table, and delete the files that are no longer needed.

Every new file with few rows makes reads slower, so small files are compacted every `COMPACT_EVERY` versions. Replaced
files stay on the disk for readers of older versions. `vacuum` deletes those that have been out of use for
`keep_seconds`, in whole hours. It deletes only files that the log has removed, never what a running copy
has staged.
"""

from __future__ import annotations

import contextlib
from typing import Final

from deltalake.exceptions import DeltaError

from walmere.names import TableName
from walmere.sinks.delta.commit import Change, try_commit
from walmere.sinks.delta.rewrite import files_of
from walmere.sinks.delta.schema import arrow_schema
from walmere.sinks.delta.tables import DeltaTables

COMPACT_EVERY: Final = 16
"""Compact a table after this many commits."""


def compact(tables: DeltaTables, table: TableName, least: int) -> int | None:
    """Join small files into large ones, if there are at least `least` of them. Rows and LSN stay as they are.

    Returns the version; None if there was nothing to do, or a batch was applied at the same time: then try again later.
    """
    opened = tables.open(table)
    small = [file for file in files_of(opened)[0] if file.size < tables.file_size // 2 and file.deleted is None]
    if len(small) < least:
        return None
    schema, directory = arrow_schema(opened), tables.directory(table)
    rows = (part for file in small for part in file.tables(directory, schema))
    return try_commit(tables, table, opened, Change(tables.write(table, schema, rows), small), None)


def vacuum(tables: DeltaTables, table: TableName) -> None:
    """Delete the files that no version within `keep_seconds` needs."""
    with contextlib.suppress(DeltaError):  # another attempt is vacuuming
        tables.open(table).vacuum(tables.keep_hours, dry_run=False, enforce_retention_duration=False)
