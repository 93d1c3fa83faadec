"""Story 14: tables are added to and dropped from the publication while the subscription runs, and copied on request."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from conftest import Database
from mirror import Mirror
from processes import Here, eventually, walmere
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.subscription.requests import resync
from walmere.subscription.state import Phase, TableState


def state(mirror: Mirror, name: str) -> TableState:
    return next(each for each in mirror.tables() if each.name == name)


def test_a_table_that_is_added_is_synced_without_a_restart_and_the_others_do_not_wait(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE first (id int PRIMARY KEY, v text)",
        "CREATE TABLE second (id int PRIMARY KEY, v text)",
        "INSERT INTO first SELECT i, 'a' FROM generate_series(1, 100) i",
        "INSERT INTO second SELECT i, 'b' FROM generate_series(1, 20000) i",
        "CREATE PUBLICATION pub FOR TABLE first",
    )
    mirror = Mirror(database, tmp_path)
    with mirror.following():
        mirror.becomes_equal("first")
        database.execute("ALTER PUBLICATION pub ADD TABLE second", "UPDATE second SET v = 'c' WHERE id % 2 = 0")
        database.execute("INSERT INTO first VALUES (1001, 'meanwhile')")
        mirror.becomes_equal("first")
        database.execute("DELETE FROM second WHERE id < 100", "INSERT INTO second VALUES (0, 'new')")
        mirror.becomes_equal("first", "second")
        # dropped: it stays readable as it was, and is marked so
        database.execute("ALTER PUBLICATION pub DROP TABLE second")
        eventually(lambda: not state(mirror, "public.second").published)
        database.execute("INSERT INTO second VALUES (-1, 'unseen')", "INSERT INTO first VALUES (1002, 'seen')")
        mirror.becomes_equal("first")
        assert mirror.rows("second").total() == 20000 - 99 + 1
        shown = json.loads(walmere("status", "-c", mirror.file, "--json").stdout)["tables"]
        assert {each["name"]: each["published"] for each in shown} == {"public.first": True, "public.second": False}
        # and taken up again
        database.execute("ALTER PUBLICATION pub ADD TABLE second")
        mirror.becomes_equal("first", "second")
    assert all(each.published for each in mirror.tables())


@pytest.mark.long
def test_changes_that_committed_before_a_table_left_the_publication_are_applied(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    tables = ("removed", "dropped", "renamed", "stays")
    database.execute(
        *(f"CREATE TABLE {each} (id int PRIMARY KEY, v text)" for each in tables),
        *(f"INSERT INTO {each} VALUES (1, 'a'), (2, 'b')" for each in tables),
        f"CREATE PUBLICATION pub FOR TABLE {', '.join(tables)}",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute(
        *(f"DELETE FROM {each} WHERE id = 1" for each in tables),
        *(f"INSERT INTO {each} VALUES (3, 'before')" for each in tables),
        "ALTER PUBLICATION pub DROP TABLE removed",
        "INSERT INTO removed VALUES (4, 'after')",
        "DROP TABLE dropped",
        "ALTER TABLE renamed RENAME TO other_name",
        "INSERT INTO stays VALUES (4, 'after')",
    )
    mirror.run_once()
    mirror.assert_equal("stays", "other_name")
    for each in ("removed", "dropped", "renamed"):
        assert not state(mirror, f"public.{each}").published
        assert mirror.rows(each) == {(2, "b"): 1, (3, "before"): 1}, each


@pytest.mark.long
def test_a_table_that_is_dropped_and_made_anew_or_renamed_is_followed_under_its_name(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE again (id int PRIMARY KEY, v text)",
        "CREATE TABLE old_name (id int PRIMARY KEY, v text)",
        "CREATE TABLE live (id int PRIMARY KEY, v text)",
        "CREATE TABLE staging (id int PRIMARY KEY, v text, more int)",
        "INSERT INTO again VALUES (1, 'a')",
        "INSERT INTO old_name VALUES (1, 'a')",
        "INSERT INTO live VALUES (1, 'old')",
        "INSERT INTO staging VALUES (1, 'new', 1), (2, 'new', 2)",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    mirror.assert_equal("again", "old_name", "live", "staging")
    database.execute(
        "INSERT INTO again VALUES (2, 'of the table that goes')",
        "DROP TABLE again",
        "CREATE TABLE again (id bigint PRIMARY KEY, other text)",
        "INSERT INTO again VALUES (3, 'of the one that comes')",
        "INSERT INTO old_name VALUES (2, 'before')",
        "ALTER TABLE old_name RENAME TO new_name",
        "INSERT INTO new_name VALUES (3, 'after')",
        # the classic swap
        "BEGIN; ALTER TABLE live RENAME TO live_old; ALTER TABLE staging RENAME TO live; COMMIT",
        "INSERT INTO live VALUES (3, 'after', 3)",
        "INSERT INTO live_old VALUES (2, 'after')",
    )
    mirror.run_once()
    mirror.assert_equal("again", "new_name", "live", "live_old")
    assert not state(mirror, "public.old_name").published
    assert mirror.rows("old_name").total() == 2, "what it had under its old name can still be read"
    database.execute("INSERT INTO new_name VALUES (4, 'x')", "INSERT INTO live VALUES (4, 'x', 4)")
    mirror.run_once()
    mirror.assert_equal("again", "new_name", "live", "live_old")


def test_a_table_is_copied_again_on_request_and_readers_see_the_old_contents_until_then(
    database18: Database, tmp_path: Path, here: Here
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE other (id int PRIMARY KEY)",
        "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 1000) i",
        "CREATE PUBLICATION pub FOR TABLE t, other",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    mirror.delta("t").delete("id = 7")  # somebody damages the target
    before = state(mirror, "public.t")
    copied_other = state(mirror, "public.other")
    with mirror.following():
        database.execute("INSERT INTO other VALUES (1)")
        mirror.becomes_equal("other")
        seen: set[int] = set()
        looking = threading.Event()

        def look() -> None:
            while not looking.is_set():
                seen.add(mirror.rows("t").total())

        reader = threading.Thread(target=look)
        reader.start()
        result = walmere("resync", "-c", mirror.file, "t")
        looking.set()
        reader.join()
        assert (result.returncode, result.stdout) == (0, "public.t: copied again by the running process\n"), result
        mirror.becomes_equal("t", "other")
    assert seen <= {999, 1000}
    after, other = state(mirror, "public.t"), state(mirror, "public.other")
    assert after.snapshot_lsn > before.snapshot_lsn
    assert other.snapshot_lsn == copied_other.snapshot_lsn, "the other tables went on"
    # without a run, it is left for the next, or it makes one
    mirror.delta("t").delete("id = 8")
    code, said, _ = here("resync", "-c", mirror.file, "public.t", "--no-wait")
    assert code == 0
    assert "or by the next `walmere run`" in said
    mirror.run_once()
    mirror.assert_equal("t", "other")
    mirror.delta("t").delete("id = 9")
    assert here("resync", "-c", mirror.file, "public.t")[:2] == (0, "public.t: copied again\n")
    mirror.assert_equal("t", "other")


def test_what_cannot_be_copied_again_is_said_and_nothing_is_asked(
    database18: Database, tmp_path: Path, here: Here
) -> None:
    database18.execute("CREATE SCHEMA a", "CREATE SCHEMA b", "CREATE TABLE a.t (id int)", "CREATE TABLE b.t (id int)")
    database18.execute("CREATE PUBLICATION pub FOR TABLE a.t, b.t")
    mirror = Mirror(database18, tmp_path)
    mirror.run_once()
    for name, wrong in {"t": "2 tables are called t", "c.t": "no published table is called c.t"}.items():
        code, _, said = here("resync", "-c", mirror.file, name)
        assert code == 2
        assert wrong in said
        assert "a.t, b.t" in said
    assert resync.find(mirror.tables(), ["b.t"]) == [TableName("b", "t")]
    assert {each.phase for each in mirror.tables()} <= {Phase.FINISHED_COPY, Phase.SYNC_DONE, Phase.READY}
    mirror.assert_equal("t", schema="a")


@pytest.mark.long
@pytest.mark.since(15, "row filters, nor column lists")
def test_a_row_filter_that_changes_is_a_new_copy(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v int)",
        "INSERT INTO t SELECT i, i % 10 FROM generate_series(1, 100) i",
        "CREATE PUBLICATION pub FOR TABLE t WHERE (id > 50)",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    assert mirror.rows("t").total() == 50
    database.execute("ALTER PUBLICATION pub SET TABLE t WHERE (id > 20)", "UPDATE t SET v = 0 WHERE id = 30")
    mirror.run_once()
    assert mirror.rows("t").total() == 80
    database.execute("ALTER PUBLICATION pub SET TABLE t (id)")
    database.execute("INSERT INTO t VALUES (200, 1)")
    mirror.run_once()
    mirror.assert_equal("t", columns="id")
    assert Lsn(0) < min(each.applied_lsn for each in mirror.tables())


@pytest.mark.long
def test_leaf_partitions_are_gathered_into_their_root_on_request(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE root (id int, region text, v text, PRIMARY KEY (id, region)) PARTITION BY LIST (region)",
        "CREATE TABLE eu PARTITION OF root FOR VALUES IN ('eu')",
        "CREATE TABLE us (v text, region text NOT NULL, id int NOT NULL, gone int, PRIMARY KEY (id, region))",
        "ALTER TABLE us DROP gone",
        "ALTER TABLE root ATTACH PARTITION us FOR VALUES IN ('us')",
        "CREATE TABLE plain (id int PRIMARY KEY)",
        "INSERT INTO root SELECT i, CASE i % 2 WHEN 0 THEN 'eu' ELSE 'us' END, 'v' FROM generate_series(1, 1000) i",
        "CREATE PUBLICATION pub FOR TABLE root, plain",
    )
    mirror = Mirror(database, tmp_path)
    mirror.set("target", gather_partitions=True)
    mirror.run_once()
    mirror.assert_equal("root", "plain")
    assert {each.name for each in mirror.tables()} == {"public.plain", "public.root"}
    copied = state(mirror, "public.root").snapshot_lsn
    database.execute(
        "UPDATE root SET region = 'us' WHERE id = 2",  # moves: a delete here, an insert there
        "UPDATE root SET region = 'eu' WHERE id = 2",
        "BEGIN; UPDATE root SET region = 'us', v = 'moved' WHERE id = 4; DELETE FROM root WHERE id = 4;"
        " INSERT INTO root VALUES (4, 'eu', 'again'); COMMIT",
        "UPDATE root SET v = 'w', id = -id WHERE id % 10 = 0",
    )
    mirror.run_once()
    mirror.assert_equal("root", "plain")
    database.execute("BEGIN; TRUNCATE root; INSERT INTO root VALUES (1, 'eu', 'after'), (2, 'us', 'after'); COMMIT")
    mirror.run_once()
    mirror.assert_equal("root", "plain")
    assert state(mirror, "public.root").snapshot_lsn == copied
    database.execute(
        "CREATE TABLE asia PARTITION OF root FOR VALUES IN ('asia')",
        "INSERT INTO root VALUES (5000, 'asia', 'new'), (5001, 'us', 'new')",
        "INSERT INTO root VALUES (3, 'eu', 'after')",
        "TRUNCATE us",  # which rows go is not known here: a new copy
        "ALTER TABLE root ADD n int DEFAULT 1",
        "INSERT INTO root VALUES (4, 'us', 'x', 5)",
    )
    mirror.run_once()
    mirror.assert_equal("root", "plain")
    assert state(mirror, "public.root").snapshot_lsn > copied


@pytest.mark.long
def test_a_gathered_table_that_is_published_by_its_root_from_now_on_is_copied_again(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE root (id int, g text, PRIMARY KEY (id, g)) PARTITION BY LIST (g)",
        "CREATE TABLE leaf PARTITION OF root FOR VALUES IN ('a')",
        "INSERT INTO root VALUES (1, 'a')",
        "CREATE PUBLICATION pub FOR TABLE root",
    )
    mirror = Mirror(database, tmp_path)
    mirror.set("target", gather_partitions=True)
    mirror.run_once()
    for via_root in ("true", "false"):
        database.execute(
            f"ALTER PUBLICATION pub SET (publish_via_partition_root = {via_root})",
            "INSERT INTO root SELECT max(id) + 1, 'a' FROM root",
        )
        mirror.run_once()
        mirror.assert_equal("root")
