"""The target when a run starts: who owns its tables, and whether they match `tables.json`.

A table's own LSN, which is in its commits, is authoritative. `tables.json` has the version that Walmere made last, and
its LSN. They differ after a crash between the two writes (the table is then ahead, by commits of Walmere), if the
table's last commits are lost (a file of its log was deleted or emptied, or the table was restored from a backup), or if
another writer committed. What is done:

    ahead, by commits of Walmere, or by others that change no rows    nothing
    behind                                      its position goes back to its own LSN, and the log is applied again from
                                                there; if the log does not have that any more, it is copied again
    others changed its rows (RESTORE, DELETE)   it is copied again

The points of the ledger name versions of tables. If commits are lost, their version numbers will be used again for
other contents, so the table is removed from all points after its own LSN.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from walmere.apply.rejects import Rejects
from walmere.apply.standing import Behind, compare
from walmere.errors import OwnedByAnother, SinkMismatch
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import TableName
from walmere.owner import owned_by_another
from walmere.shaping.columns import target_columns
from walmere.sinks.base import Sink, Standing
from walmere.subscription import state
from walmere.subscription.state import TableState
from walmere.subscription.tables import Tables

_log = logging.getLogger(__name__)

_THREADS: Final = 8
"""Tables that are read at the same time."""


def claim(sink: Sink, subscription: str, tables: Tables, published: Sequence[TableState], *, take_over: bool) -> None:
    """Check that all tables belong to the owner, before anything is written. Raises OwnedByAnother.

    `published`: tables that have no state yet. `take_over`: take tables from other owners, and copy them again.
    """
    known = {each.table: each for each in tables if each.published}
    wanted = list((known | {each.table: each for each in published if each.table not in known}).values())
    sink.claim_points(subscription)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda each: _standing(sink, each.table), wanted))
        elsewhere = None
        refused: dict[TableName, OwnedByAnother] = {}
        for each, standing in zip(wanted, found, strict=True):
            if standing is None or take_over:
                continue
            if standing.owner is None and standing.lsn is not None and not each.phase.copied:
                # written by an earlier version of Walmere, without an owner
                elsewhere = sink.tables_of_others(subscription) if elsewhere is None else elsewhere
                if (other := elsewhere.get(each.name)) is not None:
                    what = f"the table {each.name} of the target"
                    refused[each.table] = owned_by_another("reading the target's tables", what, f"subscription {other}")
            elif (error := _refusal(sink, standing, each.table)) is not None:
                refused[each.table] = error
        if refused:
            # for `walmere status`
            shown = [each for each in wanted if each.table in refused and (each.oid or each.table in known)]
            tables.put(*(state.with_error(each, str(refused[each.table])) for each in shown))
            first = next(iter(refused.values()))
            more = f" (and {len(refused) - 1} more tables)" if len(refused) > 1 else ""
            raise OwnedByAnother(first.doing, first.wrong + more, first.hint)
        names = [name for each in wanted for name in (each.table, Rejects.table(each.table))]
        taken = {name for name, was in zip(names, pool.map(lambda name: _claim(sink, name), names), strict=True) if was}
    for each in wanted:
        if each.table in taken or Rejects.table(each.table) in taken:
            _log.warning("table %s was taken over from another owner, and is copied again", each.name)
    tables.change(
        {each.oid: state.copy_again for each in known.values() if not each.of_messages and each.table in taken}
    )


def _claim(sink: Sink, table: TableName) -> bool:
    try:
        return sink.claim(table)
    except OwnedByAnother:
        raise
    except SinkMismatch:
        return False  # writing to it raises this error again


def _standing(sink: Sink, table: TableName) -> Standing | None:
    try:
        return sink.standing(table)
    except SinkMismatch:
        return None  # writing to it raises this error again


def _refusal(sink: Sink, standing: Standing, table: TableName) -> OwnedByAnother | None:
    try:
        if standing.owner is not None:
            sink.claim(table)
    except OwnedByAnother as error:
        return error
    return None


def check(sink: Sink, tables: Tables, log_start: Lsn) -> list[tuple[TableState, Behind]]:
    """Compare all tables with their states, and move back those that are behind. Returns these, with the old states.

    `log_start`: where the change log begins.
    """
    followed = [each for each in tables if each.position is not None]
    with ThreadPoolExecutor(_THREADS) as pool:
        verdicts = list(pool.map(lambda each: _check(sink, each), followed))
    behind = [(each, found) for each, (found, _) in zip(followed, verdicts, strict=True) if found is not None]
    # versions without a difference are recorded, because the table's log may lose their commits later
    fine = {
        each.oid: standing
        for each, (found, standing) in zip(followed, verdicts, strict=True)
        if found is None and standing
    }
    moved = {oid: _recorded_as(standing) for oid, standing in fine.items() if tables[oid].version != standing.version}
    if moved:
        tables.change(moved)
    move_back(tables, sink, behind, log_start)
    return behind


def _recorded_as(standing: Standing) -> Callable[[TableState], TableState]:
    return lambda known: state.committed(known, standing.version, standing.lsn)


def _check(sink: Sink, known: TableState) -> tuple[Behind | None, Standing | None]:
    try:
        found = sink.standing(known.table)
    except SinkMismatch as error:
        return Behind(str(error), None), None
    behind = compare(
        known.version,
        known.version_lsn,
        found,
        lambda after, upto: sink.changed_by_others(known.table, after, upto),
    )
    return behind, found


def move_back(
    tables: Tables, sink: Sink, behind: Iterable[tuple[TableState, Behind]], log_start: Lsn
) -> list[TableState]:
    """Apply tables that are behind again from their own LSN, or copy them again. Returns their new states."""
    changes: dict[int, Callable[[TableState], TableState]] = {}
    for known, found in behind:
        start = found.apply_from
        if known.of_messages and found.found is None:  # it was deleted, and is created again
            changes[known.oid] = _went_back(known.applied_lsn, found, f"{found.why}; it continues with new messages")
        elif known.of_messages:  # it cannot be copied
            begin = max(start or INVALID_LSN, log_start)
            changes[known.oid] = _went_back(begin, found, f"{found.why}; it is applied again from {begin}")
        elif start is not None and start >= log_start and _same_columns(known, found, tables, sink):
            changes[known.oid] = _went_back(start, found, f"{found.why}; it is applied again from {start}")
        else:
            changes[known.oid] = _copied_again(f"{found.why}; it is copied again")
    changed = tables.change(changes) if changes else []
    for each in changed:
        _log.warning("table %s: %s", each.name, each.error)
    return changed


def _went_back(lsn: Lsn, found: Behind, error: str) -> Callable[[TableState], TableState]:
    version = None if found.found is None else found.found.version
    return lambda known: state.went_back(known, lsn, version, error)


def _copied_again(error: str) -> Callable[[TableState], TableState]:
    return lambda known: state.set_aside(known, error, time.time())


def _same_columns(known: TableState, found: Behind, tables: Tables, sink: Sink) -> bool:
    """Whether a table that is behind has the columns of the changes that will be applied to it."""
    if known.definition is None or found.found is None or known.awaits is not None:
        return False
    shaped = target_columns(known.definition.shape(known.source_table).columns, tables.types, known.definition.shaping)
    return found.found.columns == sink.columns(shaped.schema)
