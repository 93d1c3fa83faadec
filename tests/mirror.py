"""What stories about the mirror have in common: run the subscription once on a real Spark, and compare both sides."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from conftest import Database
from walmere import config as configuration
from walmere.cli.run import launcher
from walmere.config import Config
from walmere.lsn import Lsn
from walmere.sinks.base import TableName
from walmere.sinks.delta import DeltaSink
from walmere.subscription.tables import Tables


class Mirror:
    """A subscription of a test's database, into a lake of its own."""

    def __init__(self, database: Database, directory: Path, *publications: str) -> None:
        self.database = database
        self.file = directory / "walmere.toml"
        names = ", ".join(f'"{name}"' for name in publications or ("pub",))
        self.file.write_text(
            f"""
[source]
dsn = "{database.dsn}"
publications = [{names}]
slot = "{database.slot}"
[subscription]
name = "{database.name}"
directory = "subscription"
[target]
path = "lake"
[spark]
master = "local[2]"
"""
        )

    @property
    def config(self) -> Config:
        return configuration.load(self.file)

    def run_once(self) -> None:
        """As `walmere run --once`, in this process, so that tests share one Spark."""
        until = Lsn.parse(self.database.value("SELECT pg_current_wal_insert_lsn()::text"))
        launcher(self.config, self.file).run(until)

    def tables(self) -> Tables:
        return Tables(self.config.subscription.directory)

    def delta(self, table: str, schema: str = "public") -> DeltaTable:
        assert self.config.target is not None
        return DeltaSink(str(self.config.target.path)).open(TableName(schema, table))

    def rows(self, table: str, schema: str = "public") -> Counter[tuple[Any, ...]]:
        """What the target holds, as a multiset."""
        found = self.delta(table, schema).to_pyarrow_table()
        return Counter(zip(*(map(_plain, column.to_pylist()) for column in found.columns), strict=True))

    def assert_equal(self, *tables: str, schema: str = "public", columns: str = "*") -> None:
        """Compare each table with its source, every row and every value."""
        for table in tables:
            query = f'SELECT {columns} FROM "{schema}"."{table}"'
            source = Counter(tuple(map(_plain, row)) for row in self.database.rows(query))
            target = self.rows(table, schema)
            assert target == source, f"{table}: missing {source - target}, extra {target - source}"


def _plain(value: Any) -> Any:
    """Lists and maps cannot be counted; decimals are equal whatever their scale."""
    if isinstance(value, list):
        return tuple(map(_plain, value))
    return value.normalize() if isinstance(value, Decimal) else value
