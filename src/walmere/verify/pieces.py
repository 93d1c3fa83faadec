"""The two sides of a table, in pieces: ranges of its pages at the source, files in the target.

A piece goes to a task, which reads it and returns a fingerprint. If the sides differ, it is read again for the rows of
the buckets that differ. The source's rows come by COPY, in the snapshot, and stay text (`source_text`).

A value that the target's type cannot hold is NULL on both sides. `verify` also checks that its text is in the table's
rejects, but not for which row: since then the row may have got another key, and the column another name.

A masked column is compared after the source's values were masked in the same way. The
explanation of verify in the documentation says what that proves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from walmere.apply.rejects import rejected_key
from walmere.publisher import copy, table
from walmere.sinks.base import LakeSink
from walmere.sinks.postgres.sink import PostgresSink
from walmere.subscription.tablesync import CopyTask
from walmere.types.base import Codec
from walmere.verify import source_text
from walmere.verify.fingerprint import Fingerprint, RowLayout, Side, empty, fingerprint, rows_of
from walmere.verify.point import APPLICATION


@dataclass(frozen=True, slots=True)
class Counted:
    """What tasks found in their pieces."""

    source: Fingerprint
    target: Fingerprint
    rejects: frozenset[str] = frozenset()  # the distinct texts of the source that the target cannot hold

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
        rejects: set[str] = set()
        found = fingerprint(self.layout, Side.SOURCE, self._batches(rejects))
        return Counted(found, empty(self.layout.buckets), frozenset(rejects))

    def rows(self, differing: NDArray[np.intp], texts: bool) -> Iterator[pa.RecordBatch]:
        """Runs in a Spark task."""
        return rows_of(self.layout, Side.SOURCE, self._batches(set()), differing, texts=texts)

    def _batches(self, rejects: set[str]) -> Iterator[pa.RecordBatch]:
        """The rows as text, or masked. Adds to `rejects` what the target cannot hold."""
        task, schema = self.task, self.layout.schema
        command = table.copy_command(task.table, task.piece, self.where, task.columns.names)
        masks = {
            place: functools.partial(_masked, each) for place, each in enumerate(task.columns.codecs) if each.hides
        }
        decimals = {
            place: column.decimal for place, column in enumerate(self.layout.source) if column.decimal is not None
        }
        for data in copy.copy_out(task.source, APPLICATION, task.snapshot, command, task.piece.part):
            found = source_text.read(data, schema, decimals, masks)
            for place, texts in found.rejected.items():
                if (name := schema.names[place]) in task.table.key:
                    raise rejected_key(name)
                rejects.update(text.decode(errors="backslashreplace") for text in texts.unique().to_pylist())
            yield found.batch


def _masked(mask: Codec, text: pa.Array) -> pa.Array:
    return mask.cast(text).values


@dataclass(frozen=True, slots=True)
class TargetPiece:
    """Rows of the target."""

    sink: LakeSink
    piece: Any
    layout: RowLayout
    where: str = "true"  # in DuckDB's SQL
    soft_deletes: str | None = None  # the target's column that is not NULL in rows that are deleted at the source

    def count(self) -> Counted:
        """Runs in a Spark task."""
        found = fingerprint(self.layout, Side.TARGET, self._batches(), self.where)
        return Counted(empty(self.layout.buckets), found)

    def rows(self, differing: NDArray[np.intp], texts: bool) -> Iterator[pa.RecordBatch]:
        """Runs in a Spark task."""
        return rows_of(self.layout, Side.TARGET, self._batches(), differing, texts=texts, where=self.where)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, without those that are deleted at the source."""
        for batch in self.sink.read(self.piece):
            if self.soft_deletes is None:
                yield batch
            else:
                live = batch.filter(batch.column(self.soft_deletes).is_null())
                yield live.select(self.layout.schema.names)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Rows of a target that is a database: they come by COPY, as the source's do."""

    sink: PostgresSink
    piece: Any
    layout: RowLayout
    columns: Mapping[str, str]  # with the types of the source

    def count(self) -> Counted:
        """Runs in a Spark task."""
        found = fingerprint(self.layout, Side.TARGET, self._batches())
        return Counted(empty(self.layout.buckets), found)

    def rows(self, differing: NDArray[np.intp], texts: bool) -> Iterator[pa.RecordBatch]:
        """Runs in a Spark task."""
        return rows_of(self.layout, Side.TARGET, self._batches(), differing, texts=texts)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for data in self.sink.copy_text(self.piece, self.columns):
            yield source_text.read(data, self.layout.schema).batch


@dataclass(frozen=True, slots=True)
class DifferingRows:
    """The rows of a piece that are in these buckets: a piece for the shuffle."""

    piece: SourcePiece | TargetPiece | TextPiece
    differing: NDArray[np.intp]
    texts: bool

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Runs in a Spark task."""
        return self.piece.rows(self.differing, self.texts)


def count(piece: SourcePiece | TargetPiece | TextPiece) -> Counted:
    """Runs in a Spark task."""
    return piece.count()
