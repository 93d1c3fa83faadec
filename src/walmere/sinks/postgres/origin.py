"""The replication origin of a subscription at the target: it marks what Walmere writes, and has the progress.

Only one session can use an origin at a time. This is a fence: a task that was given up, and is still in its
transaction, keeps the next one out until it has ended.

Each origin takes a place in the server until it is dropped, also if nobody uses it, and the server has few. So all
copies of a subscription share one, and a task uses it only while it commits: the commit is what marks its rows.
`reserve` takes both places before the first copy.
"""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from typing import Final

from psycopg import errors as pg
from psycopg.pq import TransactionStatus

from walmere.errors import SinkError, SinkUnavailable
from walmere.lsn import Lsn
from walmere.sinks.postgres.connect import Connection
from walmere.sinks.postgres.errors import without_values

_WAIT: Final = 30.0
"""Seconds to wait for another session that uses the origin."""
_OURS: Final = "roname = $1 OR (starts_with(roname, $1) AND substr(roname, length($1) + 1) ~ '^_copy_[0-9]+$')"
"""The condition for the origins of a subscription, whose name may be the beginning of another one's."""
_PLACES: Final = (
    "coalesce(current_setting('max_active_replication_origins', true), current_setting('max_replication_slots'))::int"
)
"""The places of the server."""
PLACES: Final = 2
"""That a subscription needs."""
MORE_PLACES: Final = "increase max_active_replication_origins there (before PostgreSQL 18: max_replication_slots)"
_FUNCTIONS: Final = (
    "pg_replication_origin_create(text)",
    "pg_replication_origin_drop(text)",
    "pg_replication_origin_oid(text)",
    "pg_replication_origin_session_setup(text)",
    "pg_replication_origin_session_reset()",
    "pg_replication_origin_xact_setup(pg_lsn, timestamptz)",
)


def name_of(subscription: str) -> str:
    """The name of the origin. PostgreSQL's own subscribers use pg_<oid>."""
    return f"walmere_{subscription}"


def may_use(connection: Connection) -> bool:
    """Whether the role may use origins. Managed services often do not allow it."""
    query = "SELECT bool_and(has_function_privilege(f, 'EXECUTE')) FROM unnest($1::text[]) f"
    [row] = connection.execute(query, [list(_FUNCTIONS)]).fetchall()
    return bool(row[0])


def of_copies(subscription: str) -> str:
    """The name of the origin that marks copied rows."""
    return f"{name_of(subscription)}_copy_0"


def reserve(connection: Connection, subscription: str) -> None:
    """Make sure that both origins of a subscription have a place in the server."""
    for name in (name_of(subscription), of_copies(subscription)):
        try:
            _create(connection, name)
            _use(connection, name)
            reset(connection)
        except pg.ObjectInUse:
            pass  # so it has a place
        except pg.ConfigurationLimitExceeded as error:
            raise SinkError(
                f"using the replication origin {name} of the target",
                without_values(error),
                MORE_PLACES,
            ) from None


def places_left(connection: Connection, subscription: str) -> int:
    """How many places of the server other origins leave. An origin that was never used does not take one."""
    query = f"SELECT {_PLACES} - count(*) FROM pg_replication_origin WHERE NOT ({_OURS})"  # noqa: S608
    [(left,)] = connection.execute(query, [name_of(subscription)]).fetchall()
    return int(left)


def places_free(connection: Connection, subscription: str) -> int:
    """How many places no other origin has taken, at most: not every role may see which are taken."""
    query = f"SELECT {_PLACES}, has_table_privilege('pg_replication_origin_status', 'SELECT')"
    [(places, may_see)] = connection.execute(query).fetchall()
    if not may_see:
        return int(places)
    taken = "(SELECT external_id FROM pg_replication_origin_status) AS o(roname)"
    query = f"SELECT {_PLACES} - count(*) FROM {taken} WHERE NOT ({_OURS})"  # noqa: S608
    [(free,)] = connection.execute(query, [name_of(subscription)]).fetchall()
    return int(free)


def set_up(connection: Connection, name: str) -> None:
    """Use an origin in this session, which may be in a transaction. It is created if it does not exist."""
    deadline = time.monotonic() + _WAIT
    in_transaction = connection.info.transaction_status == TransactionStatus.INTRANS
    while True:
        try:
            with connection.transaction() if in_transaction else nullcontext():  # a savepoint
                _use(connection, name)
            return
        except pg.UndefinedObject:  # the role may use origins only since a copy
            _create(connection, name)
        except pg.ObjectInUse as error:
            if time.monotonic() > deadline:
                doing = f"using the replication origin {name} of the target"
                hint = "Walmere retries; SELECT * FROM pg_replication_origin_status shows the progress of each origin"
                raise SinkUnavailable(doing, without_values(error), hint) from None
            time.sleep(0.05)


def _create(connection: Connection, name: str) -> None:
    query = "SELECT CASE WHEN pg_replication_origin_oid($1) IS NULL THEN pg_replication_origin_create($1) END"
    with suppress(pg.UniqueViolation), connection.transaction():  # created by another session at the same time
        connection.execute(query, [name])


def _use(connection: Connection, name: str) -> None:
    connection.execute("SELECT pg_replication_origin_session_setup($1)", [name])


def stamp(connection: Connection, lsn: Lsn, commit_time: str) -> None:
    """Let the commit of this transaction advance the origin."""
    connection.execute("SELECT pg_replication_origin_xact_setup($1::pg_lsn, $2::timestamptz)", [str(lsn), commit_time])


def reset(connection: Connection) -> None:
    """Let other sessions use the origin."""
    connection.execute("SELECT pg_replication_origin_session_reset()")


def ours(connection: Connection, subscription: str) -> list[int] | None:
    """The numbers of our origins, which show who has written a row last; None: the server does not track it."""
    [row] = connection.execute("SELECT current_setting('track_commit_timestamp')::bool").fetchall()
    if not row[0]:
        return None
    query = f"SELECT roident::int FROM pg_replication_origin WHERE {_OURS}"  # noqa: S608
    return [number for (number,) in connection.execute(query, [name_of(subscription)]).fetchall()]


def drop(connection: Connection, subscription: str) -> list[str]:
    """Drop the origins of a subscription: its own, and those of its copies. Returns their names."""
    query = f"SELECT roname FROM pg_replication_origin WHERE {_OURS}"  # noqa: S608
    names = [name for (name,) in connection.execute(query, [name_of(subscription)]).fetchall()]
    for name in names:
        connection.execute("SELECT pg_replication_origin_drop($1)", [name])
    return names
