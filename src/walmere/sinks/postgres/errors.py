"""Errors of the target's server: what they are about, and what a user can do. Their texts have no values of rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import errors as pg

from walmere.errors import SinkError, SinkFull, SinkMismatch, SinkRefused, SinkUnavailable
from walmere.libpq import Address, one_line, scrubber

_ROW_CLASSES: Final = frozenset({"21", "22", "23", "44", "54"})
"""Classes of SQLSTATE: cardinality, a value that is not valid or too long, a constraint, WITH CHECK OPTION, a limit of
the server (a value that is too long for an index; a table with too many columns for one statement)."""
_POSTGRES_CLASSES: Final = "0[012389ABFLPZ]|10|2[0-8BDF]|3[489BDF]|4[024]|5[34578]|72|F0|HV|P0|XX"
"""All classes of SQLSTATE that PostgreSQL has. Triggers may raise others."""
ROW_REFUSED: Final = f"^(?:{'|'.join(sorted(_ROW_CLASSES))}|P0001|(?!{_POSTGRES_CLASSES}))"
"""A regular expression, of Python and PostgreSQL, for the SQLSTATE of a row that is refused."""
SESSION_ERROR: Final = "^(?:08|25|40|53|55P|57|58|72|XX)"
"""The same for errors that have nothing to do with what is written: connection, deadlock, resources, locks, operator
intervention, system, internal. They may pass, so they are retried. Of class 55, this is a lock that is not available;
the others (55000, 55006) are about the state of a table, such as one that publishes updates without a replica identity.

With a SQLSTATE that is neither this nor `ROW_REFUSED`, the target must be corrected: a trigger or a function fails, a
privilege is missing.
"""
_REFUSED: Final = (pg.InvalidPassword, pg.InvalidAuthorizationSpecification, pg.InsufficientPrivilege)
_COPIED_COLUMN: Final = re.compile(r"COPY [^,]+, \S+ \d+, \S+ ([^:]+): ")
"""The column in the context of an error of COPY, whatever the language of the server."""
CORRECT_TARGET: Final = "correct what the message says at the target"
"""What to do about an error that is neither of a row nor of the session."""


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
    if is_session_error(error):
        hint = "see whether the target can be reached, and its log; a run without --once or --until retries"
        if isinstance(error, pg.ReadOnlySqlTransaction):
            hint = "the target is a standby or read-only: correct target.dsn, or default_transaction_read_only there"
        return SinkUnavailable(doing, text, hint)
    column = _COPIED_COLUMN.match(error.diag.context or "")
    if error.sqlstate is not None and error.sqlstate.startswith("22") and column is not None:
        hint = "alter the type of the column at the target, so that it can hold the values of the source"
        return SinkError(doing, f"column {column[1]}: {text}", hint)
    return SinkError(doing, text, "" if is_row_refused(error) else CORRECT_TARGET)


def without_values(error: psycopg.Error) -> str:
    """The server's message without its detail and context, which show rows; and without a value that is not valid."""
    primary = error.diag.message_primary
    text = one_line(error) if primary is None else " ".join(primary.split())
    invalid = error.sqlstate is not None and error.sqlstate.startswith("22")
    return re.sub(r'"[^"]*"', '"…"', text.partition(': "')[0]) if invalid else text
