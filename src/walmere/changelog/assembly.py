"""Assemble transactions from the stream, and write them to the log in commit order.

The protocol sends four kinds of message groups:

    Begin … Commit              A transaction. All that have arrived go into the current segment together. One that
                                exceeds `SPOOL_BYTES` before its Commit arrives is spooled.
    Stream Start … Stream Stop  A part of a transaction in progress; parts of several may alternate. Spooled.
    Begin Prepare … Prepare     A prepared transaction. Spooled; COMMIT PREPARED may come after a restart.
    Message, not transactional  Written at once. Walmere's heartbeat only advances the position.

To *spool* is to write a transaction to its own segments. The record of its commit makes them visible; a rollback
deletes them. So the visible part of the log always ends between two transactions, and the memory that a transaction
needs does not depend on its size.

After a restart PostgreSQL may send again what the log already has. A transaction whose commit record begins before the
log's end is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from walmere.changelog.records import Prepared, RolledBack, Transaction
from walmere.changelog.segment import Chunk, SegmentWriter
from walmere.changelog.segment_entry import Segment
from walmere.changelog.writer import Writer, segment_name
from walmere.errors import ProtocolError
from walmere.lsn import Lsn
from walmere.pgoutput import messages as m
from walmere.pgoutput.decode import decode
from walmere.pgoutput.relation import RelationVersion, RelMap
from walmere.pgoutput.scan import I64, U32, U64, Scan, scan

SPOOL_BYTES: Final = 8 << 20
"""Bytes of an unfinished transaction that are kept in memory; a larger one is spooled."""

HEARTBEAT: Final = "walmere.heartbeat"
"""Prefix of the logical messages that only advance the position of an idle source."""

_BEGIN, _COMMIT, _BEGIN_PREPARE, _PREPARE, _STOP, _ORIGIN = b"BCbPEO"
_OUTSIDE: Final = b"SEcAbPKrp"  # messages that are never between Begin and Commit
_CONTEXT: Final = b"RYTO"  # rare messages that others depend on


@dataclass(slots=True)
class _Spool:
    """A transaction that is written to its own segments."""

    xid: int
    streamed: bool
    commit_lsn: Lsn | None = None  # from Begin; None for a streamed or prepared one
    commit_time: int | None = None
    duplicate: bool = False  # the log has it already: skip it
    origin: str | None = None
    aborted: set[int] = field(default_factory=set)
    segments: list[Segment] = field(default_factory=list)
    writer: SegmentWriter | None = None


class Assembly:
    """Takes frames as they arrive, and passes transactions to the Writer."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.position = writer.summary.end_lsn
        """Everything that committed before this LSN has been passed to the writer."""
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
        self._sent_late: dict[str, Prepared] = {}  # prepared before the log's end; see _prepare

    def reset(self) -> None:
        """Forget unfinished transactions, after the connection was lost: PostgreSQL sends them again."""
        for xid, spool in self._streams.items():
            self._relations.forget(xid)
            self._discard(spool)
        if self._large is not None:
            self._discard(self._large)
        for prepared in self._sent_late.values():
            self._writer.remove(prepared.segments)
        self._streams, self._stream, self._large, self._sent_late = {}, None, None, {}

    def advance(self, lsn: Lsn) -> None:
        """Advance to an LSN before which the source has sent everything."""
        if lsn > self.position:
            self.position = lsn
            self._writer.advance(lsn, self.sequence - 1)

    def feed(self, frames: list[memoryview]) -> list[memoryview]:
        """Process frames. Returns those of an unfinished transaction at the end, to be fed again with more."""
        if not frames:
            return frames
        s = scan(frames, self._lsn)
        outside = s.where(_OUTSIDE)
        breaks = np.union1d(outside, _not_transactional(s))
        at = 0
        while at < len(s):
            if (spool := self._stream or self._large) is not None:
                at = self._spool_part(s, at, spool, outside)
                continue
            following = breaks[np.searchsorted(breaks, at) :]
            stop = int(following[0]) if following.size else len(s)
            at = self._append(s, at, stop)
            if at < stop:  # a transaction whose Commit has not arrived
                if stop < len(s):
                    raise _unexpected(s, stop, "inside a transaction")
                begin = _begin(s, at)
                if int(s.end[-1]) - int(s.start[at]) < SPOOL_BYTES:
                    break
                self._large = _Spool(begin.xid, False, begin.final_lsn, begin.commit_time_us)
                self._large.duplicate = begin.final_lsn < self.position
            elif at < len(s):
                at = self._outside(s, at)
        self.sequence += at
        if at:
            self._lsn = Lsn(int(s.lsn[at - 1]))
        return frames[at:]

    # Transactions from Begin to Commit

    def _append(self, s: Scan, at: int, stop: int) -> int:
        """Append the complete transactions among these messages; returns where they end."""
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
        of = np.cumsum(kind == _BEGIN) - 1  # transaction of each message
        known = int(np.searchsorted(final_lsn, self.position))  # the log already has these
        relation, version, truncates, origins = self._relations_of(s, slice(at, stop), None)
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

    def _relations_of(
        self, s: Scan, rows: slice, stream: int | None
    ) -> tuple[U32, U32, list[tuple[int, int, int]], list[tuple[int, str]]]:
        """The relation and its version of each message, and all truncates and origins."""
        relation = np.zeros(rows.stop - rows.start, np.uint32)
        version = np.zeros(rows.stop - rows.start, np.uint32)
        is_row = np.flatnonzero(s.is_row()[rows])
        relation[is_row] = s.u32(1 if stream is None else 5, is_row + rows.start)
        truncates: list[tuple[int, int, int]] = []
        origins: list[tuple[int, str]] = []
        done = 0
        for index in s.where(_CONTEXT):
            row = int(index) - rows.start
            if not 0 <= row < len(relation):
                continue
            match message := decode(s.message(int(index)), streamed=stream is not None):
                case m.Relation():
                    self._fill_versions(relation[done:row], version[done:row], stream)
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
        self._fill_versions(relation[done:], version[done:], stream)
        return relation, version, truncates, origins

    def _fill_versions(self, relation: U32, version: U32, stream: int | None) -> None:
        """Fill in the current version of each relation."""
        for oid in np.unique(relation):
            if oid:
                version[relation == oid] = self._relations.current(int(oid), stream).version

    def _define(self, definition: RelationVersion) -> None:
        if (definition.oid, definition.version) not in self._defined:
            self._defined.add((definition.oid, definition.version))
            self._writer.define(definition)

    # Spooled transactions

    def _spool_part(self, s: Scan, at: int, spool: _Spool, outside: I64) -> int:
        """Spool the messages of this transaction; returns where they end."""
        ends = outside if spool.streamed else np.union1d(outside, s.where(b"C"))
        ends = ends[np.searchsorted(ends, at + (int(s.kind[at]) == _BEGIN_PREPARE)) :]
        stop = int(ends[0]) if ends.size else len(s)
        ended = stop < len(s)
        if ended and s.kind[stop] not in ((_STOP,) if spool.streamed else (_COMMIT, _PREPARE)):
            raise _unexpected(s, stop, "inside a transaction")
        # Commit and Prepare are stored with the transaction; Stream Stop is not
        self._spool_rows(s, slice(at, stop + (ended and not spool.streamed)), spool)
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

    def _spool_rows(self, s: Scan, rows: slice, spool: _Spool) -> None:
        count = rows.stop - rows.start
        if not count:
            return
        stream = spool.xid if spool.streamed else None
        relation, version, truncates, origins = self._relations_of(s, rows, stream)
        if origins:
            spool.origin = origins[0][1]
        if spool.duplicate:
            return
        xid = np.full(count, spool.xid, np.uint32)
        if spool.streamed:
            own = np.flatnonzero(s.kind[rows] != _ORIGIN)  # all other messages carry the xid of their subtransaction
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
            spool.writer = SegmentWriter(
                self._writer.directory, segment_name(chunk.first_sequence), streamed=spool.streamed
            )
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
            # Either the log already has its COMMIT PREPARED too; or two_phase was off when it was prepared, and the
            # server sends it only now, right before Commit Prepared. The LSN of Commit Prepared decides.
            self._sent_late[prepare.gid] = prepared
            return
        self.position = prepare.end_lsn
        self._writer.append_record(prepared)

    def _is_waiting(self, prepare: m.BeginPrepare | m.Prepare | m.StreamPrepare) -> bool:
        """Whether this is sent again, and the log has it as prepared."""
        return prepare.prepare_lsn < self.position and prepare.gid in self._writer.summary.prepared

    def _discard(self, spool: _Spool) -> None:
        if spool.writer is not None:
            spool.writer.discard()
        self._writer.remove(spool.segments)

    # Messages outside of Begin … Commit

    def _outside(self, s: Scan, at: int) -> int:
        """Process one message that is not part of Begin … Commit; returns where to go on."""
        sequence = self.sequence + at
        match message := decode(s.message(at)):
            case m.StreamStart():
                self._start_stream(s, at, message)
            case m.StreamCommit():
                spool = self._end_stream(s, at, message.xid)
                self._define_all(message.xid, message.commit_lsn)
                self._commit(spool, message, sequence)
            case m.StreamPrepare():
                spool = self._end_stream(s, at, message.xid)
                self._define_all(message.xid, message.prepare_lsn)
                self._prepare(spool, message, sequence)
            case m.StreamAbort():
                self._abort_stream(message)
            case m.BeginPrepare():
                self._large = _Spool(message.xid, streamed=False, duplicate=self._is_waiting(message))
                return at
            case m.CommitPrepared():
                self._commit_prepared(message, sequence)
            case m.RollbackPrepared():
                self._rollback_prepared(message, sequence)
            case m.LogicalMessage():
                self._logical_message(s, at, message)
            case _:
                raise _unexpected(s, at, "between transactions")
        return at + 1

    def _start_stream(self, s: Scan, at: int, start: m.StreamStart) -> None:
        if start.first_segment:
            self._abort(start.xid)
            self._streams[start.xid] = _Spool(start.xid, streamed=True)
        elif start.xid not in self._streams:
            raise _unexpected(s, at, f"for transaction {start.xid}, whose first part was not received")
        self._stream = self._streams[start.xid]

    def _abort_stream(self, abort: m.StreamAbort) -> None:
        if abort.subxid == abort.xid:
            self._abort(abort.xid)
        elif abort.xid in self._streams:
            self._streams[abort.xid].aborted.add(abort.subxid)
            self._relations.forget(abort.xid, abort.subxid)

    def _end_stream(self, s: Scan, at: int, xid: int) -> _Spool:
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
        late = self._sent_late.pop(commit.gid, None)
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
        if (late := self._sent_late.pop(rollback.gid, None)) is not None:
            self._writer.remove(late.segments)
        # the server sends the rollback even if the transaction was prepared before two_phase was on, and never sent
        prepared = self._writer.summary.prepared.get(rollback.gid)
        if prepared is not None and rollback.rollback_end_lsn > self.position:
            self.position = rollback.rollback_end_lsn
            self._writer.append_record(RolledBack(rollback.gid, self.position, sequence))
            self._writer.remove(prepared.segments)

    def _logical_message(self, s: Scan, at: int, message: m.LogicalMessage) -> None:
        if message.lsn <= self.position:  # the LSN of a message is the end of its record, that of a commit the begin
            return
        self.position = message.lsn
        if message.prefix == HEARTBEAT:
            self._writer.advance(self.position, self.sequence + at - 1)
            return
        one = slice(at, at + 1)
        sent = s.i64(-8, one) + m.POSTGRES_EPOCH_US  # it has no commit time, so use the time it was sent
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


def _not_transactional(s: Scan) -> I64:
    """The logical messages that are not transactional. Wrong inside a stream, where the flag is another byte."""
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
