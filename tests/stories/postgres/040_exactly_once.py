"""A database as the target: every transaction once and as a whole, whatever is killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from conftest import Database
from mirror import Mirror
from processes import eventually, running
from walmere import paths
from walmere.api import Subscription
from walmere.testing.server import Server
from workload import MixedLoad, Transfers


@pytest.fixture
def target(database18: Database) -> Iterator[Database]:
    made = Database(database18.server)
    yield made
    with psycopg.connect(made.dsn, autocommit=True) as connection:
        for (name,) in connection.execute("SELECT roname FROM pg_replication_origin WHERE roname ~ '^walmere_t'"):
            connection.execute("SELECT pg_replication_origin_drop(%s)", [name])
    made.drop()


def into(target: Database, source: Database, directory: Path, *publications: str) -> Mirror:
    """A subscription whose target is another database; it creates the tables."""
    mirror = Mirror(source, directory, *publications)
    text = mirror.file.read_text()
    keys = f'kind = "postgres"\ndsn = "{target.dsn}"\ncreate_tables = true\n'
    mirror.file.write_text(text.replace('path = "lake"\n', keys))
    return mirror


def assert_equal(source: Database, target: Database, *tables: str) -> None:
    for table in tables:
        query = f"SELECT t::text FROM {table} t ORDER BY 1"
        assert target.rows(query) == source.rows(query), table


def python_workers(of: psutil.Process) -> list[psutil.Process]:
    """The processes that Spark has forked from its Python daemon for tasks; the daemon itself, if there are none."""
    found = []
    for process in of.children(recursive=True):
        try:
            if "walmere.spark.daemon" in process.cmdline():  # an argument of its own: the JVM has the name in another
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
                for worker in python_workers(psutil.Process()):
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


class KilledRun:
    """A `walmere run` whose processes, and whose target, are killed while it works. All kills are SIGKILL."""

    BACKENDS = "FROM pg_stat_activity WHERE application_name ~ '^walmere .* (apply|copy)$' AND pid <> pg_backend_pid()"
    SUM = "SELECT sum(amount)::int8 FROM (TABLE giro UNION ALL TABLE savings) t"

    def __init__(self, mirror: Mirror, target: Database, log: Path) -> None:
        self._mirror, self._target, self._log = mirror, target, log
        self._directory = mirror.config.subscription.directory
        self._run: subprocess.Popen[bytes] | None = None
        self._runs = contextlib.ExitStack()
        self.sums: set[int] = set()  # of the transfers, as a reader of the target has seen them

    def __enter__(self) -> KilledRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._runs.close()

    def start(self) -> None:
        self._run = self._runs.enter_context(running("run", "-c", self._mirror.file, output=self._log))

    def query(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query; none while the target does not answer, or has no such table yet."""
        with (
            contextlib.suppress(psycopg.OperationalError, psycopg.errors.UndefinedTable),
            psycopg.connect(self._target.dsn, autocommit=True) as connection,
        ):
            return connection.execute(query).fetchall()
        return []

    def versions(self) -> dict[str, int]:
        """How often each table was committed to."""
        return dict(self.query("SELECT name, version FROM walmere.tables"))

    def copies(self) -> bool:
        """Whether a table is being copied."""
        return bool(self.query("SELECT FROM walmere.tables WHERE copy IS NOT NULL"))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the run does."""

        def reached() -> bool:
            assert self._run is not None
            assert self._run.poll() is None, f"the run has ended\n{self._shown()}"
            return condition()

        eventually(reached, 120, self._shown, every=0.05)

    def applies(self) -> bool:
        """Whether every table has its copy, and changes after it. Then all tables are as of one LSN."""
        versions = self.versions()
        ready = len(versions) == len(MixedLoad.TABLES + Transfers.TABLES) and min(versions.values()) > 1
        if ready:
            self.sums |= {amount for (amount,) in self.query(self.SUM)}
        return ready

    def goes_on(self) -> None:
        """Wait until more batches are committed."""
        before = self.versions()
        self.wait(lambda: self.applies() and sum(self.versions().values()) > sum(before.values()) + 2)

    def kill_receiver(self) -> None:
        found: list[int] = []

        def receives() -> bool:
            with contextlib.suppress(FileNotFoundError):
                found[:] = [int(line.split()[0]) for line in self._receivers().read_text().splitlines()]
            return any(map(psutil.pid_exists, found))

        self.wait(receives)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_workers(self) -> None:
        assert self._run is not None
        run = psutil.Process(self._run.pid)
        self.wait(lambda: bool(python_workers(run)))
        for worker in python_workers(run):
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()

    def end_backends(self) -> None:
        """Not SIGKILL: only these sessions end."""
        self.wait(lambda: bool(self.query(f"SELECT pg_terminate_backend(pid) {self.BACKENDS}")))

    def kill_backend(self) -> None:
        """The server restarts all of its sessions, and recovers from its WAL."""
        found: list[tuple[Any, ...]] = []

        def has_backend() -> bool:
            found[:] = self.query(f"SELECT pid {self.BACKENDS} LIMIT 1")
            return bool(found)

        self.wait(has_backend)
        with contextlib.suppress(ProcessLookupError):
            os.kill(found[0][0], signal.SIGKILL)

    def kill_target(self) -> None:
        self._target.server.stop(signal.SIGKILL)
        self._target.server.start()

    def kill_driver(self) -> None:
        """Driver and JVM. Spark's workers and the receiver are left to themselves, as after a crash."""
        assert self._run is not None
        os.killpg(self._run.pid, signal.SIGKILL)
        self._run.wait()
        self.start()

    def kill_everything(self) -> None:
        """As if the machine had crashed."""
        assert self._run is not None
        everything = psutil.Process(self._run.pid).children(recursive=True)
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.kill_driver()

    def _receivers(self) -> Path:
        return self._directory / paths.RECEIVER_PIDS

    def _shown(self) -> str:
        return f"{self.versions()}\n{self._log.read_text()[-3000:]}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_twenty_kills_lose_and_double_nothing(database18: Database, private_server: Server, tmp_path: Path) -> None:
    """Of the driver, the receiver, workers of Spark, sessions of the target, and the target itself."""
    source, target = database18, Database(private_server)
    target.connection.close()  # the server is killed
    MixedLoad.create(source)
    Transfers.create(source, "transfers")
    source.execute("INSERT INTO ledger (account, amount) SELECT i % 100, 1 FROM generate_series(1, 300000) i")
    mirror = into(target, source, tmp_path, "pub", "transfers")
    rng = random.Random(20)
    with (
        MixedLoad(source, 1, writers=2, pause=0.4),
        Transfers(source, pause=0.05),
        KilledRun(mirror, target, tmp_path / "run.log") as run,
    ):
        while_copying = [run.kill_everything, run.end_backends, run.kill_workers, run.kill_target]
        kills = 2 * [run.kill_driver, run.kill_target, run.kill_backend, run.kill_everything]
        kills += 3 * [run.kill_receiver, run.kill_workers]
        kills += 2 * [run.end_backends]
        rng.shuffle(kills)
        assert len(while_copying + kills) == 20
        run.start()
        for kill in while_copying:
            run.wait(run.copies)
            time.sleep(rng.uniform(0, 0.2))  # anywhere in the copy
            kill()
        for kill in kills:
            run.goes_on()
            time.sleep(rng.uniform(0, 0.5))  # anywhere in a batch
            kill()
        run.goes_on()
    assert run.sums == {Transfers.TOTAL}, "a reader has seen a part of a transaction"
    mirror.run_once()
    with psycopg.connect(target.dsn, autocommit=True) as target.connection:
        assert_equal(source, target, *MixedLoad.TABLES, *Transfers.TABLES)
        assert Subscription(mirror.file).verify().equal
        assert not target.rows("SELECT FROM walmere.conflicts")
        assert not target.rows("SELECT FROM walmere.copied_ranges")
        assert not target.rows("SELECT FROM pg_class WHERE relname ~ '^copy_'")
