"""Connections to the target, and its errors."""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import errors as pg

from walmere.errors import SinkError, SinkFull, SinkMismatch, SinkRefused, SinkUnavailable
from walmere.libpq import Address, conninfo_of, describe, one_line, scrubber, settings
from walmere.sinks.postgres.text import TextArray, TextArrayDumper

Connection = psycopg.Connection[tuple[Any, ...]]

_TRANSIENT: Final = frozenset({"08", "40", "53", "55", "57", "58", "XX"})
"""Classes of SQLSTATE to retry: connection, deadlock, resources, locks, operator intervention, system, internal."""
_ROW_CLASSES: Final = frozenset({"21", "22", "23", "44", "54"})
"""Classes of SQLSTATE: cardinality, a value that is not valid or too long, a constraint, WITH CHECK OPTION, a limit of
the server (a value that is too long for an index; a table with too many columns for one statement)."""
_POSTGRES_CLASSES: Final = "0[012389ABFLPZ]|10|2[0-8BDF]|3[489BDF]|4[024]|5[34578]|72|F0|HV|P0|XX"
"""All classes of SQLSTATE that PostgreSQL has. Triggers may raise others."""
ROW_REFUSED: Final = f"^(?:{'|'.join(sorted(_ROW_CLASSES))}|P0001|(?!{_POSTGRES_CLASSES}))"
"""A regular expression, of Python and PostgreSQL, for the SQLSTATE of a row that is refused."""
SESSION_ERROR: Final = "^(?:08|25|40|53|55P|57|58|72|XX)"
"""The same for errors that have nothing to do with what is written. Of class 55, this is a lock that is not available;
the others (55000, 55006) are about the state of a table, such as one that publishes updates without a replica identity.

With a SQLSTATE that is neither this nor `ROW_REFUSED`, the target must be corrected: a trigger or a function fails, a
privilege is missing.
"""
_REFUSED: Final = (pg.InvalidPassword, pg.InvalidAuthorizationSpecification, pg.InsufficientPrivilege)
_COPIED_COLUMN: Final = re.compile(r"COPY [^,]+, \S+ \d+, \S+ ([^:]+): ")
"""The column in the context of an error of COPY, whatever the language of the server."""
_open: dict[tuple[int, str], Connection] = {}
_opening: Final = threading.Lock()


def connect(address: Address, application_name: str) -> Connection:
    """Open a connection whose session applies changes as a subscriber: triggers and rules fire only if enabled so."""
    with translate_errors(address, f"connecting to the target {describe(address)}"):
        connection: Connection = psycopg.connect(
            conninfo_of(address, application_name),
            autocommit=True,
            prepare_threshold=None,
            cursor_factory=psycopg.RawCursor,  # parameters are $1: names of tables may have a percent sign
        )
        try:
            connection.adapters.register_dumper(TextArray, TextArrayDumper)
            connection.execute(settings())
            connection.execute("SET session_replication_role = replica")
        except psycopg.Error:
            connection.close()
            raise
    return connection


@contextmanager
def reused(address: Address, application_name: str) -> Iterator[Connection]:
    """A connection that this process keeps for its next task. It is closed after an error."""
    name = (os.getpid(), conninfo_of(address, application_name))
    with _opening:
        connection = _open.pop(name, None)
    if connection is None or connection.closed:
        connection = connect(address, application_name)
    try:
        yield connection
    except BaseException:
        connection.close()
        raise
    with _opening:
        unused = _open.pop(name, None)
        _open[name] = connection
    if unused is not None:
        unused.close()


@atexit.register
def _close_all() -> None:
    """Close what this process has kept; not what it has from the process that it was forked from."""
    for (pid, _), connection in _open.items():
        if pid == os.getpid():
            connection.close()


@contextmanager
def translate_errors(address: Address, doing: str) -> Iterator[None]:
    """Convert errors of psycopg to SinkError, without passwords."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, doing, scrubber(address)) from None


def is_row_refused(error: psycopg.Error) -> bool:
    """Whether the server has refused a row: another one may be accepted."""
    return error.sqlstate is not None and re.match(ROW_REFUSED, error.sqlstate) is not None


def is_session_error(error: psycopg.Error) -> bool:
    """Whether the error has nothing to do with what is written."""
    return error.sqlstate is None or re.match(SESSION_ERROR, error.sqlstate) is not None


def translate(error: psycopg.Error, doing: str, scrub: Any = str) -> SinkError:
    """Convert an error of the target's server."""
    text = scrub(without_values(error))
    if isinstance(error, pg.DiskFull):
        return SinkFull(doing, text, "make room there; until then, the changes stay in the change log")
    if isinstance(error, _REFUSED) and "session_replication_role" in text:
        hint = "GRANT SET ON PARAMETER session_replication_role TO …;  -- before PostgreSQL 15, only a superuser may"
        return SinkRefused(doing, text, hint)
    if isinstance(error, _REFUSED) or "authentication failed" in text or "no password supplied" in text:
        return SinkRefused(doing, text, "`walmere check` shows the missing privilege and the GRANT for it")
    if isinstance(error, pg.UndefinedTable | pg.UndefinedColumn | pg.InvalidSchemaName):
        return SinkMismatch(doing, text, "`walmere check` compares the tables of source and target")
    if error.sqlstate is None or error.sqlstate[:2] in _TRANSIENT:
        hint = "see whether the target can be reached, and its log; a run without --once or --until retries"
        return SinkUnavailable(doing, text, hint)
    column = _COPIED_COLUMN.match(error.diag.context or "")
    if error.sqlstate.startswith("22") and column is not None:
        hint = "alter the type of the column at the target, so that it can hold the values of the source"
        return SinkError(doing, f"column {column[1]}: {text}", hint)
    return SinkError(doing, text)


def without_values(error: psycopg.Error) -> str:
    """The server's message without its detail and context, which show rows; and without a value that is not valid."""
    primary = error.diag.message_primary
    text = one_line(error) if primary is None else " ".join(primary.split())
    invalid = error.sqlstate is not None and error.sqlstate.startswith("22")
    return re.sub(r'"[^"]*"', '"…"', text.partition(': "')[0]) if invalid else text
