"""The replication slot: created once, as CREATE SUBSCRIPTION does, and checked before every use.

PostgreSQL allows one walsender per slot, and the slot stores which LSN was confirmed. A receiver that does not check
that slot and log belong together would skip or repeat changes without noticing.
"""

from __future__ import annotations

from dataclasses import dataclass

from psycopg.sql import SQL, Identifier

from walmere.config import Source
from walmere.errors import SlotLost, SlotUnsuitable
from walmere.lsn import Lsn
from walmere.publisher import transactions
from walmere.publisher.connect import SLOT_LOST_HINT, Connection, capabilities, translate_errors


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of `pg_replication_slots`."""

    name: str
    plugin: str | None  # None: a physical slot
    database: str | None
    active_pid: int | None
    restart_lsn: Lsn | None
    confirmed_lsn: Lsn | None
    wal_status: str | None  # reserved, extended, unreserved, lost
    safe_wal_size: int | None
    retained_bytes: int | None
    two_phase: bool
    failover: bool
    invalidation_reason: str | None

    @property
    def active(self) -> bool:
        """Whether a walsender is streaming from it."""
        return self.active_pid is not None


def read(connection: Connection, name: str) -> Slot | None:
    """Read the slot; None if it does not exist."""
    version = connection.info.server_version
    failover = "s.failover" if version >= 170_000 else "false"
    reason = "s.invalidation_reason" if version >= 170_000 else "NULL"
    row = connection.execute(
        f"""
        SELECT s.plugin, s.database, s.active_pid, s.restart_lsn::text, s.confirmed_flush_lsn::text, s.wal_status,
               s.safe_wal_size,
               pg_catalog.pg_wal_lsn_diff(
                   CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
                        ELSE pg_catalog.pg_current_wal_lsn() END, s.restart_lsn)::bigint,
               s.two_phase, {failover}, {reason}
        FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = %s""",  # noqa: S608
        [name],
    ).fetchone()
    if row is None:
        return None
    plugin, database, pid, restart, confirmed, status, safe, retained, two_phase, failover_on, invalidation = row
    return Slot(
        name,
        plugin,
        database,
        pid,
        Lsn.parse(restart) if restart else None,
        Lsn.parse(confirmed) if confirmed else None,
        status,
        safe,
        retained,
        two_phase,
        failover_on,
        invalidation,
    )


def sent_position(connection: Connection, pid: int) -> Lsn | None:
    """How far a walsender has decoded and sent; None if it has ended, or this role may not see it."""
    row = connection.execute(
        "SELECT sent_lsn::text FROM pg_catalog.pg_stat_replication WHERE pid = %s", [pid]
    ).fetchone()
    return Lsn.parse(row[0]) if row is not None and row[0] is not None else None


def require_ours(slot: Slot, database: str) -> None:
    """Refuse a slot of another plugin or database."""
    doing = f"checking replication slot {slot.name}"
    hint = "set another source.slot, or drop that slot: SELECT pg_drop_replication_slot('" + slot.name + "')"
    if slot.plugin != "pgoutput":
        kind = f"uses the output plugin {slot.plugin}" if slot.plugin else "is a physical slot"
        raise SlotUnsuitable(doing, f"it {kind}; a logical slot with pgoutput is needed", hint)
    if slot.database != database:
        raise SlotUnsuitable(doing, f"it belongs to database {slot.database}, not to {database}", hint)


def require_usable(slot: Slot, database: str) -> None:
    """Refuse a slot of another plugin or database, or one that is lost."""
    require_ours(slot, database)
    if slot.wal_status == "lost":
        why = f" ({slot.invalidation_reason})" if slot.invalidation_reason else ""
        raise SlotLost(f"checking replication slot {slot.name}", f"it is invalidated{why}", SLOT_LOST_HINT)


def create(connection: Connection, source: Source) -> Lsn:
    """Create the slot over a replication connection. Returns its consistent point."""
    features = capabilities(connection)
    for option in ("two_phase", "failover"):
        if getattr(source, option):
            features.require(option)
    if features.slot_options:
        options = (
            "SNAPSHOT 'nothing'"
            + (", TWO_PHASE" if source.two_phase else "")
            + (", FAILOVER" if source.failover else "")
        )
        tail = f"({options})"
    else:
        tail = "NOEXPORT_SNAPSHOT"
    command = SQL("CREATE_REPLICATION_SLOT {} LOGICAL pgoutput " + tail).format(Identifier(source.slot))
    with (
        translate_errors(source, f"creating replication slot {source.slot}"),
        transactions.reported_wait(source, source.slot),
    ):
        row = connection.execute(command).fetchone()
        assert row is not None
        return Lsn.parse(row[1])


def drop(connection: Connection, source: Source) -> None:
    """Drop the slot over a replication connection. Raises SlotInUse if it is in use."""
    with translate_errors(source, f"dropping replication slot {source.slot}"):
        connection.execute(SQL("DROP_REPLICATION_SLOT {}").format(Identifier(source.slot)))
