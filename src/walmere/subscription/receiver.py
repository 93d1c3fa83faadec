"""The receiver, PostgreSQL's walreceiver: one replication connection, into the change log, confirmed when durable.

It reports three positions:

    received   the stream was read up to here
    durable    everything before here is fsynced in the change log, or in the store, so the slot may move on
    applied    every sink has it (0/0 without a sink)

When the socket is empty, the receiver pauses for some milliseconds, so that walsender fills its buffer. It passes
messages to the log when enough have arrived, or when the oldest has waited for `segment_seconds`.

After a transient error it retries, with growing pauses. After other errors it stops with a hint: another system at the
address, a lost slot, a missing publication.

With a store, positions without changes are rarely recorded, because each is a put: see `_Log.may_record_position`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.changelog import manifest_file, retention
from walmere.changelog.assembly import Assembly
from walmere.changelog.records import Header, render_header
from walmere.changelog.search import ManifestSearch
from walmere.changelog.store.cache import Cache
from walmere.changelog.store.claim import Claim, create_log
from walmere.changelog.store.importing import import_log
from walmere.changelog.store.upload import Uploader
from walmere.changelog.writer import Writer, create, header_of
from walmere.config import Config
from walmere.errors import (
    ChangeLogError,
    ChangeLogMismatch,
    SlotInUse,
    SlotMissing,
    SourceError,
    SourceUnavailable,
    WalmereError,
    WrongSystem,
)
from walmere.lsn import INVALID_LSN, Lsn
from walmere.publisher import catalog, column_lists, slot
from walmere.publisher.connect import SLOT_MISSING_HINT, connect, translate_errors
from walmere.publisher.database import database_oid
from walmere.publisher.stream import Stream, System, end_when_lost, identify_system
from walmere.storage import Lock
from walmere.subscription.heartbeat import Heartbeat
from walmere.subscription.progress import SinkPositions
from walmere.subscription.shared.state import SharedPositions
from walmere.subscription.shared.store import cache_of, probe, refresh_log, require_own

_log = logging.getLogger(__name__)

FEED_BYTES: Final = 4 << 20
"""Pass messages to the log when this many bytes have arrived."""
READ_PAUSE: Final = 0.05
"""Seconds without reading when the socket is empty and more is likely to come."""
UPLOAD_PAUSE: Final = 0.02
"""With a store: seconds between two looks at an upload, which takes longer than an fsync."""
FEEDBACK_INTERVAL: Final = 1.0
"""Seconds between two status updates while the durable position moves."""
MAX_FEEDBACK_INTERVAL: Final = 9.0
"""The same, while it does not move."""
BACKOFF: Final = (0.1, 30.0)
"""Seconds before connecting again: the first pause and the longest."""
_RETENTION_INTERVAL: Final = 60.0
_SLOT_IN_USE: Final = 2.0
"""The longest pause, if another walsender has the slot: that of a lost machine is ended by the server at some point."""
UNCONFIRMED_BYTES: Final = 16 << 20
"""With a store: WAL without changes is confirmed when there is this much of it, the size of a WAL segment."""
AT_REST: Final = 15.0
"""With a store: and when the source has not written WAL for so many seconds."""
LOST_AFTER: Final = 20.0
"""With a store: the server frees the slot after so many silent seconds, so that another machine can go on."""
START_AGAIN: Final = "run `walmere drop`, then start the subscription again"
_CANCEL_TIMEOUT: Final = 2.0
"""Wait this many seconds for the server to cancel a command."""


@dataclass(slots=True)
class ReceiverProgress:
    """The receiver's positions, written to `receiver.json` for `walmere status`. The change log is authoritative."""

    received: Lsn = INVALID_LSN
    durable: Lsn = INVALID_LSN
    applied: Lsn = INVALID_LSN


class Receiver:
    """Receives until `stop` is called, or until everything before a given LSN is durable."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._directory = config.changelog
        self._cache = cache_of(config)
        self._stopping = threading.Event()
        self._positions = SinkPositions(config.subscription.directory)
        self._shared = SharedPositions(config)
        self._session: _Session | None = None
        self._last_retention = -math.inf  # so that a receiver that runs only with `--once` removes segments, too
        self.progress = ReceiverProgress()
        self.retried_error: WalmereError | None = None  # None: it is receiving
        self._received_bytes = 0
        self._reconnects = 0

    def stop(self) -> None:
        """Request the end: what has arrived is made durable and confirmed. Safe in a signal handler."""
        self._stopping.set()
        if self._session is not None:
            self._session.interrupt()

    def run(self, until: Lsn | None = None) -> Lsn:
        """Receive. Returns the durable position."""
        lock = Lock(self._directory)
        try:
            return self._run(until)
        except OSError as error:
            raise ChangeLogError(
                f"writing below {self._config.subscription.directory}",
                f"{error}",
                "no change is lost; make room or repair the disk, and start again",
            ) from error
        finally:
            (self._config.subscription.directory / paths.RECEIVER).unlink(missing_ok=True)
            lock.close()

    def _run(self, until: Lsn | None) -> Lsn:
        pause, longest = BACKOFF
        log: _Log | None = None
        try:
            while True:
                before = self.progress.durable
                try:
                    with closing(_Session(self._config)) as session:
                        self._session = session
                        if self._stopping.is_set():  # while there was no session to interrupt
                            return self.progress.durable if log is None else log.writer.durable
                        confirmed = session.prepare(self._directory, self._cache if log is None else None)
                        if self._cache is None:
                            log = log or _Log(self._config, confirmed)
                            session.require_no_gap(log.writer.durable, confirmed)
                            session.start(log.assembly.position)
                        elif log is None:
                            self._shared.read()
                            # The slot first: while another receiver is streaming, it keeps its epoch.
                            session.start(self._cache.end_lsn)
                            log = _Log(self._config, confirmed, self._cache)
                        else:
                            log.check()
                            session.start(log.assembly.position)
                        session.started(log.writer.durable, stored=self._cache is not None)
                        if until is not None:
                            session.flush_wal()
                        self.retried_error = None
                        self._receive(session, log, until)
                    return log.writer.durable
                except WalmereError as error:
                    if not error.transient:
                        raise
                    self.retried_error = error
                    self._reconnects += 1
                    self._write_progress(None if log is None else log.writer, settled=False)
                    pause = BACKOFF[0] if self.progress.durable > before else pause
                    wait = pause * random.uniform(0.5, 1.0)  # noqa: S311
                    _log.warning("%s: %s; retry in %.1f s", error.doing, error.wrong, wait)
                    if log is not None:
                        log.assembly.reset()
                    if self._stopping.wait(wait):
                        return self.progress.durable if log is None else log.writer.durable
                    pause = min(pause * 2, _SLOT_IN_USE if isinstance(error, SlotInUse) else longest)
        finally:
            if log is not None:
                log.assembly.reset()
                log.writer.close()

    def _receive(self, session: _Session, log: _Log, until: Lsn | None) -> None:
        stream, writer, assembly = session.stream, log.writer, log.assembly
        self._confirm(stream, writer, assembly, reply=False, all_fed=False)  # other processes see that it has the slot
        age, cut_age = self._config.subscription.segment_seconds, log.cut_seconds
        frames: list[memoryview] = []  # may begin with an unfinished transaction, which the last feed has returned
        size = 0  # of what has arrived since the last feed
        oldest = sent = time.monotonic()
        reply_pending = hurried = False
        while True:
            writer.check()
            session.heartbeat.check()
            busy = writer.busy
            arrived, empty = (0, True) if busy else stream.read(frames, FEED_BYTES)
            now = time.monotonic()
            if busy:
                stream.heard = now  # the server is not silent: the stream is not being read
            silent = now - stream.heard
            reply_pending &= silent >= self._config.source.timeout / 2
            self._require_answer(silent)
            if arrived:
                oldest = oldest if size else now
                size += arrived
                self._received_bytes += arrived
                session.heartbeat.received(now)
            ending = self._stopping.is_set() or (until is not None and writer.durable >= until)
            if size and (size >= FEED_BYTES or now - oldest >= age or ending):
                frames, size = assembly.feed(frames), 0
            writer.cut_if_older(cut_age)
            must_confirm = ending or stream.reply_requested
            must_confirm |= until is not None and writer.durable < until <= stream.keepalive_lsn
            is_due = ending or stream.reply_requested or now - sent >= MAX_FEEDBACK_INTERVAL
            if not frames and (must_confirm or (is_due and log.may_record_position(stream.keepalive_lsn, now))):
                assembly.advance(stream.keepalive_lsn)
            if until is not None and not hurried and assembly.position >= until:
                hurried = True
                writer.hurry()
            self._remove_old_segments(writer, now)
            if ending:
                writer.flush()
            moved = writer.durable > self.progress.durable
            request_reply = silent >= self._config.source.timeout / 2 and not reply_pending
            if is_due or request_reply or (moved and now - sent >= FEEDBACK_INTERVAL):
                self._confirm(stream, writer, assembly, reply=request_reply, all_fed=not frames)
                sent, reply_pending = now, reply_pending or request_reply
            if ending:
                return
            if empty:
                self._pause(stream, writer, oldest + age - now if size else None)

    def _remove_old_segments(self, writer: Writer, now: float) -> None:
        keep_seconds = self._config.subscription.keep_seconds
        if now - self._last_retention >= max(_RETENTION_INTERVAL, keep_seconds / 24):
            retention.submit(writer, self._applied(), keep_seconds)
            self._last_retention = now

    def _require_answer(self, silent: float) -> None:
        """Raise after `source.timeout` without data, like wal_receiver_timeout. A reply was requested at half of it."""
        if silent >= self._config.source.timeout:
            raise SourceUnavailable(
                f"reading from replication slot {self._config.source.slot}",
                f"the server has sent nothing for {silent:.0f} s, although a reply was requested",
                "no action needed: it is retried; source.timeout is the time limit",
            )

    def _pause(self, stream: Stream, writer: Writer, due: float | None) -> None:
        """Nothing to read: pause while more is likely to come, else wait until the server sends."""
        if due is not None:
            time.sleep(max(0.0, min(READ_PAUSE, due)))
        elif writer.busy or not writer.settled:
            if self._cache is None:
                time.sleep(0.002)
            elif writer.busy:
                time.sleep(UPLOAD_PAUSE)
            else:
                stream.wait(UPLOAD_PAUSE)
        else:
            stream.wait(0.25)

    def _confirm(self, stream: Stream, writer: Writer, assembly: Assembly, *, reply: bool, all_fed: bool) -> None:
        """Send a status update. The durable position is read first, so that nothing later is confirmed."""
        durable = writer.durable
        received = max(assembly.position, stream.keepalive_lsn, durable)
        applied = self._applied() or INVALID_LSN
        stream.confirm(received, durable, applied, reply=reply)
        self.progress = ReceiverProgress(received, durable, applied)
        self._write_progress(writer, settled=all_fed and writer.settled)

    def _applied(self) -> Lsn | None:
        """What every sink has applied; None if there is no sink."""
        return self._positions.applied() if self._cache is None else self._shared.applied()

    def _write_progress(self, writer: Writer | None, *, settled: bool) -> None:
        """Report to other processes: `walmere status`, and what serves metrics. `writer`: None if it has no log yet."""
        path = self._config.subscription.directory / paths.RECEIVER
        temporary = path.with_suffix(".tmp")
        state = {
            "pid": os.getpid(),
            "received_lsn": str(self.progress.received),
            "durable_lsn": str(self.progress.durable),
            "applied_lsn": str(self.progress.applied),
            "time": time.time(),
            "connected": self.retried_error is None,
            "received_bytes": self._received_bytes,
            "reconnects": self._reconnects,
        }
        if writer is not None:
            state |= {
                "log_bytes": writer.log_bytes,
                "transactions": writer.transactions,
                "written_bytes": writer.written_bytes,
            }
        if settled and self._cache is not None:  # with a store, not every position is recorded
            state["nothing_until"] = str(self.progress.received)
        temporary.write_text(json.dumps(state))
        temporary.rename(path)


def prepare(config: Config, opened: Callable[[Callable[[], None]], None] = lambda _: None) -> None:
    """Create the slot and an empty log, if there are none. After that, tables can be copied.

    `opened` gets a function that cancels it: a new slot waits for every open transaction on the source. Without a
    cancel, the server would create the slot later, although the process has ended.
    """
    lock = Lock(config.changelog)
    try:
        with closing(_Session(config)) as session:
            opened(session.interrupt)
            session.prepare(config.changelog, cache_of(config))
    finally:
        lock.close()


def require_source(config: Config) -> None:
    """Before the first run: raise if the source refuses the role or has no such publication. Spark starts later.

    A source that does not answer is no error here: the run waits for it.
    """
    if not (config.changelog / manifest_file.NAME).exists():
        with suppress(SourceUnavailable), closing(_Session(config)) as session:
            session.require_publications()


def require_matching_log(config: Config) -> None:
    """Raise if a receiver could not continue the log. Creates nothing but the local copy of a log in a store."""
    refresh_log(config)
    if header_of(config.changelog) is None:
        return
    with closing(_Session(config)) as session:
        confirmed = session.prepare(config.changelog)
        with ManifestSearch(config.changelog) as log:  # after the slot: a receiver may be running
            durable = log.end_lsn
        session.require_no_gap(durable, confirmed)


class _Log:
    """Writer and assembly of the change log, opened when the slot's confirmed position is known."""

    def __init__(self, config: Config, confirmed: Lsn, cache: Cache | None = None) -> None:
        settings = config.subscription
        self._claim = None if cache is None else Claim(cache.store, cache.head.generation)
        uploader, segment_bytes = None, settings.segment_bytes
        if cache is not None and self._claim is not None:
            uploader = Uploader(
                cache,
                self._claim,
                seconds=settings.upload_seconds,
                max_bytes=settings.upload_bytes,
                cache_bytes=settings.cache_bytes,
            )
            segment_bytes = min(segment_bytes, settings.upload_bytes)
        self.cut_seconds = settings.segment_seconds if cache is None else settings.upload_seconds
        self.writer = Writer(config.changelog, confirmed, segment_bytes=segment_bytes, uploader=uploader)
        self.assembly = Assembly(self.writer)
        self._keepalive, self._moved_at = INVALID_LSN, 0.0

    def check(self) -> None:
        """Raise TakenOver if another receiver writes the log."""
        if self._claim is not None:
            self._claim.check()

    def may_record_position(self, keepalive: Lsn, now: float) -> bool:
        """Whether to record that everything before this LSN was received, although there was nothing to store.

        With a store, this is a put. So it is done only if the source can free a WAL segment then, or when its WAL has
        not grown for a while: an idle source causes no puts, and the log still ends where the source does.
        """
        if self._claim is None:
            return True
        if keepalive != self._keepalive:
            self._keepalive, self._moved_at = keepalive, now
        at_rest = now - self._moved_at >= AT_REST
        return at_rest or keepalive - self.assembly.position >= UNCONFIRMED_BYTES


class _Session:
    """One SQL and one replication connection: checks slot, log and server, then streams."""

    def __init__(self, config: Config) -> None:
        self._config = config
        source = config.source
        self._name = f"walmere_{config.subscription.name}"
        self._sql = connect(source, self._name)
        try:
            self._replication = connect(source, self._name, replication=True)
        except WalmereError:
            self._sql.close()
            raise
        self.heartbeat: Heartbeat
        self.stream: Stream

    def require_publications(self) -> None:
        """Raise PublicationMissing unless all exist."""
        with translate_errors(self._config.source, "reading the publications"):
            catalog.require_publications(self._sql, self._config.source.publications)

    def prepare(self, directory: Path, cache: Cache | None = None) -> Lsn:
        """Create slot and log, or check that they belong together. Returns the slot's confirmed position.

        `cache`: the log is in a store, and its local copy is made first.
        """
        source, settings = self._config.source, self._config.subscription
        if cache is not None:
            probe(cache.store)
            require_own(self._config)
            if not cache.fill() and cache.local_only:
                _log.warning("moving the change log in %s to %s", directory, cache.store.url)
                import_log(cache.store, settings.name, directory, settings.upload_bytes)
                cache.fill()
        header = header_of(directory)
        with translate_errors(source, "preparing to receive"):
            system = identify_system(self._replication)
            if header is not None:
                _require_same_system(header, system, self._config)
            catalog.require_publications(self._sql, source.publications)
            column_lists.require_equal(self._sql, source.publications)
            found = slot.read(self._sql, source.slot)
        if found is None:
            if header is not None:
                raise SlotMissing(
                    "preparing to receive", f"replication slot {source.slot} does not exist", SLOT_MISSING_HINT
                )
            confirmed = slot.create(self._replication, source)
        else:
            slot.require_usable(found, system.database)
            confirmed = found.confirmed_lsn or INVALID_LSN
        if header is None:
            try:
                with translate_errors(source, "preparing to receive"):
                    oid = database_oid(self._sql)
                new = Header(system.identifier, system.database, source.slot, confirmed, database_oid=oid)
                if cache is None:
                    create(directory, new)
                elif create_log(cache.store, settings.name, render_header(new)):
                    cache.fill()
                else:  # another process has created it at the same time
                    return self.prepare(directory, cache)
            except BaseException:
                if found is None:  # no log would ever use it, and it would keep WAL
                    slot.drop(self._replication, source)
                raise
        return confirmed

    def require_no_gap(self, durable: Lsn, confirmed: Lsn) -> None:
        """Check that the slot can send everything after the log's end."""
        doing, name = "preparing to receive", self._config.source.slot
        if confirmed > durable:
            raise ChangeLogMismatch(
                doing,
                f"slot {name} has advanced to {confirmed}, but the change log ends at {durable}: there is a gap",
                START_AGAIN,
            )
        with translate_errors(self._config.source, doing):
            position = catalog.wal_position(self._sql)
        if position < durable:
            raise ChangeLogMismatch(
                doing,
                f"the source's WAL ends at {position}, before the end of the change log at {durable}:"
                " the source was restored from a backup, or failed over and lost transactions",
                START_AGAIN,
            )

    def start(self, position: Lsn) -> None:
        """START_REPLICATION at the end of the log."""
        if self._config.subscription.store is not None:
            end_when_lost(self._config.source, self._replication, LOST_AFTER)
        self.stream = Stream(self._config.source, self._replication, position)

    def started(self, durable: Lsn, *, stored: bool) -> None:
        """Check that the stream starts where the log ends. `stored`: the log is in a store."""
        source = self._config.source
        # Before the start, another process could have advanced the slot: the server starts there without an error
        with translate_errors(source, "preparing to receive"):
            found = slot.read(self._sql, source.slot)
        if found is not None and found.confirmed_lsn is not None:
            self.require_no_gap(durable, found.confirmed_lsn)
        self.heartbeat = Heartbeat(self._sql, source, UNCONFIRMED_BYTES if stored else 0)
        self.heartbeat.start()

    def interrupt(self) -> None:
        """Cancel the creation of the slot, which waits for every open transaction on the source."""
        if not hasattr(self, "stream"):
            for connection in (self._replication, self._sql):
                connection.end_within(_CANCEL_TIMEOUT)
            with suppress(SourceError), translate_errors(self._config.source, "cancelling"):
                self._replication.cancel_safe(timeout=_CANCEL_TIMEOUT)

    def flush_wal(self) -> None:
        """Have the source flush its WAL, so that the LSN of `until` is sent soon."""
        with translate_errors(self._config.source, "flushing the source's WAL"):
            catalog.push_wal(self._sql)

    def close(self) -> None:
        """Stop the heartbeat and close both connections."""
        if hasattr(self, "heartbeat"):
            self.heartbeat.stop()
        self._replication.close()
        self._sql.close()


def _require_same_system(header: Header, system: System, config: Config) -> None:
    """Refuse another system, database or slot than the one that the log was received from."""
    place = config.subscription.store or config.changelog
    doing = f"continuing the change log in {place}"
    if header.system_identifier != system.identifier:
        raise WrongSystem(
            doing,
            f"it was received from system {header.system_identifier}, but the server is system {system.identifier}",
            f"correct source.dsn; or, if the source was rebuilt, {START_AGAIN}",
        )
    for what, had, has in (("database", header.database, system.database), ("slot", header.slot, config.source.slot)):
        if had != has:
            raise ChangeLogMismatch(
                doing,
                f"it was received from {what} {had}, not {has}",
                f"use another subscription.{'directory' if config.subscription.store is None else 'store'}",
            )
