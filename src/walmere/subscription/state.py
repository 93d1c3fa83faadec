"""The state of each table, with the letters of PostgreSQL's `pg_subscription_rel.srsubstate`. Pure: no I/O here.

    i  init          known to the publication, nothing copied yet
    d  data sync     its snapshot exists, tasks are copying
    f  finished copy the copy is committed at the snapshot's LSN: the table is visible, and catches up from there
    s  sync done     caught up with the main apply, at the LSN that stands beside it
    r  ready         follows with all others

    w (sync wait) and c (catch-up) pass between a sync worker and the apply worker in PostgreSQL, and are never stored.
    Here they do not occur: the change log holds everything since the main slot's consistent point, so a table needs no
    second stream to catch up, and nobody has to wait for anybody.

Apply is in front (the usual case): the copy of a big table ends at snapshot LSN 100 while the others are at 500. From
the next batch on the table takes part with its own position, 100, so its first batch covers 100 to, say, 520. It is
then sync done at 520, and ready with the batch after.

Sync is in front: a table is added while apply lags behind at 300; its snapshot is at 450. Batches that end before 450
hold nothing for it, since all of that is in the copy. The first that ends after it finds it at 450 and goes on there.

Both come out of one predicate, `should_apply`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from walmere.errors import InvalidTransition
from walmere.lsn import INVALID_LSN, Lsn
from walmere.sinks.base import TableName


class Phase(StrEnum):
    """`srsubstate`."""

    INIT = "i"
    DATA_SYNC = "d"
    FINISHED_COPY = "f"
    SYNC_DONE = "s"
    READY = "r"

    @property
    def copied(self) -> bool:
        """Whether the table can be read."""
        return self in (Phase.FINISHED_COPY, Phase.SYNC_DONE, Phase.READY)


@dataclass(frozen=True, slots=True)
class TableState:
    """One published table. Every transition gives a new one."""

    table: TableName
    oid: int
    phase: Phase = Phase.INIT
    snapshot_lsn: Lsn = INVALID_LSN
    applied_lsn: Lsn = INVALID_LSN  # what committed before this is in the table
    rows_copied: int = 0
    rejects: int = 0
    error: str | None = None

    @property
    def name(self) -> str:
        """For people."""
        return str(self.table)

    @property
    def copying(self) -> bool:
        return self.phase is Phase.DATA_SYNC

    @property
    def position(self) -> Lsn | None:
        """What committed before it is in the table. None: nothing is, yet."""
        return self.applied_lsn if self.phase.copied else None


def copy_started(state: TableState, snapshot_lsn: Lsn = INVALID_LSN) -> TableState:
    """i → d, before there is a snapshot; then d → d with its LSN. Also, a copy that was cut off begins anew."""
    _require(state, Phase.INIT, Phase.DATA_SYNC)
    return replace(state, phase=Phase.DATA_SYNC, snapshot_lsn=snapshot_lsn, rows_copied=0, rejects=0, error=None)


def copy_committed(state: TableState, rows: int, rejects: int = 0) -> TableState:
    """d → f: all rows of the snapshot are in the table, in one commit."""
    _require(state, Phase.DATA_SYNC)
    return replace(
        state,
        phase=Phase.FINISHED_COPY,
        applied_lsn=state.snapshot_lsn,
        rows_copied=rows,
        rejects=rejects,
    )


def needed_from(states: Iterable[TableState], applied_lsn: Lsn) -> Lsn:
    """What committed from here on is still needed of the log, once a batch up to `applied_lsn` is applied.

    A copy that is under way will need everything since its snapshot; one that has none yet, possibly everything.
    """
    needs = [state.snapshot_lsn for state in states if state.phase is Phase.DATA_SYNC]
    needs += [position for state in states if (position := state.position) is not None]
    return min([applied_lsn, *needs])


def copy_failed(state: TableState, error: str | None) -> TableState:
    """d → i: it will be tried again."""
    _require(state, Phase.INIT, Phase.DATA_SYNC)
    return replace(state, phase=Phase.INIT, snapshot_lsn=INVALID_LSN, error=error)


def applied(state: TableState, end_lsn: Lsn, rejects: int | None = None) -> TableState:
    """A batch that ends here was applied: f → s → r. Its position never goes back. `rejects`: all it has by now."""
    _require(state, Phase.FINISHED_COPY, Phase.SYNC_DONE, Phase.READY)
    state = replace(state, rejects=state.rejects if rejects is None else rejects, error=None)
    if end_lsn < state.applied_lsn:
        return state  # the whole batch is in the copy already
    following = {Phase.FINISHED_COPY: Phase.SYNC_DONE, Phase.SYNC_DONE: Phase.READY, Phase.READY: Phase.READY}
    return replace(state, applied_lsn=end_lsn, phase=following[state.phase])


@overload
def should_apply(position: Lsn | None, commit_lsn: Lsn) -> bool: ...
@overload
def should_apply(position: Lsn, commit_lsn: NDArray[np.uint64]) -> NDArray[np.bool_]: ...
def should_apply(position: Lsn | None, commit_lsn: Any) -> Any:
    """Whether a transaction still has to be applied to a table: PostgreSQL's should_apply_changes_for_rel.

    `commit_lsn` is where its commit record begins; of one transaction, or of many at once. The table's position is
    where another record ended, so the first transaction that is not in the table may begin exactly there: hence <=,
    not <.
    """
    return position is not None and position <= commit_lsn


def to_json(state: TableState) -> dict[str, Any]:
    """As it is stored."""
    return {
        "schema": state.table.namespace,
        "table": state.table.name,
        "oid": state.oid,
        "phase": state.phase.value,
        "rows_copied": state.rows_copied,
        "snapshot_lsn": str(state.snapshot_lsn) if state.snapshot_lsn else None,
        "applied_lsn": str(state.applied_lsn) if state.applied_lsn else None,
        "rejects": state.rejects,
        "error": state.error,
    }


def from_json(content: Mapping[str, Any]) -> TableState:
    """The inverse."""
    lsns = {key: Lsn.parse(content[key]) if content[key] else INVALID_LSN for key in ("snapshot_lsn", "applied_lsn")}
    phase = Phase(content["phase"])
    numbers = {key: content[key] for key in ("rows_copied", "rejects")}
    table = TableName(content["schema"], content["table"])
    return TableState(table, content["oid"], phase, **lsns, **numbers, error=content["error"])


def _require(state: TableState, *phases: Phase) -> None:
    if state.phase not in phases:
        expected = ", ".join(phases)
        raise InvalidTransition(
            f"moving table {state.name} on", f"it is in phase {state.phase}, expected {expected}", "please report this"
        )
