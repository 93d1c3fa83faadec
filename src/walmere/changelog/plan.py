"""What a batch has to read: for each table, references to the blocks of the log that are still to be applied to it.

A batch ends between two transactions: where a record of the manifest ends, or, if somebody wants to see all tables at
one LSN (see `cuts`), there, in the middle of a record if need be. Each table has its own position
(its copy may be older or newer than what the others have), and takes part with the records after it. References are
small and pickle well: tasks open the log themselves, and no row passes through anybody else's hands.

How long a batch is: as long as the log is new, whatever there is, so that tables are fresh. While we are behind the
source, freshness is lost anyway and what counts is the work per change; a batch that replaces single rows rewrites the
files they lie in, and ten times as many changes often rewrite the same files. So then a batch waits until it is worth
its while: until the log has grown by enough bytes, or for some seconds, or until the log has stopped growing.

A large batch of one table that has inserts only is divided, so that several tasks decode and write it: no row of it has
anything to do with another. Where there are updates or deletes, the fold has to see all changes of a key in order, and
what takes time is then the files that are written anew, which the sink does side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from walmere.changelog.manifest import Manifest, Record, Transaction, Transactions
from walmere.changelog.segment import Block, Segment, read_block
from walmere.errors import ChangesRemoved
from walmere.lsn import INVALID_LSN, Lsn
from walmere.pgoutput.relation import RelationVersion

BEHIND: Final = 3.0
"""Seconds between a commit at the source and its arrival in the log, from which on batches are made larger."""
LONGEST_WAIT: Final = 4.0
"""Seconds that a batch waits for more, at most, while behind."""
QUIET: Final = 0.3
"""Seconds after which a log that did not grow is taken to be at the source's end."""


PositionOf: TypeAlias = Callable[[int], Lsn | None]
"""Of a relation; None: it takes no part."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of a segment, and which of its messages count."""

    segment: Segment  # with this block only
    version: int  # of the relation's definition
    position: Lsn  # of the table: see `should_apply`
    commit_lsn: Lsn | None  # of all its messages, where they do not say it themselves
    commit_time: int | None  # likewise
    aborted: frozenset[int]
    xid: int | None = None  # of the transaction, likewise: its messages may be a subtransaction's
    until: Lsn | None = None  # only what committed before it; None: all

    @property
    def block(self) -> Block:
        return self.segment.blocks[0]


class Blocks(NamedTuple):
    """What a task has to read."""

    directory: Path
    refs: Sequence[BlockRef]
    versions: Mapping[tuple[int, int], RelationVersion]  # by relation and version
    parts: int = 0  # relations that the table is gathered of; 0: it is one itself


@dataclass(slots=True)
class Plan:
    """A batch."""

    end_lsn: Lsn
    commit_time: int | None = None  # of the newest transaction in it
    blocks: dict[int, list[BlockRef]] = field(default_factory=dict)  # by relation
    definitions: dict[tuple[int, int], RelationVersion] = field(default_factory=dict)


class Planner:
    """Follows the manifest, and plans batches from what it has read. It remembers what is still to be applied."""

    def __init__(self, directory: Path, *, wait_for_more: bool = True, clock: Callable[[], float] = time.time) -> None:
        """`wait_for_more`: while behind the source, make larger batches."""
        self._directory = directory
        self._wait_for_more = wait_for_more
        self._now = clock
        self._open()

    def close(self) -> None:
        """End reading."""
        self._manifest.close()

    @property
    def start_lsn(self) -> Lsn:
        """Where the log begins."""
        return self._manifest.header.start_lsn

    @property
    def end_lsn(self) -> Lsn:
        """Where it ends now."""
        self._read()
        return self._end

    @property
    def system_identifier(self) -> str:
        """Of the cluster that the log is of."""
        return self._manifest.header.system_identifier

    def end_of_batch(self, start: Lsn, max_bytes: int, cut: Callable[[Lsn, Lsn], Lsn | None] | None = None) -> Lsn:
        """How far a batch from `start` should go now: to the log's end, but over no more than about so many bytes.

        `start` itself, if there is nothing yet, or it is better to wait for more. `cut` is asked, once the log is read,
        where between `start` and its end the batch has to end; None: wherever it likes.
        """
        self._read()
        cut_at = cut(start, self._end) if cut is not None else None
        end, size = start, 0
        newest = None
        for record in self._records:
            if record.end_lsn <= start:
                continue
            if cut_at is not None and record.end_lsn >= cut_at:
                return cut_at
            end = max(end, record.end_lsn)
            if isinstance(record, Transactions | Transaction):
                newest = record.commit_time
                size += sum(segment.length for segment in record.segments)
                if size >= max_bytes:
                    self._waited_since = self._now()
                    return end
        return start if self._is_better_later(newest) else end

    def plan(self, positions: Mapping[int, Lsn], end: Lsn, owners: Mapping[int, int] | None = None) -> Plan:
        """References to everything that is still to be applied, up to the end of a batch, by relation.

        `positions` has the position of each relation that takes part; `owners` of which table it is a part, if it is.
        """
        owner = owners or {}
        oldest = min(positions.values(), default=end)
        return self._plan(oldest, end, positions.get, lambda relation: owner.get(relation, relation))

    def plan_all(self, start: Lsn, end: Lsn) -> Plan:
        """The same for every relation, from one position on. All together, under 0, in the order of the log."""
        return self._plan(start, end, lambda relation: start if relation else None, lambda _: 0)

    def _plan(self, oldest: Lsn, end: Lsn, position_of: PositionOf, owner: Callable[[int], int]) -> Plan:
        self._read()
        if oldest < self._known_from:  # a copy that took its time
            self.close()
            self._open()
            self._read()
            if oldest < self.start_lsn:
                raise self._removed(oldest)
        made = Plan(end, definitions=self._definitions)
        for record in self._records:
            if isinstance(record, Transactions | Transaction):
                until = end if record.end_lsn > end else None  # the batch was cut in the middle of this one
                last = record.commit_time if until is None else self._commit_time(record, until)
                made.commit_time = made.commit_time if last is None else last
                for ref, relation in references(record, position_of, until):
                    made.blocks.setdefault(owner(relation), []).append(ref)
            if record.end_lsn >= end:
                break
        self._forget(min(oldest, end))
        return made

    def _commit_time(self, record: Transactions | Transaction, before: Lsn) -> int | None:
        """Of the last transaction of a record that committed before an LSN. All of them have their Begin in there."""
        if isinstance(record, Transaction):
            return record.commit_time if record.commit_lsn < before else None
        for block in [block for block in record.segment.blocks if block.relation == 0]:
            file = Segment(record.segment.file, record.segment.length, record.segment.streamed, (block,))
            rows = read_block(self._directory, file, 0)
            times = rows.column("commit_time").filter(
                pc.less(rows.column("commit_lsn"), pa.scalar(before, pa.uint64()))
            )
            if (newest := pc.max(times.cast(pa.int64())).as_py()) is not None:
                return int(newest)
        return None

    def _open(self) -> None:
        self._manifest = Manifest(self._directory)
        self._known_from = self._manifest.header.start_lsn
        self._records: list[Record] = []  # those after `_known_from`
        self._definitions: dict[tuple[int, int], RelationVersion] = {}
        self._end = self._known_from
        self._grew = self._waited_since = self._now()

    def _read(self) -> None:
        """Take in what is new in the manifest."""
        replaced = self._manifest.replaced()  # asked first: the old file does not grow any more, so read it out
        for entry in self._manifest.entries():
            if isinstance(entry, RelationVersion):
                self._definitions[entry.oid, entry.version] = entry
            elif entry.end_lsn > self._end:
                self._end = entry.end_lsn
                self._records.append(entry)
                if isinstance(entry, Transactions | Transaction):
                    self._grew = self._now()
        if replaced:
            self._go_on()

    def _go_on(self) -> None:
        """With the manifest that has taken the place of the one that was read to its end."""
        self._manifest.close()
        self._manifest = Manifest(self._directory)
        if self.start_lsn > self._end:
            raise self._removed(self._end)
        self._read()

    def _removed(self, position: Lsn) -> ChangesRemoved:
        return ChangesRemoved(
            f"reading the change log in {self._directory} from {position}",
            f"the log begins at {self.start_lsn}; earlier changes have been removed",
            "run `walmere drop`, then start the subscription again; "
            "subscription.keep_seconds sets how long the log is kept",
        )

    def _forget(self, before: Lsn) -> None:
        self._records = [record for record in self._records if record.end_lsn > before]
        self._known_from = max(self._known_from, before)

    def _is_better_later(self, commit_time: int | None) -> bool:
        if not self._wait_for_more:
            return False
        now = self._now()
        behind = commit_time is not None and now - commit_time / 1e6 > BEHIND
        if behind and now - self._grew < QUIET and now - self._waited_since < LONGEST_WAIT:
            return True
        self._waited_since = now
        return False


@overload
def should_apply(position: Lsn | None, commit_lsn: Lsn) -> bool: ...
@overload
def should_apply(position: Lsn, commit_lsn: NDArray[np.uint64]) -> NDArray[np.bool_]: ...
def should_apply(position: Lsn | None, commit_lsn: Any) -> Any:
    """Whether a transaction still has to be applied to a table: PostgreSQL's should_apply_changes_for_rel.

    `commit_lsn` is where its commit record begins; of one transaction, or of many at once. The table's position is
    where another record ended, so the first transaction that is not in the table may begin exactly there: hence <=,
    not <.
    """
    return position is not None and position <= commit_lsn


def references(
    record: Transactions | Transaction, position_of: PositionOf, until: Lsn | None
) -> Iterator[tuple[BlockRef, int]]:
    """The blocks of a record that hold something after the position of their relation, and which relation that is."""
    single = isinstance(record, Transaction)
    if single and until is not None and record.commit_lsn >= until:
        return
    for segment in record.segments:
        for block in segment.blocks:
            position = position_of(block.relation)
            if position is not None and should_apply(position, record.commit_lsn):
                yield (
                    BlockRef(
                        Segment(segment.file, segment.length, segment.streamed, (block,)),
                        block.version,
                        position,
                        record.commit_lsn if single else None,
                        record.commit_time if single else None,
                        record.aborted if isinstance(record, Transaction) else frozenset(),
                        record.xid if isinstance(record, Transaction) else None,
                        until,
                    ),
                    block.relation,
                )


def divide(refs: list[BlockRef], parts: int, least: int) -> list[list[BlockRef]]:
    """The same references in up to so many parts of at least so many bytes; in one, if not all are inserts."""
    total = sum(ref.block.length for ref in refs)
    parts = min(parts, total // least)
    if parts < 2 or not all(ref.block.inserts for ref in refs):
        return [refs]
    divided: list[list[BlockRef]] = [[] for _ in range(parts)]
    before = 0
    for ref in refs:
        divided[before * parts // total].append(ref)
        before += ref.block.length
    return [part for part in divided if part]


def messages(
    directory: Path, refs: Sequence[BlockRef], applied: Lsn | None = None, end: Lsn | None = None
) -> Iterator[tuple[BlockRef, pa.RecordBatch]]:
    """The messages that count, block by block, in commit order; with `commit_lsn` filled in.

    `applied` is what the table itself says: after a crash it may be ahead of the position that was recorded.
    `end`: only what committed before it.
    """
    for ref in refs:
        position = max(ref.position, applied or INVALID_LSN)
        ends = [each for each in (ref.until, end) if each is not None]
        before = min(ends) if ends else None
        if ref.commit_lsn is not None and (
            not should_apply(position, ref.commit_lsn) or (before is not None and ref.commit_lsn >= before)
        ):
            continue
        batch = read_block(directory, ref.segment, 0)
        if ref.aborted:
            gone = pa.array(sorted(ref.aborted), pa.uint32())
            batch = batch.filter(pc.invert(pc.is_in(batch.column("xid"), gone)))
        if ref.commit_lsn is not None:
            lsn = pa.array(np.full(batch.num_rows, ref.commit_lsn, np.uint64))
            batch = batch.set_column(batch.schema.get_field_index("commit_lsn"), batch.schema.field("commit_lsn"), lsn)
        else:
            committed = batch.column("commit_lsn").to_numpy()
            counts = should_apply(position, committed)
            if before is not None:
                counts &= committed < before
            batch = batch if counts.all() else batch.filter(pa.array(counts))
        if batch.num_rows:
            yield ref, batch
