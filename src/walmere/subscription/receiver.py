"""The receiver, PostgreSQL's walreceiver: one replication connection, into the change log, confirmed when durable.

Three positions, all of them real:

    received   the stream was read up to here
    durable    everything before here is fsynced in the change log: this is what the slot may forget
    applied    every sink has it (0/0 without one)

It is lazy: when the socket is empty it does not wait for the next message but for some milliseconds, so that
walsender fills its buffer. It feeds the log when enough has come, or when the oldest message has waited for the age at
which a segment is cut.

It goes on by itself after errors that may pass, with growing pauses, and stops with an error that says what to do
after those that do not: another system behind the address, a lost slot, a publication that is gone.
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
from walmere.changelog import retention
from walmere.changelog.assembly import Assembly
from walmere.changelog.manifest import Header
from walmere.changelog.search import ManifestSearch
from walmere.changelog.writer import Writer, create, header_of
from walmere.config import Config
from walmere.errors import (
    ChangeLogError,
    ChangeLogMismatch,
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
from walmere.publisher.stream import Stream, System, identify_system
from walmere.storage import Lock
from walmere.subscription.heartbeat import Heartbeat
from walmere.subscription.progress import SinkPositions

_log = logging.getLogger(__name__)

SLAB: Final = 4 << 20
"""Bytes that are put together at once."""
LAZY: Final = 0.05
"""Seconds to leave walsender alone when the socket is empty and more is likely to come."""
FEEDBACK: Final = 1.0
"""Seconds between two status updates while the durable position moves."""
SILENCE: Final = 9.0
"""And at the most, even if nothing moves."""
BACKOFF: Final = (0.1, 30.0)
"""The first pause before connecting again, and the longest."""
_RETENTION: Final = 60.0
_CANCELLING: Final = 2.0
"""Seconds that the server has to cancel what it does for us."""


@dataclass(slots=True)
class ReceiverProgress:
    """Where the receiver is. Written to `receiver.json` for `walmere status`; the log itself is the truth."""

    received: Lsn = INVALID_LSN
    durable: Lsn = INVALID_LSN
    applied: Lsn = INVALID_LSN


class Receiver:
    """Receives until `stop` is called, or until everything before a given LSN is durable."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._directory = config.changelog
        self._stopping = threading.Event()
        self._positions = SinkPositions(config.subscription.directory)
        self._session: _Session | None = None
        self._tidied = -math.inf  # so that also one who only ever receives `--once` keeps no more than is wanted
        self.progress = ReceiverProgress()
        self.retried_error: WalmereError | None = None  # None: it is receiving

    def stop(self) -> None:
        """End soon: finish what has arrived, make it durable, confirm it. Safe in a signal handler."""
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
                "nothing was confirmed that is not durable; make room or repair the disk, and start again",
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
                        confirmed = session.prepare(self._directory)
                        log = log or _Log(self._config, confirmed)
                        session.fits(log.writer.durable, confirmed)
                        session.start(log.assembly.position, log.writer.durable)
                        if until is not None:
                            session.hurry()
                        self.retried_error = None
                        self._receive(session, log, until)
                    return log.writer.durable
                except WalmereError as error:
                    if not error.transient:
                        raise
                    self.retried_error = error
                    pause = BACKOFF[0] if self.progress.durable > before else pause
                    wait = pause * random.uniform(0.5, 1.0)  # noqa: S311
                    _log.warning("%s: %s; trying again in %.1f s", error.doing, error.wrong, wait)
                    if log is not None:
                        log.assembly.reset()
                    if self._stopping.wait(wait):
                        return self.progress.durable if log is None else log.writer.durable
                    pause = min(pause * 2, longest)
        finally:
            if log is not None:
                log.assembly.reset()
                log.writer.close()

    def _receive(self, session: _Session, log: _Log, until: Lsn | None) -> None:
        stream, writer, assembly = session.stream, log.writer, log.assembly
        age = self._config.subscription.segment_seconds
        frames: list[memoryview] = []
        size = 0  # of what came since the last feed; before it stands what that one left, an unfinished transaction
        oldest = sent = time.monotonic()
        asked = False
        while True:
            writer.check()
            session.heartbeat.check()
            busy = writer.busy
            arrived, empty = (0, True) if busy else stream.read(frames, SLAB)
            now = time.monotonic()
            if busy:
                stream.heard = now  # it is we who do not read
            silent = now - stream.heard
            asked &= silent >= self._config.source.timeout / 2
            self._require_answer(silent)
            if arrived:
                oldest = oldest if size else now
                size += arrived
                session.heartbeat.received(now)
            ending = self._stopping.is_set() or (until is not None and writer.durable >= until)
            if size and (size >= SLAB or now - oldest >= age or ending):
                frames, size = assembly.feed(frames), 0
            writer.cut_if_older(age)
            if not frames:
                awaited = until is not None and writer.durable < until <= stream.keepalive_lsn
                if ending or awaited or stream.reply_requested or now - sent >= SILENCE:
                    assembly.advance(stream.keepalive_lsn)
            if now - self._tidied >= max(_RETENTION, self._config.subscription.keep_seconds / 24):
                retention.submit(writer, self._positions.applied(), self._config.subscription.keep_seconds)
                self._tidied = now
            if ending:
                writer.flush()
            moved = writer.durable > self.progress.durable
            ask = silent >= self._config.source.timeout / 2 and not asked
            if ending or ask or stream.reply_requested or now - sent >= (FEEDBACK if moved else SILENCE):
                self._confirm(stream, writer, assembly, reply=ask)
                sent, asked = now, asked or ask
            if ending:
                return
            if empty:
                self._pause(stream, writer, oldest + age - now if size else None)

    def _require_answer(self, silent: float) -> None:
        """As walreceiver with wal_receiver_timeout: at half of it the server was asked for a reply."""
        if silent >= self._config.source.timeout:
            raise SourceUnavailable(
                f"reading from replication slot {self._config.source.slot}",
                f"nothing has come from the server for {silent:.0f} s, not even the reply that was asked for",
                "it is tried again; source.timeout is how long it waits",
            )

    def _pause(self, stream: Stream, writer: Writer, due: float | None) -> None:
        """Nothing to read: leave walsender alone while more is likely to come, else wait until it sends."""
        if due is not None:
            time.sleep(max(0.0, min(LAZY, due)))
        elif writer.busy or not writer.settled:
            time.sleep(0.002)
        else:
            stream.wait(0.25)

    def _confirm(self, stream: Stream, writer: Writer, assembly: Assembly, *, reply: bool) -> None:
        """Say how far we are. The durable position is read first: nothing later is ever confirmed."""
        durable = writer.durable
        received = max(assembly.position, stream.keepalive_lsn, durable)
        applied = self._positions.applied() or INVALID_LSN
        stream.confirm(received, durable, applied, reply=reply)
        self.progress = ReceiverProgress(received, durable, applied)
        self._publish()

    def _publish(self) -> None:
        path = self._config.subscription.directory / paths.RECEIVER
        temporary = path.with_suffix(".tmp")
        state = {"pid": os.getpid(), "received_lsn": str(self.progress.received), "time": time.time()}
        temporary.write_text(json.dumps(state))
        temporary.rename(path)


def prepare(config: Config, opened: Callable[[Callable[[], None]], None] = lambda _: None) -> None:
    """Make the slot and an empty log, if they are new: from then on a copy may begin, whoever receives, and when.

    `opened` gets a function that cancels it: a new slot waits for every transaction that is open on the source, and a
    server that is not told that nobody wants it any more makes it all the same, later.
    """
    lock = Lock(config.changelog)
    try:
        with closing(_Session(config)) as session:
            opened(session.interrupt)
            session.prepare(config.changelog)
    finally:
        lock.close()


def require_matching_log(config: Config) -> None:
    """Raise what would keep a receiver from going on with the log that is there. Makes nothing."""
    if header_of(config.changelog) is None:
        return
    with closing(_Session(config)) as session:
        confirmed = session.prepare(config.changelog)
        with ManifestSearch(config.changelog) as log:  # after the slot: a receiver may be running
            durable = log.end_lsn
        session.fits(durable, confirmed)


class _Log:
    """The writing end of the change log, opened when the source has said what it has confirmed."""

    def __init__(self, config: Config, confirmed: Lsn) -> None:
        self.writer = Writer(config.changelog, confirmed, segment_bytes=config.subscription.segment_bytes)
        self.assembly = Assembly(self.writer)


class _Session:
    """One connection, from looking whether slot, log and server belong together to the end of the stream."""

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

    def prepare(self, directory: Path) -> Lsn:
        """Make slot and log if they are new; else see that they fit. Returns what the slot has confirmed."""
        source = self._config.source
        header = header_of(directory)
        with translate_errors(source, "preparing to receive"):
            system = identify_system(self._replication)
            if header is not None:
                _same_system(header, system, self._config)
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
                create(directory, Header(system.identifier, system.database, source.slot, confirmed, database_oid=oid))
            except BaseException:
                if found is None:  # nobody would ever use it
                    slot.drop(self._replication, source)
                raise
        return confirmed

    def fits(self, durable: Lsn, confirmed: Lsn) -> None:
        """See that nothing is missing between the log's end and what the slot can still send."""
        doing, name = "preparing to receive", self._config.source.slot
        anew = "`walmere drop`, then begin anew"
        if confirmed > durable:
            raise ChangeLogMismatch(
                doing,
                f"slot {name} has moved on to {confirmed}, the change log ends at {durable}: there is a gap",
                anew,
            )
        with translate_errors(self._config.source, doing):
            position = catalog.wal_position(self._sql)
        if position < durable:
            raise ChangeLogMismatch(
                doing,
                f"the source's WAL ends at {position}, the change log already has {durable}:"
                " the source was restored from a backup, or failed over and lost transactions",
                anew,
            )

    def start(self, position: Lsn, durable: Lsn) -> None:
        """START_REPLICATION from where the log ends."""
        source = self._config.source
        self.stream = Stream(source, self._replication, position)
        # Until here another could have moved the slot on, and the server would begin there without a word
        with translate_errors(source, "preparing to receive"):
            found = slot.read(self._sql, source.slot)
        if found is not None and found.confirmed_lsn is not None:
            self.fits(durable, found.confirmed_lsn)
        self.heartbeat = Heartbeat(self._sql, self._config.source)
        self.heartbeat.start()

    def interrupt(self) -> None:
        """End a wait before the stream: creating a slot waits for every transaction that is open on the source."""
        if not hasattr(self, "stream"):
            for connection in (self._replication, self._sql):
                connection.end_within(_CANCELLING)
            with suppress(SourceError), translate_errors(self._config.source, "cancelling"):
                self._replication.cancel_safe(timeout=_CANCELLING)

    def hurry(self) -> None:
        """Somebody waits for an LSN."""
        with translate_errors(self._config.source, "asking the source to flush its WAL"):
            catalog.push_wal(self._sql)

    def close(self) -> None:
        """End both connections."""
        if hasattr(self, "heartbeat"):
            self.heartbeat.stop()
        self._replication.close()
        self._sql.close()


def _same_system(header: Header, system: System, config: Config) -> None:
    """Refuse to mix two histories in one log."""
    doing = f"connecting the change log in {config.changelog}"
    if header.system_identifier != system.identifier:
        raise WrongSystem(
            doing,
            f"it was received from system {header.system_identifier}, at this address is {system.identifier}",
            "correct source.dsn; or, if the source was rebuilt, `walmere drop` and begin anew",
        )
    for what, had, has in (("database", header.database, system.database), ("slot", header.slot, config.source.slot)):
        if had != has:
            raise ChangeLogMismatch(
                doing, f"it was received from {what} {had}, not {has}", "use another subscription.directory"
            )
