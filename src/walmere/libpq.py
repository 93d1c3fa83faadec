"""What both ends of a subscription ask of libpq: connection strings, and the settings of every session.

Every session sets the same output formats, whatever the role or database has set, so that a value from COPY, the same
value from the stream and the same value in the target are equal as text. Passwords never leave this module, not even in
errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Final, Protocol, Self, TypeVar

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.sql import SQL, Composed
from psycopg.sql import Literal as SqlLiteral
from pydantic import SecretStr

from walmere.errors import ConfigError


class Address(Protocol):
    """A server and how to log in there: the sections [source] and [target] of the configuration."""

    section: ClassVar[str]

    @property
    def dsn(self) -> SecretStr: ...
    @property
    def password(self) -> SecretStr | None: ...
    @property
    def timeout(self) -> float: ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...


SomeAddress = TypeVar("SomeAddress", bound=Address)


SESSION: Final = {
    "client_encoding": "UTF8",
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "quote_all_identifiers": "off",
    "search_path": "",
    "standard_conforming_strings": "on",
    "row_security": "off",
    "array_nulls": "on",
    "xmloption": "content",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
}
"""Settings of every session. Text has the same format in all of them. A copy that row security would make partial is an
error. Timeouts and defaults of transactions that were set for the queries of users do not apply."""

_CONNECT_TIMEOUT: Final = (2, 10)
"""Least (a limit of libpq) and greatest number of seconds for opening a connection."""
_PROBES: Final = 3
"""The connection is lost after this many TCP keepalives without an answer."""
_SECRET: Final = frozenset({"password", "sslpassword"})


def conninfo_of(address: Address, application_name: str, **more: str) -> str:
    """The connection string for libpq, with its secrets."""
    defaults = timeouts(address.timeout)
    # drivers must know the encoding from the start: otherwise they encode non-ASCII names as the database does
    ours = {"client_encoding": SESSION["client_encoding"], "application_name": application_name}
    return make_conninfo("", **{**defaults, **parameters_of(address), **ours, **more})


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


def check_dsn(address: Address) -> None:
    """Refuse a connection string that libpq would refuse, before anything is started.

    libpq checks the values only when it starts to connect. So it is started here, with a socket path that does not
    exist: a valid string fails on that socket, once for each host. Parameters that are only for TCP are checked here.
    """
    parameters = parameters_of(address)
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
            f"reading {address.section}.dsn",
            f"libpq does not accept the value of: {', '.join(sorted(refused))}",
            "the chapter on libpq in PostgreSQL's documentation lists the connection parameters",
        )


def dsn_without_secrets(address: Address, **more: str) -> str:
    """The connection string without passwords, for commands to paste."""
    return make_conninfo("", **{k: v for k, v in parameters_of(address).items() if k not in _SECRET} | more)


def describe(address: Address) -> str:
    """Host, port and database of a connection, for messages. Never has a password."""
    p = parameters_of(address)
    if p.get("service"):
        return f"service {p['service']}"
    where = p.get("host") or p.get("hostaddr") or "the local socket"
    port = f":{p['port']}" if p.get("port") else ""
    return f"{where}{port}/{p.get('dbname') or p.get('user') or ''}"


_NESTED: Final = re.compile(r"postgres(?:ql)?://|password\s*=")
_UNENCODED: Final = re.compile(r"postgres(?:ql)?://(?:[^/]*@[^/]*|[^/]*/[^?]*)@")


def parameters_of(address: Address) -> dict[str, Any]:
    """The connection parameters, with secrets. Raises ConfigError for a text that is not a connection string."""
    dsn = address.dsn.get_secret_value()
    parameters: dict[str, Any] | None = None
    with suppress(psycopg.Error):
        parameters = {name: value for name, value in conninfo_to_dict(dsn).items() if value is not None}
    # libpq's message would show the whole string, with the password. A password with an unencoded @ or / is parsed,
    # but a part of it becomes the host or database, which is shown in messages.
    if parameters is None or _UNENCODED.match(dsn) or _NESTED.search(parameters.get("dbname", "")):
        raise ConfigError(
            f"reading {address.section}.dsn",
            "it is not a PostgreSQL connection string",
            'write it as "postgresql://user@host:5432/database" or "host=… dbname=… user=…"; '
            "in a URI, percent-encode special characters",
        )
    parameters.pop("replication", None)  # `connect` decides whether a connection is for replication
    if address.password is not None:
        parameters["password"] = address.password.get_secret_value()
    return parameters


_OF_THIS_MACHINE: Final = ("service", "servicefile", "passfile", "password")
_OF_A_CONNECTION: Final = ("application_name", "fallback_application_name", "client_encoding", "replication")


def self_contained(address: SomeAddress) -> SomeAddress:
    """The same address for another machine: with what libpq takes from this one.

    That is what the environment, the service file and the password file of this machine say. Files of certificates are
    still named by their paths.
    """
    # libpq looks up the password when it starts to connect; with several hosts, the one of the first host
    pgconn = pq.PGconn.connect_start(make_conninfo("", **parameters_of(address)).encode())
    try:
        found = {
            option.keyword.decode(): option.val.decode()
            for option in pgconn.info
            if option.val is not None and option.val != option.compiled
        }
        password = pgconn.password.decode()
    finally:
        pgconn.finish()
    for name in (*_OF_THIS_MACHINE, *_OF_A_CONNECTION):
        found.pop(name, None)
    dsn = make_conninfo("", **found, **({"password": password} if password else {}))
    return address.model_copy(update={"dsn": SecretStr(dsn), "password": None})


Scrub = Callable[[str], str]


def one_line(error: psycopg.Error) -> str:
    """The text of an error in one line, without the question that libpq asks after a refused connection."""
    text = re.sub(r"\s*Is the server running [^\n]*", "", str(error))
    text = re.sub(r"\bconnection (failed|is bad): ", "", text)
    text = text.replace("\nMultiple connection attempts failed", ". Multiple connection attempts failed")
    return " ".join(text.split())


VALUE_ERRORS: Final = {
    "22001": "value too long",
    "22003": "value out of range",
    "22007": "value not valid",
    "22008": "value out of range",
    "22012": "division by zero",
    "22015": "value out of range",
    "22021": "a character is not in the encoding of the database",
    "22026": "value of another length",
    "22P02": "value not valid",
    "22P05": "a character is not in the encoding of the database",
}
"""What is wrong with a value, by SQLSTATE. The server's message would show the value, in the server's language."""
SYNTAX_ERROR: Final = "42601"
"""The SQLSTATE that some types have for a value, such as tsquery and jsonpath."""


def value_error(sqlstate: str) -> str:
    """What is wrong with a value."""
    return VALUE_ERRORS.get(sqlstate, f"SQLSTATE {sqlstate}")


def scrubber(address: Address) -> Scrub:
    """A function that replaces the secrets of a connection in a text."""
    secrets = [address.dsn.get_secret_value(), *(v for k, v in parameters_of(address).items() if k in _SECRET)]

    def scrub(text: str) -> str:
        for secret in filter(None, secrets):
            text = text.replace(secret, "***")
        return text

    return scrub
