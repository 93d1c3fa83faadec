"""What a batch has to read: for each table, references to the blocks of the log that are still to be applied to it.

A batch ends where a record of the manifest ends, so always between two transactions. Each table has its own position
(its copy may be older or newer than what the others have), and takes part with the records after it. References are
small and pickle well: tasks open the log themselves, and no row passes through anybody else's hands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walmere.changelog.manifest import Manifest, Transaction, Transactions
from walmere.changelog.segment import Segment, read_block
from walmere.lsn import Lsn
from walmere.pgoutput.relation import RelationVersion


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of a segment, and which of its messages count."""

    segment: Segment  # with this block only
    version: int  # of the relation's definition
    after: Lsn  # messages of transactions that committed before this are in the table already
    commit_lsn: Lsn | None  # of all its messages, where they do not say it themselves
    aborted: frozenset[int]

    @property
    def length(self) -> int:
        """Its bytes on disk."""
        return self.segment.blocks[0].length


@dataclass(slots=True)
class Plan:
    """A batch."""

    end_lsn: Lsn
    commit_time: int | None = None  # of the newest transaction in it
    blocks: dict[int, list[BlockRef]] = field(default_factory=dict)  # by relation
    definitions: dict[tuple[int, int], RelationVersion] = field(default_factory=dict)


def end_of_batch(directory: Path, start: Lsn, max_bytes: int) -> Lsn:
    """How far a batch from `start` should go: to the log's end, but over no more than about so many bytes."""
    end, size = start, 0
    with Manifest(directory) as manifest:
        for entry in manifest.entries():
            if isinstance(entry, RelationVersion) or entry.end_lsn <= start:
                continue
            end = max(end, entry.end_lsn)
            if isinstance(entry, Transactions | Transaction):
                size += sum(segment.length for segment in entry.segments)
                if size >= max_bytes:
                    break
    return end


def plan(directory: Path, positions: Mapping[int, Lsn], end: Lsn) -> Plan:
    """References to everything that is still to be applied, up to the end of a batch, by relation.

    `positions` has the applied LSN of each relation that takes part.
    """
    made = Plan(end)
    with Manifest(directory) as manifest:
        for entry in manifest.entries():
            if isinstance(entry, RelationVersion):
                made.definitions[entry.oid, entry.version] = entry
                continue
            if entry.end_lsn > end:
                break
            if not isinstance(entry, Transactions | Transaction):
                continue
            made.commit_time = entry.commit_time
            single = isinstance(entry, Transaction)
            for segment in entry.segments:
                for block in segment.blocks:
                    after = positions.get(block.relation)
                    if after is None or entry.commit_lsn < after:
                        continue
                    ref = BlockRef(
                        Segment(segment.file, segment.length, segment.streamed, (block,)),
                        block.version,
                        after,
                        entry.commit_lsn if single else None,
                        entry.aborted if isinstance(entry, Transaction) else frozenset(),
                    )
                    made.blocks.setdefault(block.relation, []).append(ref)
    return made


def messages(directory: Path, refs: list[BlockRef]) -> Iterator[tuple[BlockRef, pa.RecordBatch]]:
    """The messages that count, block by block, in commit order; with `commit_lsn` filled in."""
    for ref in refs:
        batch = read_block(directory, ref.segment, 0)
        if ref.aborted:
            gone = pa.array(sorted(ref.aborted), pa.uint32())
            batch = batch.filter(pc.invert(pc.is_in(batch.column("xid"), gone)))
        if ref.commit_lsn is not None:
            lsn = pa.array(np.full(batch.num_rows, ref.commit_lsn, np.uint64))
            batch = batch.set_column(batch.schema.get_field_index("commit_lsn"), batch.schema.field("commit_lsn"), lsn)
        else:
            batch = batch.filter(pc.greater_equal(batch.column("commit_lsn"), pa.scalar(int(ref.after), pa.uint64())))
        if batch.num_rows:
            yield ref, batch
