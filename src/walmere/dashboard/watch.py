"""Reads the status of a subscription again and again, and passes on what has changed.

Each subscription has a thread: one whose source does not answer delays no other. While somebody looks, it reads every
second; otherwise rarely, only to have a history. It keeps one connection to the source. Reading takes at most a quarter
of the time: if the source is slow, it is asked less often.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from walmere.dashboard.history import History, row
from walmere.dashboard.transactions import PassedTransaction, PassingTransactions
from walmere.errors import WalmereError
from walmere.lsn import Lsn
from walmere.subscription.advice import Advice, summary
from walmere.subscription.state import Phase

if TYPE_CHECKING:
    from walmere import Subscription

_log = logging.getLogger(__name__)

INTERVAL: Final = 1.0
"""Seconds between two readings while somebody looks."""
REST_INTERVAL: Final = 10.0
"""The same, while nobody does."""
MAX_SHARE: Final = 0.25
"""A reading takes at most this share of the time: after a slow one, the next waits longer."""
_SHORTEST: Final = 0.05
KEEP_ALIVE: Final = 15.0
"""Seconds between two events of a stream, at most: a proxy would end a silent one."""
FIRST_READING: Final = 5.0
"""Seconds that `/metrics` waits for the first reading."""


_PHASES: Final = {phase.value: phase.words for phase in Phase}


class Hub:
    """Passes what was read to the event streams."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: dict[int, tuple[int, bytes]] = {}  # by number of the subscription: a version, and an event
        self._version = 0
        self._closed = False
        self.looking = 0
        """How many event streams are open."""

    def publish(self, number: int, event: bytes) -> None:
        """Pass on the newest event of a subscription."""
        with self._changed:
            self._version += 1
            self._entries[number] = (self._version, event)
            self._changed.notify_all()

    def close(self) -> None:
        """End all streams."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def events(self) -> Iterator[bytes]:
        """The newest event of each subscription, then each new one. A stream that is slow misses some."""
        with self._changed:
            self.looking += 1
            self._changed.notify_all()
        seen = 0

        def has_news() -> bool:
            return self._closed or self._version > seen

        try:
            while True:
                with self._changed:
                    self._changed.wait_for(has_news, KEEP_ALIVE)
                    if self._closed:
                        return
                    new = [event for version, event in self._entries.values() if version > seen]
                    seen = self._version
                yield b"".join(new) or b": nothing new\n\n"
        finally:
            with self._changed:
                self.looking -= 1

    def rest(self, seconds: float) -> None:
        """Wait; while nobody looks, longer, but not after somebody begins to."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)
            if not self.looking:
                self._changed.wait_for(lambda: self._closed or self.looking > 0, max(0.0, REST_INTERVAL - seconds))

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._closed


class Watch:
    """Reads one subscription."""

    def __init__(self, number: int, subscription: Subscription, hub: Hub) -> None:
        self.number = number
        self.subscription = subscription
        self._hub = hub
        self._history = History()
        self._passing = PassingTransactions(subscription.config.changelog)
        self._last: tuple[Mapping[str, Any], float] | None = None
        self._has_read = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"walmere-watch-{number}", daemon=True)

    @property
    def name(self) -> str:
        """The name of the subscription."""
        return self.subscription.config.subscription.name

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """The hub is closed first; a reading may still wait for the source, in a daemon thread."""

    def last_status(self, timeout: float = FIRST_READING) -> tuple[Mapping[str, Any], float] | None:
        """The last status, and its age in seconds; None if there is none yet after `timeout` seconds."""
        self._has_read.wait(timeout)
        return None if self._last is None else (self._last[0], time.monotonic() - self._last[1])

    def _look(self, status: Mapping[str, Any]) -> None:
        """Pass on a status, with the last transactions and the history."""
        self._last = (status, time.monotonic())
        self._has_read.set()
        self._passing.read()
        now = time.time()
        applied, durable, source = (_lsn(status[f"{each}_lsn"]) for each in ("applied", "durable", "source"))
        point = self._history.add(
            now,
            lag_seconds=status["lag_seconds"],
            lag_bytes=status["lag_bytes"],
            received=self._passing.changes_until(durable),
            applied=self._passing.changes_until(applied),
            wal=source,
        )
        running = self.subscription.running
        shown = {
            "number": self.number,
            "name": self.name,
            "time": now,
            "status": status,
            "running": running,
            "summary": asdict(summary(status, running=running)),
            "findings": [asdict(each) for each in self.subscription.advice(status)],
            "point": row(point),
            "transactions": [_shown(each, applied) for each in reversed(self._passing.last)],
        }
        self._hub.publish(self.number, event("now", shown))

    def first_event(self) -> bytes:
        """What a page needs before the first reading: the history."""
        shown = {"number": self.number, "name": self.name, "points": self._history.rows(), "phases": _PHASES}
        return event("history", shown)

    def _run(self) -> None:
        while not self._hub.closed:
            try:
                with self.subscription.watching() as status:
                    while not self._hub.closed:
                        began = time.monotonic()
                        self._look(status())
                        took = time.monotonic() - began
                        self._hub.rest(max(INTERVAL - took, took * (1 / MAX_SHARE - 1), _SHORTEST))
            except Exception as error:
                if not isinstance(error, WalmereError | OSError):
                    _log.warning("reading the status of %s has failed: %r", self.name, error)
                self._hub.publish(self.number, event("now", _failed(self.number, self.name, error)))
                self._hub.rest(INTERVAL)


def event(name: str, content: Any) -> bytes:
    """A server-sent event."""
    return f"event: {name}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


def broken(number: int, name: str, error: WalmereError) -> bytes:
    """The event of a configuration that cannot be used."""
    return event("now", _failed(number, name, error))


def _failed(number: int, name: str, error: Exception) -> dict[str, Any]:
    what, do = str(error), ""
    if isinstance(error, WalmereError):
        what, do = f"{error.doing}: {error.wrong}", error.hint
    found = [asdict(Advice("problem", what, do))]
    text = {"level": "problem", "text": "its state cannot be read"}
    return {"number": number, "name": name, "time": time.time(), "status": None, "summary": text, "findings": found}


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


def _shown(passed: PassedTransaction, applied: Lsn | None) -> dict[str, Any]:
    return {
        "xid": passed.xid,
        "count": passed.count,
        "commit_lsn": str(passed.commit_lsn),
        "time": passed.commit_time,
        "tables": [{"name": name, **counts} for name, counts in passed.tables],
        "applied": applied is not None and passed.commit_lsn < applied,
    }
