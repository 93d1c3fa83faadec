"""The state of each table, with the letters of PostgreSQL's `pg_subscription_rel.srsubstate`. Pure: no I/O here.

    i  init          published, nothing copied yet
    d  data sync     its snapshot exists, tasks are copying
    f  finished copy the copy is committed at the snapshot's LSN: the table can be read, and catches up from there
    s  sync done     caught up with the other tables, at the LSN that is stored with it
    r  ready         applied together with all others

    In PostgreSQL, w (sync wait) and c (catch-up) pass between a sync worker and the apply worker, and are never stored.
    Here they do not occur: the change log has everything since the slot's consistent point, so a table needs no second
    stream to catch up, and no worker waits for another.

Apply is ahead (the usual case): the copy of a big table ends at snapshot LSN 100 while the others are at 500. In the
next batch the table has its own position, 100, so its first batch covers 100 to, say, 520. It is then sync done at 520,
and ready after the next batch.

Sync is ahead: a table is added while apply is behind, at 300; its snapshot is at 450. Batches that end before 450 have
nothing for it, because all of that is in the copy. The first batch that ends after 450 continues from there.

`should_apply` in changelog/plan.py decides both cases.

If the stream has another definition (a new column, another name) than the target, the table stops there, and the others
continue. It **awaits** the definition: either the target adopts it in place, and the table continues from where it
stopped, or it is copied again. Until the new copy is committed, readers see the old rows.

A table with changes that cannot be applied is **set aside** and copied again: the copy has the effect of the refused
change. If the same happens soon again, the copy did not help, and the next one waits: for minutes, then for hours; or
until the table is altered, or a copy is requested with `walmere resync`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final

from walmere.definition import MESSAGES_OID, Definition, Layout, PublishedColumn, Shape, ShapedColumn, Shaping
from walmere.errors import InvalidTransition
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import Identity, TableName

COPY_HELPED: Final = 1800.0
"""A copy has helped if changes were applied for this many seconds after it."""
SETBACK_WAITS: Final = (0.0, 60.0, 3600.0, 4 * 3600.0)
"""Seconds before the next copy, after one, two, … copies that did not help."""


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

    @property
    def words(self) -> str:
        """For people, beside the letter."""
        return _WORDS[self]


_WORDS: Final = {
    Phase.INIT: "waits for its copy",
    Phase.DATA_SYNC: "being copied",
    Phase.FINISHED_COPY: "copied",
    Phase.SYNC_DONE: "caught up",
    Phase.READY: "ready",
}


@dataclass(frozen=True, slots=True)
class TableState:
    """One published table. Every transition returns a new state."""

    table: TableName
    oid: int
    phase: Phase = Phase.INIT
    snapshot_lsn: Lsn = INVALID_LSN
    applied_lsn: Lsn = INVALID_LSN  # everything that committed before is in the table
    rows_copied: int = 0
    rejects: int = 0
    error: str | None = None
    published: bool = True  # False: removed from the publication, or renamed; the target's table stays
    definition: Definition | None = None  # of the target's table
    awaits: Shape | None = None  # the definition in its stream, if the target does not have it yet
    copied_at: float = 0.0  # when its last copy was committed, in seconds of Unix time
    setbacks: int = 0  # copies in a row that did not help: changes were refused again
    retry_at: float = 0.0  # not copied before this time, unless altered or requested
    version: int | None = None  # of the target's table, made last by Walmere; None: not recorded
    version_lsn: Lsn = INVALID_LSN  # the LSN in that version
    hidden: tuple[tuple[int, str], ...] = ()  # attnum and name of columns that the target must not have as they are
    renamed_from: TableName | None = None  # its name at the source; None: `table`, which is its name in the target

    @property
    def name(self) -> str:
        """The name for messages."""
        return str(self.table)

    @property
    def source_table(self) -> TableName:
        """Its name at the source."""
        return self.renamed_from or self.table

    @property
    def of_messages(self) -> bool:
        """Whether it is the table of logical messages, which is not a relation of the source."""
        return self.oid == MESSAGES_OID

    @property
    def copying(self) -> bool:
        return self.phase is Phase.DATA_SYNC

    @property
    def position(self) -> Lsn | None:
        """Everything that committed before it is in the table. None: not copied yet, or not published any more."""
        return self.applied_lsn if self.phase.copied and self.published else None

    @property
    def follows(self) -> bool:
        """Whether it takes part in batches."""
        return self.position is not None and self.awaits is None

    @property
    def relations(self) -> tuple[int, ...]:
        """The OIDs that its changes have in the stream."""
        if self.definition is not None and self.definition.gathered:
            return tuple(leaf for leaf, _ in self.definition.leaves)
        return (self.oid,)

    @property
    def waits_for_copy(self) -> bool:
        return self.published and not self.phase.copied


def waiting_for_copy(target: TableName, source: TableName, oid: int, before: TableState | None = None) -> TableState:
    """A table that is new. `before`: the last state of the relation, if it was mirrored under another name.

    What was hidden stays hidden. If the source has renamed the table, other sections may match it, so its hidden
    columns count as renamed, too: a section has to name them again.
    """
    hidden = () if before is None else before.hidden
    if before is not None and before.source_table != source:
        hidden = tuple((attnum, f"{before.source_table}.{name}") for attnum, name in hidden)
    return TableState(target, oid, hidden=hidden, renamed_from=None if source == target else source)


def copy_started(state: TableState, snapshot_lsn: Lsn = INVALID_LSN) -> TableState:
    """i → d, before there is a snapshot; then d → d with its LSN. Also restarts a copy that was interrupted."""
    _require(state, Phase.INIT, Phase.DATA_SYNC)
    return replace(state, phase=Phase.DATA_SYNC, snapshot_lsn=snapshot_lsn, rows_copied=0, rejects=0)


def copy_committed(
    state: TableState,
    definition: Definition,
    rows: int,
    rejects: int = 0,
    *,
    version: int | None = None,
    now: float = 0.0,
) -> TableState:
    """d → f: all rows of the snapshot are in the table, in one commit."""
    _require(state, Phase.DATA_SYNC)
    return replace(
        state,
        phase=Phase.FINISHED_COPY,
        applied_lsn=state.snapshot_lsn,
        definition=definition,
        rows_copied=rows,
        rejects=rejects,
        error=None,
        copied_at=now,
        retry_at=0.0,
        version=version,
        version_lsn=state.snapshot_lsn,
        hidden=definition.hidden,
    )


def needed_from(states: Iterable[TableState], applied_lsn: Lsn) -> Lsn:
    """The LSN from which the log is still needed, after a batch up to `applied_lsn` is applied.

    A running copy will need everything since its snapshot; a copy without a snapshot may need everything.
    """
    needs = [state.snapshot_lsn for state in states if state.published and state.copying]
    needs += [position for state in states if (position := state.position) is not None]
    return min([applied_lsn, *needs])


def copy_again(state: TableState, error: str | None = None) -> TableState:
    """Any → i: a new copy is needed. The rows in the target stay until it is committed."""
    return TableState(
        state.table,
        state.oid,
        error=error,
        copied_at=state.copied_at,
        hidden=state.hidden,
        renamed_from=state.renamed_from,
    )


def copy_failed(state: TableState, error: str | None) -> TableState:
    """d → i: a copy has failed. The number of setbacks stays."""
    failed = copy_again(state, error)
    return replace(failed, definition=state.definition, setbacks=state.setbacks, retry_at=state.retry_at)


def set_aside(state: TableState, error: str | None, now: float) -> TableState:
    """Any → i: its stream has a change that cannot be applied. A copy may help; if not, the next one waits longer.

    Without an error, no change was refused: one transaction has several definitions, and needs a copy.
    """
    if error is None:
        return copy_again(state)
    helped = now - state.copied_at > COPY_HELPED
    setbacks = 1 if helped else state.setbacks + 1
    wait = SETBACK_WAITS[min(setbacks, len(SETBACK_WAITS)) - 1]
    again = copy_again(state, error)
    return replace(again, definition=state.definition, setbacks=setbacks, retry_at=now + wait if wait else 0.0)


def redefined(state: TableState, shape: Shape, reached: Lsn, rejects: int | None = None) -> TableState:
    """Its stream has another definition at `reached`: it waits there."""
    _require(state, Phase.FINISHED_COPY, Phase.SYNC_DONE, Phase.READY)
    rejects = state.rejects if rejects is None else rejects
    return replace(state, applied_lsn=max(state.applied_lsn, reached), rejects=rejects, awaits=shape)


def evolved(state: TableState, definition: Definition, version: int | None = None) -> TableState:
    """The target has the awaited definition since this version: the table continues."""
    state = replace(state, definition=definition, awaits=None, hidden=definition.hidden)
    if state.version is None or version is None:
        return state
    return replace(state, version=max(state.version, version))


def committed(state: TableState, version: int | None, lsn: Lsn | None) -> TableState:
    """Walmere has committed this version of the target's table, with this LSN."""
    return state if version is None else replace(state, version=version, version_lsn=lsn or INVALID_LSN)


def went_back(state: TableState, lsn: Lsn, version: int | None, error: str) -> TableState:
    """The target's table is behind its state: changes are applied again from the table's own LSN."""
    _require(state, Phase.FINISHED_COPY, Phase.SYNC_DONE, Phase.READY)
    return replace(state, applied_lsn=lsn, version=version, version_lsn=lsn, error=error)


def with_error(state: TableState, error: str) -> TableState:
    """The same state with an error."""
    return replace(state, error=error)


def unpublished(state: TableState) -> TableState:
    """The table was removed from the publication. Its copy can still be read."""
    return replace(state, published=False, awaits=None)


def applied(state: TableState, end_lsn: Lsn, rejects: int | None = None) -> TableState:
    """A batch up to `end_lsn` was applied: f → s → r. The position never goes back. `rejects`: the new total."""
    _require(state, Phase.FINISHED_COPY, Phase.SYNC_DONE, Phase.READY)
    state = replace(state, rejects=state.rejects if rejects is None else rejects, error=None)
    if end_lsn < state.applied_lsn:
        return state  # the copy has the whole batch
    next_phase = {Phase.FINISHED_COPY: Phase.SYNC_DONE, Phase.SYNC_DONE: Phase.READY, Phase.READY: Phase.READY}
    return replace(state, applied_lsn=end_lsn, phase=next_phase[state.phase])


def to_json(state: TableState) -> dict[str, Any]:
    """The content of `tables.json` for one table."""
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
        "published": state.published,
        "definition": asdict(state.definition) if state.definition else None,
        "awaits": state.awaits,
        "copied_at": state.copied_at,
        "setbacks": state.setbacks,
        "retry_at": state.retry_at,
        "version": state.version,
        "version_lsn": str(state.version_lsn) if state.version_lsn else None,
        "hidden": state.hidden,
        "renamed_from": state.renamed_from,
    }


def from_json(content: Mapping[str, Any]) -> TableState:
    """The inverse of `to_json`."""
    plain: dict[str, Any] = {key: content[key] for key in ("rows_copied", "rejects", "error", "published")}
    plain |= {key: content[key] for key in ("copied_at", "setbacks", "retry_at") if key in content}
    plain["version"] = content.get("version")  # missing if written by an earlier version of Walmere
    for key in ("snapshot_lsn", "applied_lsn", "version_lsn"):
        plain[key] = Lsn.parse(content[key]) if content.get(key) else INVALID_LSN
    table = TableName(content["schema"], content["table"])
    definition = None
    if (stored := content["definition"]) is not None:
        identity = stored.get("identity")
        numbers, rewrites = stored["layout"][:5], stored["layout"][5:]  # an earlier version has no rewrites
        definition = Definition(
            tuple(PublishedColumn(**each) for each in stored["columns"]),
            stored["natts"],
            Layout(*numbers, *(tuple(map(tuple, each)) for each in rewrites)),
            stored.get("publication_fingerprint") or stored["how"],  # its name in earlier versions
            tuple((leaf, since) for leaf, since in stored["leaves"]),
            stored["partial"],
            stored["gathered"],
            identity and Identity(identity["mode"], tuple(identity["key"])),
            stored.get("xid", 0),
            _shaping_from_json(stored.get("shaping")),
        )
    awaits = content["awaits"] and Shape(TableName(*content["awaits"][0]), tuple(map(tuple, content["awaits"][1])))
    phase = Phase(content["phase"])
    plain["hidden"] = tuple((attnum, name) for attnum, name in content.get("hidden", ()))
    plain["renamed_from"] = TableName(*content["renamed_from"]) if content.get("renamed_from") else None
    return TableState(table, content["oid"], phase, **plain, definition=definition, awaits=awaits)


def _shaping_from_json(stored: Mapping[str, Any] | None) -> Shaping | None:
    if stored is None:
        return None
    columns = tuple(ShapedColumn(**each) for each in stored["columns"])
    return Shaping(**{**stored, "columns": columns, "types": tuple(map(tuple, stored["types"]))})


def _require(state: TableState, *phases: Phase) -> None:
    if state.phase not in phases:
        expected = ", ".join(phases)
        raise InvalidTransition(
            f"changing the state of table {state.name}",
            f"it is in phase {state.phase}, expected {expected}",
            "please report this",
        )
