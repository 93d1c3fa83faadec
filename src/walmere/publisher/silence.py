"""Whether a connection on which nothing comes is lost, or its server is only busy.

TCP keepalives and `tcp_user_timeout` find a host that has vanished. They do not find a process that is frozen behind a
kernel that still answers, or a proxy that swallows everything. And a silent server may be fine: a COPY with a slow row
filter, a query that waits for a lock, a new slot that waits for old transactions. So after half of `[source] timeout`
without a byte, and again after the whole of it, the server is asked over a second connection what the first one's
backend is doing:

    no second connection can be made                          the server does not answer: the connection is lost
    the backend does not exist any more                       lost
    it waits for its client both times, with no progress      what it sent, or what we sent, was swallowed: lost
    anything else                                             it is at work: wait for another timeout

The replication stream does not need this: there the server answers a status update that asks for a reply.
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
    # a walsender that waits for WAL, as on a standby, has a wait event of the class Client too
    "SELECT a.state = 'active'"
    " AND coalesce(a.wait_event, '') NOT IN ('ClientRead', 'ClientWrite', 'WalSenderWriteData'),"
    " coalesce(c.bytes_processed, 0)"
    " FROM pg_catalog.pg_stat_activity a LEFT JOIN pg_catalog.pg_stat_progress_copy c ON c.pid = a.pid"
    " WHERE a.pid = %s"
)


class Backend(NamedTuple):
    """What a second connection was told about a backend."""

    reachable: bool = True
    exists: bool = True
    busy: bool = True
    """It works, or waits for something else than its client."""
    bytes_processed: int = 0


class Silence:
    """How long nothing has come from a server, and what that means."""

    def __init__(self, seconds: float, ask: Callable[[], Backend]) -> None:
        self._seconds = seconds
        self._ask = ask
        self._ends: float | None = None
        self.lost = False
        self.heard()

    def heard(self) -> None:
        """Something came."""
        self._since = time.monotonic()
        self._first: Backend | None = None

    def end_within(self, seconds: float) -> None:
        """Wait no longer than this, whatever the server does. May be called from another thread."""
        self._ends = time.monotonic() + seconds

    def check(self) -> None:
        """Nothing came. Raises psycopg.OperationalError if the connection is lost."""
        now = time.monotonic()
        silent = now - self._since
        if self._ends is not None and now >= self._ends:
            self._raise("the command is stopping")
        elif self._first is None:
            if silent >= self._seconds / 2:
                self._first = self._ask()
        elif silent >= self._seconds:
            first = self._first
            last = self._ask() if first.reachable else first
            if (lost := _lost(first, last)) is not None:
                self._raise(f"nothing has come from the server for {silent:.0f} s, and {lost}")
            self._since, self._first = time.monotonic() - self._seconds / 2, last

    def _raise(self, wrong: str) -> NoReturn:
        self.lost = True
        raise psycopg.OperationalError(wrong)


def _lost(first: Backend, last: Backend) -> str | None:
    if not last.reachable:
        return "it does not answer a second connection either"
    if not last.exists:
        return "the connection's backend is gone"
    if not first.busy and not last.busy and first.bytes_processed == last.bytes_processed:
        return "the server process waits for the client: data was lost on the connection"
    return None


def watched(generator: Generator[Any, Any, Value], silence: Silence) -> Generator[Any, Any, Value]:
    """A generator of psycopg's, which resumes it now and then also if nothing came."""
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
    """A connection whose queries end with an error if the server is lost, or if they are told to end."""

    silence: Silence | None = None

    def end_within(self, seconds: float) -> None:
        """End a query in progress, and every later one, with an error. Safe in a signal handler."""
        if self.silence is not None:
            self.silence.end_within(seconds)

    def wait(self, gen: Any, *more: Any, **named: Any) -> Any:
        """See psycopg. A connection that was found lost is closed."""
        if self.silence is None:
            return super().wait(gen, *more, **named)
        try:
            return super().wait(watched(gen, self.silence), *more, **named)
        except psycopg.OperationalError:
            if self.silence.lost:
                self.close()
            raise


def look(conninfo: str, pid: int, seconds: float) -> Backend:
    """Ask the server what a backend is doing. Takes no longer than a connection may take to be made, plus `seconds`."""
    try:
        with WatchedConnection.connect(conninfo, autocommit=True, prepare_threshold=None) as connection:
            connection.silence = Silence(seconds, lambda: Backend(reachable=False))
            row = connection.execute(_ACTIVITY, [pid]).fetchone()
    except psycopg.Error as error:
        return Backend(reachable="FATAL" in str(error))  # a server that refuses a connection does answer
    return Backend(exists=False) if row is None else Backend(busy=bool(row[0]), bytes_processed=int(row[1]))


def silence_of(connection: Any, conninfo: str, pid: int, seconds: float) -> Silence:
    """The silence of a connection, of psycopg or psycopg2, to this backend. `conninfo` is for the second connection."""
    parameters = conninfo_to_dict(conninfo)
    if "," in f"{parameters.get('host')} {parameters.get('hostaddr')}":  # of several, the one that it is connected to
        parameters |= {"host": connection.info.host, "hostaddr": None, "port": connection.info.port}
    return Silence(seconds, functools.partial(look, make_conninfo("", **parameters), pid, seconds))
