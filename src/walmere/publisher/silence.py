"""Decides whether a connection without data is lost, or its server is only busy.

TCP keepalives and `tcp_user_timeout` detect a host that is unreachable. They do not detect a stopped process, whose
kernel still answers, or a proxy that drops all data. And a server without output may be working: on a COPY with a slow
row filter, waiting for a lock, or creating a slot, which waits for old transactions. So after half of
`[source] timeout` without data, and again after all of it, a second connection queries the state of the backend:

    a second connection cannot be opened                      the server does not answer: the connection is lost
    the backend does not exist any more                       lost
    it waits for its client both times, without progress      data was lost on the way: lost
    anything else                                             it is working: wait for another timeout

The replication stream does not need this: there, the server answers a status update that requests a reply.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

Value = TypeVar("Value")

_ACTIVITY: Final = (
    # events by name: a walsender that waits for WAL, as on a standby, also has an event of the class Client
    "SELECT a.state = 'active'"
    " AND coalesce(a.wait_event, '') NOT IN ('ClientRead', 'ClientWrite', 'WalSenderWriteData'),"
    " coalesce(c.bytes_processed, 0)"
    " FROM pg_catalog.pg_stat_activity a LEFT JOIN pg_catalog.pg_stat_progress_copy c ON c.pid = a.pid"
    " WHERE a.pid = %s"
)


class Backend(NamedTuple):
    """The state of a backend, as seen by a second connection."""

    reachable: bool = True
    exists: bool = True
    busy: bool = True
    """It is working, or waits for something other than its client."""
    bytes_processed: int = 0


class Silence:
    """Measures how long a server has sent nothing, and decides whether the connection is lost."""

    def __init__(self, seconds: float, read_backend: Callable[[], Backend]) -> None:
        self._seconds = seconds
        self._read_backend = read_backend
        self._ends: float | None = None
        self.lost = False
        self.heard()

    def heard(self) -> None:
        """Start again: data has arrived."""
        self._since = time.monotonic()
        self._first: Backend | None = None

    def end_within(self, seconds: float) -> None:
        """End the wait after this time, even if the server is working. Safe to call from another thread."""
        self._ends = time.monotonic() + seconds

    def check(self) -> None:
        """Raise psycopg.OperationalError if the connection is lost. Call it when no data has come for a moment."""
        now = time.monotonic()
        silent = now - self._since
        if self._ends is not None and now >= self._ends:
            self._raise("the command is stopping")
        elif self._first is None:
            if silent >= self._seconds / 2:
                self._first = self._read_backend()
        elif silent >= self._seconds:
            first = self._first
            last = self._read_backend() if first.reachable else first
            if (lost := _lost(first, last)) is not None:
                self._raise(f"no data from the server for {silent:.0f} s, and {lost}")
            self._since, self._first = time.monotonic() - self._seconds / 2, last

    def _raise(self, wrong: str) -> NoReturn:
        self.lost = True
        raise psycopg.OperationalError(wrong)


def _lost(first: Backend, last: Backend) -> str | None:
    if not last.reachable:
        return "it does not answer a second connection either"
    if not last.exists:
        return "its backend does not exist any more"
    if not first.busy and not last.busy and first.bytes_processed == last.bytes_processed:
        return "its backend waits for us: data was lost on the way"
    return None


def watched(generator: Generator[Any, Any, Value], silence: Silence) -> Generator[Any, Any, Value]:
    """Wrap a generator of psycopg, which is resumed at intervals also if no data came, with checks of the silence."""
    silence.heard()
    try:
        wanted = next(generator)
        while True:
            ready = yield wanted
            if ready:
                silence.heard()
            else:
                silence.check()
            wanted = generator.send(ready)
    except StopIteration as ended:
        value: Value = ended.value
        return value


class WatchedConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose queries raise an error if the server is lost, or after `end_within`."""

    silence: Silence | None = None

    def end_within(self, seconds: float) -> None:
        """End a query in progress, and every later one, with an error. Safe in a signal handler."""
        if self.silence is not None:
            self.silence.end_within(seconds)

    def wait(self, gen: Any, *more: Any, **named: Any) -> Any:
        """As in psycopg, but with checks for a lost connection, which is closed."""
        if self.silence is None:
            return super().wait(gen, *more, **named)
        try:
            return super().wait(watched(gen, self.silence), *more, **named)
        except psycopg.OperationalError:
            if self.silence.lost:
                self.close()
            raise


def read_backend(conninfo: str, pid: int, seconds: float) -> Backend:
    """Read the state of a backend. Takes at most `connect_timeout` plus `seconds`."""
    try:
        with WatchedConnection.connect(conninfo, autocommit=True, prepare_threshold=None) as connection:
            connection.silence = Silence(seconds, lambda: Backend(reachable=False))
            row = connection.execute(_ACTIVITY, [pid]).fetchone()
    except psycopg.Error as error:
        return Backend(reachable="FATAL" in str(error))  # a server that refuses the connection does answer
    return Backend(exists=False) if row is None else Backend(busy=bool(row[0]), bytes_processed=int(row[1]))


def silence_of(connection: Any, conninfo: str, pid: int, seconds: float) -> Silence:
    """The silence of a connection of psycopg or psycopg2. `conninfo` is for the second connection."""
    parameters = conninfo_to_dict(conninfo)
    if "," in f"{parameters.get('host')} {parameters.get('hostaddr')}":  # several hosts: use the one that is connected
        parameters |= {"host": connection.info.host, "hostaddr": None, "port": connection.info.port}
    return Silence(seconds, functools.partial(read_backend, make_conninfo("", **parameters), pid, seconds))
