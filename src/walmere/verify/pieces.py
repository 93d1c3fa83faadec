"""The two sides of a table, in pieces: ranges of its pages at the source, files in the target.

A piece goes to a task, which reads it and returns a fingerprint, or, in a second look, the rows of some buckets. From
the source the rows come as a copy's do: by COPY, in the snapshot, through the same casts. What the target's type cannot
hold is NULL on both sides, then; that its text stands among the table's rejects is seen to separately. By the text
alone: a row may have got another key since, and a column another name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from walmere.apply.rejects import Rejects
from walmere.sinks.base import Sink
from walmere.subscription.tablesync import CopyTask, copied_rows
from walmere.verify.fingerprint import Fingerprint, RowLayout, fingerprint, nothing, rows_of
from walmere.verify.point import APPLICATION
from walmere.verify.rows import SOURCE, TARGET


@dataclass(frozen=True, slots=True)
class Counted:
    """What tasks found in their pieces."""

    source: Fingerprint
    target: Fingerprint
    rejects: frozenset[str] = frozenset()  # the different texts that the source's rows have, and the target cannot

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.source + other.source, self.target + other.target, self.rejects | other.rejects)


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """Rows of the source."""

    task: CopyTask
    layout: RowLayout
    where: str | None = None  # in PostgreSQL's SQL

    def count(self) -> Counted:
        """Runs in a Spark task."""
        rejects = Rejects(self.task.table.key)
        texts: set[str] = set()

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in copied_rows(self.task, rejects, self.where, APPLICATION):
                texts.update(rejects.texts())
                yield batch

        found = fingerprint(self.layout, batches())
        return Counted(found, nothing(self.layout.buckets), frozenset(texts))

    def rows(self, differing: NDArray[np.intp], texts: bool) -> Iterator[pa.RecordBatch]:
        """Runs in a Spark task."""
        batches = copied_rows(self.task, Rejects(self.task.table.key), self.where, APPLICATION)
        return rows_of(self.layout, batches, SOURCE, differing, texts=texts)


@dataclass(frozen=True, slots=True)
class TargetPiece:
    """Rows of the target."""

    sink: Sink
    piece: Any
    layout: RowLayout
    where: str = "true"  # in DuckDB's SQL

    def count(self) -> Counted:
        """Runs in a Spark task."""
        found = fingerprint(self.layout, self.sink.read(self.piece), self.where)
        return Counted(nothing(self.layout.buckets), found)

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
