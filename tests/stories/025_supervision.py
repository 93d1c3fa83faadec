"""Story 25: nothing stays stuck. A frozen source, killed processes, a full lake, and a run that is told to end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from psycopg.sql import SQL
from pyspark import SparkContext

from conftest import Database
from mirror import Mirror
from processes import Background, Here, eventually, running, walmere, write_config
from proxy import Proxy
from receiving import changes, receive_all
from walmere.errors import PublicationMissing, SinkFull, SourceUnavailable
from walmere.ledger.file import Ledger
from walmere.publisher import copy, snapshot
from walmere.publisher.connect import connect, translate_errors
from walmere.storage import Lock
from walmere.subscription.state import Phase

TIMEOUT = 2.0


@contextlib.contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


@pytest.mark.long
def test_a_frozen_source_is_noticed_within_the_timeout_and_received_from_when_it_answers_again(
    database18: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    with Proxy(database.server.port) as proxy:
        config = database.config(tmp_path / "s", dsn=proxy.dsn(database.dsn), timeout=TIMEOUT)
        with Background(config) as background:
            eventually(database.streaming)
            database.execute("INSERT INTO t VALUES (1)")
            eventually(lambda: len(changes(config)) == 1)
            time.sleep(TIMEOUT * 1.5)  # an idle server answers when it is asked: that is no silence
            assert "the server has sent nothing" not in caplog.text
            assert "no data from the server" not in caplog.text
            proxy.freeze()
            frozen = time.monotonic()
            database.execute("INSERT INTO t VALUES (2)")
            eventually(lambda: background.receiver.retried_error is not None, 3 * TIMEOUT)
            assert time.monotonic() - frozen > TIMEOUT / 2
            assert isinstance(background.receiver.retried_error, SourceUnavailable)
            proxy.thaw()
            eventually(lambda: len(changes(config)) == 2)
            proxy.freeze()
            background.receiver.stop()
            stopped = time.monotonic()
            background.join(10)
            assert time.monotonic() - stopped < 8
    assert [row["id"] for _, _, row in changes(config) if row] == ["1", "2"]
    said = [record.getMessage() for record in caplog.records if "the server has sent nothing" in record.getMessage()]
    assert said, caplog.text


@pytest.mark.long
def test_a_copy_from_a_frozen_source_ends_and_one_that_is_only_slow_does_not(
    database18: Database, tmp_path: Path
) -> None:
    rows = "COPY (SELECT repeat('x', 1000) FROM generate_series(1, 200000)) TO STDOUT"
    slow = "COPY (SELECT 1 FROM generate_series(1, 3), pg_sleep(3)) TO STDOUT"
    with Proxy(database18.server.port) as proxy:
        source = database18.config(tmp_path, dsn=proxy.dsn(database18.dsn), timeout=TIMEOUT / 2).source
        direct = database18.config(tmp_path).source
        with snapshot.exported(direct, "frozen") as made:
            assert b"".join(copy.copy_out(source, "test", made, SQL(slow).format())) == b"1\n1\n1\n"
            chunks = copy.copy_out(source, "test", made, SQL(rows).format())
            assert next(chunks)
            proxy.freeze()
            with pytest.raises(SourceUnavailable, match="no data from the server"):
                list(chunks)


@pytest.mark.long
def test_a_copy_from_a_frozen_source_is_begun_anew(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat(md5(i::text), 4) FROM generate_series(1, 100000) i",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    with Proxy(database.server.port) as proxy:
        mirror = Mirror(database, tmp_path, dsn=proxy.dsn(database.dsn), timeout=TIMEOUT)
        copying = "SELECT 1 FROM pg_stat_progress_copy WHERE datname = current_database() AND tuples_processed > 1000"
        with mirror.following():
            eventually(lambda: database.rows(copying), 60)
            proxy.freeze()
            eventually(lambda: mirror.phase("t") is Phase.INIT)  # Spark has tried it some more times by then
            [table] = mirror.tables()
            assert table.error
            proxy.thaw()
            mirror.becomes_equal("t")
            database.execute("INSERT INTO t VALUES (0, 'later')")
            mirror.becomes_equal("t")


@pytest.mark.long
def test_a_query_of_a_frozen_source_ends_and_one_that_only_takes_long_does_not(
    database18: Database, tmp_path: Path, here: Here
) -> None:
    database = database18
    with Proxy(database.server.port) as proxy:
        source = database.config(tmp_path, dsn=proxy.dsn(database.dsn), timeout=TIMEOUT / 2).source
        with connect(source, "test") as connection:
            assert connection.execute("SELECT 1 FROM pg_sleep(3)").fetchone() == (1,), "it works: it is waited for"
            proxy.freeze()
            with pytest.raises(SourceUnavailable, match="does not answer"), translate_errors(source, "asking"):
                connection.execute("SELECT 1")
            assert connection.closed
        config = write_config(database.config(tmp_path), tmp_path / "walmere.toml", dsn=f"'{proxy.dsn(database.dsn)}'")
        config.write_text(config.read_text().replace("[source]", "[source]\ntimeout = 2"))
        began = time.monotonic()
        assert here("check", "-c", config)[0] == 1
        assert time.monotonic() - began < 5


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_a_killed_receiver_is_started_again_and_python_processes_of_spark_are_replaced(
    database18: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database, tmp_path)
    directory = mirror.config.subscription.directory
    with mirror.following():
        database.execute("INSERT INTO t VALUES (1)")
        mirror.becomes_equal("t")
        first = int((directory / "receiver.pids").read_text().split()[0])
        os.kill(first, signal.SIGKILL)
        eventually(lambda: f"{first} " not in (directory / "receiver.pids").read_text())
        database.execute("INSERT INTO t VALUES (2)")
        mirror.becomes_equal("t")
        gateway = SparkContext._gateway
        assert gateway is not None
        for worker in psutil.Process(gateway.proc.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        database.execute("INSERT INTO t VALUES (3)")
        mirror.becomes_equal("t")
    said = [record.getMessage() for record in caplog.records]
    assert any("the receiver was ended by signal 9 (SIGKILL); starting it again" in line for line in said), said
    assert all("\n" not in line for line in said), [(r.name, r.getMessage()) for r in caplog.records]


@pytest.mark.long
def test_an_error_that_the_receiver_reports_ends_the_run_with_that_error(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database, tmp_path)
    following = contextlib.ExitStack()
    _, run = following.enter_context(mirror.following())
    eventually(lambda: mirror.phase("t") is Phase.READY, 60)
    database.execute("DROP PUBLICATION pub")
    run.join(60)
    with pytest.raises(PublicationMissing, match="there is no publication pub") as raised:
        following.close()
    assert raised.value.hint


@pytest.mark.long
def test_a_run_whose_jvm_is_killed_says_so_in_one_line(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror, said = Mirror(database, tmp_path), tmp_path / "said"
    with running("run", "--quiet", "-c", mirror.file, output=said) as run:
        database.execute("INSERT INTO t VALUES (1)")
        mirror.becomes_equal("t", why=said.read_text)
        eventually(lambda: Ledger(mirror.config.subscription.directory).last())
        began = time.monotonic()
        assert walmere("run", "-c", mirror.file).returncode == 1, "there is one already"
        assert time.monotonic() - began < 8, "Spark is not started for that"
        [java] = [each for each in psutil.Process(run.pid).children() if each.name() == "java"]
        java.kill()
        assert run.wait(20) == 1
    assert "Spark's JVM was ended by signal 9 (SIGKILL)" in said.read_text()
    assert len(lines_of(said.read_text())) <= 4, said.read_text()
    assert "Traceback" not in said.read_text()


@pytest.mark.parametrize(
    "which",
    [
        "the slot waits and the source freezes",
        pytest.param("a lock is held", marks=pytest.mark.long),
        "SIGINT twice",
    ],
)
def test_a_run_ends_within_ten_seconds_whatever_the_source_does(
    database18: Database, tmp_path: Path, which: str
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror, said = Mirror(database, tmp_path), tmp_path / "said"
    making = f"SELECT 1 FROM pg_stat_activity WHERE query LIKE 'CREATE_REP%' AND datname = '{database.name}'"
    locked = which == "a lock is held"
    if locked:
        mirror.run_once()
    with psycopg.connect(database.dsn) as writer, Proxy(database.server.port) as proxy:
        mirror.file.write_text(mirror.file.read_text().replace(database.dsn, proxy.dsn(database.dsn)))
        writer.execute("INSERT INTO t VALUES (1)")  # a new slot waits for its transaction
        writer.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        with running("run", "-c", mirror.file, output=said) as run:
            waits = database.streaming if locked else lambda: bool(database.rows(making))
            eventually(waits, 90, said.read_text)
            started = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
            if not locked:
                proxy.freeze()
            told = time.monotonic()
            os.kill(run.pid, signal.SIGINT if which == "SIGINT twice" else signal.SIGTERM)
            if which == "SIGINT twice":
                time.sleep(0.1)
                os.kill(run.pid, signal.SIGINT)
            code = run.wait(20)
            assert time.monotonic() - told < 10
            # it may have ended, or be about to, when the second one comes
            assert code in ((0, 130, -signal.SIGINT) if which == "SIGINT twice" else (0,)), said.read_text()
            eventually(lambda: not any(each.is_running() and each.status() != "zombie" for each in started))
    assert "Traceback" not in said.read_text(), said.read_text()


@pytest.mark.long
@pytest.mark.parametrize("after", [0.0, 0.7, 1.5, 2.5])
def test_a_start_that_is_stopped_together_with_its_jvm_is_no_error(
    database18: Database, tmp_path: Path, after: float
) -> None:
    """As by `systemctl stop` and `timeout`, whose signal reaches all processes."""
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror, said = Mirror(database18, tmp_path), tmp_path / "said.log"
    with running("run", "-c", mirror.file, output=said) as run:
        eventually(lambda: any(each.name() == "java" for each in psutil.Process(run.pid).children(recursive=True)))
        time.sleep(after)  # somewhere in the start of Spark
        os.killpg(run.pid, signal.SIGTERM)
        assert run.wait(15) == 0, said.read_text()
    assert "hint" not in said.read_text()


def test_a_full_lake_is_waited_for_and_a_run_that_ends_by_itself_gives_up(
    database18: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database, tmp_path)
    with small_disk(tmp_path / "lake", "1m") as disk:
        mirror.run_once()
        filler = disk / "filler"
        with contextlib.suppress(OSError):
            filler.write_bytes(b"x" * (2 << 20))
        database.execute("INSERT INTO t SELECT i, repeat(md5(i::text), 3) FROM generate_series(1, 1000) i")
        with pytest.raises(SinkFull, match="No space left") as full:
            mirror.run_once()
        assert full.value.hint
        caplog.clear()
        with mirror.following() as (_, run):
            eventually(lambda: "No space left" in caplog.text, 60)
            database.execute("INSERT INTO t VALUES (0)")
            eventually(lambda: caplog.text.count("starting to apply changes again") > 1, 60)
            assert run.is_alive()
            filler.unlink()
            mirror.becomes_equal("t")
    assert len(mirror.retries) > 2
    assert {type(error) for _, error in mirror.retries} == {SinkFull}
    before, _ = mirror.retries[-1]
    assert mirror.batches[before:], "then, a batch was applied"
    assert all(seconds > 0 for seconds in mirror.batches)
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_a_missing_publication_or_right_is_known_before_spark_starts(
    database18: Database, tmp_path: Path, here: Here
) -> None:
    role = f"{database18.name}_repl"
    database18.execute("CREATE PUBLICATION pub", f"CREATE ROLE {role} LOGIN")
    try:
        for mirror, said in [
            (Mirror(database18, tmp_path / "a", "nothing"), "there is no publication nothing"),
            (Mirror(database18, tmp_path / "b", user=role), "to start (WAL sender|walsender)"),  # before PostgreSQL 16
        ]:
            nobody = '"spark://127.0.0.1:1"\nshared_directory = true'  # Spark would be refused
            mirror.file.write_text(mirror.file.read_text().replace('"local[2]"', nobody))
            code, _, err = here("run", "-c", mirror.file)
            assert code == 1
            assert re.search(said, err), err
    finally:
        database18.execute(f"DROP ROLE {role}")


def test_what_can_be_refused_is_refused_before_spark_starts(database18: Database, tmp_path: Path, here: Here) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    good = mirror.file.read_text()
    (tmp_path / "file").write_text("")
    for old, new, said in [
        ('"local[2]"', f'"spark://127.0.0.1:{port}"\nshared_directory = true', f"127.0.0.1:{port} does not answer"),
        ('directory = "subscription"', 'directory = "file"', f"{tmp_path / 'file'} is not a directory"),
        ('directory = "subscription"', 'directory = "file/s"', f"{tmp_path / 'file'} is not a directory"),
        ('directory = "subscription"', 'directory = "/proc/s"', "/proc"),
    ]:
        mirror.file.write_text(good.replace(old, new))
        began = time.monotonic()
        code, _, err = here("run", "-c", mirror.file)
        assert (code, time.monotonic() - began < 15) == (1, True), err
        assert said in err
        assert len(lines_of(err)) <= 2, err
    mirror.file.write_text(good)
    lock = Lock(mirror.config.subscription.directory / "run")
    began = time.monotonic()
    code, _, err = here("run", "-c", mirror.file)
    lock.close()
    assert code == 1
    assert f"process {os.getpid()} runs it already" in err
    assert time.monotonic() - began < 2


def test_a_table_that_nobody_knows_is_refused_by_log(database18: Database, tmp_path: Path, here: Here) -> None:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database18.config(tmp_path / "s")
    receive_all(database18, config)
    database18.execute("INSERT INTO t VALUES (1)")
    receive_all(database18, config)
    file = write_config(config, tmp_path / "walmere.toml")
    assert here("log", "-c", file, "--table", "t")[0] == 0
    code, out, err = here("log", "-c", file, "--table", "nosuch")
    assert (code, out) == (2, "")
    assert "no table is called nosuch" in err
    assert "public.t" in err
