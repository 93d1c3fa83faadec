"""A database as the target: every transaction once and as a whole, whatever is killed."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from conftest import Database
from mirror import Mirror
from processes import eventually, running
from walmere.api import Subscription
from workload import MixedLoad, Transfers


@pytest.fixture
def target(database18: Database) -> Iterator[Database]:
    made = Database(database18.server)
    yield made
    with psycopg.connect(made.dsn, autocommit=True) as connection:
        for (name,) in connection.execute("SELECT roname FROM pg_replication_origin WHERE roname ~ '^walmere_t'"):
            connection.execute("SELECT pg_replication_origin_drop(%s)", [name])
    made.drop()


def into(target: Database, source: Database, directory: Path) -> Mirror:
    """A subscription whose target is another database; it creates the tables."""
    mirror = Mirror(source, directory)
    text = mirror.file.read_text()
    keys = f'kind = "postgres"\ndsn = "{target.dsn}"\ncreate_tables = true\n'
    mirror.file.write_text(text.replace('path = "lake"\n', keys))
    return mirror


def assert_equal(source: Database, target: Database, *tables: str) -> None:
    for table in tables:
        query = f"SELECT t::text FROM {table} t ORDER BY 1"
        assert target.rows(query) == source.rows(query), table


def python_workers() -> list[psutil.Process]:
    """The processes that Spark has forked from its Python daemon for tasks."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "pyspark.daemon" in " ".join(process.cmdline()) or "walmere.spark.daemon" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    parents = {process.ppid() for process in found if process.is_running()}
    return [process for process in found if process.pid not in parents]


def test_a_reader_never_sees_half_a_transaction_while_backends_and_workers_are_killed(
    database18: Database, target: Database, tmp_path: Path
) -> None:
    Transfers.create(database18)
    mirror = into(target, database18, tmp_path)
    mirror.run_once()
    sums: list[int] = []
    versions = "SELECT sum(version) FROM walmere.tables"
    with Transfers(database18), mirror.following():
        for number in range(6):
            before = target.value(versions)

            def applied(before: int = before) -> bool:
                query = "SELECT (SELECT sum(amount) FROM giro) + (SELECT sum(amount) FROM savings)"
                sums.append(int(target.value(query)))
                return bool(target.value(versions) > before + 2)

            mirror.becomes(applied)
            if number % 2:
                for worker in python_workers():
                    worker.kill()
            else:
                target.rows(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE application_name LIKE 'walmere % apply'"
                    " AND datname = current_database()"
                )
    assert set(sums) == {Transfers.TOTAL}
    mirror.run_once()
    assert_equal(database18, target, "giro", "savings")
    query = "SELECT remote_lsn >= (SELECT max(lsn) FROM walmere.tables) FROM pg_replication_origin_status"
    assert target.rows(f"{query} WHERE external_id = %s", f"walmere_{database18.name}") == [(True,)]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_twenty_kills_of_the_whole_run_lose_and_double_nothing(
    database18: Database, target: Database, tmp_path: Path
) -> None:
    MixedLoad.create(database18)
    mirror = into(target, database18, tmp_path)
    rng = random.Random(20)

    def version() -> int:
        if target.value("SELECT to_regclass('walmere.tables') IS NULL"):
            return 0
        return int(target.value("SELECT coalesce(sum(version), 0) FROM walmere.tables"))

    with MixedLoad(database18, 1):
        for number in range(20):
            before = version()
            with running("run", "-c", mirror.file, output=tmp_path / "run.log") as process:
                if number:  # the first is killed while it copies, or before

                    def works(before: int = before) -> bool:
                        return version() > before

                    eventually(works, 120, lambda: (tmp_path / "run.log").read_text()[-2000:])
                    threading.Event().wait(rng.uniform(0, 1.5))
                else:
                    eventually(lambda: target.value("SELECT to_regclass('walmere.tables') IS NOT NULL"), 120)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for child in psutil.process_iter(["cmdline"]):  # Spark's workers have sessions of their own
                if str(mirror.file) in (child.info["cmdline"] or []):
                    child.kill()
    mirror.run_once()
    assert_equal(database18, target, *MixedLoad.TABLES)
    assert Subscription(mirror.file).verify().equal
    assert not target.rows("SELECT FROM walmere.conflicts")
