"""The preflight behind `walmere check`: what would stop a subscription or endanger its source, and what to do about it.

One look at the server, before anything is created there. Every check is a small function that asks over the same
ordinary connection. It yields what it finds: a *problem* (it cannot work, or would be silently incomplete) or a
*warning* (it works, but may go wrong later); and it returns what to say if there was nothing. With each comes the fix,
ready to paste: SQL, a command, or, where only a person can decide, a comment that begins with `--`. Nothing is changed
on the server.

Catalogs say what should be possible, but managed services bend the rules (a role may stream by membership in some role
of theirs, without the REPLICATION attribute). So where an honest try is harmless it takes the place of the catalog: the
role's right to replicate is found by opening a replication connection.

A check that cannot run, because the role may not read what it needs, is a warning of its own and the others go on. Only
a server that cannot be reached or refuses the login ends the preflight, with that one finding.

Names in the queries are not qualified: every session of ours has an empty search_path, so they are pg_catalog's, and
`regclass` prints the names of tables qualified and quoted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final

from walmere.config import Source
from walmere.errors import AccessRefused, NotConfigured, SourceError
from walmere.publisher import check_slot, check_tables
from walmere.publisher.capabilities import NEWEST_TESTED, OLDEST
from walmere.publisher.check_slot import Subscriber
from walmere.publisher.connect import Connection, capabilities, connect, describe, shown, translate_errors
from walmere.publisher.finding import (
    Check,
    Finding,
    Level,
    Said,
    problem,
    query_row,
    query_value,
    restart,
    role_name,
    variable,
    warning,
)
from walmere.publisher.stream import identify_system

LOCK_TIMEOUT: Final = "5s"
"""Somebody's ALTER TABLE must not hold the preflight up for longer."""


def check(source: Source, subscriber: Subscriber = Subscriber()) -> list[Finding]:  # noqa: B008
    """Look at the source and say what was found. Raises ConfigError for a connection string that is none."""
    try:
        connection = connect(source, "walmere_check")
    except SourceError as error:
        fix = f"pg_isready -d {shlex.quote(shown(source))}" if error.transient else error.hint
        return [Finding("connection", Level.PROBLEM, error.wrong, fix)]
    with closing(connection):
        return list(_run(connection, source, subscriber))


def _run(connection: Connection, source: Source, subscriber: Subscriber) -> Iterator[Finding]:
    yield Finding("connection", Level.OK, f"connected to {describe(source)} as role {role_name(connection)}")
    connection.execute("SELECT set_config('lock_timeout', %s, false)", [LOCK_TIMEOUT])
    for one in _CHECKS:
        name = one.__name__
        try:
            with translate_errors(source, name):
                asked = one(connection, source, subscriber) if one is check_slot.slot else one(connection, source)
                said = list(_told(asked))
        except SourceError as error:
            if connection.closed:
                yield Finding("connection", Level.PROBLEM, error.wrong, "walmere check -c walmere.toml  # again")
                return
            said = [warning(f"cannot be checked: {error.wrong}", _grant(connection, error) or error.hint)]
        # what is said if nothing was found comes last
        yield from (Finding(name, *each) for each in said[:-1] or said if each[1])


def _told(asked: Check) -> Iterator[Said]:
    fine = yield from asked
    yield Level.OK, fine, ""


def server_version(connection: Connection, _source: Source) -> Check:
    """14 is the first that sends transactions in progress."""
    major = capabilities(connection).major
    if major < OLDEST:
        yield problem(f"PostgreSQL {major} is too old, {OLDEST} is needed", f"-- pg_upgrade to {OLDEST} or later")
    if major > NEWEST_TESTED:
        yield warning(f"PostgreSQL {major} is newer than what this version is tested with", "pip install -U walmere")
    return f"PostgreSQL {major}"


def options(connection: Connection, source: Source) -> Check:
    """What the configuration asks for and this version does not have."""
    wanted = {"two_phase": source.two_phase, "origin": source.origin != "any", "failover": source.failover}
    for option in (name for name, on in wanted.items() if on):
        try:
            capabilities(connection).require(option)
        except NotConfigured as error:
            default = str(Source.model_fields[option].default).lower()
            yield problem(error.wrong, f"export {variable(option)}={default}")
    return "the server has what the configuration asks for"


def standby(connection: Connection, _source: Source) -> Check:
    """A standby decodes from 16 on, but nothing can be written there."""
    if query_value(connection, "SELECT pg_is_in_recovery()"):
        if capabilities(connection).decoding_on_standby:
            yield warning(
                "the server is a standby: no heartbeat can be written there, and the primary's wal_level counts too",
                "ALTER SYSTEM SET wal_level = 'logical';  -- on the primary, then restart it\n"
                "SELECT pg_logical_emit_message(false, 'walmere', '');  -- there too, every few seconds",
            )
        else:
            yield problem(
                "the server is a standby, and logical decoding on a standby needs PostgreSQL 16",
                "SELECT pg_promote();  -- or let source.dsn point to the primary",
            )
    return "the server is a primary"


def wal_level(connection: Connection, _source: Source) -> Check:
    """Only at `logical` does WAL hold what pgoutput needs."""
    level = query_value(connection, "SELECT current_setting('wal_level')")
    if level != "logical":
        yield problem(f"wal_level is {level}", restart("wal_level", "logical"))
    return f"wal_level is {level}"


def role(connection: Connection, source: Source) -> Check:
    """Whether it may replicate, by trying."""
    name = role_name(connection)
    try:
        with closing(connect(source, "walmere_check", replication=True)) as replication:
            system = identify_system(replication)
    except AccessRefused as error:
        may, by_membership = query_row(
            connection,
            "SELECT rolsuper OR rolreplication, EXISTS (SELECT FROM pg_roles WHERE rolname = 'rds_replication')"
            " FROM pg_roles WHERE rolname = current_user",
        )
        grant = f"GRANT rds_replication TO {name};" if by_membership else f"ALTER ROLE {name} REPLICATION;"
        yield problem(f"role {name} cannot start a walsender: {error.wrong}", error.hint if may else grant)
        return ""
    return f"role {name} can start a walsender (system {system.identifier}, timeline {system.timeline})"


# wal_senders stands before role, whose own walsender may take a moment to go
_CHECKS: Final[tuple[Callable[..., Check], ...]] = (
    server_version,
    options,
    standby,
    wal_level,
    check_slot.replication_slots,
    check_slot.wal_senders,
    role,
    check_tables.publication,
    check_tables.column_lists,
    check_tables.select,
    check_tables.row_security,
    check_tables.replica_identity,
    check_tables.partition_identity,
    check_tables.locks,
    check_tables.unlogged_tables,
    check_tables.foreign_tables,
    check_slot.slot,
    check_slot.wal_status,
    check_slot.max_slot_wal_keep_size,
    check_slot.idle_replication_slot_timeout,
    check_slot.idle_database,
    check_slot.old_transactions,
)


def _grant(connection: Connection, error: SourceError) -> str:
    match = re.search(r"permission denied for (function|table|view) (\S+)", error.wrong)
    if match is None:
        return ""
    right = "EXECUTE ON FUNCTION" if match[1] == "function" else "SELECT ON"
    return f"GRANT {right} pg_catalog.{match[2]} TO {role_name(connection)};"
