"""Read the transactions of the log, in commit order, for people and small tools.

It needs no lock and can read while a receiver writes. It has one segment in memory, whatever the size of a transaction.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walmere.changelog.changes import KINDS, Change, Messages, TypesOf
from walmere.changelog.manifest import Manifest
from walmere.changelog.records import Record, Transaction, Transactions
from walmere.changelog.segment import SCHEMA, read_block
from walmere.changelog.segment_entry import Block, Segment
from walmere.errors import ChangeLogDamaged, ChangeLogError, ProtocolError
from walmere.lsn import INVALID_LSN, Lsn
from walmere.pgoutput import messages as m
from walmere.pgoutput.relation import RelationVersion, RelMap

_POLL_SECONDS: Final = 0.1
_TOGETHER: Final = 1000
"""Decode up to this many messages at once. As Python objects, they take many times their size in a segment."""

Wanted = Callable[[m.Relation], bool]


@dataclass(frozen=True, slots=True)
class LoggedTransaction:
    """One committed transaction; or, with xid 0, a logical message that belongs to none."""

    xid: int
    commit_lsn: Lsn
    commit_time: datetime
    origin: str | None
    changes: Iterator[Change]  # must be read before the next transaction


class Reader:
    """Reads a change log from its beginning."""

    def __init__(self, directory: Path, types: TypesOf = lambda _: {}) -> None:
        """`types` is called for the columns whose values are asked for."""
        self._directory = directory
        self._types = types
        self._manifest = Manifest(directory)
        self._relations = RelMap()
        self._end = self._manifest.header.start_lsn

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._manifest.close()

    def transactions(
        self,
        start: Lsn = INVALID_LSN,
        *,
        wanted: Wanted | None = None,
        follow: Callable[[], bool] = lambda: False,
    ) -> Iterator[LoggedTransaction]:
        """Transactions that committed at or after `start`, with their changes of the wanted relations.

        Ends at the log's end; but waits for more as long as `follow` returns True.
        """
        if INVALID_LSN < start < self._end:
            raise ChangeLogError(
                f"reading the change log from {start}",
                f"the log begins at {self._end}; earlier changes have been removed",
            )
        while True:
            replaced = self._manifest.replaced()  # first: a replaced file does not grow, so it is read to its end
            for entry in self._manifest.entries():
                if isinstance(entry, RelationVersion):
                    self._relations.add(entry)
                elif entry.end_lsn > self._end:
                    self._end = entry.end_lsn
                    yield from self._read(entry, start, wanted)
            if replaced:
                self._open_next()
            elif follow():
                time.sleep(_POLL_SECONDS)
            else:
                return

    def _open_next(self) -> None:
        """Continue with the manifest that has replaced this one."""
        self._manifest.close()
        self._manifest = Manifest(self._directory)
        begins = self._manifest.header.start_lsn
        if begins > self._end:
            raise ChangeLogError(
                f"reading the change log in {self._directory} from {self._end}",
                f"the log now begins at {begins}; earlier changes have been removed",
            )

    def _read(self, entry: Record, start: Lsn, wanted: Wanted | None) -> Iterator[LoggedTransaction]:
        match entry:
            case Transaction() if entry.commit_lsn >= start:
                time_ = m.at(entry.commit_time)
                changes = self._changes(entry.segments, wanted, entry.aborted)
                blocks = (block for segment in entry.segments for block in segment.blocks)
                if wanted is None or any(self._is_wanted(block, wanted) for block in blocks):
                    yield LoggedTransaction(entry.xid, entry.commit_lsn, time_, entry.origin, changes)
            case Transactions() if entry.commit_lsn >= start:
                yield from self._read_segment(entry.segment, start, wanted)

    def _read_segment(self, segment: Segment, start: Lsn, wanted: Wanted | None) -> Iterator[LoggedTransaction]:
        """The transactions of a segment that holds several."""
        rows = self._rows(segment, wanted)
        commits = rows.column("commit_lsn").to_pylist()
        # a message outside of transactions may have the LSN of the next commit, but never its xid
        keys = list(zip(commits, rows.column("xid").to_pylist(), strict=True))
        edges = [i for i in range(len(keys)) if i == 0 or keys[i] != keys[i - 1]] + [len(keys)]
        for begin, end in itertools.pairwise(edges):
            if commits[begin] < start:
                continue
            part = rows.slice(begin, end - begin)
            xid, time_, origin = (part.column(name)[0] for name in ("xid", "commit_time", "origin"))
            yield LoggedTransaction(
                xid.as_py(),
                Lsn(commits[begin]),
                m.at(time_.value),
                origin.as_py(),
                self._decode(part, segment.streamed, frozenset()),
            )

    def _changes(
        self, segments: tuple[Segment, ...], wanted: Wanted | None, aborted: frozenset[int]
    ) -> Iterator[Change]:
        for segment in segments:
            yield from self._decode(self._rows(segment, wanted), segment.streamed, aborted)

    def _rows(self, segment: Segment, wanted: Wanted | None) -> pa.Table:
        """The messages of the wanted relations of a segment, in order, with the version of their relation."""
        parts = []
        for index, block in enumerate(segment.blocks):
            if wanted is not None and not self._is_wanted(block, wanted):
                continue
            batch = self._block(segment, index)
            version = pa.array([block.version], pa.uint32()).take(pa.array([0] * batch.num_rows))
            parts.append(pa.Table.from_batches([batch]).append_column("version", version))
        if not parts:
            return SCHEMA.empty_table()
        return pa.concat_tables(parts).sort_by("sequence")

    def _block(self, segment: Segment, index: int) -> pa.RecordBatch:
        try:
            return read_block(self._directory, segment, index)
        except ChangeLogDamaged:
            if (self._directory / segment.file).exists() or not self._manifest.replaced():
                raise
            raise ChangeLogError(
                f"reading the change log in {self._directory}",
                f"{segment.file} has been removed: its retention time is over",
                "increase subscription.keep_seconds, or start to read at a later LSN",
            ) from None

    def _is_wanted(self, block: Block, wanted: Wanted) -> bool:
        if not block.relation:
            return False
        try:
            return wanted(self._relations.get(block.relation, block.version).relation)
        except ProtocolError:  # a definition that was rolled back is not in the log, and has no rows
            return False

    def _decode(self, rows: pa.Table, streamed: bool, aborted: frozenset[int]) -> Iterator[Change]:
        sequence = rows.column("sequence").to_numpy()
        # a Truncate is in the block of every relation that it empties
        wanted = np.append(True, sequence[1:] != sequence[:-1])[: len(sequence)]
        wanted &= pc.is_in(rows.column("kind"), pa.array(list(KINDS))).to_numpy()
        if aborted:
            wanted &= ~np.isin(rows.column("xid").to_numpy(), sorted(aborted))
        for batch in rows.filter(pa.array(wanted)).combine_chunks().to_batches(_TOGETHER):
            yield from Messages(batch, streamed, self._relations, self._types).changes()
