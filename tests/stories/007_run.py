"""Story 7: `walmere run` as people use it: started, stopped, killed; any table, any publication, any failure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from psycopg.sql import SQL, Identifier

from conftest import Database
from mirror import Mirror
from processes import Here, eventually, running, walmere
from walmere.errors import SinkError, WalmereError
from walmere.ledger.file import Ledger
from walmere.lsn import Lsn
from walmere.spark.apply import ApplyWorker
from walmere.spark.placement import Placement
from walmere.subscription.state import Phase
from workload import MixedLoad


def everything_of(process_id: int) -> list[psutil.Process]:
    """A run and what it has started: the receiver, java, Spark's Python workers."""
    run = psutil.Process(process_id)
    return [run, *run.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def insert_position(database: Database) -> Lsn:
    return Lsn.parse(database.value("SELECT pg_current_wal_insert_lsn()::text"))


def terminate(process_id: int) -> None:
    os.kill(process_id, signal.SIGTERM)


def press_ctrl_c(process_id: int) -> None:
    """The terminal sends it to all of the foreground's processes."""
    os.killpg(process_id, signal.SIGINT)


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "hands"),
    [(terminate, 2), (press_ctrl_c, 1)],
    ids=["SIGTERM, two hands", "Ctrl-C, one hand"],
)
def test_a_run_follows_until_it_is_told_to_end_and_leaves_nothing_running(
    database18: Database, tmp_path: Path, end: Callable[[int], None], hands: int
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, v text)",
        "CREATE TABLE small (id int PRIMARY KEY)",
        "INSERT INTO big SELECT i, md5(i::text) FROM generate_series(1, 2000) i",
        "CREATE PUBLICATION pub FOR TABLE big, small",
    )
    mirror = Mirror(database, tmp_path)
    said = tmp_path / "said"
    environment = {**os.environ, "WALMERE_SPARK__MASTER": f"local[{hands}]"}
    with running("run", "-c", mirror.file, output=said, env=environment) as run:
        mirror.becomes_equal("big", "small", why=said.read_text)
        for number in range(2):
            database.execute(f"INSERT INTO small VALUES ({number})", "DELETE FROM big WHERE id % 7 = 0 AND id < 1000")
            mirror.becomes_equal("big", "small", why=said.read_text)
        started = everything_of(run.pid)
        assert {"java"} < {each.name() for each in started}, "java, and Python's"
        end(run.pid)
        assert run.wait(30) == 0, said.read_text()
        eventually(lambda: not alive(started), 30, lambda: str(alive(started)))
        assert "Traceback" not in said.read_text()
    copied = mirror.delta("big")
    copied.load_as_version(1)
    assert len(copied.file_uris()) == hands, "one task for each hand that the environment gives"
    database.execute("UPDATE big SET v = 'later' WHERE id < 100", "DELETE FROM small")
    mirror.run_once()
    mirror.assert_equal("big", "small")


def kill_all_of(run: subprocess.Popen[bytes]) -> None:
    """kill -9 of a run and of all that it has started."""
    os.kill(run.pid, signal.SIGSTOP)  # it starts nothing more while we look what it has started
    started = everything_of(run.pid)
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert run.wait() == -signal.SIGKILL
    eventually(lambda: not alive(started))


def test_a_run_that_has_nothing_to_apply_reaches_the_lsn_without_a_job(
    database18: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE other (id int)", "CREATE PUBLICATION pub FOR TABLE t"
    )
    database.execute("INSERT INTO t VALUES (1)")
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute("INSERT INTO other VALUES (1)")
    position = insert_position(database)
    with monkeypatch.context() as patch:
        patch.setattr(ApplyWorker, "_run_job", None)
        mirror.run_once()
    assert mirror.tables()[mirror.oid("t")].applied_lsn >= position
    last = Ledger(mirror.config.subscription.directory).last()
    assert last is not None
    assert last.lsn >= position
    database.execute("INSERT INTO t VALUES (2)")
    mirror.run_once()
    mirror.assert_equal("t")


def test_killed_while_it_applies_a_later_run_makes_all_equal(database18: Database, tmp_path: Path) -> None:
    """The short form: one kill -9 of the run and of all that it has started."""
    database = database18
    MixedLoad.create(database)
    mirror = Mirror(database, tmp_path)
    output = tmp_path / "output"

    def batches_are_applied() -> bool:
        last = Ledger(mirror.config.subscription.directory).last()
        return last is not None and last.versions.get("public.ledger", 0) > 2

    with MixedLoad(database, seed=7, writers=1), running("run", "-c", mirror.file, output=output) as run:
        eventually(batches_are_applied, 90, output.read_text)
        kill_all_of(run)
    mirror.run_once()
    mirror.assert_equal("notes")
    mirror.assert_equal("accounts", columns="id, balance::text")
    mirror.assert_equal("ledger", columns="id, account, amount::text, note")


@pytest.mark.timeout(480)
@pytest.mark.long
def test_killed_in_the_middle_of_a_copy_and_of_batches_a_later_run_makes_all_equal(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    MixedLoad.create(database)
    database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, v text)",
        "INSERT INTO big SELECT i, repeat(md5(i::text), 4) FROM generate_series(1, 200000) i",
        "ALTER PUBLICATION pub ADD TABLE big",
    )
    mirror = Mirror(database, tmp_path)
    ledger = Ledger(mirror.config.subscription.directory)
    said = tmp_path / "said"

    def version() -> int:
        commits = (tmp_path / "lake/public/ledger/_delta_log").glob("*[0-9].json")
        return max((int(file.stem) for file in commits), default=0)

    def copying() -> bool:
        return mirror.phase("big") is Phase.DATA_SYNC and any((tmp_path / "lake/public/big").glob("*.parquet"))

    def kill(in_the_middle: Callable[[], bool]) -> None:
        with running("run", "-c", mirror.file, output=said) as run:
            eventually(in_the_middle, 90, said.read_text)
            kill_all_of(run)

    def kill_in_a_batch() -> None:
        before = version()

        def committed_but_not_entered() -> bool:
            now = version()  # before the ledger is looked at, which may be written in between
            last = ledger.last()
            return now > before and (last is None or last.versions.get("public.ledger", 0) < now)

        kill(committed_but_not_entered)

    with MixedLoad(database, seed=7, writers=1):
        kill(copying)
        assert mirror.phase("big") is Phase.DATA_SYNC
        kill_in_a_batch()
        kill_in_a_batch()
    mirror.run_once()
    mirror.assert_equal("big", "notes")
    mirror.assert_equal("accounts", columns="id, balance::text")
    mirror.assert_equal("ledger", columns="id, account, amount::text, note")


def test_a_run_until_an_lsn_ends_with_0_when_it_is_applied(database18: Database, tmp_path: Path, here: Here) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE PUBLICATION pub FOR TABLE t",
        "INSERT INTO t SELECT generate_series(1, 100)",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute("INSERT INTO t SELECT generate_series(101, 200)")
    until = insert_position(database)
    code, *_ = here("run", "-c", mirror.file, "--until", str(until))
    assert code == 0
    assert all(table.applied_lsn >= until for table in mirror.tables())
    mirror.assert_equal("t")


LONG = "é" * 31 + "x"  # 63 bytes
ODD = [
    "Capitals",
    "two words",
    'quo"ted',
    "quo'ted",
    "dot.ted",
    "😀",
    LONG,
    "sl/ash",
    "per%20cent%",
    "~",
    "..",
    "sélect",
]


def test_tables_and_columns_of_any_name_are_copied_and_followed(database18: Database, tmp_path: Path) -> None:
    database = database18
    assert len(LONG.encode()) == 63
    schemas = ["public", "Other schema/😀%", LONG]
    columns = SQL(", ").join(SQL("{} text").format(Identifier(name)) for name in ODD)
    tables = [(schemas[number % 3], name) for number, name in enumerate(ODD)]
    tables += [(schema, "same") for schema in schemas]
    tables += [("a.b", "c"), ("a", "b.c"), ("x.y", "z")]
    for schema in {schema for schema, _ in tables} - {"public"}:
        database.connection.execute(SQL("CREATE SCHEMA {}").format(Identifier(schema)))
    for number, table in enumerate(tables):
        database.connection.execute(
            SQL('CREATE TABLE {} ("The key" int PRIMARY KEY, {})').format(Identifier(*table), columns)
        )
        database.connection.execute(SQL("INSERT INTO {} VALUES ({}, 'copied', 'ü')").format(Identifier(*table), number))
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    for schema, name in tables:
        mirror.assert_equal(name, schema=schema)
        where = Identifier(schema, name)
        database.connection.execute(SQL("UPDATE {} SET {} = 'new'").format(where, Identifier(ODD[5])))
        database.connection.execute(SQL("INSERT INTO {} VALUES (-1, {})").format(where, name))
    mirror.run_once()
    for schema, name in tables:
        mirror.assert_equal(name, schema=schema)
    assert mirror.delta("same").schema().to_arrow().names == ["The key", *ODD]


def test_a_dot_in_the_name_of_a_schema_mixes_up_neither_ledger_nor_rejects(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    tables = [("a.b", "c"), ("a", "b.c")]
    for schema, name in tables:
        database.execute(
            f'CREATE SCHEMA "{schema}"',
            f'CREATE TABLE "{schema}"."{name}" (id int PRIMARY KEY, day date)',
            f'INSERT INTO "{schema}"."{name}" VALUES (1, \'infinity\')',
        )
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    for schema, name in tables:
        database.execute(f'INSERT INTO "{schema}"."{name}" VALUES (2)')
    mirror.run_once()
    for schema, name in tables:
        mirror.assert_equal(name, schema=schema, columns="id, NULL")
    last = Ledger(mirror.config.subscription.directory).last()
    assert last is not None
    assert len(last.versions) == len(tables)
    assert len(list((tmp_path / "lake").glob("_rejects.*/*"))) == len(tables)


@pytest.mark.long
@pytest.mark.since(15, "row filters, nor column lists")
def test_what_a_publication_leaves_out_is_left_out_as_a_native_subscriber_would(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE added (id int PRIMARY KEY, v text)",
        "INSERT INTO added VALUES (1, 'copied'), (2, 'copied')",
        "CREATE TABLE filtered (id int PRIMARY KEY, region text, v int)",
        "ALTER TABLE filtered REPLICA IDENTITY FULL",
        "INSERT INTO filtered SELECT i, CASE i % 2 WHEN 0 THEN 'eu' ELSE 'us' END, 0 FROM generate_series(1, 100) i",
        "CREATE TABLE narrow (hidden text, id int PRIMARY KEY, secret text, shown text)",
        "INSERT INTO narrow SELECT 'h', i, 's', 'shown' FROM generate_series(1, 10) i",
        "CREATE PUBLICATION inserts FOR TABLE added WITH (publish = 'insert')",
        "CREATE PUBLICATION parts FOR TABLE filtered WHERE (region = 'eu'), narrow (id, shown)",
    )
    mirror = Mirror(database, tmp_path, "inserts", "parts")
    mirror.run_once()
    mirror.assert_equal("added")
    assert mirror.rows("filtered").total() == 50
    mirror.assert_equal("narrow", columns="id, shown")
    database.execute(
        "UPDATE added SET v = 'not published' WHERE id = 1",
        "DELETE FROM added WHERE id = 2",
        "INSERT INTO added VALUES (3, 'inserted')",
        "UPDATE filtered SET region = 'eu' WHERE id BETWEEN 1 AND 20",
        "UPDATE filtered SET region = 'us' WHERE id BETWEEN 11 AND 40",
        "UPDATE filtered SET v = v + 1",
        "UPDATE filtered SET id = -id WHERE id IN (2, 90)",
        "DELETE FROM filtered WHERE id > 95",
        "INSERT INTO filtered VALUES (1000, 'eu', 0), (1001, 'us', 0)",
        "UPDATE narrow SET secret = 'changed' WHERE id <= 5",
        "UPDATE narrow SET shown = 'changed' WHERE id > 5",
        "INSERT INTO narrow VALUES ('h', 11, 's', 'new')",
    )
    mirror.run_once()
    assert sorted(mirror.rows("added")) == [(1, "copied"), (2, "copied"), (3, "inserted")]
    database.execute("DELETE FROM filtered WHERE region <> 'eu'")
    mirror.assert_equal("filtered")
    mirror.assert_equal("narrow", columns="id, shown")


def test_every_replica_identity_is_copied_and_followed(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE by_nothing (a int, b text)",
        "ALTER TABLE by_nothing REPLICA IDENTITY NOTHING",
        "CREATE TABLE by_index (id int PRIMARY KEY, email text NOT NULL, v int)",
        "CREATE UNIQUE INDEX by_email ON by_index (email)",
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_email",
        "CREATE TABLE by_row (a int, b text, c float8)",
        "ALTER TABLE by_row REPLICA IDENTITY FULL",
        "CREATE TABLE without_key (a int)",
        "INSERT INTO by_nothing SELECT i % 3, 'x' FROM generate_series(1, 30) i",
        "INSERT INTO by_index SELECT i, i || '@example.org', 0 FROM generate_series(1, 30) i",
        "INSERT INTO by_row SELECT i % 3, NULL, 'NaN' FROM generate_series(1, 30) i",
        "INSERT INTO without_key SELECT i % 3 FROM generate_series(1, 30) i",
        "CREATE PUBLICATION pub FOR TABLE by_index, by_row",
        "CREATE PUBLICATION inserts FOR TABLE by_nothing, without_key WITH (publish = 'insert')",
    )
    tables = ("by_nothing", "by_index", "by_row", "without_key")
    mirror = Mirror(database, tmp_path, "pub", "inserts")
    mirror.run_once()
    database.execute(
        "INSERT INTO by_nothing SELECT 1, 'x' FROM generate_series(1, 5)",
        "INSERT INTO without_key SELECT 1 FROM generate_series(1, 5)",
        "UPDATE by_index SET v = 1 WHERE id <= 5",
        "UPDATE by_index SET id = -id WHERE id BETWEEN 3 AND 8",
        "UPDATE by_index SET email = 'new' || email WHERE id BETWEEN 9 AND 12",
        "DELETE FROM by_index WHERE id > 25",
        "INSERT INTO by_index VALUES (26, '26@example.org', 7)",
        "DELETE FROM by_row WHERE ctid IN (SELECT ctid FROM by_row WHERE a = 1 LIMIT 4)",
        "UPDATE by_row SET b = 'x' WHERE ctid IN (SELECT ctid FROM by_row WHERE a = 2 LIMIT 4)",
        "INSERT INTO by_row SELECT 2, NULL, '-0' FROM generate_series(1, 3) i",
    )
    mirror.run_once()
    mirror.assert_equal(*tables)


def test_a_copy_whose_backend_is_terminated_is_tried_again_and_doubles_nothing(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, v text)",
        "INSERT INTO big SELECT i, repeat(md5(i::text), 4) FROM generate_series(1, 200000) i",
        "CREATE PUBLICATION pub FOR TABLE big",
    )
    mirror = Mirror(database, tmp_path)
    copying = (
        "SELECT pid FROM pg_stat_progress_copy WHERE datname = current_database() AND tuples_processed > 1000 LIMIT 1"
    )

    def terminate_one() -> None:
        with psycopg.connect(database.dsn, autocommit=True) as admin:
            eventually(
                lambda: admin.execute(f"SELECT pg_terminate_backend(pid) FROM ({copying}) AS copying").rowcount, 60
            )
        terminated.set()

    terminated = threading.Event()
    terminator = threading.Thread(target=terminate_one)
    terminator.start()
    mirror.run_once()
    terminator.join()
    assert terminated.is_set()
    assert [table.rows_copied for table in mirror.tables()] == [200_000]
    mirror.assert_equal("big")


WAITING = "SELECT pid FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'CREATE_REPLICATION_SLOT%TEMPORARY%'"


@pytest.mark.long
def test_a_copy_whose_connection_is_cut_is_made_in_the_same_run(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub")
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute("ALTER PUBLICATION pub ADD TABLE t")

    def cut() -> None:
        with psycopg.connect(database.dsn) as writer, psycopg.connect(database.dsn, autocommit=True) as admin:
            writer.execute("INSERT INTO t VALUES (1)")
            ready.set()
            eventually(
                lambda: admin.execute(f"SELECT pg_terminate_backend(pid) FROM ({WAITING}) AS waiting").rowcount, 60
            )

    ready = threading.Event()
    cutter = threading.Thread(target=cut)
    cutter.start()
    ready.wait(30)
    mirror.run_once()
    cutter.join()
    mirror.assert_equal("t")


@pytest.mark.long
def test_while_a_copy_waits_for_an_open_transaction_the_other_tables_are_followed(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE followed (id int PRIMARY KEY)",
        "CREATE TABLE waiting (id int PRIMARY KEY)",
        "CREATE PUBLICATION pub FOR TABLE followed",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute("ALTER PUBLICATION pub ADD TABLE waiting")
    with psycopg.connect(database.dsn) as writer:
        writer.execute("INSERT INTO waiting VALUES (1)")
        with mirror.following():
            database.execute("INSERT INTO followed VALUES (1)", "INSERT INTO waiting VALUES (2)")
            try:
                mirror.becomes_equal("followed")
                assert [table.name for table in mirror.tables() if table.phase.copied] == ["public.followed"]
            finally:
                writer.commit()
            database.execute("INSERT INTO waiting VALUES (3)")
            mirror.becomes_equal("waiting")
    mirror.assert_equal("followed", "waiting")


def test_a_run_that_is_told_to_end_does_not_wait_for_its_copies(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE followed (id int PRIMARY KEY)",
        "CREATE TABLE waiting (id int PRIMARY KEY)",
        "CREATE PUBLICATION pub FOR TABLE followed",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute("ALTER PUBLICATION pub ADD TABLE waiting")
    with psycopg.connect(database.dsn) as writer:
        writer.execute("INSERT INTO waiting VALUES (1)")
        with mirror.following() as (launcher, thread):
            eventually(lambda: database.rows(WAITING), 60)
            launcher.stop()
            thread.join(10)
            ended = not thread.is_alive()
            writer.commit()
    assert ended
    mirror.run_once()
    mirror.assert_equal("followed", "waiting")


@pytest.mark.long
def test_a_batch_whose_job_fails_is_tried_again_and_not_for_ever(
    database18: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database18, tmp_path)
    mirror.run_once()
    database18.execute("INSERT INTO t VALUES (1)")
    failures = [RuntimeError("Python worker failed to connect back.")] * 2
    usual = Placement.items

    def items(placement: Placement, work: Any) -> Any:
        if failures:
            raise failures.pop()
        return usual(placement, work)

    monkeypatch.setattr(Placement, "items", items)
    mirror.launcher().run(insert_position(database18))
    mirror.assert_equal("t")
    assert [str(error.wrong) for _, error in mirror.retries] == ["Python worker failed to connect back."] * 2
    database18.execute("INSERT INTO t VALUES (2)")
    failures += [RuntimeError("Python worker failed to connect back.")] * 100
    with pytest.raises(WalmereError, match="failed to connect back"):
        mirror.launcher().run(insert_position(database18))


def test_a_receiver_that_outlived_its_launcher_does_not_keep_the_next_one_from_running(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database, tmp_path)
    streaming = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active"
    with running("receive", "-c", mirror.file, output=tmp_path / "said"):
        eventually(lambda: database.rows(streaming, database.slot))
        database.execute("INSERT INTO t VALUES (1)")
        mirror.run_once()
        mirror.assert_equal("t")


def test_a_lake_that_cannot_be_written_is_an_error_that_says_what_to_do(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database, tmp_path)
    lake = tmp_path / "lake"
    lake.write_text("a file")
    with pytest.raises(SinkError) as refused:
        mirror.run_once()
    assert str(lake) in str(refused.value)
    assert refused.value.hint
    lake.unlink()
    mirror.run_once()
    mirror.assert_equal("t")


def test_a_table_that_somebody_has_taken_away_is_copied_again(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    (tmp_path / "lake/public/t").rename(tmp_path / "elsewhere")
    database.execute("INSERT INTO t VALUES (1)")
    mirror.run_once()
    mirror.assert_equal("t")


BAD = {
    "target.kind": ("[target]", "[target]\nkind = 'papyrus'", "target.kind"),
    "no setting of Spark": ("[spark]", "[spark]\nmemory = '1g'", "memory is not a Spark setting"),
    "a setting that Spark refuses": ("[spark]", "[spark]\n'spark.driver.memory' = 'plenty'", "plenty"),
    "a master that is none": ('"local[2]"', '"locally"', "locally"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_target_or_setting_of_spark_is_one_message_and_exit_code_2(
    database18: Database, tmp_path: Path, what: str
) -> None:
    old, new, said = BAD[what]
    database18.execute("CREATE PUBLICATION pub")
    mirror = Mirror(database18, tmp_path)
    mirror.file.write_text(mirror.file.read_text().replace(old, new))
    ended = walmere("run", "-c", mirror.file)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) <= 2, "one line and a hint"
    assert not (tmp_path / "subscription").exists(), "nothing was started"
