"""From references to rows: what a task of the `pgoutput` source does.

Blocks are decoded by whole columns; `tablerows` and `jsonrows` make rows of them. What every row says of its change:

    _op                 I, U, D or T, pgoutput's letters
    _lsn, _commit_lsn   of the change, and of its transaction's commit
    _seq                the change's number in the log; with _commit_lsn before it, the order of everything
    _xid, _commit_ts    of the transaction
    _rejects            the text of values that the column's type cannot hold, by column

Small blocks are put together before they are decoded, since a step of the decoder costs the same for one row as for a
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

TOGETHER: Final = 20_000
"""Rows that are decoded at once, and sent to the JVM at once."""

REJECTS: Final = pa.map_(pa.string(), pa.string())
CHANGE: Final = (
    pa.field("_op", pa.string()),
    pa.field("_lsn", pa.int64()),
    pa.field("_commit_lsn", pa.int64()),
    pa.field("_seq", pa.int64()),
    pa.field("_xid", pa.int64()),
    pa.field("_commit_ts", pa.timestamp("us", "UTC")),
)
"""What every row says of its change."""
OF_CHANGE: Final = tuple(each.name for each in CHANGE)


class OutputColumn(NamedTuple):
    """A column of a definition."""

    name: str
    type_oid: int
    typmod: int


class Format(Protocol):
    """How rows look."""

    def schema(self) -> pa.Schema:
        """All that a row can have."""

    def batch(self, messages: pa.RecordBatch, relation: Relation, streamed: bool) -> pa.RecordBatch:
        """The rows of messages of one definition."""


@dataclass(frozen=True, slots=True)
class ReadJob:
    """What one task reads."""

    blocks: Blocks
    rows: Format


def read(job: ReadJob) -> Iterator[pa.RecordBatch]:
    """Read, decode and cast what the job refers to, in its order."""
    for ref, some in _together(job):
        relation = job.blocks.versions[ref.block.relation, ref.version].relation
        # a piece at a time: the JVM is busy with it while the next is decoded
        for first in range(0, some.num_rows, TOGETHER):
            yield job.rows.batch(some.slice(first, TOGETHER), relation, ref.segment.streamed)


def _together(job: ReadJob) -> Iterator[tuple[BlockRef, pa.RecordBatch]]:
    """The messages, neighbouring blocks of one definition as one."""
    waiting: list[tuple[BlockRef, pa.RecordBatch]] = []
    count = 0
    for ref, batch in _messages(job):
        if waiting and (count >= TOGETHER or _kind(ref) != _kind(waiting[0][0])):
            yield waiting[0][0], _joined(waiting)
            waiting, count = [], 0
        waiting.append((ref, _whose(ref, batch)))
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
        yield from messages(directory, refs)
    except ChangeLogDamaged:
        with Manifest(directory) as now:
            begins = now.header.start_lsn
        if begins <= refs[0].position:
            raise
        raise removed(directory, refs[0].position, begins) from None


def removed(directory: object, position: Lsn, begins: Lsn) -> ChangesRemoved:
    """The error for a query whose changes retention has taken."""
    return ChangesRemoved(
        f"reading the change log in {directory} from {position}",
        f"it begins at {begins}; what was before has been removed",
        'begin the query anew, with a new checkpoint; option("reader", "…") has the log kept for a query,'
        " subscription.keep_seconds for a time",
    )


def _whose(ref: BlockRef, batch: pa.RecordBatch) -> pa.RecordBatch:
    """With the transaction that one large transaction's record names, instead of its messages."""
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
    """Messages of one definition. A TRUNCATE has no place in `rows`."""

    def __init__(self, batch: pa.RecordBatch, relation: Relation, streamed: bool) -> None:
        messages = batch.column("message")
        truncates = as_mask(pc.equal(batch.column("kind"), "T"))
        self._places: pa.Array | None = None
        if truncates.any():
            messages = messages.filter(pa.array(~truncates))
            self._places = pa.array(np.cumsum(~truncates) - 1, mask=truncates)
        self.rows = decode_rows(messages, relation, streamed=streamed)

    def spread(self, array: pa.Array) -> pa.Array:
        """An array of the rows as one of the messages."""
        return array if self._places is None else array.take(self._places)

    @cached_property
    def deleted(self) -> Mask | None:
        """Where a row was deleted; None: nowhere."""
        found: Mask = self.rows.kind == DELETE
        return found if found.any() else None

    def current(self, place: int) -> Values:
        """What is known of a column: of a deleted row what it had, of an unchanged value what the old tuple says."""
        new, old = self.rows.new[place], self.rows.old[place]
        there, unchanged = self.deleted, new.unchanged
        if unchanged is not None:
            known = unchanged & as_mask(old.text.is_valid())
            there = known if there is None else there | known
            unchanged = unchanged & ~known
        if there is None:
            return new
        return Values(pc.if_else(pa.array(there), old.text, new.text), unchanged)


def of_change(name: str, batch: pa.RecordBatch) -> pa.Array:
    """One of the columns that every row has."""
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
    """Collects what was rejected, by row, as a map of columns to texts."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._found: list[tuple[str, NDArray[np.intp], pa.Array]] = []

    def keep(self, name: str, text: pa.Array, cast: Cast) -> pa.Array:
        """The cast's values; what it rejected is kept under this name."""
        if cast.rejected is not None and cast.rejected.any():
            rows = np.flatnonzero(cast.rejected)
            self._found.append((name, rows, _readable(text.take(pa.array(rows)))))
        return cast.values

    def maps(self) -> pa.Array:
        """All of it."""
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
    """As strings; bytes that are none are shown as a backslash and their number."""
    try:
        return text.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([value.decode(errors="backslashreplace") for value in text.to_pylist()], pa.string())
