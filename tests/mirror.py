"""What stories about the mirror have in common: run the subscription once on a real Spark, and compare both sides."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from psycopg.sql import SQL, Identifier
from psycopg.types.json import set_json_loads

from conftest import Database
from delta_rows import read_delta
from processes import eventually
from walmere import config as configuration
from walmere.config import Config, DeltaTarget
from walmere.errors import SinkMismatch, WalmereError
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.running import launcher
from walmere.sinks.delta.sink import DeltaSink
from walmere.subscription.launcher import Launcher
from walmere.subscription.state import Phase
from walmere.subscription.tables import Tables


class Mirror:
    """A subscription of a test's database, into a lake of its own."""

    def __init__(
        self, database: Database, directory: Path, *publications: str, user: str = "postgres", **source: Any
    ) -> None:
        """`source` are more keys of [source], or other values of those that are there anyway."""
        self.database = database
        self._failures: list[BaseException] = []
        self.batches: list[float] = []
        """Of all runs in this process: how long each batch took."""
        self.retries: list[tuple[int, WalmereError]] = []  # after so many batches, this error
        set_json_loads(_as_text, database.connection)  # json as its text, as the target has it
        directory.mkdir(exist_ok=True)
        self.file = directory / "walmere.toml"
        dsn = database.server.dsn(database.name, user)
        keys = {"dsn": dsn, "publications": publications or ("pub",), "slot": database.slot} | source
        lines = "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items())
        self.file.write_text(
            f"""
[source]
{lines}
[subscription]
name = "{database.name}"
directory = "subscription"
[target]
path = "lake"
[maintenance]
[spark]
master = "local[2]"
"""
        )

    def set(self, section: str, **keys: str | bool | float) -> None:
        """Add keys to a section of the configuration."""
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        self.file.write_text(self.file.read_text().replace(f"[{section}]\n", f"[{section}]\n{lines}"))

    @property
    def config(self) -> Config:
        return configuration.load(self.file)

    def run_once(self) -> None:
        """As `walmere run --once`, in this process, so that tests share one Spark."""
        until = Lsn.parse(self.database.value("SELECT pg_current_wal_insert_lsn()::text"))
        self.launcher().run(until)

    def launcher(self) -> Launcher:
        """As `walmere run` makes it."""

        def retried(error: WalmereError) -> None:
            self.retries.append((len(self.batches), error))

        return launcher(self.config, self.file, on_batch_end=self.batches.append, on_retry=retried)

    @contextlib.contextmanager
    def following(self) -> Iterator[tuple[Launcher, threading.Thread]]:
        """As `walmere run`, in a thread; it is told to end at the end of the block, which raises what it ended with."""
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
            yield made, thread
        finally:
            made.stop()
            thread.join(60)
        assert not thread.is_alive(), "it does not end"
        if self._failures:
            raise self._failures[0]

    def phase(self, table: str, schema: str = "public") -> Phase | None:
        return next((each.phase for each in self.tables() if each.name == f"{schema}.{table}"), None)

    def oid(self, table: str) -> int:
        return int(self.database.value("SELECT %s::regclass::oid::int8", table))

    def tables(self) -> Tables:
        return Tables(self.config.subscription.directory)

    def delta(self, table: str, schema: str = "public") -> DeltaTable:
        assert isinstance(self.config.target, DeltaTarget)
        options = self.config.storage.settings if isinstance(self.config.target.path, str) else None
        return DeltaSink(str(self.config.target.path), storage_options=options).open(TableName(schema, table))

    def rows(self, table: str, schema: str = "public") -> Counter[tuple[Any, ...]]:
        """What the target holds, as a multiset."""
        found = read_delta(self.delta(table, schema))
        return Counter(zip(*(map(_plain, column.to_pylist()) for column in found.columns), strict=True))

    def assert_equal(self, *tables: str, schema: str = "public", columns: str = "*", where: str = "true") -> None:
        """Compare each table with its source, every row and every value; `where`: of those rows that are published."""
        for table in tables:
            query = SQL("SELECT {} FROM {} WHERE {}").format(SQL(columns), Identifier(schema, table), SQL(where))
            source = Counter(tuple(map(_plain, row)) for row in self.database.rows(query.as_string()))
            target = self.rows(table, schema)
            assert target == source, f"{table}: missing {source - target}, extra {target - source}"

    def becomes_equal(self, *tables: str, why: Callable[[], str] = lambda: "") -> None:
        """Wait until the target has caught up."""

        def equal() -> bool:
            with contextlib.suppress(AssertionError, SinkMismatch):
                self.assert_equal(*tables)
                return True
            return False

        self.becomes(equal, why)

    def becomes(self, done: Callable[[], bool], why: Callable[[], str] = lambda: "") -> None:
        """Wait until something is so, or a run that is in a thread has failed.

        Looking takes its time, so it leaves some to those who do the work.
        """
        eventually(lambda: self._failures or done(), 90, lambda: f"{why()}\n{self._situation()}", every=0.25)
        if self._failures:
            raise self._failures[0]

    def _situation(self) -> str:
        """What is known of each table, for the message of a test that fails."""
        return "\n".join(
            f"{each.name}: phase {each.phase}, applied {each.applied_lsn}, awaits {each.awaits}, error {each.error}"
            for each in self.tables()
        )


def _plain(value: Any) -> Any:
    """Lists and maps cannot be counted; decimals are equal whatever their scale; NaN equals nothing, not even NaN."""
    if isinstance(value, list):
        return tuple(map(_plain, value))
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return value.normalize() if isinstance(value, Decimal) else value


def _as_text(content: str | bytes) -> str:
    return content if isinstance(content, str) else content.decode()
