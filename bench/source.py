"""The server that benchmarks read from, and the limit tools: pg_recvlogical, COPY, a native subscription."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from bench.side_by_side import Run, timed
from walmere.lsn import Lsn
from walmere.testing.server import LOGICAL, Server, binaries

SETTINGS = {**LOGICAL, "max_wal_size": "16GB", "shared_buffers": "'512MB'", "checkpoint_timeout": "'1h'"}


class Source:
    """A server, and the limit tools that read from it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.sql = psycopg.connect(server.dsn(), autocommit=True)
        self.sql.execute("SET synchronous_commit = off")
        self._number = 0

    def value(self, query: str, *parameters: object) -> str:
        row = self.sql.execute(query.encode(), parameters or None).fetchone()
        assert row is not None
        return str(row[0])

    def slot(self, name: str) -> None:
        self.sql.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])

    def drop(self, name: str) -> None:
        """Drop a slot, when its walsender has ended."""
        while self.sql.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active", [name]).fetchone():
            time.sleep(0.01)
        self.sql.execute("SELECT pg_drop_replication_slot(%s)", [name])

    @contextlib.contextmanager
    def copy_of(self, slot: str, name: str = "") -> Iterator[str]:
        """Create another slot at the same position, for one run."""
        self._number += 1
        name = name or f"copy_{self._number}"
        self.sql.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [slot, name])
        try:
            yield name
        finally:
            self.drop(name)

    def end(self) -> str:
        """Flush the WAL. Returns where it ends."""
        self.sql.execute("SELECT txid_current()")
        self.sql.execute("CHECKPOINT")
        return self.value("SELECT pg_current_wal_lsn()::text")

    def mark(self) -> Lsn:
        """Commit a transaction with a logical message. Returns an LSN before that commit, after all others."""
        return Lsn.parse(self.value("SELECT pg_logical_emit_message(true, 'bench', '')::text"))

    def recvlogical(self, slot: str, publication: str, end: str) -> Run:
        """Run pg_recvlogical of the same version to /dev/null, over TCP."""
        with self.copy_of(slot) as copy:
            return timed(
                [
                    self.server.bindir / "pg_recvlogical",
                    *("-h", "127.0.0.1", "-p", str(self.server.port), "-U", "postgres", "-d", "postgres"),
                    *("-S", copy, "--start", "-f", "/dev/null", "-E", end, "--no-loop"),
                    *("-o", "proto_version=1", "-o", f"publication_names={publication}"),
                ]
            )

    def two_copies(self, table: str, target: str | None = None) -> Run:
        """Run two parallel `COPY … TO STDOUT`, half of the pages each, to /dev/null or into a target's table."""
        pages = int(self.value("SELECT pg_relation_size(%s::regclass) / 8192", table))
        halves = [(0, pages // 2), (pages // 2, pages + 1)]
        psql = (str(self.server.bindir / "psql"), "-qX")
        began = time.perf_counter()
        running = []
        for first, last in halves:
            query = f"COPY (SELECT * FROM {table} WHERE ctid >= '({first},0)' AND ctid < '({last},0)') TO STDOUT"
            output = subprocess.DEVNULL if target is None else subprocess.PIPE
            running.append(subprocess.Popen([*psql, "-d", self.server.dsn(), "-c", query], stdout=output))
            if target is not None:
                into = [*psql, "-d", target, "-c", f"COPY {table} FROM STDIN"]
                running.append(subprocess.Popen(into, stdin=running[-1].stdout))
        codes = [process.wait() for process in running]
        assert not any(codes)
        return Run(time.perf_counter() - began, 0, 0)


class Native:
    """A second server with a subscription: PostgreSQL's own walreceiver, table sync and apply worker."""

    def __init__(self, server: Server, source: Source, options: str = "") -> None:
        self.server = server
        self.sql = psycopg.connect(server.dsn(), autocommit=True)
        self._source = source
        self._options = options

    def initial_sync(self, table: str, create: str) -> Run:
        """Time from CREATE SUBSCRIPTION until the table is copied and in sync."""
        self.sql.execute(f"DROP TABLE IF EXISTS {table}; {create}".encode())
        began = time.perf_counter()
        self.sql.execute(self._command(table, "copy_data = true").encode())
        while self.sql.execute("SELECT 1 FROM pg_subscription_rel WHERE srsubstate NOT IN ('s', 'r')").fetchone():
            time.sleep(0.01)
        seconds = time.perf_counter() - began
        self.sql.execute(f"DROP SUBSCRIPTION {table}".encode())
        return Run(seconds, 0, 0)

    def catch_up(self, table: str, create: str, fill: str, slot: str, end: str, *, reported: bool = True) -> Run:
        """Time from CREATE SUBSCRIPTION on a slot with a backlog until all of it is applied.

        `reported`: until the publisher knows. With synchronous_commit = off, that is a moment later, because the
        subscriber flushes its WAL first.
        """
        recreate(self.sql, table, create, fill)
        with self._source.copy_of(slot) as copy:
            began = time.perf_counter()
            options = f"copy_data = false, create_slot = false, slot_name = '{copy}'"
            self.sql.execute(self._command(table, options).encode())
            while not (self._reported(copy, end) if reported else self._applied(table, end)):
                time.sleep(0.01)
            seconds = time.perf_counter() - began
            self.sql.execute(f"ALTER SUBSCRIPTION {table} DISABLE".encode())
            self.sql.execute(f"ALTER SUBSCRIPTION {table} SET (slot_name = NONE)".encode())
            self.sql.execute(f"DROP SUBSCRIPTION {table}".encode())
        return Run(seconds, 0, 0)

    def _reported(self, slot: str, end: str) -> bool:
        query = "SELECT 1 FROM pg_replication_origin_status WHERE remote_lsn >= %s::pg_lsn"
        applied = (
            "SELECT 1 FROM pg_stat_replication r JOIN pg_replication_slots s ON r.pid = s.active_pid"
            f" WHERE s.slot_name = '{slot}' AND r.replay_lsn >= '{end}'"
        )
        found = self.sql.execute(query, [end]).fetchone() or self._source.sql.execute(applied.encode()).fetchone()
        return found is not None

    def _applied(self, subscription: str, end: str) -> bool:
        """Whether the apply worker has reached a keepalive with this LSN: it has applied all messages before."""
        query = "SELECT 1 FROM pg_stat_subscription WHERE subname = %s AND latest_end_lsn >= %s::pg_lsn"
        return self.sql.execute(query, [subscription, end]).fetchone() is not None

    def _command(self, table: str, options: str) -> str:
        dsn = self._source.server.dsn()
        options = ", ".join(filter(None, (options, self._options)))
        return f"CREATE SUBSCRIPTION {table} CONNECTION '{dsn}' PUBLICATION {table} WITH ({options})"


def recreate(sql: psycopg.Connection[Any], table: str, create: str, fill: str) -> None:
    """Create a table of a subscriber again, with its existing rows."""
    sql.execute(f"DROP TABLE IF EXISTS {table}; {create}".encode())
    if fill:
        sql.execute(fill.encode())
        sql.execute(f"VACUUM (ANALYZE) {table}".encode())
        sql.execute("CHECKPOINT")


@contextlib.contextmanager
def source(major: int) -> Iterator[Source]:
    """A server of this version, removed at the end."""
    server = Server(binaries()[major], SETTINGS)
    try:
        server.start()
        made = Source(server)
        yield made
        made.sql.close()
    finally:
        server.remove()


@contextlib.contextmanager
def native(of: Source, major: int, options: str = "") -> Iterator[Native]:
    """A subscriber of the same version. `options` are those of CREATE SUBSCRIPTION."""
    server = Server(binaries()[major], SETTINGS)
    try:
        server.start()
        made = Native(server, of, options)
        yield made
        made.sql.close()
    finally:
        server.remove()


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--server", type=int, default=max(binaries()), help="major version of the servers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--small", action="store_true", help="a hundredth of the rows, to check that the benchmark works"
    )
    return parser


def scratch_config(
    server: Server, directory: Path, publication: str, slot: str, more: str = "", target: str = 'path = "lake"'
) -> Path:
    """Write a walmere.toml."""
    config = directory / "walmere.toml"
    config.write_text(
        f'[source]\ndsn = "{server.dsn()}"\npublications = ["{publication}"]\nslot = "{slot}"\n{more}'
        '[subscription]\nname = "bench"\ndirectory = "subscription"\n'
        f"[target]\n{target}\n"
        '[spark]\nmaster = "local[2]"\n'
    )
    return config
