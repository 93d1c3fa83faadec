"""The checks of the source for `walmere check`: what prevents a subscription or endangers its source, and the fixes.

Every check is a small function that queries the server over one ordinary connection. It yields its findings: a
*problem* (the subscription cannot work, or would be incomplete) or a *warning* (it works, but may fail later). It
returns the text for the case that there is no finding. Each finding has a fix, ready to paste: SQL, a command, or,
where a person must decide, a comment that begins with `--`. The checks change nothing on the server.

Where a try is harmless, it replaces a look at the catalogs: whether a role may replicate is found by opening a
replication connection. On managed services, a role may have this privilege by membership in another role, without the
REPLICATION attribute.

A check that cannot run, because the role may not read a catalog, is a warning, and the other checks go on. Only a
server that cannot be reached or refuses the login ends the checks, with that one finding.

Names in the queries are not qualified: every session has an empty search_path, so they are those of pg_catalog, and
`regclass` prints table names qualified and quoted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final

from walmere.config import Source
from walmere.errors import AccessRefused, NotConfigured, SourceError
from walmere.libpq import describe, dsn_without_secrets
from walmere.publisher import check_slot, check_tables
from walmere.publisher.capabilities import NEWEST_TESTED, OLDEST
from walmere.publisher.check_slot import Subscriber
from walmere.publisher.connect import Connection, capabilities, connect, translate_errors
from walmere.publisher.finding import (
    Check,
    Finding,
    Level,
    Result,
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
"""The longest that a check waits for another session's lock, such as that of an ALTER TABLE."""


def check(source: Source, subscriber: Subscriber = Subscriber()) -> list[Finding]:  # noqa: B008
    """Run all checks. Raises ConfigError if source.dsn is not a connection string."""
    try:
        connection = connect(source, "walmere_check")
    except SourceError as error:
        fix = f"pg_isready -d {shlex.quote(dsn_without_secrets(source))}" if error.transient else error.hint
        return [Finding("connection", Level.PROBLEM, error.wrong, fix)]
    with closing(connection):
        return list(_run(connection, source, subscriber))


def _run(connection: Connection, source: Source, subscriber: Subscriber) -> Iterator[Finding]:
    yield Finding("connection", Level.OK, f"connected to {describe(source)} as role {role_name(connection)}")
    connection.execute("SELECT set_config('lock_timeout', %s, false)", [LOCK_TIMEOUT])
    for function in _CHECKS:
        name = function.__name__
        more = (subscriber,) if function is check_slot.slot else ()
        try:
            with translate_errors(source, name):
                results = list(_results(function(connection, source, *more)))
        except SourceError as error:
            if connection.closed:
                yield Finding("connection", Level.PROBLEM, error.wrong, "walmere check -c walmere.toml  # again")
                return
            results = [warning(f"cannot be checked: {error.wrong}", _grant(connection, error) or error.hint)]
        # the last result is that of a check that found nothing
        yield from (Finding(name, *result) for result in results[:-1] or results if result[1])


def _results(running: Check) -> Iterator[Result]:
    fine = yield from running
    yield Level.OK, fine, ""


def server_version(connection: Connection, _source: Source) -> Check:
    """14 is the first version that streams transactions in progress."""
    major = capabilities(connection).major
    if major < OLDEST:
        yield problem(
            f"PostgreSQL {major} is too old: {OLDEST} or later is needed", f"-- upgrade it to {OLDEST} or later"
        )
    if major > NEWEST_TESTED:
        yield warning(
            f"PostgreSQL {major} is newer than {NEWEST_TESTED}, the newest version that Walmere was tested with",
            "-- update Walmere: git pull in its clone, then pip install -c constraints.txt .",
        )
    return f"PostgreSQL {major}"


def options(connection: Connection, source: Source) -> Check:
    """Options of the configuration that this version of PostgreSQL does not have."""
    wanted = {"two_phase": source.two_phase, "origin": source.origin != "any", "failover": source.failover}
    for option in (name for name, on in wanted.items() if on):
        try:
            capabilities(connection).require(option)
        except NotConfigured as error:
            default = str(Source.model_fields[option].default).lower()
            yield problem(error.wrong, f"export {variable(option)}={default}")
    return "the server supports all configured options"


def standby(connection: Connection, _source: Source) -> Check:
    """A standby can decode since version 16, but cannot write a heartbeat."""
    if query_value(connection, "SELECT pg_is_in_recovery()"):
        if capabilities(connection).decoding_on_standby:
            yield warning(
                "the server is a standby: it cannot write heartbeats, and the primary needs wal_level = logical too",
                "ALTER SYSTEM SET wal_level = 'logical';  -- on the primary, then restart it\n"
                "SELECT pg_logical_emit_message(false, 'walmere', '');  -- on the primary, every few seconds",
            )
        else:
            yield problem(
                "the server is a standby, and logical decoding on a standby needs PostgreSQL 16",
                "SELECT pg_promote();  -- or set source.dsn to the primary",
            )
    return "the server is a primary"


def wal_level(connection: Connection, _source: Source) -> Check:
    """pgoutput needs WAL of the level `logical`."""
    level = query_value(connection, "SELECT current_setting('wal_level')")
    if level != "logical":
        yield problem(f"wal_level is {level}", restart("wal_level", "logical"))
    return f"wal_level is {level}"


def role(connection: Connection, source: Source) -> Check:
    """Whether the role may replicate: by opening a replication connection."""
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


# wal_senders comes before role, because the walsender of role may still count for a moment
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
    privilege = "EXECUTE ON FUNCTION" if match[1] == "function" else "SELECT ON"
    return f"GRANT {privilege} pg_catalog.{match[2]} TO {role_name(connection)};"
