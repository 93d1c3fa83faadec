"""Errors of the target's server: what they are about, and what a user can do. Their texts have no values of rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import errors as pg

from walmere.errors import SinkError, SinkFull, SinkMismatch, SinkRefused, SinkUnavailable
from walmere.libpq import SYNTAX_ERROR, Address, one_line, scrubber, value_error

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
_COPIED_COLUMN: Final = re.compile(r"(?:[^\n]*JSON[^\n]*\n)?COPY [^,]+, \S+ \d+, \S+ ([^:]+): ")
"""The column in the context of an error of COPY, whatever the language of the server. The type JSON adds a line."""
REMOTE_COMMAND: Final = r"^[^\n]*: (?:INSERT INTO|UPDATE|DELETE FROM|TRUNCATE) [^\n]*(?:\n|$)"
"""A regular expression, of Python and PostgreSQL, for the line that postgres_fdw adds to the context of an error."""
NOT_VALID: Final = "22P02"
"""The SQLSTATE of a value that is not valid for its type."""
UNIQUE_VIOLATION: Final = "23505"
REMEDIES: Final = {
    "23502": "alter the constraint of the target",
    "23503": "correct the rows of the target that the foreign key compares, or let its triggers fire only for other"
    " sessions (ALTER TABLE … ENABLE TRIGGER …)",
    UNIQUE_VIOLATION: "change the row of the target that is in the way",
    "23514": "alter the constraint of the target",
    "23P01": "change the conflicting row of the target, or alter the exclusion constraint",
}
"""What to do about a constraint that is violated."""
CREATE_PARTITION: Final = "create a partition for the row at the target"
ALTER_TARGET: Final = "alter the target so that it takes the row"
"""What to do about a row that is refused for another reason."""
CORRECT_TARGET: Final = "correct what the message says at the target"
"""What to do about an error that is neither of a row nor of the session."""


@contextmanager
def translate_errors(address: Address, doing: str, *, of_rows: bool = True) -> Iterator[None]:
    """Convert errors of psycopg to SinkError, without passwords. `of_rows`: False: the statements have no rows."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, doing, scrubber(address), of_rows=of_rows) from None


def is_row_refused(error: psycopg.Error) -> bool:
    """Whether the server has refused a row: another one may be accepted."""
    return error.sqlstate is not None and re.match(ROW_REFUSED, error.sqlstate) is not None


def is_in_function(error: psycopg.Error) -> bool:
    """Whether a function has raised the error, such as that of a trigger. Not for COPY, which adds a line itself."""
    return bool(re.sub(REMOTE_COMMAND, "", error.diag.context or ""))


def is_session_error(error: psycopg.Error) -> bool:
    """Whether the error has nothing to do with what is written."""
    return error.sqlstate is None or re.match(SESSION_ERROR, error.sqlstate) is not None


def translate(error: psycopg.Error, doing: str, scrub: Any = str, *, of_rows: bool = True) -> SinkError:
    """Convert an error of the target's server."""
    text = scrub(without_values(error) if of_rows else _message(error))
    if isinstance(error, pg.DiskFull):
        return SinkFull(doing, text, "make room there; until then, the changes stay in the change log")
    if isinstance(error, _REFUSED) and "session_replication_role" in text:
        hint = "GRANT SET ON PARAMETER session_replication_role TO …;  -- before PostgreSQL 15, only a superuser may"
        return SinkRefused(doing, text, hint)
    if isinstance(error, _REFUSED) or "authentication failed" in text or "no password supplied" in text:
        return SinkRefused(doing, text, "`walmere check` shows the missing privilege and the GRANT for it")
    if is_session_error(error):
        hint = "see whether the target can be reached, and its log; a run without --once or --until retries"
        if isinstance(error, pg.ReadOnlySqlTransaction):
            hint = "the target is a standby or read-only: correct target.dsn, or default_transaction_read_only there"
        return SinkUnavailable(doing, text, hint)
    if (column := _column(error)) is not None and not isinstance(error, pg.IntegrityError):
        hint = "alter the type of the column at the target, so that it can hold the values of the source"
        return SinkError(doing, f"column {column}: {text}", hint)
    if isinstance(error, pg.UndefinedTable | pg.UndefinedColumn | pg.InvalidSchemaName):
        return SinkMismatch(doing, text, "`walmere check` compares the tables of source and target")
    return SinkError(doing, text, _remedy(error))


def _remedy(error: psycopg.Error) -> str:
    if not is_row_refused(error):
        return CORRECT_TARGET
    if isinstance(error, pg.CheckViolation) and error.diag.constraint_name is None:
        return CREATE_PARTITION
    return REMEDIES.get(error.sqlstate or "", ALTER_TARGET)


def without_values(error: psycopg.Error) -> str:
    """The server's message without its detail and context, which show rows; nor that about a value, which shows it.

    An input function may fail with any SQLSTATE: `regclass` with that of a table that does not exist.
    """
    state = error.sqlstate or ""
    if state.startswith("22"):
        return value_error(state)
    if _column(error) is not None and not isinstance(error, pg.IntegrityError) and not is_session_error(error):
        return value_error(NOT_VALID)
    return value_error(state) if state == SYNTAX_ERROR else _message(error)


def _message(error: psycopg.Error) -> str:
    primary = error.diag.message_primary
    return one_line(error) if primary is None else " ".join(primary.split())


def _column(error: psycopg.Error) -> str | None:
    """The column whose value COPY could not read."""
    found = _COPIED_COLUMN.match(error.diag.context or "")
    return None if found is None else found[1].strip()
