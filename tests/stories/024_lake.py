"""Story 24: the lake or a state file is not as the subscription left it: owners, lost commits, damaged files."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import psycopg
import pytest
from deltalake import DeltaTable

import walmere
from conftest import Database
from delta_rows import read_delta
from mirror import Mirror
from processes import Here
from walmere.api import Subscription
from walmere.config import DeltaTarget
from walmere.errors import OwnedByAnother, SinkMismatch, StateDamaged
from walmere.ledger.file import Ledger
from walmere.lsn import Lsn
from walmere.owner import PROPERTY
from walmere.subscription.progress import SinkPositions
from walmere.subscription.state import Phase, TableState


def two_tables(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE other (id int PRIMARY KEY, d date)",
        "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100) i",
        "CREATE PUBLICATION pub FOR TABLE t, other",
    )


def lake(mirror: Mirror) -> Path:
    assert isinstance(mirror.config.target, DeltaTarget)
    return Path(mirror.config.target.path)


def state(mirror: Mirror, table: str) -> TableState:
    [found] = [each for each in mirror.tables() if each.name == f"public.{table}"]
    return found


def commits(mirror: Mirror, table: str) -> list[Path]:
    return sorted((lake(mirror) / "public" / table / "_delta_log").glob("*.json"))


def assert_points_agree(mirror: Mirror) -> None:
    """Every point that is published, in the lake and in the ledger, has what the source had then: here, whole rows."""
    for point in walmere.lake(lake(mirror)).points():
        for table in point.tables:
            point.arrow(table)  # each version is there
    entries = [(entry.lsn, entry.versions) for entry in Ledger(mirror.config.subscription.directory).entries()]
    newest = walmere.lake(lake(mirror)).latest()
    assert (newest.lsn, {name: newest.version(name) for name in newest.tables}) == entries[-1]
    assert all(newest.version(f"public.{name}") == mirror.delta(name).version() for name in ("t", "other"))


# Owners


def test_another_subscription_is_refused_before_anything_is_written_and_may_take_over(
    database18: Database, tmp_path: Path, here: Here
) -> None:
    database = database18
    two_tables(database)
    first = Mirror(database, tmp_path / "first")
    first.run_once()
    owner = json.loads(first.delta("t").metadata().configuration[PROPERTY])
    oid = database.value("SELECT oid FROM pg_database WHERE datname = current_database()")
    system = str(database.value("SELECT system_identifier FROM pg_control_system()"))
    assert owner == {"subscription": database.name, "system_identifier": system, "database_oid": oid}

    neighbour = Database(database.server)
    try:
        two_tables(neighbour)
        neighbour.execute("INSERT INTO t VALUES (1000, 'theirs')", "CREATE TABLE extra (id int PRIMARY KEY)")
        neighbour.execute("ALTER PUBLICATION pub ADD TABLE extra")
        second = Mirror(neighbour, tmp_path / "second")
        second.file.write_text(second.file.read_text().replace('path = "lake"', 'path = "../first/lake"'))
        before = {path: path.stat().st_mtime_ns for path in lake(first).rglob("*")}
        code, _, said = here("run", "-c", second.file, "--once")
        assert code == 1
        assert "public/other belongs to" in said
        assert f"subscription {database.name} of the database with OID {oid}" in said
        assert "--take-over" in said
        assert "Traceback" not in said
        assert {path: path.stat().st_mtime_ns for path in lake(first).rglob("*")} == before, "nothing was written"
        assert neighbour.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0
        code, said, _ = here("status", "-c", second.file, "--json")
        errors = {each["name"]: each["error"] for each in json.loads(said)["tables"]}
        assert "belongs to" in errors["public.t"]
        # a subscription of the same name, of another database, does not overwrite the points
        second.file.write_text(
            second.file.read_text().replace(f'name = "{neighbour.name}"', f'name = "{database.name}"')
        )
        with pytest.raises(OwnedByAnother, match=f"the name {database.name} belongs to"):
            second.run_once()
        assert {path: path.stat().st_mtime_ns for path in lake(first).rglob("*")} == before, "nothing was written"

        Subscription(second.file).run(once=True, take_over=True)
        second.assert_equal("t", "other", "extra")
        assert json.loads(second.delta("t").metadata().configuration[PROPERTY])["database_oid"] != oid
        # the first owner is refused by name now, and may take its tables back
        database.execute("INSERT INTO t VALUES (101, 'more')")
        with pytest.raises(OwnedByAnother):
            first.run_once()
        Subscription(first.file).run(once=True, take_over=True)
        first.assert_equal("t", "other")
    finally:
        neighbour.drop()


@pytest.mark.long
def test_a_table_without_an_owner_is_adopted_and_a_subscription_begun_anew_is_the_same_owner(
    database18: Database, tmp_path: Path
) -> None:
    """An earlier version has written no owners, no OID into the log's header, and no versions into tables.json."""
    database = database18
    two_tables(database)
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    snapshot = state(mirror, "t").snapshot_lsn
    for table in ("t", "other"):
        for file in commits(mirror, table):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            for line in lines:
                line.get("metaData", {}).get("configuration", {}).pop(PROPERTY, None)
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert PROPERTY not in mirror.delta("t").metadata().configuration
    (lake(mirror) / "_walmere" / database.name / "owner.json").unlink()
    tables = tmp_path / "subscription" / "tables.json"
    content = json.loads(tables.read_text())
    for each in content["tables"]:
        del each["version"], each["version_lsn"]
    tables.write_text(json.dumps(content))
    database.execute("INSERT INTO t VALUES (101, 'more')")
    mirror.run_once()
    mirror.assert_equal("t", "other")
    assert state(mirror, "t").snapshot_lsn == snapshot, "it was not copied again"
    assert json.loads(mirror.delta("t").metadata().configuration[PROPERTY])["subscription"] == database.name

    Subscription(mirror.file).drop()
    database.execute("INSERT INTO t VALUES (102, 'more')")
    mirror.run_once()
    mirror.assert_equal("t", "other")


# A table that is behind


@pytest.mark.parametrize("how", [pytest.param("deleted", marks=pytest.mark.long), "emptied"])
def test_a_table_whose_last_commits_are_lost_is_applied_again_from_its_own_lsn(
    database18: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    database = database18
    two_tables(database)
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    snapshot = state(mirror, "other").snapshot_lsn
    database.execute("INSERT INTO other VALUES (1, 'infinity')", "INSERT INTO t VALUES (101, 'a')")
    mirror.run_once()
    database.execute("INSERT INTO other VALUES (2, 'infinity')", "INSERT INTO t VALUES (102, 'b')")
    mirror.run_once()
    *_, one, last = commits(mirror, "other")
    if how == "deleted":
        one.unlink()
        last.unlink()
    else:
        last.write_bytes(b"")
    database.execute("INSERT INTO t VALUES (103, 'c')")  # and nothing at all for the other
    with caplog.at_level(logging.WARNING):
        mirror.run_once()
    assert "public.other" in caplog.text
    assert "applied again from" in caplog.text
    mirror.assert_equal("t")
    assert mirror.rows("other").total() == 2
    assert state(mirror, "other").snapshot_lsn == snapshot, "it was not copied again"
    assert state(mirror, "other").error is None
    assert read_delta(mirror.delta("other", "_rejects.public")).num_rows == 2, "no reject is kept twice"
    assert_points_agree(mirror)


@pytest.mark.long
def test_a_table_restored_from_a_backup_or_changed_by_others_is_copied_again_if_need_be(
    database18: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("walmere.subscription.state.SETBACK_WAITS", (0.0,))  # it happens again and again here
    database = database18
    two_tables(database)
    mirror = Mirror(database, tmp_path)
    mirror.set("subscription", keep_seconds=0)
    mirror.run_once()
    first = state(mirror, "t").snapshot_lsn
    shutil.copytree(lake(mirror) / "public" / "t", tmp_path / "backup")
    for number in (101, 102):
        database.execute(f"INSERT INTO t VALUES ({number}, 'a')")
        mirror.run_once()
    DeltaTable(lake(mirror) / "public" / "t").optimize.compact()
    DeltaTable(lake(mirror) / "public" / "t").alter.set_table_properties({"delta.appendOnly": "false"})
    DeltaTable(lake(mirror) / "public" / "t").vacuum(0, dry_run=False, enforce_retention_duration=False)
    database.execute("UPDATE t SET v = 'b' WHERE id = 1")
    with caplog.at_level(logging.WARNING):
        mirror.run_once()
    assert "public.t" not in caplog.text
    assert state(mirror, "t").snapshot_lsn == first, "what changes no rows is no reason for a copy"
    mirror.assert_equal("t", "other")

    # from a backup, and the log does not have the span any more
    shutil.rmtree(lake(mirror) / "public" / "t")
    shutil.copytree(tmp_path / "backup", lake(mirror) / "public" / "t")
    with caplog.at_level(logging.WARNING):
        mirror.run_once()
    assert "commits were lost, or it was restored; it is copied again" in caplog.text
    mirror.assert_equal("t", "other")
    assert_points_agree(mirror)

    # a log that cannot be read concerns its table alone, and the way out leads out
    commits(mirror, "other")[-1].write_bytes(b"{torn")
    database.execute("INSERT INTO t VALUES (103, 'a')")
    with pytest.raises(SinkMismatch, match="_delta_log cannot be read"):
        mirror.run_once()
    mirror.assert_equal("t")
    assert "cannot be read" in (state(mirror, "other").error or "")
    shutil.rmtree(lake(mirror) / "public" / "other")
    mirror.run_once()
    mirror.assert_equal("t", "other")
    assert_points_agree(mirror)

    # RESTORE: the LSN stays, and the rows are old; noticed by the running process
    with mirror.following():
        database.execute("INSERT INTO t VALUES (201, 'c')")
        mirror.becomes_equal("t")
        before = state(mirror, "t").snapshot_lsn
        restored = mirror.delta("t")
        restored.restore(restored.version() - 1)
        database.execute("INSERT INTO t VALUES (202, 'd')")
        mirror.becomes(lambda: state(mirror, "t").snapshot_lsn > before and mirror.phase("t") is Phase.READY)
        mirror.becomes_equal("t", "other")
    assert "RESTORE" in caplog.text
    # and by the next one
    mirror.delta("t").delete("id = 5")
    mirror.run_once()
    mirror.assert_equal("t", "other")
    assert_points_agree(mirror)


# Damaged files


@pytest.mark.long
def test_damage_that_can_be_made_good_is_and_the_run_goes_on(
    database18: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = database18
    two_tables(database)
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    directory = mirror.config.subscription.directory
    database.execute("INSERT INTO t VALUES (101, 'a')")
    mirror.run_once()
    snapshot = state(mirror, "t").snapshot_lsn
    for number, (name, content) in enumerate(
        [
            ("positions/target.json", b"\xff\xfe"),
            ("ledger.jsonl", b"\xff\xfe\nnothing\n"),
        ]
    ):
        (directory / name).parent.mkdir(exist_ok=True, parents=True)
        (directory / name).write_bytes(content)
        database.execute(f"INSERT INTO t VALUES ({200 + number}, 'b')")
        mirror.run_once()
        mirror.assert_equal("t", "other")
        assert_points_agree(mirror)
    assert state(mirror, "t").snapshot_lsn == snapshot, "nothing was copied again"
    assert SinkPositions(directory).applied() == state(mirror, "t").applied_lsn
    assert len(list(Ledger(directory).entries())) > 2, "points of the lake's ledger were kept"
    assert "ledger.jsonl" in caplog.text


@pytest.mark.long
def test_a_damaged_list_of_tables_is_named_and_the_way_out_keeps_slot_and_log(
    database18: Database, tmp_path: Path, here: Here
) -> None:
    database = database18
    two_tables(database)
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    directory = mirror.config.subscription.directory
    for content in (b"\xff\xfe\x00", b"", b"{", b"[]", b'{"version": 2, "tables": [{}], "types": []}'):
        (directory / "tables.json").write_bytes(content)
        with pytest.raises(StateDamaged, match=r"tables\.json"):
            mirror.launcher()
    code, _, said = here("run", "-c", mirror.file, "--once")
    assert code == 1
    assert len(said.strip().splitlines()) == 2, "one line and a hint"
    assert "tables.json" in said
    assert "move the file to another directory" in said
    restart = database.value("SELECT restart_lsn::text FROM pg_replication_slots WHERE slot_name = %s", database.slot)
    (directory / "tables.json").rename(tmp_path / "damaged")
    database.execute("INSERT INTO t VALUES (101, 'a')")
    mirror.run_once()
    mirror.assert_equal("t", "other")
    now = database.value("SELECT restart_lsn::text FROM pg_replication_slots WHERE slot_name = %s", database.slot)
    assert Lsn.parse(now) >= Lsn.parse(restart), "it is the same slot"
    with psycopg.connect(database.dsn):
        assert_points_agree(mirror)
