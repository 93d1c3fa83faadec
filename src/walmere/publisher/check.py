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
# ruff: noqa: S608 - what is put into a query's text is this module's own

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from psycopg.sql import Identifier

from walmere.config import PREFIX, Source
from walmere.errors import AccessRefused, NotConfigured, SlotLost, SlotUnsuitable, SourceError
from walmere.publisher import column_lists as lists
from walmere.publisher import slot as slots
from walmere.publisher.capabilities import NEWEST_TESTED, OLDEST
from walmere.publisher.catalog import locked_tables, published_tables
from walmere.publisher.connect import Connection, capabilities, connect, describe, shown, speaking
from walmere.publisher.identity import HINT, IS_REPLICA_IDENTITY
from walmere.publisher.publication import published
from walmere.publisher.stream import identify_system

OLD_SECONDS: Final = 3600
"""A transaction open for longer is worth a warning."""

LOCK_TIMEOUT: Final = "5s"
"""Somebody's ALTER TABLE must not hold the preflight up for longer."""

LITTLE_LEFT: Final = 0.25
"""A slot with less than this part of max_slot_wal_keep_size to go is worth a warning."""


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `name` is stable, for scripts; `fix` is empty when there is nothing to do."""

    name: str
    level: Level
    what: str
    fix: str = ""


Said: TypeAlias = tuple[Level, str, str]
Check: TypeAlias = Generator[Said, None, str]


@dataclass(frozen=True, slots=True)
class Subscriber:
    """What the caller knows of the subscription that the source is checked for."""

    has_log: bool = False  # it has received something already
    receiver: str | None = None  # the application_name of its own receiver, if that is running


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
    yield Finding("connection", Level.OK, f"connected to {describe(source)} as role {_role(connection)}")
    connection.execute("SELECT set_config('lock_timeout', %s, false)", [LOCK_TIMEOUT])
    for one in _CHECKS:
        name = one.__name__
        try:
            with speaking(source, name):
                asked = slot(connection, source, subscriber) if one is slot else one(connection, source)
                said = list(_told(asked))
        except SourceError as error:
            if connection.closed:
                yield Finding("connection", Level.PROBLEM, error.wrong, "walmere check -c walmere.toml  # again")
                return
            said = [_warning(f"cannot be checked: {error.wrong}", _grant(connection, error) or error.hint)]
        # what is said if nothing was found comes last
        yield from (Finding(name, *each) for each in said[:-1] or said if each[1])


def _told(asked: Check) -> Iterator[Said]:
    fine = yield from asked
    yield Level.OK, fine, ""


def server_version(connection: Connection, _source: Source) -> Check:
    """14 is the first that sends transactions in progress."""
    major = capabilities(connection).major
    if major < OLDEST:
        yield _problem(f"PostgreSQL {major} is too old, {OLDEST} is needed", f"-- pg_upgrade to {OLDEST} or later")
    if major > NEWEST_TESTED:
        yield _warning(f"PostgreSQL {major} is newer than what this version is tested with", "pip install -U walmere")
    return f"PostgreSQL {major}"


def options(connection: Connection, source: Source) -> Check:
    """What the configuration asks for and this version does not have."""
    wanted = {"two_phase": source.two_phase, "origin": source.origin != "any", "failover": source.failover}
    for option in (name for name, on in wanted.items() if on):
        try:
            capabilities(connection).require(option)
        except NotConfigured as error:
            default = str(Source.model_fields[option].default).lower()
            yield _problem(error.wrong, f"export {_variable(option)}={default}")
    return "the server has what the configuration asks for"


def standby(connection: Connection, _source: Source) -> Check:
    """A standby decodes from 16 on, but nothing can be written there."""
    if _value(connection, "SELECT pg_is_in_recovery()"):
        if capabilities(connection).decoding_on_standby:
            yield _warning(
                "the server is a standby: no heartbeat can be written there, and the primary's wal_level counts too",
                "ALTER SYSTEM SET wal_level = 'logical';  -- on the primary, then restart it\n"
                "SELECT pg_logical_emit_message(false, 'walmere', '');  -- there too, every few seconds",
            )
        else:
            yield _problem(
                "the server is a standby, and logical decoding on a standby needs PostgreSQL 16",
                "SELECT pg_promote();  -- or let source.dsn point to the primary",
            )
    return "the server is a primary"


def wal_level(connection: Connection, _source: Source) -> Check:
    """Only at `logical` does WAL hold what pgoutput needs."""
    level = _value(connection, "SELECT current_setting('wal_level')")
    if level != "logical":
        yield _problem(f"wal_level is {level}", _restart("wal_level", "logical"))
    return f"wal_level is {level}"


def replication_slots(connection: Connection, source: Source) -> Check:
    """One for the subscription, and one for a moment while tables are synchronised."""
    used, idle = _row(
        connection,
        "SELECT count(*), string_agg(slot_name, ', ' ORDER BY slot_name) FILTER (WHERE NOT active)"
        " FROM pg_replication_slots",
    )
    need = 0 if slots.read(connection, source.slot) else 1
    return (yield from _room(connection, "max_replication_slots", used, need, f"not active: {idle or 'none'}"))


def wal_senders(connection: Connection, source: Source) -> Check:
    """One for the receiver, and one for a moment while tables are synchronised."""
    used = _value(connection, "SELECT count(*) FROM pg_stat_get_wal_senders()")
    found = slots.read(connection, source.slot)
    need = 0 if found and found.active else 1
    return (yield from _room(connection, "max_wal_senders", used, need, "see pg_stat_replication"))


def role(connection: Connection, source: Source) -> Check:
    """Whether it may replicate, by trying."""
    name = _role(connection)
    try:
        with closing(connect(source, "walmere_check", replication=True)) as replication:
            system = identify_system(replication)
    except AccessRefused as error:
        may, by_membership = _row(
            connection,
            "SELECT rolsuper OR rolreplication, EXISTS (SELECT FROM pg_roles WHERE rolname = 'rds_replication')"
            " FROM pg_roles WHERE rolname = current_user",
        )
        grant = f"GRANT rds_replication TO {name};" if by_membership else f"ALTER ROLE {name} REPLICATION;"
        yield _problem(f"role {name} cannot start a walsender: {error.wrong}", error.hint if may else grant)
        return ""
    return f"role {name} can start a walsender (system {system.identifier}, timeline {system.timeline})"


def publication(connection: Connection, source: Source) -> Check:
    """Missing, or empty."""
    rows = connection.execute(
        f"{published(connection)} SELECT p.pubname, p.puballtables, count(t.relid) FROM chosen p"
        " LEFT JOIN published t ON t.pubid = p.oid GROUP BY 1, 2",
        [list(source.publications)],
    )
    found = {name: (all_tables, count) for name, all_tables, count in rows}
    database = connection.info.dbname
    for name in source.publications:
        quoted = Identifier(name).as_string(connection)
        match found.get(name):
            case None:
                yield _problem(
                    f"there is no publication {quoted} in database {database}",
                    f"CREATE PUBLICATION {quoted} FOR ALL TABLES;",
                )
            case (True, 0):
                yield _warning(
                    f"publication {quoted} is for all tables, and database {database} has none",
                    "-- create tables, or correct the database in source.dsn",
                )
            case (False, 0):
                yield _problem(f"publication {quoted} has no tables", _fill(connection, quoted))
    return f"published tables: {sum(count for _, count in found.values())}"


def select(connection: Connection, source: Source) -> Check:
    """What copying a table takes: USAGE of its schema and SELECT on its published columns."""
    name = _role(connection)
    for (schema,) in connection.execute(
        f"{published(connection)} SELECT DISTINCT quote_ident(n.nspname) FROM published"
        " JOIN pg_class c ON c.oid = relid JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE NOT has_schema_privilege(n.oid, 'USAGE') ORDER BY 1",
        [list(source.publications)],
    ):
        yield _problem(f"role {name} has no USAGE on schema {schema}", f"GRANT USAGE ON SCHEMA {schema} TO {name};")
    for table, whole, columns in connection.execute(
        f"""
        SELECT t.name, bool_and(a.published) FILTER (WHERE NOT a.generated),
               string_agg(a.name, ', ' ORDER BY a.attnum) FILTER (WHERE a.published)
        FROM ({published(connection)} SELECT relid, relid::regclass::text AS name, attnums FROM published) t
        CROSS JOIN LATERAL (
            SELECT attnum, quote_ident(attname) AS name, attnum = ANY(t.attnums) AS published,
                   attgenerated <> '' AS generated, has_column_privilege(t.relid, attnum, 'SELECT') AS readable
            FROM pg_attribute WHERE attrelid = t.relid AND attnum > 0 AND NOT attisdropped) a
        GROUP BY t.name, t.attnums HAVING NOT bool_and(a.readable) FILTER (WHERE a.published) ORDER BY 1""",
        [list(source.publications)],
    ):
        of = "" if whole else f" ({columns})"
        yield _problem(f"role {name} has no SELECT{of} on {table}", f"GRANT SELECT{of} ON TABLE {table} TO {name};")
    return f"role {name} can read the published tables"


def row_security(connection: Connection, source: Source) -> Check:
    """The stream has every row, whatever the policies; a copy has what the role may see. Partitions have their own."""
    name = _role(connection)
    for (table,) in connection.execute(
        f"""
        WITH every AS ({_with_leaves(connection)})
        SELECT relid::regclass::text FROM every WHERE row_security_active(relid) ORDER BY 1""",
        [list(source.publications)],
    ):
        yield _problem(
            f"row security applies to role {name} on {table}, so a copy would be partial",
            f"ALTER ROLE {name} BYPASSRLS;",
        )
    return f"no row security applies to role {name} on the published tables"


def replica_identity(connection: Connection, source: Source) -> Check:
    """Without one, UPDATE and DELETE fail on the source itself. A partition has its own, beside that of its root."""
    why = {"d": "no primary key", "n": "REPLICA IDENTITY NOTHING", "i": "lost the index of its replica identity"}
    for table, letter, index, primary in connection.execute(
        f"""
        WITH every AS ({_with_leaves(connection, "p.pubupdate OR p.pubdelete")})
        SELECT c.oid::regclass::text, c.relreplident::text, i.name, i.indisprimary
        FROM every JOIN pg_class c ON c.oid = every.relid
        LEFT JOIN LATERAL (
            SELECT quote_ident(k.relname) AS name, x.indisprimary
            FROM pg_index x JOIN pg_class k ON k.oid = x.indexrelid
            WHERE x.indrelid = c.oid AND x.indisunique AND x.indimmediate AND x.indisvalid
              AND x.indpred IS NULL AND x.indexprs IS NULL
              AND NOT EXISTS (SELECT FROM pg_attribute a
                              WHERE a.attrelid = c.oid AND NOT a.attnotnull
                                AND a.attnum = ANY((x.indkey::int2[])[0:x.indnkeyatts - 1]))
            ORDER BY x.indisprimary DESC, 1 LIMIT 1) i ON true
        WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.relreplident <> 'f'
          AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND {IS_REPLICA_IDENTITY})
        ORDER BY 1""",
        [list(source.publications)],
    ):
        if index is None:
            fix = (
                f"ALTER TABLE {table} REPLICA IDENTITY FULL;  -- or, cheaper: ALTER TABLE {table} ADD PRIMARY KEY (…);"
            )
        else:
            fix = f"ALTER TABLE {table} REPLICA IDENTITY {'DEFAULT' if primary else f'USING INDEX {index}'};"
        yield _problem(f"{table} has {why[letter]}; its UPDATE or DELETE is published, and fails", fix)
    return "every table whose UPDATE or DELETE is published has a replica identity"


def partition_identity(connection: Connection, source: Source) -> Check:
    """Partitions that are mirrored as one table need a key that tells their rows apart."""
    for table in published_tables(connection, source.publications):
        if table.identity is not None and table.identity.refused:
            name = Identifier(table.schema, table.name).as_string(connection)
            yield _problem(f"{name} cannot be mirrored: {table.identity.refused}", f"-- {HINT}")
    return "rows of partitioned tables can be told apart"


def locks(connection: Connection, source: Source) -> Check:
    """A table that nobody can read cannot be copied, and a new slot waits for the transaction that has locked it."""
    tables = published_tables(connection, source.publications)
    of = {oid: table for table in tables for oid in (table.oid, *(leaf for leaf, _ in table.leaves))}
    for oid, who in locked_tables(connection, list(of)).items():
        name = Identifier(of[oid].schema, of[oid].name).as_string(connection)
        yield _warning(
            f"{name} is locked: {who}",
            "SELECT pid, query FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE mode = 'AccessExclusiveLock';",
        )
    return "no published table is locked for long"


def unlogged_tables(connection: Connection, source: Source) -> Check:
    """They write no WAL, so nothing of them is ever sent."""
    for table, parent, _server in _left_out(connection, source, "c.relpersistence = 'u'"):
        fix = f"ALTER TABLE {table} SET LOGGED;"
        if parent:
            yield _problem(f"{table} is unlogged: its parent {parent} is published, but it is not", fix)
        else:
            yield _warning(f"{table} is unlogged: the publication leaves it out", fix)
    return "no unlogged table is left out"


def foreign_tables(connection: Connection, source: Source) -> Check:
    """Their rows are another server's."""
    for table, parent, server in _left_out(connection, source, "c.relkind = 'f'"):
        if parent:
            yield _problem(
                f"{table} is a foreign table: its parent {parent} is published, but it is not",
                f"ALTER TABLE {parent} DETACH PARTITION {table};",
            )
        else:
            yield _warning(
                f"{table} is a foreign table: the publication leaves it out",
                f"-- publish it where its rows are, behind foreign server {server}",
            )
    return "no foreign table is left out"


def column_lists(connection: Connection, source: Source) -> Check:
    """PostgreSQL does not decode a table's changes if its lists differ."""
    for found in lists.conflicts(connection, source.publications):
        yield _problem(f"{found}: its changes cannot be decoded", found.fix)
    return "no table has different column lists"


def slot(connection: Connection, source: Source, subscriber: Subscriber = Subscriber()) -> Check:  # noqa: B008
    """One that exists must be ours to use; one that we have used must exist."""
    found = slots.read(connection, source.slot)
    if found is None and subscriber.has_log:
        yield _problem(
            f"replication slot {source.slot} does not exist any more, and the change log ends where it was:"
            " later changes are lost",
            "walmere drop -c walmere.toml  # then begin anew: all tables are copied again",
        )
    if found is None:
        return f"replication slot {source.slot} does not exist yet; it will be created"
    name = f"replication slot {found.name}"
    try:
        slots.require_usable(found, connection.info.dbname)
    except SlotUnsuitable as error:
        yield _problem(f"{name}: {error.wrong}", f"export {_variable('slot')}={found.name[:61]}_2")
        return ""
    except SlotLost:
        return ""  # wal_status tells
    own = False
    if found.active:
        who = _value(connection, "SELECT application_name FROM pg_stat_activity WHERE pid = %s", found.active_pid)
        own = who is not None and who == subscriber.receiver
        if not own:
            yield (
                Level.WARNING if str(who).startswith("walmere") else Level.PROBLEM,
                f"{name} is in use by process {found.active_pid} (application_name {who or 'is empty'})",
                f"SELECT pg_terminate_backend({found.active_pid});",
            )
    if source.two_phase and not found.two_phase:
        yield _warning(
            f"{name} has two_phase off, unlike the configuration; the server turns it on when the receiver starts",
            f"export {_variable('two_phase')}=false  # if that is not wanted",
        )
    if found.two_phase and not source.two_phase:
        yield _warning(
            f"{name} has two_phase on, unlike the configuration; transactions will come when they are prepared",
            f"export {_variable('two_phase')}=true",
        )
    if found.failover != source.failover:
        command = f"ALTER_REPLICATION_SLOT {found.name} (FAILOVER {str(source.failover).lower()})"
        yield _warning(
            f"{name} has failover {'on' if found.failover else 'off'}, unlike the configuration",
            f"psql {shlex.quote(shown(source, replication='database'))} -c {shlex.quote(command)}",
        )
    return f"{name} is used by this subscription's receiver" if own else f"{name} exists and is free"


def wal_status(connection: Connection, source: Source) -> Check:
    """Whether the WAL that the slot needs is still there."""
    found = slots.read(connection, source.slot)
    if found is None:
        return ""
    what = f"replication slot {found.name} is {found.wal_status}"
    behind = f"{what}, and retains {_size(found.retained_bytes or 0)} of WAL"
    if found.wal_status == "lost":
        reason = f" ({found.invalidation_reason})" if found.invalidation_reason else ""
        yield _problem(f"{what}{reason}: it cannot be used any more", "walmere drop -c walmere.toml")
    if found.wal_status == "unreserved":
        yield _problem(f"{behind}, which the next checkpoint may remove", _keep_more(found))
    if found.wal_status == "extended":
        yield _warning(f"{behind}, more than max_wal_size", "walmere receive -c walmere.toml")
    return behind


def max_slot_wal_keep_size(connection: Connection, source: Source) -> Check:
    """Without a limit a stopped receiver fills the source's disk; with one it loses its slot."""
    limit = int(_value(connection, "SELECT setting FROM pg_settings WHERE name = 'max_slot_wal_keep_size'")) << 20
    if limit < 0:
        yield _warning(
            "max_slot_wal_keep_size is -1: while the receiver is stopped, WAL can fill the source's disk",
            _reload("max_slot_wal_keep_size", "64GB") + "  -- or what the disk can spare",
        )
    found = slots.read(connection, source.slot)
    if found is None or found.safe_wal_size is None:
        return f"max_slot_wal_keep_size is {_size(limit)}: a slot further behind is lost"
    left = f"max_slot_wal_keep_size is {_size(limit)}: {_size(found.safe_wal_size)} more, and the slot is lost"
    if found.safe_wal_size < limit * LITTLE_LEFT:
        yield _warning(left, _keep_more(found))
    return left


def idle_replication_slot_timeout(connection: Connection, _source: Source) -> Check:
    """From 18 on a slot can be lost by time alone."""
    timeout = _value(connection, "SELECT current_setting('idle_replication_slot_timeout', true)")
    if timeout not in ("0", None):
        yield _warning(
            f"idle_replication_slot_timeout is {timeout}: a receiver stopped for longer loses its slot",
            _reload("idle_replication_slot_timeout", "0"),
        )
    return "idle_replication_slot_timeout is off" if timeout else ""


def idle_database(connection: Connection, source: Source) -> Check:
    """A slot moves only when something comes through it, while all databases write the same WAL."""
    if _value(connection, "SELECT pg_is_in_recovery()"):
        return ""  # standby tells
    name = _role(connection)
    function, may = _row(
        connection,
        "SELECT oid::regprocedure::text, has_function_privilege(oid, 'EXECUTE') FROM pg_proc"
        " WHERE proname = 'pg_logical_emit_message' AND proargtypes[2] = 'text'::regtype",
    )
    effect = "while nothing is written in this database, the slot holds WAL back"
    if not source.heartbeat:
        yield _warning(f"source.heartbeat is 0: {effect}", f"export {_variable('heartbeat')}=10")
    elif not may:
        yield _warning(
            f"role {name} may not write the heartbeat: {effect}", f"GRANT EXECUTE ON FUNCTION {function} TO {name};"
        )
    return f"after {source.heartbeat:g} idle seconds a heartbeat moves the slot on"


def old_transactions(connection: Connection, _source: Source) -> Check:
    """A slot's restart_lsn stays before the oldest transaction that has written, in any database; a new slot waits."""
    writing = "FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND"
    effect = "holds the slot's restart_lsn, and so WAL, back"
    for pid, user, database, age in connection.execute(
        "SELECT pid, usename, datname, date_trunc('second', now() - xact_start)::text"
        f" {writing} xact_start < now() - make_interval(secs => %s) ORDER BY xact_start",
        [OLD_SECONDS],
    ):
        yield _warning(
            f"a transaction of role {user} in database {database} (pid {pid}), open for {age}, {effect}",
            f"SELECT pg_terminate_backend({pid});",
        )
    for gid, database, age in connection.execute(
        "SELECT quote_literal(gid), database, date_trunc('second', now() - prepared)::text FROM pg_prepared_xacts"
        " WHERE prepared < now() - make_interval(secs => %s) ORDER BY prepared",
        [OLD_SECONDS],
    ):
        yield _warning(
            f"prepared transaction {gid} in database {database}, {age} old, {effect}",
            f"ROLLBACK PREPARED {gid};  -- or COMMIT PREPARED; in database {database}",
        )
    if hidden := _value(connection, f"SELECT count(*) {writing} xact_start IS NULL"):
        yield _warning(
            f"open transactions of other roles: {hidden}; since when is hidden from this one",
            f"GRANT pg_read_all_stats TO {_role(connection)};",
        )
    return "no transaction has been open for long"


# wal_senders stands before role, whose own walsender may take a moment to go
_CHECKS: Final[tuple[Callable[..., Check], ...]] = (
    server_version,
    options,
    standby,
    wal_level,
    replication_slots,
    wal_senders,
    role,
    publication,
    column_lists,
    select,
    row_security,
    replica_identity,
    partition_identity,
    locks,
    unlogged_tables,
    foreign_tables,
    slot,
    wal_status,
    max_slot_wal_keep_size,
    idle_replication_slot_timeout,
    idle_database,
    old_transactions,
)


def _warning(what: str, fix: str) -> Said:
    return Level.WARNING, what, fix


def _problem(what: str, fix: str) -> Said:
    return Level.PROBLEM, what, fix


def _row(connection: Connection, query: str, *parameters: Any) -> tuple[Any, ...]:
    return connection.execute(query, parameters or None).fetchone() or (None,)


def _value(connection: Connection, query: str, *parameters: Any) -> Any:
    return _row(connection, query, *parameters)[0]


def _role(connection: Connection) -> str:
    return str(_value(connection, "SELECT quote_ident(current_user)"))


def _variable(key: str) -> str:
    return f"{PREFIX}SOURCE__{key.upper()}"


def _restart(setting: str, value: str | int) -> str:
    return f"ALTER SYSTEM SET {setting} = '{value}';  -- then restart the server"


def _reload(setting: str, value: str) -> str:
    return f"ALTER SYSTEM SET {setting} = '{value}'; SELECT pg_reload_conf();"


def _keep_more(found: slots.Slot) -> str:
    return _reload("max_slot_wal_keep_size", f"{(found.retained_bytes or 0) * 2 // (1 << 20) + 1024}MB")


def _size(count: int) -> str:
    return f"{count / (1 << 20):.0f} MB"


def _room(connection: Connection, setting: str, used: int, need: int, where: str) -> Check:
    limit = int(_value(connection, "SELECT current_setting(%s)", setting))
    what = f"{used} of {setting} = {limit} in use"
    lacking = used + need + 1 - limit
    fix = _restart(setting, limit + lacking)
    if lacking > 0 and need:
        yield _problem(f"{what}; the receiver needs one, and synchronising tables another ({where})", fix)
    elif lacking > 0:
        yield _warning(f"{what}; synchronising tables needs another ({where})", fix)
    return what


def _with_leaves(connection: Connection, which: str = "true") -> str:
    """The published tables, and of partitioned ones the leaves too. `which`: of publications p like that."""
    return f"""
        {published(connection)}
        SELECT relid FROM published JOIN chosen p ON p.oid = pubid WHERE {which}
        UNION SELECT leaf.relid FROM published JOIN chosen p ON p.oid = pubid
              JOIN leaf ON leaf.root = published.relid WHERE {which}"""


def _left_out(connection: Connection, source: Source, which: str) -> list[tuple[Any, ...]]:
    """Such tables in what is published as a whole (database, schema, partition tree): name, parent, foreign server."""
    by_schema = (
        "OR EXISTS (SELECT FROM pg_publication_namespace s JOIN pg_class m ON m.relnamespace = s.pnnspid"
        " WHERE s.pnpubid = p.oid AND m.oid = any_of.oid)"
    )
    return connection.execute(
        f"""
        SELECT DISTINCT c.oid::regclass::text, i.inhparent::regclass::text, quote_ident(f.srvname)
        FROM pg_publication p, pg_class c
        CROSS JOIN LATERAL (SELECT c.oid UNION SELECT relid FROM pg_partition_ancestors(c.oid)) any_of (oid)
        LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND c.relispartition
        LEFT JOIN pg_foreign_table t ON t.ftrelid = c.oid
        LEFT JOIN pg_foreign_server f ON f.oid = t.ftserver
        WHERE p.pubname = ANY(%s) AND c.relkind IN ('r', 'p', 'f') AND c.oid >= 16384 AND {which}
          AND (p.puballtables
               OR EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = any_of.oid)
               {by_schema if connection.info.server_version >= 150_000 else ""})
        ORDER BY 1""",
        [list(source.publications)],
    ).fetchall()


def _fill(connection: Connection, quoted: str) -> str:
    tables = _value(
        connection,
        "SELECT string_agg(oid::regclass::text, ', ' ORDER BY oid) FROM pg_class WHERE relkind IN ('r', 'p')"
        " AND relpersistence = 'p' AND NOT relispartition AND oid >= 16384",
    )
    return f"ALTER PUBLICATION {quoted} ADD TABLE {tables};" if tables else "-- create tables, then add them to it"


def _grant(connection: Connection, error: SourceError) -> str:
    match = re.search(r"permission denied for (function|table|view) (\S+)", error.wrong)
    if match is None:
        return ""
    right = "EXECUTE ON FUNCTION" if match[1] == "function" else "SELECT ON"
    return f"GRANT {right} pg_catalog.{match[2]} TO {_role(connection)};"
