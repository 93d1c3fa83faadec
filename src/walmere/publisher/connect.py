"""Connections to the source through libpq, with service files, .pgpass, TLS, SCRAM and several hosts.

psycopg opens the connection; for replication, libpq's functions are then called directly through `pgconn`. (psycopg2
has a replication cursor, but it answers keepalives itself and moves the flushed position to what the server sent.
Walmere must decide itself which LSN is confirmed.)

Every session sets the same output formats, whatever the role or database has set, so that a value from COPY and the
same value from the stream are equal. Passwords never leave this module, not even in errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg
from psycopg import errors as pg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq.abc import PGresult
from psycopg.sql import SQL, Composed
from psycopg.sql import Literal as SqlLiteral

from walmere.config import Source
from walmere.errors import (
    AccessRefused,
    ColumnListsDiffer,
    ConfigError,
    NotConfigured,
    PublicationMissing,
    SlotInUse,
    SlotLost,
    SlotMissing,
    SourceError,
    SourceUnavailable,
    TableLocked,
)
from walmere.publisher.capabilities import Capabilities
from walmere.publisher.silence import WatchedConnection, silence_of

Connection = psycopg.Connection[tuple[Any, ...]]

SESSION: Final = {
    "client_encoding": "UTF8",
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "quote_all_identifiers": "off",
    "search_path": "",
    "row_security": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
}
"""Settings of every session. Text has the same format in all of them. A copy that row security would make partial is an
error. Timeouts that were set for the queries of users do not apply."""

_CONNECT_TIMEOUT: Final = (2, 10)
"""Least (a limit of libpq) and greatest number of seconds for opening a connection."""
_PROBES: Final = 3
"""The connection is lost after this many TCP keepalives without an answer."""
_SECRET: Final = frozenset({"password", "sslpassword"})


def connect(source: Source, application_name: str, *, replication: bool = False) -> WatchedConnection:
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


def conninfo_of(source: Source, application_name: str, **more: str) -> str:
    """The connection string for libpq, with its secrets."""
    defaults = timeouts(source.timeout)
    # drivers must know the encoding from the start: otherwise they encode non-ASCII names as the database does
    ours = {"client_encoding": SESSION["client_encoding"], "application_name": application_name}
    return make_conninfo("", **{**defaults, **_parameters(source), **ours, **more})


def timeouts(seconds: float) -> dict[str, str]:
    """libpq parameters that detect an unreachable host after `seconds`.

    Keepalives are for an idle connection: half of the time passes before the first probe, the probes take the other
    half. `tcp_user_timeout` is for a connection with data that was not acknowledged.
    """
    shortest, longest = _CONNECT_TIMEOUT
    return {
        "connect_timeout": str(min(max(math.ceil(seconds), shortest), longest)),
        "keepalives_idle": str(max(round(seconds / 2), 1)),
        "keepalives_interval": str(max(round(seconds / 2 / _PROBES), 1)),
        "keepalives_count": str(_PROBES),
        "tcp_user_timeout": str(round(seconds * 1000)),
    }


def settings() -> Composed:
    """The statement that applies `SESSION` and returns the backend's pid.

    Settings that this version of the server does not have are skipped.
    """
    rows = (SQL("({}, {})").format(SqlLiteral(name), SqlLiteral(value)) for name, value in SESSION.items())
    return SQL(
        "SELECT pg_catalog.pg_backend_pid(), pg_catalog.set_config(ours.name, ours.value, false)"
        " FROM (VALUES {}) AS ours (name, value)"
        " WHERE pg_catalog.current_setting(ours.name, true) IS NOT NULL"
    ).format(SQL(", ").join(rows))


_NOWHERE: Final = "/nonexistent/walmere"
_INTEGERS: Final = (
    "connect_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
    "tcp_user_timeout",
)
_INTEGER: Final = re.compile(r"\s*[-+]?[0-9]{1,9}\s*\Z")


def check_dsn(source: Source) -> None:
    """Refuse a connection string that libpq would refuse, before anything is started.

    libpq checks the values only when it starts to connect. So it is started here, with a socket path that does not
    exist: a valid string fails on that socket, once for each host. Parameters that are only for TCP are checked here.
    """
    parameters = _parameters(source)
    refused = {name for name in _INTEGERS if not _INTEGER.match(parameters.get(name, "0"))}
    hosts = (parameters.pop("hostaddr", None) or parameters.get("host") or "").count(",") + 1
    if parameters.get("gssencmode") == "require":
        del parameters["gssencmode"]  # a valid value, but not for a socket
    # with a password, libpq does not read .pgpass, and does not warn about its permissions
    probe = {"port": "5432", **parameters, "host": ",".join([_NOWHERE] * hosts), "password": "none"}
    pgconn = pq.PGconn.connect_start(make_conninfo("", **probe).encode())
    text = pgconn.error_message.decode(errors="replace")
    pgconn.finish()
    if text.count(_NOWHERE) < hosts:
        refused |= {name for name in probe if re.search(rf"\b{name}\b", text)} or {"a value"}
    if refused:
        raise ConfigError(
            "reading source.dsn",
            f"libpq does not accept the value of: {', '.join(sorted(refused))}",
            "the chapter on libpq in PostgreSQL's documentation lists the connection parameters",
        )


def dsn_without_secrets(source: Source, **more: str) -> str:
    """The connection string without passwords, for commands to paste."""
    return make_conninfo("", **{k: v for k, v in _parameters(source).items() if k not in _SECRET} | more)


def describe(source: Source) -> str:
    """Host, port and database of a connection, for messages. Never has a password."""
    p = _parameters(source)
    if p.get("service"):
        return f"service {p['service']}"
    where = p.get("host") or p.get("hostaddr") or "the local socket"
    port = f":{p['port']}" if p.get("port") else ""
    return f"{where}{port}/{p.get('dbname') or p.get('user') or ''}"


def capabilities(connection: Connection) -> Capabilities:
    """The capabilities of the connected server."""
    return Capabilities(connection.info.server_version)


_NESTED: Final = re.compile(r"postgres(?:ql)?://|password\s*=")
_UNENCODED: Final = re.compile(r"postgres(?:ql)?://(?:[^/]*@[^/]*|[^/]*/[^?]*)@")


def _parameters(source: Source) -> dict[str, Any]:
    dsn = source.dsn.get_secret_value()
    parameters: dict[str, Any] | None = None
    with suppress(psycopg.Error):
        parameters = {name: value for name, value in conninfo_to_dict(dsn).items() if value is not None}
    # libpq's message would show the whole string, with the password. A password with an unencoded @ or / is parsed,
    # but a part of it becomes the host or database, which is shown in messages.
    if parameters is None or _UNENCODED.match(dsn) or _NESTED.search(parameters.get("dbname", "")):
        raise ConfigError(
            "reading source.dsn",
            "it is not a PostgreSQL connection string",
            'write it as "postgresql://user@host:5432/database" or "host=… dbname=… user=…"; '
            "in a URI, percent-encode special characters",
        )
    parameters.pop("replication", None)  # `connect` decides whether a connection is for replication
    if source.password is not None:
        parameters["password"] = source.password.get_secret_value()
    return parameters


@contextmanager
def translate_errors(source: Source, doing: str) -> Iterator[None]:
    """Convert errors of psycopg to SourceError, without passwords."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, doing, _scrubber(source)) from None


Scrub = Callable[[str], str]


def _scrubber(source: Source) -> Scrub:
    secrets = [source.dsn.get_secret_value(), *(v for k, v in _parameters(source).items() if k in _SECRET)]

    def scrub(text: str) -> str:
        for secret in filter(None, secrets):
            text = text.replace(secret, "***")
        return text

    return scrub


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
        "Walmere retries; if this repeats, see the log of the source",
    ),
)
"""Errors of the server, with error class and hint. The first that fits counts."""


def translate(error: psycopg.Error, doing: str, scrub: Scrub = lambda text: text) -> SourceError:
    """Convert an error of the server to a SourceError."""
    text = scrub(" ".join(str(error).split()))
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
