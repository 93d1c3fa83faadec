"""Runs the same statements for a native subscription and for ours. At the end both subscribers must be equal.

There are three databases: one on the publisher, and two on the subscriber's server, `…_native` and `…_ours`. A story
changes the publisher's database, calls `sync`, and compares:

    both.source("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    both.target("CREATE TABLE t (id int PRIMARY KEY)")
    both.start()
    both.source("INSERT INTO t VALUES (1)")
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT id FROM t") == [(1,)]

The native subscription has `disable_on_error`, so that it stops at an error as ours does.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier, Literal

from conftest import Database
from processes import eventually
from walmere import config as configuration
from walmere.api import Subscription
from walmere.errors import SinkError, WalmereError
from walmere.lsn import Lsn
from walmere.running import launcher
from walmere.subscription.launcher import Launcher
from walmere.subscription.tables import Tables
from walmere.testing.server import Server

CATCH_UP_SECONDS = 60
_FINISHED = re.compile(r"finished at ([0-9A-F]+/[0-9A-F]+)")
_SKIP_HINT = re.compile(r"walmere skip -c \S+ ([0-9A-F]+/[0-9A-F]+)")

USER_TABLES = """
    SELECT n.nspname, c.relname
    FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
    WHERE relkind IN ('r', 'p') AND NOT relispartition
      AND nspname NOT LIKE 'pg\\_%' AND nspname NOT IN ('information_schema', 'walmere')
    ORDER BY 1, 2
"""

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Pair:
    """Which servers a story runs on. None is the version under test."""

    publisher: int | None = None
    subscriber: int | None = None
    subscriber_options: str = ""  # of CREATE DATABASE


class SubscriberDatabase(Database):
    """A database of a given name on the subscriber's server."""

    def __init__(self, server: Server, name: str, options: str = "") -> None:
        self.server, self.name = server, name
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            strategy = " STRATEGY file_copy" if admin.info.server_version >= 150_000 else ""
            admin.execute(f"CREATE DATABASE {name}{strategy} {options}")
        self.connection = psycopg.connect(self.dsn, autocommit=True)


class SideBySide:
    """A publisher's database, and the databases of a native subscription and of ours."""

    def __init__(self, publisher: Server, subscriber: Server, directory: Path, options: str = "") -> None:
        self.publisher = Database(publisher)
        self.name = self.publisher.name
        self.native = SubscriberDatabase(subscriber, f"{self.name}_native", options)
        self.ours = SubscriberDatabase(subscriber, f"{self.name}_ours", options)
        self.subscription = f"{self.name}_sub"
        self.file = directory / "walmere.toml"
        self._log = subscriber.directory / "log"
        self._log_offset = 0
        self._origins = self._existing_origins()
        self._roles: list[str] = []
        self._failures: list[BaseException] = []

    # -- statements

    def source(self, *statements: str) -> None:
        """Run statements on the publisher."""
        self.publisher.execute(*statements)

    def target(self, *statements: str) -> None:
        """Run statements on both subscribers."""
        self.native.execute(*statements)
        self.ours.execute(*statements)

    def everywhere(self, *statements: str) -> None:
        """Run statements on the publisher and on both subscribers."""
        self.source(*statements)
        self.target(*statements)

    def role(self, suffix: str, options: str = "LOGIN") -> str:
        """Create a role on both servers. Returns its name. It is dropped at the end."""
        name = f"{self.name}_{suffix}"
        for database in (self.publisher, self.ours):
            database.execute(f"CREATE ROLE {name} {options}")
        self._roles.append(name)
        return name

    # -- the subscriptions

    def subscribe(
        self,
        *publications: str,
        native: Mapping[str, str] | None = None,
        target: Mapping[str, Any] | None = None,
        **source: Any,
    ) -> None:
        """Create the native subscription, and write the configuration of ours. Nothing of ours runs yet.

        `source` are keys of [source]; `streaming`, `two_phase` and `origin` are options of the native subscription,
        too. `target` are more keys of [target], `native` more options of CREATE SUBSCRIPTION.
        """
        names = publications or ("pub",)
        self._write_configuration(names, source, target or {})
        self._log_offset = self._log.stat().st_size
        self.create_native(names, {**self._native_options(source), **(native or {})})

    def start(self, *publications: str, **options: Any) -> None:
        """Subscribe, and wait until both subscribers have a copy of all tables."""
        self.subscribe(*publications, **options)
        self.sync()

    def create_native(self, publications: Sequence[str], options: Mapping[str, str]) -> None:
        """CREATE SUBSCRIPTION."""
        given = SQL(", ").join(SQL("{} = {}").format(SQL(key), Literal(value)) for key, value in options.items())
        self.native.connection.execute(
            SQL("CREATE SUBSCRIPTION {} CONNECTION {} PUBLICATION {} WITH ({})").format(
                Identifier(self.subscription),
                Literal(self.publisher.dsn),
                SQL(", ").join(map(Identifier, publications)),
                given,
            )
        )

    def alter_native(self, action: str) -> None:
        """ALTER SUBSCRIPTION."""
        self.native.execute(f"ALTER SUBSCRIPTION {self.subscription} {action}")

    def refresh(self) -> None:
        """Let the native subscription notice tables that were added. Ours notices them by itself."""
        self.alter_native("REFRESH PUBLICATION")

    def launcher(self) -> Launcher:
        """Our run, as `walmere run` makes it."""
        return launcher(configuration.load(self.file), self.file)

    def tables(self) -> Tables:
        """The states of our tables."""
        return Tables(configuration.load(self.file).subscription.directory)

    # -- catching up

    def sync(self) -> None:
        """Wait until both subscribers have copied all tables and applied everything that is committed now."""
        self.sync_native()
        self.sync_ours()

    def sync_native(self) -> None:
        """Wait for the native subscription."""
        lsn = self.publisher.value("SELECT pg_current_wal_flush_lsn()::text")
        eventually(lambda: self._native_has_applied(lsn), CATCH_UP_SECONDS, self._native_situation, every=0.02)

    def sync_ours(self) -> None:
        """As `walmere run --once`, in this process, so that tests share one Spark."""
        until = Lsn.parse(self.publisher.value("SELECT pg_current_wal_insert_lsn()::text"))
        self.launcher().run(until)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """As `walmere run`, in a thread. It is stopped at the end of the block, which raises the error of the run."""
        made = self.launcher()
        self._failures = []

        def follow() -> None:
            try:
                made.run()
            except BaseException as error:
                self._failures.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            made.stop()
            thread.join(60)
        assert not thread.is_alive(), "the run does not stop"
        if self._failures:
            raise self._failures[0]

    @contextlib.contextmanager
    def subscriber_down(self) -> Iterator[None]:
        """The subscriber's server crashes. It starts again at the end of the block."""
        server = self.ours.server
        server.stop(signal.SIGKILL)
        try:
            yield
        finally:
            server.start()
            for database in (self.native, self.ours):
                database.connection.close()
                database.connection = psycopg.connect(database.dsn, autocommit=True)

    # -- errors

    def native_stops(self) -> str:
        """Wait until an error has disabled the native subscription. Returns what the server has logged since."""
        if self.native.major < 15:
            pytest.skip("PostgreSQL 14 has no disable_on_error")
        eventually(lambda: not self._native_enabled(), CATCH_UP_SECONDS, self._native_situation)
        return self._native_log()

    def ours_stops(self, kind: type[WalmereError] = SinkError) -> WalmereError:
        """Run ours, which must stop with an error. Returns the error."""
        with pytest.raises(kind) as caught:
            self.sync_ours()
        return caught.value

    def both_stop(self) -> tuple[str, WalmereError]:
        """Both must stop with an error. Returns the native log, and our error."""
        return self.native_stops(), self.ours_stops()

    def enable_native(self) -> None:
        """Let the native subscription continue."""
        self._log_offset = self._log.stat().st_size
        self.alter_native("ENABLE")

    def skip(self, our_error: WalmereError | None = None) -> Lsn:
        """Both have stopped: skip the transaction that the native log names, for both. Returns its LSN.

        With `our_error`, ours skips the transaction that this error names instead.
        """
        found = _FINISHED.findall(self._native_log())
        assert found, self._native_log()
        lsn = found[-1]
        self.alter_native(f"SKIP (lsn = '{lsn}')")
        self.enable_native()
        if our_error is not None:
            named = _SKIP_HINT.search(str(our_error))
            assert named, str(our_error)
            lsn = named[1]
        Subscription(self.file).skip(Lsn.parse(lsn))
        return Lsn.parse(lsn)

    # -- comparison

    def rows(self, query: str, *parameters: Any) -> Rows:
        """The rows of a query, which must be the same on both subscribers."""
        native = self.native.rows(query, *parameters)
        ours = self.ours.rows(query, *parameters)
        assert ours == native, f"{query}\n  native: {_shown(native)}\n  ours:   {_shown(ours)}"
        return native

    def value(self, query: str, *parameters: Any) -> Any:
        """The value of a query, which must be the same on both subscribers."""
        return self.rows(query, *parameters)[0][0]

    def assert_equal(self, *queries: str, source: bool = False) -> None:
        """Each query gives the same rows on both subscribers, and on the source if asked.

        Without queries: all tables are compared, each row as its text and with the partition that it is in.
        """
        for query in queries or self._all_tables(source):
            rows = self.rows(query)
            if source:
                published = self.publisher.rows(query)
                assert rows == published, f"{query}\n  source:      {_shown(published)}\n  subscribers: {_shown(rows)}"

    def becomes_equal(self, *queries: str, source: bool = True) -> None:
        """Wait until `assert_equal` holds, or a run in a thread has failed."""
        last = ""

        def equal() -> bool:
            nonlocal last
            try:
                self.assert_equal(*queries, source=source)
            except AssertionError as error:
                last = str(error)
                return False
            return True

        self.becomes(equal, lambda: last)

    def becomes(self, done: Callable[[], bool], why: Callable[[], str] = lambda: "") -> None:
        """Wait until something is so, or a run in a thread has failed."""
        eventually(lambda: self._failures or done(), 60, lambda: f"{why()}\n{self._our_situation()}", every=0.1)
        if self._failures:
            raise self._failures[0]

    def native_conflicts(self) -> dict[str, int]:
        """How often the native subscription had each kind of conflict. The counters are reported with a delay."""
        row = self.native.value(
            "SELECT to_jsonb(s) FROM pg_stat_subscription_stats s WHERE subname = %s", self.subscription
        )
        return {key.removeprefix("confl_"): n for key, n in row.items() if key.startswith("confl_") and n}

    def our_conflicts(self) -> dict[str, int]:
        """How often ours had each kind of conflict."""
        query = "SELECT conflict, count(*) FROM walmere.conflicts WHERE subscription = %s GROUP BY 1"
        return dict(self.ours.rows(query, self.name))

    # -- what a subscriber sends on

    def publish_on(self, *tables: str, two_phase: bool = False) -> None:
        """Publish tables of both subscribers, and make slots there, for `sent_on`."""
        names = ", ".join(tables)
        slot = "SELECT pg_create_logical_replication_slot(current_database() || '_on', 'pgoutput'"
        self.target(f"CREATE PUBLICATION on_pub FOR TABLE {names}", slot + (", false, true)" if two_phase else ")"))

    def sent_on(self, **options: str) -> list[str]:
        """The pgoutput messages that both subscribers would send on, by their letters. Both must send the same.

        Origin and Relation messages are left out.
        """
        native, ours = (self.sent_on_by(database, **options) for database in (self.native, self.ours))
        assert ours == native, f"sent on\n  native: {native}\n  ours:   {ours}"
        return native

    def sent_on_by(self, subscriber: Database, **options: str) -> list[str]:
        """As `sent_on`, of one subscriber."""
        given = {"proto_version": "3" if self.native.major >= 15 else "2", "publication_names": "on_pub"} | options
        arguments = ", ".join(f"'{key}', '{value}'" for key, value in given.items())
        letters = (
            "SELECT chr(get_byte(data, 0)) FROM pg_logical_slot_peek_binary_changes("
            f"current_database() || '_on', NULL, NULL, {arguments})"
        )
        return [letter for (letter,) in subscriber.rows(f"{letters} WHERE chr(get_byte(data, 0)) NOT IN ('O', 'R')")]

    # -- the end

    def drop(self) -> None:
        """Drop subscriptions, databases, origins, slots and roles, so that the next story can use the servers."""
        for database in (self.native, self.ours, self.publisher):
            database.connection.rollback()  # a statement may have failed between BEGIN and COMMIT
            for (name,) in database.rows(
                "SELECT subname FROM pg_subscription JOIN pg_database d ON d.oid = subdbid"
                " WHERE datname = current_database()"
            ):
                database.execute(
                    f"ALTER SUBSCRIPTION {name} DISABLE",
                    f"ALTER SUBSCRIPTION {name} SET (slot_name = NONE)",
                    f"DROP SUBSCRIPTION {name}",
                )
            self._roll_back_prepared(database)
        self.native.drop()
        self.ours.drop()
        self.publisher.drop()
        with psycopg.connect(self.ours.server.dsn(), autocommit=True) as admin:
            for origin in self._existing_origins(admin) - self._origins:
                admin.execute("SELECT pg_replication_origin_drop(%s)", [origin])
        for server in (self.ours.server, self.publisher.server):
            with psycopg.connect(server.dsn(), autocommit=True) as admin:
                for role in self._roles:
                    admin.execute(f"DROP OWNED BY {role}")  # what it may do on the server
                    admin.execute(f"DROP ROLE {role}")

    # -- inside

    def _write_configuration(
        self, publications: Sequence[str], source: Mapping[str, Any], target: Mapping[str, Any]
    ) -> None:
        sections = {
            "source": {
                "dsn": self.publisher.dsn,
                "publications": list(publications),
                "slot": self.publisher.slot,
                **source,
            },
            "subscription": {"name": self.name, "directory": "subscription"},
            "target": {"kind": "postgres", "dsn": self.ours.dsn, **target},
            "spark": {"master": "local[2]"},
        }
        lines = [
            line
            for section, keys in sections.items()
            for line in (f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()))
        ]
        self.file.write_text("\n".join(lines) + "\n")

    def _native_options(self, source: Mapping[str, Any]) -> dict[str, str]:
        options = {"slot_name": f"{self.name}_native", "streaming": "on" if source.get("streaming", True) else "off"}
        if self.native.major >= 15:
            options |= {"disable_on_error": "on"}
        if source.get("two_phase"):
            options |= {"two_phase": "on"}
        if "origin" in source:
            options |= {"origin": source["origin"]}
        return options

    def _native_enabled(self) -> bool:
        return bool(self.native.value("SELECT subenabled FROM pg_subscription WHERE subname = %s", self.subscription))

    def _native_has_applied(self, lsn: str) -> bool:
        assert self._native_enabled(), f"the native subscription has stopped:\n{self._native_log()}"
        copying = self.native.value(
            "SELECT count(*) FROM pg_subscription_rel JOIN pg_subscription s ON s.oid = srsubid"
            " WHERE subname = %s AND srsubstate NOT IN ('r', 's')",
            self.subscription,
        )
        applied = self.publisher.rows(
            "SELECT 1 FROM pg_stat_replication WHERE application_name = %s AND state = 'streaming'"
            " AND replay_lsn >= %s::pg_lsn",
            self.subscription,
            lsn,
        )
        return not copying and bool(applied)

    def _native_log(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._log_offset)
            return log.read().decode(errors="replace")

    def _native_situation(self) -> str:
        states = self.native.rows("SELECT srrelid::regclass::text, srsubstate FROM pg_subscription_rel")
        return f"the native subscription: {states}\n{self._native_log()[-3000:]}"

    def _our_situation(self) -> str:
        shown = (f"{each.name}: phase {each.phase}, applied {each.applied_lsn}, {each.error}" for each in self.tables())
        return "\n".join(shown)

    def _all_tables(self, source: bool) -> list[str]:
        names = self.native.rows(USER_TABLES)
        assert self.ours.rows(USER_TABLES) == names, "the subscribers have different tables"
        where = "" if source else "tableoid::regclass::text, "  # partitions of the source have other names
        return [
            SQL("SELECT {}t::text FROM {} t ORDER BY 1{}")
            .format(SQL(where), Identifier(*name), SQL("" if source else ", 2"))
            .as_string()
            for name in names
        ]

    def _roll_back_prepared(self, database: Database) -> None:
        """A prepared transaction that a failed story has left would block the next slot on the same server."""
        query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        for (gid,) in database.rows(query):
            database.connection.execute(SQL("ROLLBACK PREPARED {}").format(Literal(gid)))

    def _existing_origins(self, connection: psycopg.Connection[Any] | None = None) -> set[str]:
        query = "SELECT roname FROM pg_replication_origin"
        rows = (connection or self.ours.connection).execute(query).fetchall()
        return {name for (name,) in rows}


def _shown(rows: Rows, limit: int = 40) -> str:
    """Rows for a message."""
    more = f" … ({len(rows)} rows)" if len(rows) > limit else ""
    return f"{rows[:limit]}{more}"
