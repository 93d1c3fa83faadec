"""The two sides of a table, in pieces: ranges of its pages at the source, files in the target.

A piece goes to a task, which reads it and returns a fingerprint, or, in a second look, the rows of some buckets. From
the source the rows come as a copy's do: by COPY, in the snapshot, through the same casts. What the target's type cannot
hold is NULL on both sides, then; that its text stands among the rejects is seen to separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from walmere.sinks.base import Sink
from walmere.subscription.rejects import Rejects
from walmere.subscription.tablesync import CopyTask, copied_rows
from walmere.verify.fingerprint import Fingerprint, Layout, fingerprint, rows_of
from walmere.verify.rows import SOURCE, TARGET

APPLICATION = "walmere verify"


@dataclass(frozen=True, slots=True)
class Counted:
    """What a task found in its piece."""

    side: int
    fingerprint: Fingerprint
    rejects: NDArray[np.uint64]  # hashes of those that the source's rows come to


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """Rows of the source."""

    task: CopyTask
    layout: Layout
    where: str | None = None  # in PostgreSQL's SQL

    def count(self) -> Counted:
        """Runs in a Spark task."""
        rejects = Rejects(self.task.table.key)
        found = fingerprint(self.layout, copied_rows(self.task, rejects, self.where, APPLICATION))
        return Counted(SOURCE, found, reject_hashes(rejects.rows()))

    def rows(self, differing: NDArray[np.intp], texts: bool) -> Iterator[pa.RecordBatch]:
        """Runs in a Spark task."""
        batches = copied_rows(self.task, Rejects(self.task.table.key), self.where, APPLICATION)
        return rows_of(self.layout, batches, SOURCE, differing, texts=texts)


@dataclass(frozen=True, slots=True)
class TargetPiece:
    """Rows of the target."""

    sink: Sink
    piece: Any
    layout: Layout
    where: str = "true"  # in DuckDB's SQL

    def count(self) -> Counted:
        """Runs in a Spark task."""
        found = fingerprint(self.layout, self.sink.read(self.piece), self.where)
        return Counted(TARGET, found, np.zeros(0, np.uint64))

    def rows(self, differing: NDArray[np.intp], texts: bool) -> Iterator[pa.RecordBatch]:
        """Runs in a Spark task."""
        return rows_of(self.layout, self.sink.read(self.piece), TARGET, differing, texts=texts, where=self.where)


@dataclass(frozen=True, slots=True)
class DifferingRows:
    """The rows of a piece that are of these buckets: a piece for the shuffle."""

    piece: SourcePiece | TargetPiece
    differing: NDArray[np.intp]
    texts: bool

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Runs in a Spark task."""
        return self.piece.rows(self.differing, self.texts)


def count(piece: SourcePiece | TargetPiece) -> Counted:
    """Runs in a Spark task."""
    return piece.count()


def reject_hashes(rejects: pa.RecordBatch) -> NDArray[np.uint64]:
    """What was rejected, each once: of which row, in which column, and its text."""
    connection = duckdb.connect(config={"threads": 1})
    connection.register("rejects", pa.Table.from_batches([rejects]))
    found = connection.sql('SELECT DISTINCT hash(key, "column", value) AS h FROM rejects').to_arrow_table()
    hashes: NDArray[np.uint64] = found["h"].to_numpy()
    return hashes
