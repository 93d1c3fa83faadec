"""From the stream to whole transactions: what belongs together goes into the log together, in commit order.

The protocol sends four kinds of things, and each has its way into the log:

    Begin … Commit              A whole transaction. As many as have arrived go into the current segment together.
                                One that is larger than `LARGE` while its Commit is still to come is spooled.
    Stream Start … Stream Stop  A part of a transaction in progress, perhaps one of several that alternate. Spooled.
    Begin Prepare … Prepare     A prepared transaction. Spooled; COMMIT PREPARED may come after a restart.
    Message, not transactional  Stands alone, and counts at once. Our own heartbeat only moves the position.

To *spool* is to write into segments of the transaction's own. They become visible by reference, when the record of
its commit is published, and are deleted when it rolls back. So the log's visible part always ends between two
transactions, and the memory that a transaction needs does not depend on its size.

After a restart PostgreSQL may send again what the log has. A transaction whose commit record begins before the log's
end is one of those, and is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from walmere.changelog.manifest import Prepared, RolledBack, Transaction
from walmere.changelog.segment import Chunk, Segment, SegmentWriter
from walmere.changelog.writer import Writer, name
from walmere.errors import ProtocolError
from walmere.lsn import Lsn
from walmere.pgoutput import messages as m
from walmere.pgoutput.decode import decode
from walmere.pgoutput.relation import RelationVersion, RelMap
from walmere.pgoutput.scan import I64, U32, U64, Scan, scan

LARGE: Final = 8 << 20
"""Bytes of an unfinished transaction that are kept in memory."""

HEARTBEAT: Final = "walmere.heartbeat"
"""Prefix of the logical messages that only say that the source is alive."""

_BEGIN, _COMMIT, _BEGIN_PREPARE, _PREPARE, _STOP, _ORIGIN = b"BCbPEO"
_BRACKETS: Final = b"SEcAbPKrp"  # what is never inside an ordinary transaction
_DEFINES: Final = b"RYTO"  # rare messages that say something about others


@dataclass(slots=True)
class _Spool:
    """A transaction that is written to segments of its own."""

    xid: int
    streamed: bool
    commit_lsn: Lsn | None = None  # known from Begin; of a streamed or prepared one, not yet
    commit_time: int | None = None
    duplicate: bool = False  # the log has it: read over it
    origin: str | None = None
    aborted: set[int] = field(default_factory=set)
    segments: list[Segment] = field(default_factory=list)
    writer: SegmentWriter | None = None


class Assembly:
    """Takes frames as they arrive and brings whole transactions to the Writer."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.position = writer.summary.end_lsn
        """Everything committed before this has been brought to the writer."""
        self.sequence = writer.summary.last_sequence + 1
        self._lsn = self.position
        self._relations = RelMap()
        self._defined: set[tuple[int, int]] = set()
        for definition in writer.summary.relations:
            self._relations.add(definition)
            self._defined.add((definition.oid, definition.version))
        self._streams: dict[int, _Spool] = {}
        self._stream: _Spool | None = None  # between Stream Start and Stream Stop
        self._large: _Spool | None = None  # between Begin and Commit, or Begin Prepare and Prepare
        self._late: dict[str, Prepared] = {}  # prepared before the log's end, but the log does not have them

    def reset(self) -> None:
        """The connection was cut: what was not finished will be sent again from its beginning."""
        for xid, spool in self._streams.items():
            self._relations.forget(xid)
            self._discard(spool)
        if self._large is not None:
            self._discard(self._large)
        for prepared in self._late.values():
            self._writer.remove(prepared.segments)
        self._streams, self._stream, self._large, self._late = {}, None, None, {}

    def advance(self, lsn: Lsn) -> None:
        """The source says that it has sent everything before this LSN."""
        if lsn > self.position:
            self.position = lsn
            self._writer.advance(lsn, self.sequence - 1)

    def feed(self, frames: list[memoryview]) -> list[memoryview]:
        """Take what can be taken; returns the frames of the unfinished transaction at the end."""
        if not frames:
            return frames
        s = scan(frames, self._lsn)
        brackets = s.where(_BRACKETS)
        breaks = np.union1d(brackets, _alone(s))
        at = 0
        while at < len(s):
            if (spool := self._stream or self._large) is not None:
                at = self._part(s, at, spool, brackets)
                continue
            following = breaks[np.searchsorted(breaks, at) :]
            stop = int(following[0]) if following.size else len(s)
            at = self._whole(s, at, stop)
            if at < stop:  # a transaction without its end
                if stop < len(s):
                    raise _unexpected(s, stop, "inside a transaction")
                begin = _begin(s, at)
                if int(s.end[-1]) - int(s.start[at]) < LARGE:
                    break
                self._large = _Spool(begin.xid, False, begin.final_lsn, begin.commit_time_us)
                self._large.duplicate = begin.final_lsn < self.position
            elif at < len(s):
                at = self._between(s, at)
        self.sequence += at
        if at:
            self._lsn = Lsn(int(s.lsn[at - 1]))
        return frames[at:]

    # Whole transactions

    def _whole(self, s: Scan, at: int, stop: int) -> int:
        """Bring the whole transactions among these messages to the writer; returns where they end."""
        kind = s.kind[at:stop]
        commits = np.flatnonzero(kind == _COMMIT)
        if not commits.size:
            return at
        stop = at + int(commits[-1]) + 1
        kind = kind[: stop - at]
        begins = np.flatnonzero(kind == _BEGIN)
        if len(begins) != len(commits) or begins[0] or (begins[1:] != commits[:-1] + 1).any():
            raise _unexpected(s, at, "where Begin and Commit should alternate")
        final_lsn, commit_time, xid = s.u64(1, begins + at), s.i64(9, begins + at), s.u32(17, begins + at)
        if (s.u64(2, commits + at) != final_lsn).any():
            raise _unexpected(s, at, "with another commit LSN than its Commit")
        of = np.cumsum(kind == _BEGIN) - 1  # each message's transaction
        known = int(np.searchsorted(final_lsn, self.position))  # the log has these
        relation, version, truncates, origins = self._describe(s, slice(at, stop), None)
        if known == len(begins):
            return stop
        first = int(begins[known])
        names: npt.NDArray[np.object_] | None = None
        if origins:
            of_transaction = np.full(len(begins), None, object)
            for row, origin in origins:
                of_transaction[of[row]] = origin
            names = of_transaction[of][first:]
        self.position = Lsn(int(s.u64(10, commits[-1:] + at)[0]))
        chunk = Chunk(
            s,
            slice(at + first, stop),
            self.sequence + at + first,
            relation[first:],
            version[first:],
            xid[of][first:],
            final_lsn[of][first:],
            commit_time[of][first:] + m.POSTGRES_EPOCH_US,
            names,
            tuple((row - first, oid, number) for row, oid, number in truncates if row >= first),
        )
        self._writer.append(
            chunk,
            count=len(begins) - known,
            commit_lsn=Lsn(int(final_lsn[-1])),
            end_lsn=self.position,
            commit_time=int(commit_time[-1]) + m.POSTGRES_EPOCH_US,
        )
        return stop

    def _describe(
        self, s: Scan, rows: slice, stream: int | None
    ) -> tuple[U32, U32, list[tuple[int, int, int]], list[tuple[int, str]]]:
        """Each message's relation and its version, with the truncates and origins on the way."""
        relation = np.zeros(rows.stop - rows.start, np.uint32)
        version = np.zeros(rows.stop - rows.start, np.uint32)
        is_row = np.flatnonzero(s.is_row()[rows])
        relation[is_row] = s.u32(1 if stream is None else 5, is_row + rows.start)
        truncates: list[tuple[int, int, int]] = []
        origins: list[tuple[int, str]] = []
        done = 0
        for index in s.where(_DEFINES):
            row = int(index) - rows.start
            if not 0 <= row < len(relation):
                continue
            match message := decode(s.message(int(index)), streamed=stream is not None):
                case m.Relation():
                    self._versions(relation[done:row], version[done:row], stream)
                    done = row
                    raw = s.message(int(index))
                    raw = raw if stream is None else raw[:1] + raw[5:]
                    definition = self._relations.update(message, raw, Lsn(int(s.lsn[index])), stream)
                    if stream is None:
                        self._define(definition)
                case m.Type():
                    self._relations.update_type(message)
                case m.Truncate():
                    for oid in message.relations:
                        truncates.append((row, oid, self._relations.current(oid, stream).version))
                case m.Origin():
                    origins.append((row, message.name))
        self._versions(relation[done:], version[done:], stream)
        return relation, version, truncates, origins

    def _versions(self, relation: U32, version: U32, stream: int | None) -> None:
        """Fill in the version of each relation that stands there, as of now."""
        for oid in np.unique(relation):
            if oid:
                version[relation == oid] = self._relations.current(int(oid), stream).version

    def _define(self, definition: RelationVersion) -> None:
        if (definition.oid, definition.version) not in self._defined:
            self._defined.add((definition.oid, definition.version))
            self._writer.define(definition)

    # Transactions in segments of their own

    def _part(self, s: Scan, at: int, spool: _Spool, brackets: I64) -> int:
        """Take what belongs to this transaction; returns where that ends."""
        ends = brackets if spool.streamed else np.union1d(brackets, s.where(b"C"))
        ends = ends[np.searchsorted(ends, at + (int(s.kind[at]) == _BEGIN_PREPARE)) :]
        stop = int(ends[0]) if ends.size else len(s)
        ended = stop < len(s)
        if ended and s.kind[stop] not in ((_STOP,) if spool.streamed else (_COMMIT, _PREPARE)):
            raise _unexpected(s, stop, "inside a transaction")
        # Commit and Prepare are kept with the transaction; Stream Stop is only a frame
        self._take(s, slice(at, stop + (ended and not spool.streamed)), spool)
        if not ended:
            return stop
        if spool.streamed:
            self._stream = None
            return stop + 1
        self._large = None
        match end := decode(s.message(stop)):
            case m.Commit():
                self._commit(spool, end, self.sequence + stop)
            case m.Prepare():
                self._prepare(spool, end, self.sequence + stop)
        return stop + 1

    def _take(self, s: Scan, rows: slice, spool: _Spool) -> None:
        count = rows.stop - rows.start
        if not count:
            return
        stream = spool.xid if spool.streamed else None
        relation, version, truncates, origins = self._describe(s, rows, stream)
        if origins:
            spool.origin = origins[0][1]
        if spool.duplicate:
            return
        xid = np.full(count, spool.xid, np.uint32)
        if spool.streamed:
            own = np.flatnonzero(s.kind[rows] != _ORIGIN)  # every other message says its subtransaction
            xid[own] = s.u32(1, own + rows.start)
        lsn, time, origin = spool.commit_lsn, spool.commit_time, spool.origin
        chunk = Chunk(
            s,
            rows,
            self.sequence + rows.start,
            relation,
            version,
            xid,
            None if lsn is None else np.full(count, lsn, np.uint64),
            None if time is None else np.full(count, time, np.int64),
            None if origin is None else np.full(count, origin, object),
            tuple(truncates),
        )
        if spool.writer is None:
            spool.writer = SegmentWriter(self._writer.directory, name(chunk.first_sequence), streamed=spool.streamed)
        spool.writer.append(chunk)
        if spool.writer.length >= self._writer.segment_bytes:
            self._seal(spool)

    def _seal(self, spool: _Spool) -> None:
        if spool.writer is not None:
            spool.segments.append(self._writer.spool(spool.writer))
            spool.writer = None

    def _commit(self, spool: _Spool, commit: m.Commit | m.StreamCommit, sequence: int) -> None:
        if commit.commit_lsn < self.position:
            self._discard(spool)
            return
        self._seal(spool)
        self.position = commit.end_lsn
        self._writer.append_record(
            Transaction(
                spool.xid,
                commit.commit_lsn,
                commit.end_lsn,
                commit.commit_time_us,
                sequence,
                tuple(spool.segments),
                frozenset(spool.aborted),
                spool.origin,
            )
        )

    def _prepare(self, spool: _Spool, prepare: m.Prepare | m.StreamPrepare, sequence: int) -> None:
        if self._is_waiting(prepare):
            self._discard(spool)
            return
        self._seal(spool)
        prepared = Prepared(
            prepare.gid,
            spool.xid,
            prepare.end_lsn,
            sequence,
            tuple(spool.segments),
            frozenset(spool.aborted),
            spool.origin,
        )
        if prepare.prepare_lsn < self.position:
            # Either the log has it and its end too, or two_phase was off when it was prepared: then the server sends
            # it only now, right before its Commit Prepared, and this is the only time. Which one, its end will tell.
            self._late[prepare.gid] = prepared
            return
        self.position = prepare.end_lsn
        self._writer.append_record(prepared)

    def _is_waiting(self, prepare: m.BeginPrepare | m.Prepare | m.StreamPrepare) -> bool:
        """Whether this is sent again, and the log has it among those that wait for their end."""
        return prepare.prepare_lsn < self.position and prepare.gid in self._writer.summary.prepared

    def _discard(self, spool: _Spool) -> None:
        if spool.writer is not None:
            spool.writer.discard()
        self._writer.remove(spool.segments)

    # What stands between transactions

    def _between(self, s: Scan, at: int) -> int:
        """Take one message that is not part of an ordinary transaction; returns where to go on."""
        sequence = self.sequence + at
        match message := decode(s.message(at)):
            case m.StreamStart():
                if message.first_segment:
                    self._abort(message.xid)
                    self._streams[message.xid] = _Spool(message.xid, streamed=True)
                elif message.xid not in self._streams:
                    raise _unexpected(s, at, f"for transaction {message.xid}, whose first part was not received")
                self._stream = self._streams[message.xid]
            case m.StreamCommit():
                spool = self._streamed(s, at, message.xid)
                self._define_all(message.xid, message.commit_lsn)
                self._commit(spool, message, sequence)
            case m.StreamPrepare():
                spool = self._streamed(s, at, message.xid)
                self._define_all(message.xid, message.prepare_lsn)
                self._prepare(spool, message, sequence)
            case m.StreamAbort():
                if message.subxid == message.xid:
                    self._abort(message.xid)
                elif message.xid in self._streams:
                    self._streams[message.xid].aborted.add(message.subxid)
                    self._relations.forget(message.xid, message.subxid)
            case m.BeginPrepare():
                self._large = _Spool(message.xid, streamed=False, duplicate=self._is_waiting(message))
                return at
            case m.CommitPrepared():
                self._commit_prepared(message, sequence)
            case m.RollbackPrepared():
                self._rollback_prepared(message, sequence)
            case m.LogicalMessage():
                self._message(s, at, message)
            case _:
                raise _unexpected(s, at, "between transactions")
        return at + 1

    def _streamed(self, s: Scan, at: int, xid: int) -> _Spool:
        if xid not in self._streams:
            raise _unexpected(s, at, f"for transaction {xid}, which was never streamed")
        return self._streams.pop(xid)

    def _abort(self, xid: int) -> None:
        if (spool := self._streams.pop(xid, None)) is not None:
            self._relations.forget(xid)
            self._discard(spool)

    def _define_all(self, xid: int, lsn: Lsn) -> None:
        for definition in self._relations.commit(xid, lsn):
            self._define(definition)

    def _commit_prepared(self, commit: m.CommitPrepared, sequence: int) -> None:
        late = self._late.pop(commit.gid, None)
        if commit.commit_lsn < self.position:
            if late is not None:
                self._writer.remove(late.segments)
            return
        prepared = late or self._writer.summary.prepared.get(commit.gid)
        if prepared is None:
            raise ProtocolError(
                "receiving Commit Prepared",
                f"the change log has no prepared transaction {commit.gid!r}",
                "slot and change log do not belong together: run `walmere drop`, then start the subscription again",
            )
        self.position = commit.end_lsn
        self._writer.append_record(
            Transaction(
                commit.xid,
                commit.commit_lsn,
                commit.end_lsn,
                commit.commit_time_us,
                sequence,
                prepared.segments,
                prepared.aborted,
                prepared.origin,
                commit.gid,
            )
        )

    def _rollback_prepared(self, rollback: m.RollbackPrepared, sequence: int) -> None:
        if (late := self._late.pop(rollback.gid, None)) is not None:
            self._writer.remove(late.segments)
        # A prepare before the slot was made two-phase was never sent, but its rollback is
        prepared = self._writer.summary.prepared.get(rollback.gid)
        if prepared is not None and rollback.rollback_end_lsn > self.position:
            self.position = rollback.rollback_end_lsn
            self._writer.append_record(RolledBack(rollback.gid, self.position, sequence))
            self._writer.remove(prepared.segments)

    def _message(self, s: Scan, at: int, message: m.LogicalMessage) -> None:
        if message.lsn <= self.position:  # a message's LSN is where its record ends, unlike a commit's
            return
        self.position = message.lsn
        if message.prefix == HEARTBEAT:
            self._writer.advance(self.position, self.sequence + at - 1)
            return
        one = slice(at, at + 1)
        sent = s.i64(-8, one) + m.POSTGRES_EPOCH_US  # it has no commit time: the time it was sent stands for it
        nothing = np.zeros(1, np.uint32)
        # inside its record, as a commit's LSN is: a table whose position is the end of the record has the message
        commit_lsn = Lsn(message.lsn - 1)
        lsn: U64 = np.array([commit_lsn], np.uint64)
        self._writer.append(
            Chunk(s, one, self.sequence + at, nothing, nothing, nothing, lsn, sent, None),
            count=0,
            commit_lsn=commit_lsn,
            end_lsn=self.position,
            commit_time=int(sent[0]),
        )


def _alone(s: Scan) -> I64:
    """The logical messages that are not transactional. Inside a stream, where it is another byte, nobody asks."""
    candidates = s.where(b"M")
    transactional = s.buffer[s.start[candidates] + 1] & 1 == 1
    alone: I64 = candidates[~transactional]
    return alone


def _begin(s: Scan, at: int) -> m.Begin:
    message = decode(s.message(at))
    if not isinstance(message, m.Begin):
        raise _unexpected(s, at, "where a transaction should begin")
    return message


def _unexpected(s: Scan, at: int, where: str) -> ProtocolError:
    return ProtocolError(
        "assembling transactions from the stream",
        f"a message of kind {chr(int(s.kind[at]))!r} came {where}",
        "this is a bug in Walmere or in the server's output plugin: please report it",
        offset=int(s.start[at]),
    )
