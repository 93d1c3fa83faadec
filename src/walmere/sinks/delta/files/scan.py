"""Read a table at one version, in pieces that tasks read in parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from walmere.bins import bins
from walmere.errors import SinkMismatch
from walmere.names import TableName
from walmere.sinks.base import TableScan
from walmere.sinks.delta.files.data_file import DataFile, count
from walmere.sinks.delta.log import replay
from walmere.sinks.delta.log.actions import unreadable
from walmere.sinks.delta.tables import DeltaTables

SCAN_BYTES: Final = 32 << 20
"""The size of the files that one task reads, about."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Some files of a table."""

    table: TableName
    schema: pa.Schema
    files: tuple[DataFile, ...]


def scan(tables: DeltaTables, table: TableName, version: int, at_least: int) -> TableScan:
    """All rows of a version, in at least so many pieces if the table is large enough."""
    directory = tables.directory(table)
    found = replay.at(directory, version)
    if (why := unreadable(found)) is not None:
        raise SinkMismatch(f"reading the Delta table {table} at version {version}", why, "drop the feature")
    schema, files = found.arrow_schema, found.files
    size = min(SCAN_BYTES, sum(file.size for file in files) // at_least)
    pieces = bins(files, lambda file: file.size, size)
    rows = count(directory, files)
    return TableScan(schema, rows, [FilePiece(table, schema, tuple(piece)) for piece in pieces])


def read(tables: DeltaTables, piece: FilePiece, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """The rows of a piece, with these columns, or all."""
    directory = tables.directory(piece.table)
    schema = piece.schema if columns is None else pa.schema([piece.schema.field(name) for name in columns])
    for file in piece.files:
        for rows in file.tables(directory, schema):
            yield from rows.to_batches()
