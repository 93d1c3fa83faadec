"""A subscription whose target is a database, for benchmarks.

The database is on the server of the native subscriber, so both have the same settings.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from pydantic import SecretStr

from bench.ours import OurSubscription
from bench.side_by_side import Run
from bench.source import Native, Source
from walmere.config import PostgresTarget
from walmere.lsn import Lsn
from walmere.sinks.postgres.sink import PostgresSink

DATABASE = "ours"
SUBSCRIPTION = "bench"


@dataclass(frozen=True)
class Database:
    """The database that our subscription writes to."""

    dsn: str
    sql: psycopg.Connection[Any]


@contextlib.contextmanager
def database(subscriber: Native, synchronous_commit: str) -> Iterator[Database]:
    """A database beside the one of the native subscription."""
    subscriber.sql.execute(f"CREATE DATABASE {DATABASE}".encode())
    dsn = subscriber.server.dsn(DATABASE, options=f"-c synchronous_commit={synchronous_commit}")
    with psycopg.connect(dsn, autocommit=True) as sql:
        yield Database(dsn, sql)


class OursInPostgres(OurSubscription):
    """A subscription with its directory. Its tables are created by the benchmarks."""

    def __init__(self, database: Database, source: Source, directory: Path, publication: str) -> None:
        super().__init__(source, directory, publication)
        self.sql = database.sql
        self.dsn = database.dsn
        self.target = f'kind = "postgres"\ndsn = "{database.dsn}"'

    def catch_up(self, slot: str, mark: Lsn) -> Run:
        """Do what `walmere run` does, without starting Spark: time until what committed after `mark` is applied.

        It goes on, as a native subscription does. So it starts its query at once, without looking for changes first.
        """
        reached = threading.Event()
        made = self.launcher(slot, lambda _, lsn: reached.set() if lsn > mark else None)
        began = time.perf_counter()
        thread = threading.Thread(target=made.run)
        thread.start()
        while not reached.wait(1.0):
            assert thread.is_alive()
        seconds = time.perf_counter() - began
        made.stop()
        thread.join()
        return Run(seconds, 0, 0)

    def rows(self, table: str) -> int:
        [[count]] = self.sql.execute(f"SELECT count(*) FROM {table}".encode()).fetchall()
        return int(count)

    def keep(self) -> Callable[[], None]:
        """Save all files and the stored positions as they are now. The returned function restores them."""
        restore_files = super().keep()
        columns = "lsn::text, version, schema, name"
        stored = self.sql.execute(f"SELECT {columns} FROM walmere.tables".encode()).fetchall()

        def restore() -> None:
            restore_files()
            for row in stored:
                self.sql.execute(
                    "UPDATE walmere.tables SET lsn = %s::pg_lsn, version = %s WHERE (schema, name) = (%s, %s)", row
                )
            # its progress is that of the last round
            self.sql.execute(
                "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin WHERE starts_with(roname, %s)",
                [f"walmere_{SUBSCRIPTION}"],
            )

        return restore

    def remove(self) -> None:
        """Remove the files, and what is stored in the target. The tables stay."""
        target = PostgresTarget(kind="postgres", dsn=SecretStr(self.dsn))
        PostgresSink(target, SUBSCRIPTION).drop()
        super().remove()


def contents(sql: psycopg.Connection[Any], table: str) -> tuple[Any, ...]:
    """The number of rows, and a checksum of all columns: equal if the rows are, in any order."""
    query = f"SELECT count(*), sum(hashtextextended(t::text, 0)) FROM {table} t"
    [row] = sql.execute(query.encode()).fetchall()
    return tuple(row)
