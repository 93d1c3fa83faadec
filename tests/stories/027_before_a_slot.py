"""Story 27: what can be refused is refused before a slot is made, and what check says is what a run would meet."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest
from pyspark.errors import AnalysisException

from conftest import Database
from mirror import Mirror
from processes import Background, Here, eventually
from querying import Queries
from receiving import receive_all
from walmere.api import Subscription
from walmere.errors import ChangeLogError, ColumnListsDiffer
from walmere.lsn import Lsn
from walmere.publisher.finding import Finding, Level
from walmere.subscription import receiver


@pytest.fixture
def mirror(database_under_test: Database, tmp_path: Path) -> Mirror:
    database_under_test.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a int, b int)",
        "INSERT INTO t SELECT i, i, i FROM generate_series(1, 100) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    return Mirror(database_under_test, tmp_path)


def slots(database: Database) -> list[str]:
    found = database.rows("SELECT slot_name FROM pg_replication_slots WHERE database = %s", database.name)
    return [name for (name,) in found]


def problems(mirror: Mirror) -> dict[str, Finding]:
    return {each.name: each for each in Subscription(mirror.file).check() if each.level is Level.PROBLEM}


@pytest.mark.long
@pytest.mark.since(15, "column lists")
def test_different_column_lists_are_refused_by_name_and_the_way_out_leads_out(
    database_under_test: Database, tmp_path: Path, here: Here
) -> None:
    database = database_under_test
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a int, b int)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1, 1, 1)",
        "CREATE PUBLICATION one FOR TABLE t (id, a), u",
        "CREATE PUBLICATION two FOR TABLE t (id, b) WHERE (id > 0)",
    )
    mirror = Mirror(database, tmp_path, "one", "two")
    found = problems(mirror)["column_lists"]
    assert "public.t has different column lists" in found.what
    for command in (("receive", "--once"), ("run", "--once")):
        code, _, said = here(*command, "-c", mirror.file)
        assert (code, "public.t has different column lists" in said, slots(database)) == (1, True, [])
        assert found.fix in said
    database.execute(*found.fix.split("; "))
    assert problems(mirror) == {}
    mirror.run_once()
    # they become different while it runs; made equal again, the slot is stuck at what was changed in between
    database.execute("ALTER PUBLICATION two SET TABLE t (id, b)", "INSERT INTO t VALUES (2, 2, 2)")
    again = problems(mirror)["column_lists"].fix
    database.execute(*again.split("; "), "INSERT INTO u VALUES (1)")
    assert problems(mirror) == {}
    with Background(mirror.config, Lsn.parse(database.value("SELECT pg_current_wal_insert_lsn()::text"))) as stuck:
        error = stuck.join()
    assert isinstance(error, ColumnListsDiffer)
    assert not error.transient
    assert "public.t" in error.wrong
    assert "`walmere drop` and `walmere run`" in error.hint
    code, _, said = here("run", "--once", "-c", mirror.file)
    assert (code, "`walmere drop` and `walmere run`" in said) == (1, True), said
    eventually(lambda: not database.streaming())
    assert here("drop", "-c", mirror.file)[0] == 0
    mirror.run_once()
    database.execute("UPDATE t SET a = 9")
    mirror.run_once()
    mirror.assert_equal("t", columns="id, a")
    mirror.assert_equal("u")


def test_check_sees_what_a_run_would_meet(mirror: Mirror, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    database = mirror.database
    assert problems(mirror) == {}
    receive_all(database, mirror.config)
    assert problems(mirror) == {}
    with Background(mirror.config):
        eventually(database.streaming)
        [found] = [each for each in Subscription(mirror.file).check() if each.name == "slot"]
        assert (found.level, found.fix) == (Level.OK, ""), "its own receiver is no trouble"
    eventually(lambda: not database.streaming())
    database.execute("INSERT INTO t VALUES (101, 1, 1)")
    slot, position = database.slot, database.value("SELECT pg_current_wal_lsn()::text")
    eventually(lambda: not database.value("SELECT active FROM pg_replication_slots WHERE slot_name = %s", slot))
    database.rows("SELECT pg_replication_slot_advance(%s, %s)", slot, position)
    assert "there is a gap" in problems(mirror)["change_log"].what
    database.execute(f"SELECT pg_drop_replication_slot('{slot}')")
    code, said, _ = here("check", "-c", mirror.file, "--json")
    assert code == 1
    [gone] = [each for each in json.loads(said)["findings"] if each["level"] == "problem"]
    assert (gone["name"], "does not exist any more" in gone["what"]) == ("slot", True)
    assert "walmere drop" in gone["fix"]
    manifest = mirror.config.changelog / "manifest.jsonl"
    was = manifest.read_bytes()
    manifest.write_bytes(was[:20])
    assert "incomplete" in problems(mirror)["change_log"].what
    manifest.write_bytes(was)
    monkeypatch.setenv("JAVA_HOME", str(mirror.file.parent))
    monkeypatch.setattr("walmere.subscription.checks.subscriber.LEAST_FREE", 1 << 60)
    (mirror.file.parent / "lake").write_text("not a directory")
    found_now = {each.name: each for each in Subscription(mirror.file).check()}
    assert "Java 17" in found_now["java"].what
    assert found_now["disk_space"].level is Level.WARNING
    assert "lake is not a directory" in found_now["lake_directory"].what
    assert found_now["state_directory"].level is Level.OK


def test_check_refuses_the_log_of_another_database(mirror: Mirror) -> None:
    receive_all(mirror.database, mirror.config)
    other = Database(mirror.database.server)
    try:
        other.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR ALL TABLES")
        mirror.file.write_text(mirror.file.read_text().replace(f"/{mirror.database.name}", f"/{other.name}"))
        assert f"received from database {mirror.database.name}" in problems(mirror)["change_log"].what
    finally:
        other.drop()


def test_nothing_is_left_at_the_source_by_a_call_that_is_refused(
    mirror: Mirror, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = mirror.database
    mirror.set("target", messages="public.t")
    code, _, said = here("run", "--once", "-c", mirror.file)
    assert (code, "a table of the source" in said, slots(database)) == (2, True, [])
    mirror.file.write_text(mirror.file.read_text().replace('messages = "public.t"\n', ""))
    with monkeypatch.context() as patch:
        patch.setattr(receiver, "create", _no_space)
        with pytest.raises(ChangeLogError, match="No space"):
            receiver.prepare(mirror.config)
    assert slots(database) == [], "what was made for a log that cannot be is removed"
    queries = Queries(database, tmp_path)
    own = {"dsn": database.dsn, "publications": "pub", "slot": database.slot, "directory": str(tmp_path / "own")}
    with pytest.raises(AnalysisException, match="nothing was received through slot"):
        queries.load("t", **own).count()
    assert (slots(database), (tmp_path / "own").exists()) == ([], False)
    mirror.run_once()
    mirror.assert_equal("t")
    assert here("drop", "-c", mirror.file)[0] == 0
    code, _, said = here("verify", "-c", mirror.file)
    assert (code, "there is no subscription" in said, slots(database)) == (3, True, [])


def _no_space(*_: object) -> None:
    raise ChangeLogError("writing", "No space left on device")


def test_a_run_that_is_stopped_while_its_slot_is_made_leaves_none(mirror: Mirror) -> None:
    database = mirror.database
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CREATE_REPLICATION_SLOT%%' AND datname = %s"
    with psycopg.connect(database.dsn) as other:
        other.execute("INSERT INTO t VALUES (200, 1, 1)")  # and no COMMIT: no slot before that
        with mirror.following():
            eventually(lambda: database.value(waiting, database.name) > 0)
    eventually(lambda: database.value(waiting, database.name) == 0)
    assert slots(database) == []
