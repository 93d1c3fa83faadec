"""Connections to the source, through libpq with everything it knows: service files, .pgpass, TLS, SCRAM, several hosts.

psycopg makes the connection; for replication we then drive libpq's own calls, which psycopg exposes as `pgconn`.
(psycopg2 has a replication cursor, but that one answers keepalives by itself and moves the flushed position forward to
what the server says: the confirmed LSN would no longer be ours to decide.)

Every session says the same about how values look as text, whatever the role or database has set: that is what makes a
value from COPY and the same value from the stream equal. Passwords never leave this module, in errors either.
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
"""Settings of every session: text looks the same in all of them, a copy that row security would make partial is an
error instead, and no timeout that is meant for people's queries ends ours."""

_CONNECT_TIMEOUT: Final = (2, 10)
"""Seconds for a connection to be made, at least (libpq has no less) and at most."""
_PROBES: Final = 3
"""TCP keepalives without an answer after which the connection is lost."""
_SECRET: Final = frozenset({"password", "sslpassword"})


def connect(source: Source, application_name: str, *, replication: bool = False) -> WatchedConnection:
    """Open a connection: an ordinary one, or one for replication of a database."""
    more = {"replication": "database"} if replication else {}
    with translate_errors(source, f"connecting to {describe(source)}"):
        conninfo = conninfo_of(source, application_name, **more)
        connection = WatchedConnection.connect(conninfo, autocommit=True, prepare_threshold=None)
        second = conninfo_of(source, f"{application_name} timeout")
        try:
            connection.silence = silence_of(connection, second, connection.info.backend_pid, source.timeout)
            row = connection.execute(settings()).fetchone()
            assert row is not None
            connection.silence = silence_of(connection, second, row[0], source.timeout)  # a pooler says another one
        except psycopg.Error:
            connection.close()
            raise
    return connection


def conninfo_of(source: Source, application_name: str, **more: str) -> str:
    """The connection string for libpq, with its secrets."""
    defaults = timeouts(source.timeout)
    # drivers take it from here: one that finds out later still writes non-ASCII names in the database's encoding
    ours = {"client_encoding": SESSION["client_encoding"], "application_name": application_name}
    return make_conninfo("", **{**defaults, **_parameters(source), **ours, **more})


def timeouts(seconds: float) -> dict[str, str]:
    """What libpq has for a host that has vanished: half of the time without an answer, then probes for the other half.

    Probes are for a connection on which nothing is under way, `tcp_user_timeout` for one on which something is.
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
    """The statement that makes a session one of ours, and gives its backend's pid.

    What this version of the server does not have is left out.
    """
    each = (SQL("({}, {})").format(SqlLiteral(name), SqlLiteral(value)) for name, value in SESSION.items())
    return SQL(
        "SELECT pg_catalog.pg_backend_pid(), pg_catalog.set_config(ours.name, ours.value, false)"
        " FROM (VALUES {}) AS ours (name, value)"
        " WHERE pg_catalog.current_setting(ours.name, true) IS NOT NULL"
    ).format(SQL(", ").join(each))


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
    """Refuse a connection string that libpq would refuse by its form, before anything is started.

    libpq looks at the values only when it begins to connect. So it may begin, at a socket that cannot be there: a
    string that is good fails on that socket, once for each host. What is only for TCP is looked at here.
    """
    parameters = _parameters(source)
    refused = {name for name in _INTEGERS if not _INTEGER.match(parameters.get(name, "0"))}
    hosts = (parameters.pop("hostaddr", None) or parameters.get("host") or "").count(",") + 1
    if parameters.get("gssencmode") == "require":
        del parameters["gssencmode"]  # a good value, but not for a socket
    # a password that is given keeps libpq from looking for one, and from warning about a .pgpass it finds
    probe = {"port": "5432", **parameters, "host": ",".join([_NOWHERE] * hosts), "password": "none"}
    pgconn = pq.PGconn.connect_start(make_conninfo("", **probe).encode())
    said = pgconn.error_message.decode(errors="replace")
    pgconn.finish()
    if said.count(_NOWHERE) < hosts:
        refused |= {name for name in probe if re.search(rf"\b{name}\b", said)} or {"a value"}
    if refused:
        raise ConfigError(
            "reading source.dsn",
            f"libpq does not accept the value of: {', '.join(sorted(refused))}",
            "see the connection parameters in PostgreSQL's documentation of libpq",
        )


def shown(source: Source, **more: str) -> str:
    """The connection string without its secrets, for commands that people paste."""
    return make_conninfo("", **{k: v for k, v in _parameters(source).items() if k not in _SECRET} | more)


def describe(source: Source) -> str:
    """Where a connection goes, for people. Never has a password."""
    p = _parameters(source)
    if p.get("service"):
        return f"service {p['service']}"
    where = p.get("host") or p.get("hostaddr") or "the local socket"
    port = f":{p['port']}" if p.get("port") else ""
    return f"{where}{port}/{p.get('dbname') or p.get('user') or ''}"


def capabilities(connection: Connection) -> Capabilities:
    """What the server at the other end can do."""
    return Capabilities(connection.info.server_version)


_NESTED: Final = re.compile(r"postgres(?:ql)?://|password\s*=")
_ASTRAY: Final = re.compile(r"postgres(?:ql)?://(?:[^/]*@[^/]*|[^/]*/[^?]*)@")


def _parameters(source: Source) -> dict[str, Any]:
    dsn = source.dsn.get_secret_value()
    parameters: dict[str, Any] | None = None
    with suppress(psycopg.Error):
        parameters = {name: value for name, value in conninfo_to_dict(dsn).items() if value is not None}
    # libpq's own message would repeat the string, password and all. And a password with a bare @ or / in it, or a
    # string as the name of the database, does parse, but into a host or database that would be shown.
    if parameters is None or _ASTRAY.match(dsn) or _NESTED.search(parameters.get("dbname", "")):
        raise ConfigError(
            "reading source.dsn",
            "it is not a connection string of PostgreSQL",
            'write it as "postgresql://user@host:5432/database" or "host=… dbname=… user=…"; '
            "in a URI, special characters are percent-encoded",
        )
    parameters.pop("replication", None)  # whether a connection is for replication is not the string's to say
    if source.password is not None:
        parameters["password"] = source.password.get_secret_value()
    return parameters


@contextmanager
def translate_errors(source: Source, doing: str) -> Iterator[None]:
    """Turn what psycopg raises into our own errors, without any password."""
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
    (re.compile(said), error, hint)
    for said, error, hint in (
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
            "ALTER ROLE … REPLICATION; `walmere check` tells which right is missing",
        ),
        (r"permission denied for database \"(.*)\"", AccessRefused, 'GRANT CONNECT ON DATABASE "{0}" TO …;'),
        (r"authentication failed", AccessRefused, "-- see pg_hba.conf for how this role has to show who it is"),
        (
            r"certificate|does not support SSL",
            AccessRefused,
            "-- see sslmode, sslrootcert and the host's name in source.dsn, and the names in the server's certificate",
        ),
        # a walsender whose client is gone frees its place, if late
        (r"max_wal_senders", SourceUnavailable, "ALTER SYSTEM SET max_wal_senders = …;  -- then restart the server"),
        (r'database "(.*)" does not exist', SourceError, 'CREATE DATABASE "{0}";  -- or correct source.dsn'),
    )
)
"""What a login that cannot succeed says. libpq gives no SQLSTATE for it, only the text."""
_GONE: Final = re.compile(
    r"can no longer (get changes|access)|has been invalidated|has already been removed", re.IGNORECASE
)


def translate(error: psycopg.Error, doing: str, scrub: Scrub = lambda text: text) -> SourceError:
    """The one table of what the server may say, and what that means to us."""
    text = scrub(" ".join(str(error).split()))
    detail = scrub(error.diag.message_detail or "")
    text = f"{text} ({detail})" if detail and detail not in text else text
    if error.sqlstate is None:
        for said, kind, advice in _AT_LOGIN:
            if match := said.search(text):
                return kind(doing, text, advice.format(*(name.replace('"', '""') for name in match.groups())))
    if isinstance(error, _ACCESS):
        return AccessRefused(doing, text, "`walmere check` tells which right is missing")
    if isinstance(error, pg.LockNotAvailable):
        return TableLocked(doing, text, "it is tried again; SELECT * FROM pg_locks WHERE granted shows who has it")
    if _GONE.search(text):
        return SlotLost(doing, text, LOST)
    if isinstance(error, pg.ObjectInUse):
        return SlotInUse(doing, text, "only one receiver can use a slot; end the other, or give this one its own slot")
    if isinstance(error, pg.UndefinedObject) and "replication slot" in text:
        return SlotMissing(doing, text, MISSING)
    if isinstance(error, pg.UndefinedObject) and "publication" in text:
        if "output plugin" in (error.diag.context or ""):
            return PublicationMissing(doing, text, UNDECODABLE)
        return PublicationMissing(doing, text, "CREATE PUBLICATION … on the source, or correct source.publications")
    if "different column lists" in text:
        return ColumnListsDiffer(doing, text, STUCK)
    if isinstance(error, pg.ConfigurationLimitExceeded):
        return NotConfigured(
            doing, text, "raise max_replication_slots or max_wal_senders on the source, and restart it"
        )
    if "wal_level" in text or "logical decoding" in text:
        return NotConfigured(doing, text, "ALTER SYSTEM SET wal_level = 'logical'; then restart the source")
    if error.sqlstate is None or error.sqlstate[:2] in _PASSING:
        return SourceUnavailable(doing, text, "it is tried again; see the source's log if it goes on")
    return SourceError(doing, text)


_PASSING: Final = frozenset({"08", "53", "57", "58", "XX"})
"""Classes of SQLSTATE that may pass: connection, resources, operator intervention (a restart), system, internal."""

LOST: Final = (
    "the source removed WAL that the slot needed: `walmere drop`, then begin anew; "
    "raise max_slot_wal_keep_size so that it does not happen again"
)
UNDECODABLE: Final = (
    "PostgreSQL before 18 never decodes what was changed while a publication was missing, even if it is there again: "
    "see that it is, then `walmere drop`, and begin anew"
)
STUCK: Final = (
    "two publications had different column lists for this table when it was changed, and PostgreSQL never decodes that "
    "change, even if the lists are equal now. Make them equal (`walmere check` has the statements), then "
    "`walmere drop` and `walmere run`: all tables are copied again, and can be read meanwhile"
)
MISSING: Final = "somebody dropped the slot, so changes may be lost: `walmere drop`, then begin anew"


def error_of(result: PGresult) -> psycopg.Error:
    """The psycopg error for a failed command that was given below psycopg."""
    return pg.error_from_result(result, encoding="utf-8")
