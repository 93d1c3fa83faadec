"""Connections to the source through libpq, with service files, .pgpass, TLS, SCRAM and several hosts.

psycopg opens the connection; for replication, libpq's functions are then called directly through `pgconn`. (psycopg2
has a replication cursor, but it answers keepalives itself and moves the flushed position to what the server sent.
Walmere must decide itself which LSN is confirmed.)

`walmere.libpq` has what connections to the target need, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import errors as pg
from psycopg.pq.abc import PGresult

from walmere.errors import (
    AccessRefused,
    ColumnListsDiffer,
    NotConfigured,
    PublicationMissing,
    SlotInUse,
    SlotLost,
    SlotMissing,
    SourceError,
    SourceUnavailable,
    TableLocked,
)
from walmere.libpq import (
    SYNTAX_ERROR,
    Address,
    Scrub,
    conninfo_of,
    describe,
    one_line,
    scrubber,
    settings,
    value_error,
)
from walmere.publisher.capabilities import Capabilities
from walmere.publisher.silence import WatchedConnection, silence_of

Connection = psycopg.Connection[tuple[Any, ...]]


def connect(source: Address, application_name: str, *, replication: bool = False) -> WatchedConnection:
    """Open an ordinary connection, or one for logical replication."""
    more = {"replication": "database"} if replication else {}
    with translate_errors(source, f"connecting to {describe(source)}"):
        conninfo = conninfo_of(source, application_name, **more)
        connection = WatchedConnection.connect(conninfo, autocommit=True, prepare_threshold=None)
        second = conninfo_of(source, f"{application_name} timeout")
        try:
            connection.silence = silence_of(connection, second, connection.info.backend_pid, source.timeout)
            row = connection.execute(settings()).fetchone()
            assert row is not None
            connection.silence = silence_of(
                connection, second, row[0], source.timeout
            )  # a pooler's backend_pid is wrong
        except psycopg.Error:
            connection.close()
            raise
    return connection


def capabilities(connection: Connection) -> Capabilities:
    """The capabilities of the connected server."""
    return Capabilities(connection.info.server_version)


@contextmanager
def translate_errors(source: Address, doing: str, *, of_rows: bool = False) -> Iterator[None]:
    """Convert errors of psycopg to SourceError, without passwords.

    `of_rows`: the server reads rows. A function of a row filter may fail, and its message shows the value.
    """
    try:
        yield
    except psycopg.Error as error:
        state = error.sqlstate or ""
        if of_rows and (state.startswith("22") or state == SYNTAX_ERROR):
            raise SourceError(doing, value_error(state), ROW_FILTER_HINT) from None
        raise translate(error, doing, scrubber(source)) from None


_ACCESS: Final = (pg.InvalidPassword, pg.InvalidAuthorizationSpecification, pg.InsufficientPrivilege)
_AT_LOGIN: Final[tuple[tuple[re.Pattern[str], type[SourceError], str], ...]] = tuple(
    (re.compile(pattern), error, hint)
    for pattern, error, hint in (
        (
            r"password authentication failed|no password supplied",
            AccessRefused,
            "export WALMERE_SOURCE__PASSWORD='…'  # or PGPASSWORD, ~/.pgpass, a service file",
        ),
        (
            r'no pg_hba\.conf entry for host "([0-9.]+)", user "(.*)", database "(.*?)"',
            AccessRefused,
            """echo 'host "{2}" "{1}" {0}/32 scram-sha-256' >> "$PGDATA/pg_hba.conf" && pg_ctl reload""",
        ),
        (
            r"pg_hba\.conf",
            AccessRefused,
            "-- add a line for this role and database to pg_hba.conf, then: SELECT pg_reload_conf();",
        ),
        (r'role "(.*)" does not exist', AccessRefused, 'CREATE ROLE "{0}" LOGIN REPLICATION;'),
        (r'role "(.*)" is not permitted to log in', AccessRefused, 'ALTER ROLE "{0}" LOGIN;'),
        (
            r"must be superuser or replication|permission denied to start WAL sender",
            AccessRefused,
            "ALTER ROLE … REPLICATION; `walmere check` shows the missing privilege",
        ),
        (r"permission denied for database \"(.*)\"", AccessRefused, 'GRANT CONNECT ON DATABASE "{0}" TO …;'),
        (
            r"authentication failed",
            AccessRefused,
            "-- see pg_hba.conf on the server for the authentication method of this role",
        ),
        (
            r"certificate|does not support SSL",
            AccessRefused,
            "-- check sslmode, sslrootcert and the host name in source.dsn, and the names in the server's certificate",
        ),
        # transient: the walsender of a lost client ends after a while
        (r"max_wal_senders", SourceUnavailable, "ALTER SYSTEM SET max_wal_senders = …;  -- then restart the server"),
        (r'database "(.*)" does not exist', SourceError, 'CREATE DATABASE "{0}";  -- or correct source.dsn'),
    )
)
"""Texts of failed logins, with error class and hint. libpq gives no SQLSTATE for them."""
_GONE: Final = re.compile(
    r"can no longer (get changes|access)|has been invalidated|has already been removed", re.IGNORECASE
)


_TRANSIENT: Final = frozenset({"08", "53", "57", "58", "XX"})
"""Classes of SQLSTATE to retry: connection, resources, operator intervention (a restart), system, internal."""

SLOT_LOST_HINT: Final = (
    "the source removed WAL that the slot needed: `walmere drop`, then `walmere run` copies all tables again; "
    "increase max_slot_wal_keep_size so that this does not happen again"
)
PUBLICATION_WAS_MISSING_HINT: Final = (
    "PostgreSQL before 18 cannot decode changes made while a publication did not exist, even if it exists now. "
    "Create the publication, then `walmere drop` and `walmere run`: all tables are copied again"
)
COLUMN_LISTS_DIFFERED_HINT: Final = (
    "publications had different column lists for this table when it was changed, and PostgreSQL cannot decode that "
    "change, even if the lists are equal now. Make them equal (`walmere check` has the statements), then "
    "`walmere drop` and `walmere run`: all tables are copied again, and can be read meanwhile"
)
ROW_FILTER_HINT: Final = (
    "a row filter of the publication fails for a row; the source's log has the whole message. Correct the row filter. "
    "Changes from before that are decoded with the old one: if the error stays, `walmere drop`, then `walmere run` "
    "copies all tables again"
)
SLOT_MISSING_HINT: Final = (
    "the slot was dropped, so changes may be lost: `walmere drop`, then `walmere run` copies all tables again"
)


def _is_missing(error: psycopg.Error, text: str, what: str) -> bool:
    return isinstance(error, pg.UndefinedObject) and what in text


_BY_ERROR: Final[tuple[tuple[Callable[[psycopg.Error, str], bool], type[SourceError], str], ...]] = (
    (
        lambda error, _: isinstance(error, _ACCESS),
        AccessRefused,
        "`walmere check` shows the missing privilege and the GRANT for it",
    ),
    (
        lambda error, _: isinstance(error, pg.LockNotAvailable),
        TableLocked,
        "Walmere retries; SELECT * FROM pg_locks WHERE granted shows who holds the lock",
    ),
    (lambda _, text: bool(_GONE.search(text)), SlotLost, SLOT_LOST_HINT),
    (
        lambda error, _: isinstance(error, pg.ObjectInUse),
        SlotInUse,
        "only one receiver can use a slot: stop the other one, or set another source.slot",
    ),
    (lambda error, text: _is_missing(error, text, "replication slot"), SlotMissing, SLOT_MISSING_HINT),
    (
        lambda error, text: _is_missing(error, text, "publication") and "output plugin" in (error.diag.context or ""),
        PublicationMissing,
        PUBLICATION_WAS_MISSING_HINT,
    ),
    (
        lambda error, text: _is_missing(error, text, "publication"),
        PublicationMissing,
        "CREATE PUBLICATION … on the source, or correct source.publications",
    ),
    (lambda _, text: "different column lists" in text, ColumnListsDiffer, COLUMN_LISTS_DIFFERED_HINT),
    (
        lambda error, _: isinstance(error, pg.ConfigurationLimitExceeded),
        NotConfigured,
        "increase max_replication_slots or max_wal_senders on the source, then restart it",
    ),
    (
        lambda _, text: "wal_level" in text or "logical decoding" in text,
        NotConfigured,
        "ALTER SYSTEM SET wal_level = 'logical'; then restart the source",
    ),
    (
        lambda error, _: error.sqlstate is None or error.sqlstate[:2] in _TRANSIENT,
        SourceUnavailable,
        "see whether the source can be reached, and its log; a run without --once or --until retries",
    ),
)
"""Errors of the server, with error class and hint. The first that fits counts."""


def translate(error: psycopg.Error, doing: str, scrub: Scrub = lambda text: text) -> SourceError:
    """Convert an error of the server to a SourceError."""
    text = scrub(one_line(error))
    detail = scrub(error.diag.message_detail or "")
    text = f"{text} ({detail})" if detail and detail not in text else text
    if error.sqlstate is None:
        for pattern, kind, hint in _AT_LOGIN:
            if match := pattern.search(text):
                return kind(doing, text, hint.format(*(name.replace('"', '""') for name in match.groups())))
    for fits, kind, hint in _BY_ERROR:
        if fits(error, text):
            return kind(doing, text, hint)
    return SourceError(doing, text)


def error_of(result: PGresult) -> psycopg.Error:
    """The psycopg error for a failed command that was sent through `pgconn`."""
    return pg.error_from_result(result, encoding="utf-8")
