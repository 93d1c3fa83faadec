"""Many changes of a table, applied in chunks within one transaction of a database. No PySpark.

While the target's server applies a chunk, a thread reads, decodes and folds the next one, and makes its statements. So
neither waits for the other, and the memory of a task does not grow with its batch.

A TRUNCATE empties tables together, so it has to be known before anything is applied. And tables that are applied row by
row are changed in the order of the source among each other. Such changes are read twice (`ChangesInLog`): once for what
there is, then, chunk by chunk, to apply or to stage them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from walmere.apply.decode import Span, TextChanges, Truncation, decode_text, require_whole_truncates
from walmere.apply.fold_rows import fold_rows, require_identity
from walmere.apply.jobs import ApplyJob
from walmere.apply.row_changes import row_changes
from walmere.changelog.plan import BlockRef, Blocks
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.postgres.relation import TargetRelation
from walmere.sinks.postgres.statements import RowSet, row_set
from walmere.sinks.postgres.transaction import TargetTransaction

CHUNK_BYTES: Final = 4 << 20
"""Bytes of the log in the first chunk, about. Each one has twice as many as the one before: the first begins early, and
in a larger one more of the changes are of the same pages."""
MAX_CHUNK_BYTES: Final = 16 << 20
"""Bytes of the log in a chunk, about: this limits the memory of a task. A chunk ends with the block that reaches this
size; in a gathered table, with the blocks of the same segment whose changes alternate with those of that block."""
Made = TypeVar("Made")


class Truncated(Exception):
    """A chunk has a TRUNCATE. What was applied before it is undone."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    changes: TextChanges
    rows: RowSet


def is_large(job: ApplyJob) -> bool:
    """Whether a job has so many changes that chunks are worth it."""
    return bool(job.shape.columns) and sum(ref.block.length for ref in job.blocks.refs) >= 2 * CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class ChangesInLog:
    """Many changes of a table, which are read from the log piece by piece, as often as they are needed."""

    blocks: Blocks
    span: Span
    applied: Lsn | None
    skip: Lsn | None
    truncations: tuple[Truncation, ...] = ()
    after: Truncation | None = None  # without the changes before it

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [name for name, *_ in self.span.shape.columns]

    def pieces(self) -> Iterator[TextChanges]:
        """The changes in pieces, in order."""
        for refs in _divided(self.blocks.refs):
            piece = decode_text(self.blocks, self.span, self.applied, self.skip, refs)
            if piece is not None:
                yield piece if self.after is None else piece.after(self.after)

    def after_truncation(self) -> ChangesInLog:
        """The changes after the last TRUNCATE, or all."""
        return replace(self, truncations=(), after=self.truncations[-1]) if self.truncations else self


def read_changes(
    job: ApplyJob, span: Span, applied: Lsn | None, skip: Lsn | None
) -> tuple[TextChanges | ChangesInLog, int] | None:
    """The changes of a span, and how many they are; None if there are none. Raises NotMirrored.

    If they are many, they stay in the log.
    """
    if not is_large(job):
        changes = decode_text(job.blocks, span, applied, skip)
        if changes is None:
            return None
        require_identity(changes.changes, span.identity)
        return changes, len(changes.changes) + len(changes.truncations)
    require_whole_truncates(job.blocks, span, applied, skip)
    in_log, count, found = ChangesInLog(job.blocks, span, applied, skip), 0, set[Truncation]()
    for piece in in_log.pieces():
        require_identity(piece.changes, span.identity)
        count += len(piece.changes)
        found.update(piece.truncations)
    truncations = tuple(sorted(found, key=lambda each: (each.commit_lsn, each.sequence)))
    return (replace(in_log, truncations=truncations), count + len(found)) if count or found else None


def by_sets(job: ApplyJob, span: Span, transaction: TargetTransaction) -> bool:
    """Whether the changes of a job can be applied by sets of rows."""
    names = [name for name, *_ in job.shape.columns]
    return span.shape == job.shape and not transaction.one_by_one(job.target, span.identity, names)


def apply_in_chunks(
    transaction: TargetTransaction, job: ApplyJob, span: Span, applied: Lsn | None, skip: Lsn | None
) -> int:
    """Apply the changes of a job. Returns how many there were. Raises Truncated, and leaves the table as it was."""
    relation = transaction.relations[job.target]
    count = 0
    make = functools.partial(_make, relation, job.blocks, span, applied, skip)
    with transaction.connection.transaction():
        for chunk in _ahead([functools.partial(make, refs) for refs in _divided(job.blocks.refs)]):
            if chunk is None:
                continue
            count += len(chunk.changes.changes)
            if not transaction.apply_set(chunk.rows):
                transaction.apply_rows([row_changes(relation, span.identity, chunk.changes)], [])
    return count


def apply_pieces(transaction: TargetTransaction, table: TableName, identity: Identity, changes: ChangesInLog) -> None:
    """Apply changes piece by piece: by sets of rows, or row by row where that is needed."""
    relation = transaction.relations[table]
    for piece in changes.pieces():
        if not transaction.apply_set(row_set(relation, fold_rows(piece.changes, identity))):
            transaction.apply_rows([row_changes(relation, identity, piece)], [])


def _make(
    relation: TargetRelation,
    blocks: Blocks,
    span: Span,
    applied: Lsn | None,
    skip: Lsn | None,
    refs: Sequence[BlockRef],
) -> _Chunk | None:
    """Read some blocks, and make the statements for them."""
    changes = decode_text(blocks, span, applied, skip, refs)
    if changes is None:
        return None
    if changes.truncations:
        raise Truncated
    require_identity(changes.changes, span.identity)
    return _Chunk(changes, row_set(relation, fold_rows(changes.changes, span.identity)).made())


def _divided(refs: Sequence[BlockRef]) -> list[list[BlockRef]]:
    """References as chunks, whose changes are in order among each other."""
    chunks: list[list[BlockRef]] = [[]]
    size, limit = 0, CHUNK_BYTES
    for overlapping in _overlapping(refs):
        if size >= limit:
            chunks.append([])
            size, limit = 0, min(2 * limit, MAX_CHUNK_BYTES)
        chunks[-1] += overlapping
        size += sum(ref.block.length for ref in overlapping)
    return chunks


def _overlapping(refs: Sequence[BlockRef]) -> Iterator[list[BlockRef]]:
    """References that must be in one chunk.

    Segments are in order, and so are the blocks of one relation. In a gathered table, a segment has blocks of several
    relations, whose changes may alternate.
    """
    for _, of_segment in itertools.groupby(refs, key=lambda ref: ref.segment.file):
        together: list[BlockRef] = []
        last = 0
        for ref in sorted(of_segment, key=lambda ref: ref.block.first_sequence):
            if together and ref.block.first_sequence > last:
                yield together
                together = []
            together.append(ref)
            last = max(last, ref.block.last_sequence)
        yield together


def _ahead(makers: Sequence[Callable[[], Made]]) -> Iterator[Made]:
    """Call all of these, each while the result of the one before is used."""
    with ThreadPoolExecutor(1) as pool:
        coming = [pool.submit(makers[0])]
        for following in (*makers[1:], None):
            ready = coming.pop().result()
            if following is not None:
                coming.append(pool.submit(following))
            yield ready
