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
from functools import cached_property
from typing import Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from walmere.changelog.manifest import Manifest
from walmere.changelog.plan import BlockRef, Blocks, messages
from walmere.errors import ChangeLogDamaged, ChangesRemoved
from walmere.lsn import Lsn
from walmere.pgoutput.columns import DELETE, Values, decode_rows
from walmere.pgoutput.messages import Relation
from walmere.types.base import Cast, Mask, as_mask
from walmere.types.flat import nested

BATCH_ROWS: Final = 20_000
"""Decode this many rows at once, and send them to the JVM as one batch."""

REJECTS: Final = pa.map_(pa.string(), pa.string())
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
    for ref, some in _joined_blocks(job):
        relation = job.blocks.versions[ref.block.relation, ref.version].relation
        # in pieces, so that the JVM processes one while the next is decoded
        for first in range(0, some.num_rows, BATCH_ROWS):
            yield job.rows.batch(some.slice(first, BATCH_ROWS), relation, ref.segment.streamed)


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


def _joined(some: list[tuple[BlockRef, pa.RecordBatch]]) -> pa.RecordBatch:
    return some[0][1] if len(some) == 1 else pa.concat_batches([each for _, each in some])


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
            its = batch.schema.field(name)
            same = pa.scalar(value, its.type)
            place = batch.schema.get_field_index(name)
            batch = batch.set_column(place, its, pa.repeat(same, batch.num_rows))
    return batch


class DecodedRows:
    """The messages of one definition, decoded. A TRUNCATE is not in `rows`."""

    def __init__(self, batch: pa.RecordBatch, relation: Relation, streamed: bool) -> None:
        messages = batch.column("message")
        truncates = as_mask(pc.equal(batch.column("kind"), "T"))
        self._places: pa.Array | None = None
        if truncates.any():
            messages = messages.filter(pa.array(~truncates))
            self._places = pa.array(np.cumsum(~truncates) - 1, mask=truncates)
        self.rows = decode_rows(messages, relation, streamed=streamed)

    def spread(self, array: pa.Array) -> pa.Array:
        """An array with an item per row as one with an item per message: null for a TRUNCATE."""
        return array if self._places is None else array.take(self._places)

    @cached_property
    def deleted(self) -> Mask | None:
        """Which rows were deleted; None: none."""
        found: Mask = self.rows.kind == DELETE
        return found if found.any() else None

    def current(self, place: int) -> Values:
        """The values of a column. For deleted rows and unchanged values, those of the old tuple, if it has them."""
        new, old = self.rows.new[place], self.rows.old[place]
        there, unchanged = self.deleted, new.unchanged
        if unchanged is not None:
            known = unchanged & as_mask(old.text.is_valid())
            there = known if there is None else there | known
            unchanged = unchanged & ~known
        if there is None:
            return new
        return Values(pc.if_else(pa.array(there), old.text, new.text), unchanged)


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


class Rejected:
    """Collects the rejected values of each row: a map of column names to texts."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._found: list[tuple[str, NDArray[np.intp], pa.Array]] = []

    def keep(self, name: str, text: pa.Array, cast: Cast) -> pa.Array:
        """Returns the values of the cast, and keeps the texts that it rejected under this name."""
        if cast.rejected is not None and cast.rejected.any():
            rows = np.flatnonzero(cast.rejected)
            self._found.append((name, rows, _readable(text.take(pa.array(rows)))))
        return cast.values

    def maps(self) -> pa.Array:
        """For each row, its rejected values; null if it has none."""
        if not self._found:
            return pa.nulls(self._count, REJECTS)
        rows = np.concatenate([rows for _, rows, _ in self._found])
        order = pa.array(np.argsort(rows, kind="stable"))
        keys = pa.concat_arrays([pa.repeat(name, len(rows)) for name, rows, _ in self._found])
        texts = pa.concat_arrays([text for *_, text in self._found])
        pairs = pa.StructArray.from_arrays(
            [keys.take(order), texts.take(order)], fields=[REJECTS.key_field, REJECTS.item_field]
        )
        counts = np.bincount(rows, minlength=self._count)
        return nested(REJECTS, counts, counts > 0, pairs)


def _readable(text: pa.Array) -> pa.Array:
    """As strings. Bytes that are not UTF-8 are shown as backslash escapes."""
    try:
        return text.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([value.decode(errors="backslashreplace") for value in text.to_pylist()], pa.string())
