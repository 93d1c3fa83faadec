"""The last transactions of a change log as they pass: which tables they changed, and how many rows. Never row values.

The manifest has the number of messages of each relation. For the kinds of changes (insert, update, delete) of small
segments, the columns of the segment are read; the messages are not decoded. A large segment, or a large transaction, is
counted by the manifest alone.

It also counts all changes up to each LSN, so that the rate of applied changes follows from the applied LSN.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from walmere.changelog.manifest import Manifest
from walmere.changelog.manifest_file import NAME
from walmere.changelog.records import Transaction, Transactions
from walmere.changelog.search import ManifestSearch
from walmere.changelog.segment import read_block
from walmere.changelog.segment_entry import Block, Segment
from walmere.errors import ChangeLogError, WalmereError
from walmere.lsn import INVALID_LSN, Lsn
from walmere.pgoutput.relation import RelationVersion

SHOWN: Final = 40
"""Transactions that are kept."""
MAX_ROWS: Final = 20_000
"""A segment with more messages is not opened: its transactions are shown as one line."""
_LOOK_BACK: Final = 16 << 20
"""At the start, this many bytes of WAL before the end of the log are looked at."""
_KEPT: Final = 100_000
"""Records whose counts are kept: hours of them."""
_KINDS: Final = {"I": "inserts", "U": "updates", "D": "deletes", "T": "truncates"}


@dataclass(frozen=True, slots=True)
class PassedTransaction:
    """A transaction, or several of a large segment, as shown."""

    xid: int | None  # None: several transactions
    count: int  # of transactions
    commit_lsn: Lsn  # of the last
    commit_time: float  # of the last, in seconds of Unix time
    tables: tuple[tuple[str, dict[str, int]], ...]  # changes by kind; "changes" if the kind is not known


class PassingTransactions:
    """Reads the manifest as it grows."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._manifest: Manifest | None = None
        self._names: dict[tuple[int, int], str] = {}
        self._end = INVALID_LSN
        self._ends: list[Lsn] = []  # of the records that were read, and the number of changes up to each
        self._counts: list[int] = []
        self.last: deque[PassedTransaction] = deque(maxlen=SHOWN)

    def read(self) -> None:
        """Read what has arrived since the last call. A log that was removed, or begins anew, is read again."""
        if not (self._directory / NAME).exists():
            self._close()
            return
        try:
            if self._manifest is None or self._manifest.replaced():
                self._open()
            self._read_new()
        except (ChangeLogError, OSError):  # retention or `walmere drop` was faster; `status` reports what is damaged
            self._close()

    def changes_until(self, lsn: Lsn | None) -> int | None:
        """How many changes the log has up to an LSN, counted from some point; None: the LSN is before that point."""
        if lsn is None or not self._ends:
            return None
        found = bisect.bisect_right(self._ends, lsn) - 1
        return None if found < 0 else self._counts[found]

    def _close(self) -> None:
        if self._manifest is not None:
            self._manifest.close()
        self._manifest = None

    def _open(self) -> None:
        self._close()
        manifest = Manifest(self._directory)
        with ManifestSearch(self._directory) as found:
            if manifest.header.start_lsn > self._end or not self._ends:  # the first time, or too late
                before = Lsn(max(manifest.header.start_lsn, found.end_lsn - _LOOK_BACK))
                self._end, self._ends, self._counts = before, [before], [0]
                self.last.clear()
            for each in found.relations():
                self._add_name(each)
            if not manifest.replaced():  # otherwise the offset is that of another file; the next call opens it
                manifest.position = found.offset_after(self._end)
        self._manifest = manifest

    def _read_new(self) -> None:
        assert self._manifest is not None
        new: list[Transaction | Transactions] = []
        for entry in self._manifest.entries():
            if isinstance(entry, RelationVersion):
                self._add_name(entry)
            elif entry.end_lsn > self._end:
                self._end = entry.end_lsn
                changes = 0
                if isinstance(entry, Transaction | Transactions):
                    changes = sum(
                        block.rows for segment in entry.segments for block in segment.blocks if block.relation
                    )
                    new.append(entry)
                self._ends.append(entry.end_lsn)
                self._counts.append(self._counts[-1] + changes)
        del self._ends[:-_KEPT], self._counts[:-_KEPT]
        if new:
            shown = 0
            begin = len(new)
            while begin > 0 and shown < SHOWN:  # only what will be shown is opened
                begin -= 1
                record = new[begin]
                shown += record.count if isinstance(record, Transactions) and _is_small(record) else 1
            for record in new[begin:]:
                self.last.extend(self._passed(record))

    def _passed(self, record: Transaction | Transactions) -> Iterator[PassedTransaction]:
        if isinstance(record, Transactions) and _is_small(record):
            try:
                yield from self._small(record.segment)
                return
            except WalmereError:  # removed from the local disk meanwhile, or only in a store that does not answer
                pass
        blocks = [block for segment in record.segments for block in segment.blocks]
        tables: dict[str, dict[str, int]] = {}
        for block in blocks:
            if block.relation:
                counts = tables.setdefault(self._name(block), {"changes": 0})
                counts["changes"] += block.rows
        xid, count = (record.xid, 1) if isinstance(record, Transaction) else (None, record.count)
        if tables:
            yield PassedTransaction(xid, count, record.commit_lsn, record.commit_time / 1e6, tuple(tables.items()))

    def _small(self, segment: Segment) -> Iterator[PassedTransaction]:
        """The transactions of a segment, without those that changed no table."""
        parts = []
        for index, block in enumerate(segment.blocks):
            if block.relation:
                columns = read_block(self._directory, segment, index).select(
                    ["commit_lsn", "xid", "commit_time", "kind"]
                )
                name = pa.repeat(pa.scalar(self._name(block)), columns.num_rows)
                parts.append(pa.Table.from_batches([columns]).append_column("table", name))
        if not parts:
            return
        rows = pa.concat_tables(parts)
        keys = ["commit_lsn", "xid", "table", "kind"]
        counted = rows.group_by(keys).aggregate([("commit_time", "max"), ("kind", "count")]).sort_by("commit_lsn")
        found: dict[tuple[int, int], tuple[float, dict[str, dict[str, int]]]] = {}
        times = pc.cast(counted.column("commit_time_max"), pa.int64()).to_pylist()
        columns_ = [counted.column(name).to_pylist() for name in (*keys, "kind_count")]
        for lsn, xid, table, kind, count, time_ in zip(*columns_, times, strict=True):
            _, tables = found.setdefault((lsn, xid), (time_ / 1e6, {}))
            if kind in _KINDS:
                tables.setdefault(table, {})[_KINDS[kind]] = count
        for (lsn, xid), (commit_time, tables) in found.items():
            yield PassedTransaction(xid, 1, Lsn(lsn), commit_time, tuple(sorted(tables.items())))

    def _add_name(self, entry: RelationVersion) -> None:
        self._names[entry.oid, entry.version] = f"{entry.relation.namespace or 'pg_catalog'}.{entry.relation.name}"

    def _name(self, block: Block) -> str:
        return self._names.get((block.relation, block.version), f"relation {block.relation}")


def _is_small(record: Transactions) -> bool:
    return record.segment.rows <= MAX_ROWS
