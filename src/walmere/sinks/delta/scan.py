"""Read a table at one version, in pieces that tasks read in parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from walmere.bins import bins
from walmere.names import TableName
from walmere.sinks.base import TableScan
from walmere.sinks.delta.rewrite import DataFile, files_of
from walmere.sinks.delta.schema import arrow_schema
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
    opened = tables.open(table, version)
    schema = arrow_schema(opened)
    files, actions = files_of(opened)
    size = min(SCAN_BYTES, sum(file.size for file in files) // at_least)
    pieces = bins(files, lambda file: file.size, size)
    rows = sum(actions["num_records"].to_pylist()) - sum(
        len(file.deleted) for file in files if file.deleted is not None
    )
    return TableScan(schema, rows, [FilePiece(table, schema, tuple(some)) for some in pieces])


def read(tables: DeltaTables, piece: FilePiece, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """The rows of a piece, with these columns, or all."""
    directory = tables.directory(piece.table)
    schema = piece.schema if columns is None else pa.schema([piece.schema.field(name) for name in columns])
    for file in piece.files:
        for rows in file.tables(directory, schema):
            yield from rows.to_batches()
