"""The checks of the replication slot: limits of the server, whether the slot is usable, and what may invalidate it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Final

from walmere.config import Source
from walmere.errors import SlotLost, SlotUnsuitable
from walmere.libpq import dsn_without_secrets
from walmere.publisher import slot as slots
from walmere.publisher.connect import Connection
from walmere.publisher.finding import (
    Check,
    Level,
    problem,
    query_row,
    query_value,
    reload,
    restart,
    role_name,
    variable,
    warning,
)

OLD_SECONDS: Final = 3600
"""Warn of transactions that are open for longer."""

LOW_FRACTION: Final = 0.25
"""Warn if less than this fraction of max_slot_wal_keep_size is left to a slot."""


@dataclass(frozen=True, slots=True)
class Subscriber:
    """What the caller knows about the subscription that the source is checked for."""

    has_log: bool = False  # it has a change log
    receiver: str | None = None  # the application_name of its receiver, if that is running


def replication_slots(connection: Connection, source: Source) -> Check:
    """The subscription needs one slot, and another one while tables are copied."""
    used, idle = query_row(
        connection,
        "SELECT count(*), string_agg(slot_name, ', ' ORDER BY slot_name) FILTER (WHERE NOT active)"
        " FROM pg_replication_slots",
    )
    need = 0 if slots.read(connection, source.slot) else 1
    return (yield from _check_limit(connection, "max_replication_slots", used, need, f"not active: {idle or 'none'}"))


def wal_senders(connection: Connection, source: Source) -> Check:
    """The receiver needs one walsender, and another one is needed while tables are copied."""
    used = query_value(connection, "SELECT count(*) FROM pg_stat_get_wal_senders()")
    found = slots.read(connection, source.slot)
    need = 0 if found and found.active else 1
    return (yield from _check_limit(connection, "max_wal_senders", used, need, "see pg_stat_replication"))


def slot(connection: Connection, source: Source, subscriber: Subscriber = Subscriber()) -> Check:  # noqa: B008
    """An existing slot must be usable, and the slot of an existing change log must exist."""
    found = slots.read(connection, source.slot)
    if found is None and subscriber.has_log:
        yield problem(
            f"replication slot {source.slot} does not exist any more: changes after the end of the change log are lost",
            "walmere drop -c walmere.toml  # then walmere run: all tables are copied again",
        )
    if found is None:
        return f"replication slot {source.slot} does not exist yet; it will be created"
    name = f"replication slot {found.name}"
    try:
        slots.require_usable(found, connection.info.dbname)
    except SlotUnsuitable as error:
        yield problem(f"{name}: {error.wrong}", f"export {variable('slot')}={found.name[:61]}_2")
        return ""
    except SlotLost:
        return ""  # reported by wal_status
    own = False
    if found.active:
        who = query_value(connection, "SELECT application_name FROM pg_stat_activity WHERE pid = %s", found.active_pid)
        own = who is not None and who == subscriber.receiver
        if not own:
            yield (
                Level.WARNING if str(who).startswith("walmere") else Level.PROBLEM,
                f"{name} is in use by process {found.active_pid} (application_name {who or 'is empty'})",
                f"SELECT pg_terminate_backend({found.active_pid});",
            )
    if source.two_phase and not found.two_phase:
        yield warning(
            f"{name} has two_phase off, but the configuration has it on; the server turns it on at the next start",
            f"export {variable('two_phase')}=false  # to keep it off",
        )
    if found.two_phase and not source.two_phase:
        yield warning(
            f"{name} has two_phase on, but the configuration has it off; transactions are sent at PREPARE",
            f"export {variable('two_phase')}=true",
        )
    if found.failover != source.failover:
        command = f"ALTER_REPLICATION_SLOT {found.name} (FAILOVER {str(source.failover).lower()})"
        yield warning(
            f"{name} has failover {'on' if found.failover else 'off'}, but the configuration has the opposite",
            f"psql {shlex.quote(dsn_without_secrets(source, replication='database'))} -c {shlex.quote(command)}",
        )
    return f"{name} is used by this subscription's receiver" if own else f"{name} exists and is free"


def wal_status(connection: Connection, source: Source) -> Check:
    """Whether the server still has the WAL that the slot needs."""
    found = slots.read(connection, source.slot)
    if found is None:
        return ""
    what = f"replication slot {found.name} is {found.wal_status}"
    retained = f"{what}, and retains {_size(found.retained_bytes or 0)} of WAL"
    if found.wal_status == "lost":
        reason = f" ({found.invalidation_reason})" if found.invalidation_reason else ""
        yield problem(f"{what}{reason}: it cannot be used any more", "walmere drop -c walmere.toml  # then walmere run")
    if found.wal_status == "unreserved":
        yield problem(f"{retained}, which the next checkpoint may remove", _keep_more(found))
    if found.wal_status == "extended":
        yield warning(f"{retained}, more than max_wal_size", "walmere receive -c walmere.toml")
    return retained


def max_slot_wal_keep_size(connection: Connection, source: Source) -> Check:
    """Without a limit, a stopped receiver fills the source's disk; with a limit, it loses its slot."""
    limit = int(query_value(connection, "SELECT setting FROM pg_settings WHERE name = 'max_slot_wal_keep_size'")) << 20
    if limit < 0:
        yield warning(
            "max_slot_wal_keep_size is -1: while the receiver is stopped, WAL can fill the source's disk",
            reload("max_slot_wal_keep_size", "64GB") + "  -- or as much as the disk can spare",
        )
    found = slots.read(connection, source.slot)
    if found is None or found.safe_wal_size is None:
        return f"max_slot_wal_keep_size is {_size(limit)}: a slot that is further behind is lost"
    left = f"max_slot_wal_keep_size is {_size(limit)}: the slot is lost after {_size(found.safe_wal_size)} more of WAL"
    if found.safe_wal_size < limit * LOW_FRACTION:
        yield warning(left, _keep_more(found))
    return left


def idle_replication_slot_timeout(connection: Connection, _source: Source) -> Check:
    """Since version 18, a slot can be invalidated because it is idle."""
    timeout = query_value(connection, "SELECT current_setting('idle_replication_slot_timeout', true)")
    if timeout not in ("0", None):
        yield warning(
            f"idle_replication_slot_timeout is {timeout}: a receiver that is stopped for longer loses its slot",
            reload("idle_replication_slot_timeout", "0"),
        )
    return "idle_replication_slot_timeout is off" if timeout else ""


def idle_database(connection: Connection, source: Source) -> Check:
    """A slot advances only with changes of its own database, while all databases write to the same WAL."""
    if query_value(connection, "SELECT pg_is_in_recovery()"):
        return ""  # reported by standby
    name = role_name(connection)
    function, may = query_row(
        connection,
        "SELECT oid::regprocedure::text, has_function_privilege(oid, 'EXECUTE') FROM pg_proc"
        " WHERE proname = 'pg_logical_emit_message' AND proargtypes[2] = 'text'::regtype",
    )
    effect = "while this database is idle, the slot retains the WAL of the other databases"
    if not source.heartbeat:
        yield warning(f"source.heartbeat is 0: {effect}", f"export {variable('heartbeat')}=10")
    elif not may:
        yield warning(
            f"role {name} may not write the heartbeat: {effect}", f"GRANT EXECUTE ON FUNCTION {function} TO {name};"
        )
    return f"a heartbeat advances the slot after {source.heartbeat:g} idle seconds"


def old_transactions(connection: Connection, _source: Source) -> Check:
    """An open transaction that has written, in any database, holds back restart_lsn, and a new slot waits for it."""
    writing = "FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND"
    effect = "holds back restart_lsn of the slot, so WAL is retained"
    for pid, user, database, age in connection.execute(
        "SELECT pid, usename, datname, date_trunc('second', now() - xact_start)::text"
        f" {writing} xact_start < now() - make_interval(secs => %s) ORDER BY xact_start",
        [OLD_SECONDS],
    ):
        yield warning(
            f"a transaction of role {user} in database {database} (pid {pid}), open for {age}, {effect}",
            f"SELECT pg_terminate_backend({pid});",
        )
    for gid, database, age in connection.execute(
        "SELECT quote_literal(gid), database, date_trunc('second', now() - prepared)::text FROM pg_prepared_xacts"
        " WHERE prepared < now() - make_interval(secs => %s) ORDER BY prepared",
        [OLD_SECONDS],
    ):
        yield warning(
            f"prepared transaction {gid} in database {database}, {age} old, {effect}",
            f"ROLLBACK PREPARED {gid};  -- or COMMIT PREPARED; in database {database}",
        )
    if hidden := query_value(connection, f"SELECT count(*) {writing} xact_start IS NULL"):
        yield warning(
            f"open transactions of other roles: {hidden}; this role may not see since when",
            f"GRANT pg_read_all_stats TO {role_name(connection)};",
        )
    return "no old transaction is open"


def _keep_more(found: slots.Slot) -> str:
    return reload("max_slot_wal_keep_size", f"{(found.retained_bytes or 0) * 2 // (1 << 20) + 1024}MB")


def _size(count: int) -> str:
    return f"{count / (1 << 20):.0f} MB"


def _check_limit(connection: Connection, setting: str, used: int, need: int, where: str) -> Check:
    limit = int(query_value(connection, "SELECT current_setting(%s)", setting))
    what = f"{used} of {setting} = {limit} in use"
    lacking = used + need + 1 - limit
    fix = restart(setting, limit + lacking)
    if lacking > 0 and need:
        yield problem(f"{what}; the receiver needs one, and copying tables another ({where})", fix)
    elif lacking > 0:
        yield warning(f"{what}; copying tables needs another ({where})", fix)
    return what
