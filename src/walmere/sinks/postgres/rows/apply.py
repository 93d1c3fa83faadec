"""Changes that are applied row by row, in the order of the source, by one PL/pgSQL block on the target's server.

This is for what sets of rows cannot do as PostgreSQL's own subscriber does:

- tables with triggers or rules that are enabled for a subscriber: each change has to fire them, in order;
- tables in which a key can have several rows, of which one is changed;
- a set that failed: two rows that swap a unique value violate the constraint in passing, and one that really violates
  it has to be named.

All changes go to one temporary table of the session, with their values as arrays of text. The block loops over it. So
rows are not sent back and forth, and tables are changed in the order of the source, also among each other. (A
transaction that has used a temporary table cannot be prepared, and not every role may create one: then it is a table of
Walmere's schema.)

`changes` describes the changes, `block` is the block, `conflicts` is about rows that the target refuses, and `refused`
is the error for one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import psycopg
import pyarrow as pa
from numpy.typing import NDArray
from psycopg.sql import SQL, Identifier

from walmere.errors import Conflict
from walmere.sinks.postgres.connect import Connection
from walmere.sinks.postgres.errors import is_row_refused, is_session_error, without_values
from walmere.sinks.postgres.relation import require_same
from walmere.sinks.postgres.rows.block import block
from walmere.sinks.postgres.rows.changes import RowChanges, RowPiece, TruncateRows
from walmere.sinks.postgres.rows.conflicts import SQLSTATE
from walmere.sinks.postgres.rows.refused import Refused, conflict_of
from walmere.sinks.postgres.state import STAGED_COLUMNS, State
from walmere.sinks.postgres.text import array_rows, copy_text, text_array

_STAGING: Final = f"CREATE TEMP TABLE IF NOT EXISTS walmere_changes ({STAGED_COLUMNS}) ON COMMIT DELETE ROWS"
_LINE: Final = re.compile(r"^COPY [a-z_]+\D+(\d+)")
"""The number of a line in the context of an error, whatever the language of the server."""


@dataclass(frozen=True, slots=True)
class RowMode:
    """How changes are applied row by row.

    `our_origins`: a change of a row that was written last by another origin is recorded. None: the server does not
    track who has written a row.
    """

    on_conflict: str
    our_origins: Sequence[int] | None
    prepares: bool  # the transaction will be prepared


def apply_rows(
    connection: Connection,
    state: State,
    changes: Sequence[RowChanges],
    truncates: Sequence[TruncateRows],
    mode: RowMode,
) -> bool:
    """Apply changes row by row, in the transaction of the connection. Raises Conflict.

    Returns whether the target has refused rows, which may have been skipped or overwritten.
    """
    temporary = not mode.prepares and _may_create_temporary(connection)
    staging = Identifier("pg_temp", "walmere_changes") if temporary else Identifier(state.schema, "staged_changes")
    if temporary:
        connection.execute(_STAGING)
        connection.execute(SQL("TRUNCATE {}").format(staging))  # of an earlier try in this transaction
    _stage(connection, changes, truncates, staging)
    refused = _run(connection, state, changes, staging, mode)
    if not temporary:
        connection.execute(SQL("DELETE FROM {}").format(staging))
    return refused


def _may_create_temporary(connection: Connection) -> bool:
    [(allowed,)] = connection.execute("SELECT has_database_privilege(current_database(), 'TEMP')").fetchall()
    return bool(allowed)


def _stage(
    connection: Connection, changes: Sequence[RowChanges], truncates: Sequence[TruncateRows], staging: Identifier
) -> None:
    for number, each in enumerate(changes):
        for piece in each.pieces:
            try:
                _copy(connection, staging, _staged(number, piece))
            except psycopg.DataError as error:  # a character that the target's encoding does not have
                line = _LINE.match(error.diag.context or "")
                if line is None:
                    raise
                raise _refused(each, piece, int(line[1]) - 1, error) from None
    _copy(connection, staging, _staged_truncates(truncates))


def _copy(connection: Connection, staging: Identifier, rows: pa.Table) -> None:
    with connection.cursor() as cursor, cursor.copy(SQL("COPY {} FROM STDIN").format(staging)) as copy:
        for text in copy_text(rows):
            copy.write(text)


def _refused(changes: RowChanges, piece: RowPiece, place: int, error: psycopg.Error) -> Conflict:
    """The error for a change that cannot be staged, by its place in the piece."""
    key = {name: _shown(piece, name, place) for name in changes.shown_key}
    refused = Refused(
        conflict={"I": "insert_failed", "U": "update_failed"}.get(chr(piece.kind[place]), "delete_failed"),
        relation=str(changes.relation.table),
        key=json.dumps(key) if key else None,
        constraint=None,
        message=without_values(error),
        sqlstate=error.sqlstate or "",
        commit_lsn=int(piece.commit_lsn[place]),
    )
    return conflict_of(refused, on_conflict=None)


def _shown(piece: RowPiece, name: str, place: int) -> str | None:
    """A value of the key."""
    value = piece.old[name][place].as_py() if name in piece.old.column_names else None
    value = piece.new[name][place].as_py() if value is None else value
    return None if value is None else value.decode(errors="replace")


def _run(
    connection: Connection,
    state: State,
    changes: Sequence[RowChanges],
    staging: Identifier,
    mode: RowMode,
) -> bool:
    """Run the block. The first try has no subtransaction for each row. Returns whether a second one was needed."""
    try:
        with connection.transaction():
            connection.execute(block(state, changes, staging, None, mode.our_origins))
        return False
    except psycopg.Error as error:
        if is_session_error(error):
            raise
        if not is_row_refused(error):
            require_same(connection, [(each.relation.table, each.names) for each in changes])
            state.require(connection)
    try:
        with connection.transaction():
            connection.execute(block(state, changes, staging, mode.on_conflict, mode.our_origins))
        return True
    except psycopg.Error as error:
        if error.sqlstate != SQLSTATE:
            raise
        raise conflict_of(Refused.from_json(error.diag.message_detail or "{}"), mode.on_conflict) from None


def _staged_truncates(truncates: Sequence[TruncateRows]) -> pa.Table:
    """Rows of the temporary table whose new value is a statement, and whose old ones are its tables."""
    count = len(truncates)
    names = [pa.array([name.encode() for name in each.tables], pa.binary()) for each in truncates]
    statements = pa.array([each.statement.encode() for each in truncates], pa.binary())
    return pa.table(
        {
            "commit_lsn": _numbers(np.array([each.commit_lsn for each in truncates], np.int64)),
            "sequence": _numbers(np.array([each.sequence for each in truncates], np.int64)),
            "relation": _numbers(np.full(count, -1)),
            "kind": pa.array([b"T"] * count, pa.binary()),
            "old": pa.array([text_array(each).literal for each in names], pa.binary()),
            "new": array_rows([statements], count),
            "unchanged": pa.nulls(count, pa.binary()),
        }
    )


def _numbers(values: Any) -> pa.Array:
    """Numbers as text."""
    return pa.array(values).cast(pa.string()).cast(pa.binary())


def _staged(number: int, changes: RowPiece) -> pa.Table:
    count = len(changes.kind)
    unchanged = pa.nulls(count, pa.binary())
    if any(mask is not None for mask in changes.unchanged):
        unchanged = array_rows([_flags(mask, count) for mask in changes.unchanged], count)

    return pa.table(
        {
            "commit_lsn": _numbers(changes.commit_lsn.astype(np.int64)),
            "sequence": _numbers(changes.sequence.astype(np.int64)),
            "relation": _numbers(np.full(count, number)),
            "kind": pa.array(changes.kind.view("S1"), pa.binary()),
            "old": array_rows(changes.old.columns, count),
            "new": array_rows(changes.new.columns, count),
            "unchanged": unchanged,
        }
    )


def _flags(mask: NDArray[np.bool_] | None, count: int) -> pa.Array:
    return pa.array(np.where(np.zeros(count, np.bool_) if mask is None else mask, b"t", b"f"), pa.binary())
