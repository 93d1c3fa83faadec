"""From references to rows: what a task of the `pgoutput` source does.

Blocks are decoded column by column; `table_rows` and `json_rows` make rows of them. Every row has these columns:

    _op                 I, U, D or T, pgoutput's letters
    _lsn, _commit_lsn   of the change, and of its transaction's commit
    _seq                the change's number in the log; with _commit_lsn before it, the order of everything
    _xid, _commit_ts    of the transaction
    _rejects            the text of values that the column's type cannot hold, by column

Small blocks are joined before they are decoded, because a step of the decoder costs the same for one row as for a
thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import pyarrow as pa

from walmere.changelog.manifest import Manifest
from walmere.changelog.plan import BlockRef, Blocks, messages
from walmere.errors import ChangeLogDamaged, ChangesRemoved
from walmere.lsn import Lsn
from walmere.pgoutput.messages import Relation

BATCH_ROWS: Final = 20_000
"""Decode this many rows at once, and send them to the JVM as one batch."""

CHANGE: Final = (
    pa.field("_op", pa.string()),
    pa.field("_lsn", pa.int64()),
    pa.field("_commit_lsn", pa.int64()),
    pa.field("_seq", pa.int64()),
    pa.field("_xid", pa.int64()),
    pa.field("_commit_ts", pa.timestamp("us", "UTC")),
)
"""The columns of every row that describe the change."""
CHANGE_NAMES: Final = tuple(each.name for each in CHANGE)


class OutputColumn(NamedTuple):
    """A column of a definition."""

    name: str
    type_oid: int
    typmod: int


class Format(Protocol):
    """The format of rows."""

    def schema(self) -> pa.Schema:
        """All columns."""

    def batch(self, messages: pa.RecordBatch, relation: Relation, streamed: bool) -> pa.RecordBatch:
        """The rows of messages of one definition."""


@dataclass(frozen=True, slots=True)
class ReadJob:
    """What one task reads."""

    blocks: Blocks
    rows: Format


def read(job: ReadJob) -> Iterator[pa.RecordBatch]:
    """Read, decode and cast what the job refers to, in its order."""
    for ref, block in _joined_blocks(job):
        relation = job.blocks.versions[ref.block.relation, ref.version].relation
        # in pieces, so that the JVM processes one while the next is decoded
        for first in range(0, block.num_rows, BATCH_ROWS):
            yield job.rows.batch(block.slice(first, BATCH_ROWS), relation, ref.segment.streamed)


def _joined_blocks(job: ReadJob) -> Iterator[tuple[BlockRef, pa.RecordBatch]]:
    """The messages; neighbouring blocks of one definition are joined."""
    waiting: list[tuple[BlockRef, pa.RecordBatch]] = []
    count = 0
    for ref, batch in _messages(job):
        if waiting and (count >= BATCH_ROWS or _kind(ref) != _kind(waiting[0][0])):
            yield waiting[0][0], _joined(waiting)
            waiting, count = [], 0
        waiting.append((ref, _with_transaction(ref, batch)))
        count += batch.num_rows
    if waiting:
        yield waiting[0][0], _joined(waiting)


def _joined(blocks: list[tuple[BlockRef, pa.RecordBatch]]) -> pa.RecordBatch:
    return blocks[0][1] if len(blocks) == 1 else pa.concat_batches([each for _, each in blocks])


def _kind(ref: BlockRef) -> tuple[int, int, bool]:
    return ref.block.relation, ref.version, ref.segment.streamed


def _messages(job: ReadJob) -> Iterator[tuple[BlockRef, pa.RecordBatch]]:
    directory, refs = job.blocks.directory, job.blocks.refs
    try:
        yield from messages(directory, refs, store=job.blocks.store)
    except ChangeLogDamaged:
        with Manifest(directory) as now:
            log_start = now.header.start_lsn
        if log_start <= refs[0].position:
            raise
        raise removed(directory, refs[0].position, log_start) from None


def removed(directory: object, position: Lsn, log_start: Lsn) -> ChangesRemoved:
    """The error of a query whose changes were removed by retention."""
    return ChangesRemoved(
        f"reading the change log in {directory} from {position}",
        f"it begins at {log_start}; earlier changes have been removed",
        'start the query with a new checkpoint; option("reader", "…") keeps the log for a query,'
        " subscription.keep_seconds keeps it for a time",
    )


def _with_transaction(ref: BlockRef, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add commit time and xid of a large transaction: they are in its record, not in its messages."""
    if ref.commit_time is None:
        return batch
    for name, value in (("commit_time", ref.commit_time), ("xid", ref.xid)):
        if value is not None:
            field = batch.schema.field(name)
            same = pa.scalar(value, field.type)
            place = batch.schema.get_field_index(name)
            batch = batch.set_column(place, field, pa.repeat(same, batch.num_rows))
    return batch


def change_column(name: str, batch: pa.RecordBatch) -> pa.Array:
    """One of the columns of CHANGE."""
    match name:
        case "_op":
            return batch.column("kind")
        case "_commit_ts":
            return batch.column("commit_time")
        case "_seq":
            return batch.column("sequence").view(pa.int64())
        case "_xid":
            return batch.column("xid").cast(pa.int64())
    return batch.column(name.removeprefix("_")).view(pa.int64())
