"""The data files of a table, as its log has them, and their rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from walmere.directory import Directory
from walmere.sinks.base import Mask
from walmere.sinks.delta.files.parquet import row_groups
from walmere.sinks.delta.files.vectors import Vector
from walmere.sinks.row_index import I64

NO_ROWS: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of the table as the log has it."""

    path: str  # as the log has it: percent-encoded
    size: int
    stats: str | None = None  # see StagedFile
    vector: Vector | None = None  # which rows are deleted

    @staticmethod
    def from_action(add: Mapping[str, Any]) -> DataFile:
        """Read an `add` action."""
        vector = add.get("deletionVector")
        return DataFile(
            add["path"], add["size"], add.get("stats"), None if vector is None else Vector.from_action(vector)
        )

    @property
    def name(self) -> str:
        """The path of the file, relative to the table."""
        return unquote(self.path)

    @property
    def statistics(self) -> dict[str, Any]:
        """The statistics; empty if the log has none."""
        return _parsed(self.stats or "{}")

    @property
    def deleted(self) -> int:
        """How many of its rows are deleted."""
        return 0 if self.vector is None else self.vector.count

    def rows(self, directory: Directory) -> int:
        """How many rows it has, with deleted ones."""
        count = self.statistics.get("numRecords")
        if count is None:
            with directory.filesystem.open_input_file(self.name) as source:
                count = pq.read_metadata(source).num_rows
        return int(count)

    def deleted_rows(self, directory: Directory) -> I64:
        """The numbers of the deleted rows, ascending."""
        return NO_ROWS if self.vector is None else self.vector.rows(directory)

    def tables(self, directory: Directory, schema: pa.Schema, without: I64 = NO_ROWS) -> Iterator[pa.Table]:
        """The rows of the file, without these (by their numbers, ascending) and without deleted ones."""
        if self.vector is not None:
            without = np.union1d(without, self.deleted_rows(directory))
        for group in row_groups(directory, self.name, schema):
            begin, end = np.searchsorted(without, [group.first, group.first + group.rows])
            if end - begin == group.rows:
                continue
            table = group.table()
            if end > begin:
                keep = np.ones(group.rows, np.bool_)
                keep[without[begin:end] - group.first] = False
                table = table.filter(pa.array(keep))
            yield table


def count(directory: Directory, files: Iterable[DataFile]) -> int:
    """The number of rows of some files, without deleted ones."""
    return sum(file.rows(directory) - file.deleted for file in files)


def is_in(rows: I64, others: I64) -> Mask:
    """Which of the rows are among others, which are ascending."""
    if not len(others):
        return np.zeros(len(rows), np.bool_)
    found: Mask = others[np.minimum(np.searchsorted(others, rows), len(others) - 1)] == rows
    return found


@lru_cache(maxsize=4096)
def _parsed(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text, parse_float=Decimal)
    return found
