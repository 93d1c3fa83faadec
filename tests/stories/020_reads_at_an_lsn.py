"""Story 20: whoever reads through the lake's points sees whole transactions across tables; plain reads do not."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import psycopg
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

import walmere
from conftest import Database
from delta_rows import read_delta
from mirror import Mirror
from processes import eventually
from walmere.errors import LakeError, NotApplied, PointGone
from walmere.ledger.file import Ledger
from walmere.lsn import Lsn
from walmere.spark.session import session

TABLES = ("giro", "savings")
ROWS = 50
TOTAL = 2 * ROWS * 1000


def create(database: Database) -> None:
    for table in TABLES:
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, amount bigint)",
            f"INSERT INTO {table} SELECT i, 1000 FROM generate_series(1, {ROWS}) i",
        )
    database.execute("CREATE PUBLICATION pub FOR TABLE giro, savings")


def begin(database: Database, directory: Path) -> Mirror:
    """Both tables are copied, each at an LSN of its own, and brought to the same one."""
    create(database)
    mirror = Mirror(database, directory)
    mirror.set("target", keep_seconds=600)
    mirror.run_once()
    return mirror


@contextlib.contextmanager
def transfers(database: Database, writers: int = 2) -> Iterator[None]:
    """Move amounts from rows of one table to rows of the other, several at a time: the sum is always the same."""
    stopping = threading.Event()

    def transfer(seed: int) -> None:
        rng = random.Random(seed)
        with psycopg.connect(database.dsn) as connection:
            while not stopping.wait(0.005):
                amount = rng.randint(1, 99)
                for table, change in (("giro", -amount), ("savings", amount)):  # one order: or they would deadlock
                    query = f"UPDATE {table} SET amount = amount + %s WHERE id = %s"
                    connection.execute(query, [change, rng.randint(1, ROWS)])
                connection.commit()

    threads = [threading.Thread(target=transfer, args=[seed]) for seed in range(writers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def plain_sum(lake: Path) -> int:
    """What a reader sees who takes the newest version of each table."""
    tables = [read_delta(DeltaTable(str(lake / "public" / table))) for table in TABLES]
    return sum(pc.sum(table["amount"]).as_py() for table in tables)


def arrow_sum(point: walmere.Point) -> int:
    return sum(pc.sum(point.arrow(table)["amount"]).as_py() for table in TABLES)


def duckdb_sum(point: walmere.Point) -> int:
    with duckdb.connect() as connection:
        return sum(int(point.duckdb(table, connection).aggregate("sum(amount)").fetchall()[0][0]) for table in TABLES)


def spark_sum(spark: SparkSession, point: walmere.Point) -> int:
    frames = [point.dataframe(spark, table) for table in TABLES]
    return int(frames[0].union(frames[1]).agg(F.sum("amount")).collect()[0][0])


@pytest.mark.timeout(480)
@pytest.mark.parametrize("reads", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_reads_under_load_see_whole_transactions_and_plain_reads_see_halves(
    database18: Database, tmp_path: Path, reads: int
) -> None:
    database = database18
    mirror = begin(database, tmp_path)
    lake = walmere.lake(tmp_path / "lake")
    first = lake.latest()
    assert arrow_sum(first) == TOTAL
    rng = random.Random(20)
    seen: set[Lsn] = set()
    with mirror.following(), transfers(database):
        spark = session("test", mirror.config.spark.master, mirror.config.spark.settings)
        eventually(lambda: plain_sum(tmp_path / "lake") != TOTAL, 120, lambda: "plain reads were right all the time")
        for number in itertools.count():
            point = lake.latest() if number % 2 else rng.choice(lake.points())
            assert arrow_sum(point) == TOTAL, point
            seen.add(point.lsn)
            if number % 100 == 0:
                assert duckdb_sum(point) == TOTAL, point
                assert lake.at(point.lsn).lsn == point.lsn
            if number % 250 == 0:
                assert spark_sum(spark, point) == TOTAL, point
                assert walmere.read(spark, mirror.file, "giro", lsn=point.lsn).count() == ROWS
            if number >= reads and len(seen) > 3:  # it must follow meanwhile
                break
    mirror.run_once()
    mirror.assert_equal(*TABLES)
    assert arrow_sum(lake.latest()) == TOTAL
    assert {str(point.lsn) for point in lake.points()} >= {str(first.lsn)}
    for table in TABLES:
        assert lake.latest().arrow(table).sort_by("id") == read_delta(mirror.delta(table)).sort_by("id")


def test_the_first_run_ends_with_all_tables_at_one_point(database18: Database, tmp_path: Path) -> None:
    create(database18)
    mirror = Mirror(database18, tmp_path)
    with transfers(database18):
        mirror.run_once()
        point = walmere.lake(tmp_path / "lake").latest()
        assert arrow_sum(point) == TOTAL, "although each was copied at an LSN of its own"
    assert sorted(point.tables) == ["public.giro", "public.savings"]
    assert plain_sum(tmp_path / "lake") == TOTAL, "nobody runs now"
    mirror.run_once()
    mirror.assert_equal(*TABLES)


@pytest.mark.long
def test_what_is_published_is_what_the_ledger_has_and_a_run_puts_it_right(database18: Database, tmp_path: Path) -> None:
    database = database18
    mirror = begin(database, tmp_path)
    before = database.value("SELECT pg_current_wal_lsn()::text")
    database.execute("UPDATE giro SET amount = amount - 1", "UPDATE savings SET amount = amount + 1")
    mirror.run_once()
    published = tmp_path / "lake" / "_walmere" / database.name
    ledger = Ledger(mirror.config.subscription.directory)
    last = ledger.last()
    assert last is not None
    latest = json.loads((published / "latest.json").read_text())
    assert (latest["subscription"], latest["lsn"], latest["keep_seconds"]) == (database.name, str(last.lsn), 600)
    assert {each["path"]: each["version"] for each in latest["tables"]} == {
        f"public/{table}": last.versions[f"public.{table}"] for table in TABLES
    }
    assert ledger.at(last.lsn) == last
    assert (published / "ledger.jsonl").read_text() == (
        mirror.config.subscription.directory / "ledger.jsonl"
    ).read_text()
    lake = walmere.lake(tmp_path / "lake")
    newest = lake.latest()
    assert newest.commit_time is not None
    assert lake.at(at=newest.commit_time).lsn == newest.lsn
    assert lake.at(before).lsn <= Lsn.parse(before)
    assert sum(lake.at(before).arrow("giro")["amount"].to_pylist()) == ROWS * 1000
    assert sum(newest.arrow("giro")["amount"].to_pylist()) == ROWS * 999
    with pytest.raises(NotApplied, match=str(newest.lsn)):
        lake.at("FF/0")
    with pytest.raises(PointGone, match="oldest"):
        lake.at("0/1")

    (published / "latest.json").unlink()
    (published / "ledger.jsonl").write_text("")  # as if a crash had come before they were durable
    with pytest.raises(LakeError, match="there is no point yet"):
        lake.latest()
    database.execute("INSERT INTO giro VALUES (0, 0)")
    mirror.run_once()
    assert lake.latest().lsn > newest.lsn
    assert lake.at(newest.lsn).lsn == newest.lsn
    mirror.assert_equal(*TABLES)


@pytest.mark.long
def test_a_table_that_is_copied_again_is_in_a_point_as_it_was_as_it_is_or_not_at_all(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    mirror = begin(database, tmp_path)
    lake = walmere.lake(tmp_path / "lake")
    old = lake.latest()
    database.execute("ALTER TABLE giro ALTER amount TYPE numeric(20, 2)", "UPDATE savings SET amount = amount + 1")
    database.execute("UPDATE giro SET amount = amount - 1")
    mirror.run_once()
    new = lake.latest()
    assert sorted(new.tables) == ["public.giro", "public.savings"]
    assert sum(new.arrow("giro")["amount"].to_pylist()) == ROWS * 999
    assert sum(old.arrow("giro")["amount"].to_pylist()) == ROWS * 1000, "and older points have the older columns"
    assert str(old.arrow("giro").schema.field("amount").type) == "int64"
    for point in lake.points():
        if "public.giro" not in point.tables:
            with pytest.raises(LakeError, match="being copied"):
                point.arrow("giro")
    mirror.assert_equal(*TABLES)
