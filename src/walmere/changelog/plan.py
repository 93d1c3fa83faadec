"""Plan a batch: for each table, references to the blocks of the log that are not yet applied to it.

A batch ends between two transactions: at the end of a record of the manifest, or at the LSN of a cut, which may be
inside a record. Each table has its own position, because its copy may be older or newer than the others, and takes part
with the records after it. References are small and pickle well. Tasks open the log themselves, so rows do not pass
through the driver.

The size of a batch: when the log is up to date, a batch takes all there is, so that tables are fresh. While the log is
behind the source, the work per change matters more. A batch that replaces rows rewrites their files, and ten times as
many changes often rewrite the same files. So the batch waits until the log has enough bytes, has stopped growing, or
some seconds have passed.

A target that prepares transactions itself needs a batch to end with each PREPARE TRANSACTION, COMMIT PREPARED and
ROLLBACK PREPARED (`two_phase`): what comes with it is planned apart from the batch's other changes.

A large batch of one table that has only inserts is divided, so that several tasks decode and write it. With updates or
deletes, the fold needs all changes of a key in order: then `walmere.apply.parts` divides by key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from walmere.changelog.manifest import Manifest
from walmere.changelog.read_ahead import read_blocks
from walmere.changelog.records import Prepared, Record, RolledBack, Transaction, Transactions
from walmere.changelog.segment import read_block
from walmere.changelog.segment_entry import Block, Segment
from walmere.changelog.store.log_store import LogStore
from walmere.errors import ChangesRemoved
from walmere.lsn import INVALID_LSN, Lsn
from walmere.pgoutput.relation import RelationVersion

BEHIND_SECONDS: Final = 3.0
"""Batches are made larger if a commit arrives in the log later than this."""
MAX_WAIT_SECONDS: Final = 4.0
"""A batch waits for more changes at most this long."""
QUIET_SECONDS: Final = 0.3
"""A log that has not grown for this long has caught up with the source."""


PositionOf: TypeAlias = Callable[[int], Lsn | None]
"""The position of a relation; None: it does not take part."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of a segment, and which of its messages to apply."""

    segment: Segment  # with only this block
    version: int  # of the relation's definition
    position: Lsn  # of the table: see `should_apply`
    commit_lsn: Lsn | None  # of all its messages, if they do not have it themselves
    commit_time: int | None  # likewise
    aborted: frozenset[int]
    xid: int | None = None  # of the transaction, likewise: its messages may have that of a subtransaction
    until: Lsn | None = None  # only what committed before this LSN; None: all

    @property
    def block(self) -> Block:
        return self.segment.blocks[0]


class Blocks(NamedTuple):
    """The blocks that a task reads."""

    directory: Path
    refs: Sequence[BlockRef]
    versions: Mapping[tuple[int, int], RelationVersion]  # by relation and version
    parts: int = 0  # number of relations that the table is gathered from; 0: it is one itself
    store: LogStore | None = None  # has the blocks too, if the directory is a cache, or not on this machine


@dataclass(frozen=True, slots=True)
class TwoPhase:
    """What a batch ends with: a transaction that was prepared, or what became of one."""

    kind: Literal["prepare", "commit", "rollback"]
    gid: str  # of the source
    lsn: Lsn  # everything else of the batch committed before it, and this did not


@dataclass(slots=True)
class Plan:
    """A batch."""

    end_lsn: Lsn
    commit_time: int | None = None  # of the newest transaction in it
    blocks: dict[int, list[BlockRef]] = field(default_factory=dict)  # by relation
    definitions: dict[tuple[int, int], RelationVersion] = field(default_factory=dict)
    two_phase: TwoPhase | None = None
    two_phase_blocks: dict[int, list[BlockRef]] = field(default_factory=dict)  # by relation


class Planner:
    """Follows the manifest, and plans batches. It remembers the records that are not yet applied."""

    def __init__(
        self,
        directory: Path,
        *,
        wait_for_more: bool = True,
        two_phase: bool = False,
        until: Lsn | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`wait_for_more`: while behind the source, make larger batches. `two_phase`: see `TwoPhase`.

        `until`: the run ends at this LSN, so a batch does not wait for what comes after it.
        """
        self._two_phase = two_phase
        self._until = until
        self._directory = directory
        self._wait_for_more = wait_for_more
        self._now = clock
        self._open()

    def close(self) -> None:
        """Close the manifest."""
        self._manifest.close()

    @property
    def start_lsn(self) -> Lsn:
        """Where the log begins."""
        return self._manifest.header.start_lsn

    @property
    def end_lsn(self) -> Lsn:
        """Where the log ends now."""
        self._read()
        return self._end

    @property
    def system_identifier(self) -> str:
        """The system identifier of the source."""
        return self._manifest.header.system_identifier

    def end_of_batch(
        self,
        start: Lsn,
        max_bytes: int,
        cut: Callable[[Lsn, Lsn], Lsn | None] | None = None,
    ) -> Lsn:
        """Where a batch from `start` should end now: at the log's end, or after about `max_bytes`.

        Returns `start` if there is nothing to apply, or the batch should wait for more. `cut` is called with `start`
        and the log's end, and returns where between them the batch must end, or None.
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
            if self._two_phase and _two_phase(record) is not None:
                self._waited_since = self._now()
                return end
            if isinstance(record, Transactions | Transaction):
                newest = record.commit_time
                size += sum(segment.length for segment in record.segments)
                if size >= max_bytes:
                    break
        if size >= max_bytes:
            self._waited_since = self._now()
            return end
        return start if self._should_wait(newest) else end

    def plan(self, positions: Mapping[int, Lsn], end: Lsn, owners: Mapping[int, int] | None = None) -> Plan:
        """References to everything that is not yet applied, up to the end of the batch, by table.

        `positions` has the position of each relation that takes part; `owners` the table of a relation that is part of
        a gathered table.
        """
        owner = owners or {}
        oldest = min(positions.values(), default=end)
        return self._plan(oldest, end, positions.get, lambda relation: owner.get(relation, relation))

    def plan_all(self, start: Lsn, end: Lsn) -> Plan:
        """The same for all relations, from one position on: together under 0, in the order of the log."""
        return self._plan(start, end, lambda relation: start if relation else None, lambda _: 0)

    def _plan(self, oldest: Lsn, end: Lsn, position_of: PositionOf, owner: Callable[[int], int]) -> Plan:
        self._read()
        if oldest < self._known_from:  # the copy of a table took long
            self.close()
            self._open()
            self._read()
            if oldest < self.start_lsn:
                raise self._removed(oldest)
        made = Plan(end, definitions=self._definitions)
        for record in self._records:
            if self._two_phase and record.end_lsn == end:
                made.two_phase = _two_phase(record)
            if made.two_phase is not None:
                self._plan_two_phase(made, record, position_of, owner)
                break
            if isinstance(record, Transactions | Transaction):
                until = end if record.end_lsn > end else None  # a cut is inside this record
                last = record.commit_time if until is None else self._commit_time(record, until)
                made.commit_time = made.commit_time if last is None else last
                for ref, relation in references(record, position_of, until):
                    made.blocks.setdefault(owner(relation), []).append(ref)
            if record.end_lsn >= end:
                break
        self._forget(min(oldest, end))
        return made

    def _plan_two_phase(self, made: Plan, record: Record, position_of: PositionOf, owner: Callable[[int], int]) -> None:
        if isinstance(record, Prepared):  # as if it committed there
            rest = (record.last_sequence, record.segments, record.aborted, record.origin)
            record = Transaction(record.xid, record.end_lsn, record.end_lsn, 0, *rest)
        elif isinstance(record, Transaction):
            made.commit_time = record.commit_time
        if isinstance(record, Transaction):
            for ref, relation in references(record, position_of, None):
                made.two_phase_blocks.setdefault(owner(relation), []).append(ref)

    def _commit_time(self, record: Transactions | Transaction, before: Lsn) -> int | None:
        """The commit time of a record's last transaction before an LSN. Each one has a Begin in relation 0."""
        if isinstance(record, Transaction):
            return record.commit_time if record.commit_lsn < before else None
        for block in [block for block in record.segment.blocks if block.relation == 0]:
            rows = read_block(self._directory, record.segment.only(block), 0)
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
        self._grew_at = self._waited_since = self._now()

    def _read(self) -> None:
        """Read what is new in the manifest."""
        replaced = self._manifest.replaced()  # first: a replaced file does not grow, so it is read to its end
        for entry in self._manifest.entries():
            if isinstance(entry, RelationVersion):
                self._definitions[entry.oid, entry.version] = entry
            elif entry.end_lsn > self._end:
                self._end = entry.end_lsn
                self._records.append(entry)
                if isinstance(entry, Transactions | Transaction):
                    self._grew_at = self._now()
        if replaced:
            self._open_next()

    def _open_next(self) -> None:
        """Continue with the manifest that has replaced this one."""
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

    def _should_wait(self, commit_time: int | None) -> bool:
        if not self._wait_for_more or (self._until is not None and self._end >= self._until):
            return False
        now = self._now()
        behind = commit_time is not None and now - commit_time / 1e6 > BEHIND_SECONDS
        if behind and now - self._grew_at < QUIET_SECONDS and now - self._waited_since < MAX_WAIT_SECONDS:
            return True
        self._waited_since = now
        return False


def _two_phase(record: Record) -> TwoPhase | None:
    match record:
        case Prepared():
            return TwoPhase("prepare", record.gid, Lsn(record.end_lsn - 1))
        case RolledBack():
            return TwoPhase("rollback", record.gid, record.end_lsn)
        case Transaction(gid=str(gid)):
            return TwoPhase("commit", gid, record.commit_lsn)
    return None


@overload
def should_apply(position: Lsn | None, commit_lsn: Lsn) -> bool: ...
@overload
def should_apply(position: Lsn, commit_lsn: NDArray[np.uint64]) -> NDArray[np.bool_]: ...
def should_apply(position: Lsn | None, commit_lsn: Any) -> Any:
    """Whether a transaction still has to be applied to a table: PostgreSQL's should_apply_changes_for_rel.

    `commit_lsn` is where the commit record begins; an array for many transactions. A table's position is where another
    record ended, so the next transaction's commit record may begin exactly there: hence <=, not <.
    """
    return position is not None and position <= commit_lsn


def references(
    record: Transactions | Transaction, position_of: PositionOf, until: Lsn | None
) -> Iterator[tuple[BlockRef, int]]:
    """The blocks of a record with changes after the position of their relation, each with the relation."""
    single = isinstance(record, Transaction)
    if single and until is not None and record.commit_lsn >= until:
        return
    for segment in record.segments:
        for block in segment.blocks:
            position = position_of(block.relation)
            if position is not None and should_apply(position, record.commit_lsn):
                yield (
                    BlockRef(
                        segment.only(block),
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


def divide(refs: list[BlockRef], parts: int, min_bytes: int) -> list[list[BlockRef]]:
    """Divide references into up to `parts` parts of at least `min_bytes`. One part, if not all are inserts."""
    total = sum(ref.block.length for ref in refs)
    parts = min(parts, total // min_bytes)
    if parts < 2 or not all(ref.block.inserts for ref in refs):
        return [refs]
    divided: list[list[BlockRef]] = [[] for _ in range(parts)]
    before = 0
    for ref in refs:
        divided[before * parts // total].append(ref)
        before += ref.block.length
    return [part for part in divided if part]


def messages(
    directory: Path,
    refs: Sequence[BlockRef],
    applied: Lsn | None = None,
    end: Lsn | None = None,
    store: LogStore | None = None,
) -> Iterator[tuple[BlockRef, pa.RecordBatch]]:
    """The messages to apply, block by block, in commit order, with `commit_lsn` filled in.

    `applied` is the LSN in the table: after a crash it may be ahead of the recorded position. `end`: only messages that
    committed before it. `store`: see `Blocks`.
    """
    wanted: list[tuple[BlockRef, Lsn, Lsn | None]] = []
    for ref in refs:
        position = max(ref.position, applied or INVALID_LSN)
        ends = [each for each in (ref.until, end) if each is not None]
        before = min(ends) if ends else None
        if ref.commit_lsn is None or (
            should_apply(position, ref.commit_lsn) and (before is None or ref.commit_lsn < before)
        ):
            wanted.append((ref, position, before))
    blocks = read_blocks(directory, [ref.segment for ref, _, _ in wanted], store)
    for (ref, position, before), block in zip(wanted, blocks, strict=True):
        batch = block
        if ref.aborted:
            aborted = pa.array(sorted(ref.aborted), pa.uint32())
            batch = batch.filter(pc.invert(pc.is_in(batch.column("xid"), aborted)))
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
