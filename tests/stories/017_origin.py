"""Story 17: with `origin = "none"`, what came to the source by replication is not passed on."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from conftest import Database
from mirror import Mirror
from processes import eventually
from walmere.testing.server import Server

SINCE = pytest.mark.since(16, 'origin = "none"')
every_origin = pytest.mark.parametrize("asked", ["any", pytest.param("none", marks=SINCE)])


@every_origin
@pytest.mark.long
def test_changes_of_an_origin_are_mirrored_with_any_and_left_out_with_none(
    database18: Database, tmp_path: Path, asked: str
) -> None:
    database = database18
    origin = f"origin_{database.name}"
    database.execute(
        f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'",
        "CREATE TABLE t (id int PRIMARY KEY, made text, v text)",
        "CREATE TABLE emptied (id int PRIMARY KEY)",
        "INSERT INTO t SELECT i, 'here', 'copied' FROM generate_series(1, 20) i",
        "INSERT INTO emptied SELECT generate_series(1, 10)",
        "CREATE PUBLICATION pub FOR TABLE t, emptied",
        f"SELECT pg_replication_origin_create('{origin}')",
    )
    large = "INSERT INTO t SELECT {} + i, '{}', repeat(md5(i::text), 3) FROM generate_series(1, 2000) i"
    mirror = Mirror(database, tmp_path, origin=asked)
    mirror.run_once()
    with psycopg.connect(database.dsn, autocommit=True) as replicating, psycopg.connect(database.dsn) as local:
        replicating.execute(f"SELECT pg_replication_origin_session_setup('{origin}')")
        for statement in (
            "INSERT INTO t VALUES (101, 'elsewhere', 'replicated')",
            "UPDATE t SET v = 'replicated' WHERE id = 1",
            "UPDATE t SET id = 102, made = 'elsewhere' WHERE id = 2",
            "DELETE FROM t WHERE id = 3",
            "TRUNCATE emptied",
        ):
            replicating.execute(statement)
            local.execute("UPDATE t SET v = v || '!' WHERE id = 20")
            local.commit()
        with replicating.transaction():  # streamed, alternating with one of our own
            replicating.execute(large.format(10_000, "elsewhere"))
            local.execute(large.format(20_000, "here"))
            replicating.execute(large.format(30_000, "elsewhere"))
            local.execute(large.format(40_000, "here"))
            local.commit()
        replicating.execute("SELECT pg_replication_origin_session_reset()")
    database.execute(
        f"SELECT pg_replication_origin_drop('{origin}')",
        "INSERT INTO t VALUES (201, 'here', 'after')",
        "DELETE FROM t WHERE id IN (19, 101)",  # of which one came by replication
    )
    mirror.run_once()
    if asked == "none":
        database.execute(  # what it would be had nothing come by replication
            "DELETE FROM t WHERE made = 'elsewhere'",
            "UPDATE t SET v = 'copied' WHERE id = 1",
            "INSERT INTO t VALUES (2, 'here', 'copied'), (3, 'here', 'copied')",
            "INSERT INTO emptied SELECT generate_series(1, 10)",
        )
        assert mirror.rows("t").total() == 20 + 2 * 2000
    mirror.assert_equal("t", "emptied")


@every_origin
def test_in_a_cascade_the_last_one_sees_what_the_middle_one_received_unless_it_asks_for_none(
    database18: Database, private_server: Server, tmp_path: Path, asked: str
) -> None:
    first, middle = database18, Database(private_server)
    with closing(middle.connection):
        for database in (first, middle):
            database.execute("CREATE TABLE t (id int PRIMARY KEY, made text)")
        first.execute(
            "INSERT INTO t SELECT i, 'at first' FROM generate_series(1, 10) i", "CREATE PUBLICATION pub FOR TABLE t"
        )
        middle.execute(
            "CREATE PUBLICATION pub FOR TABLE t",
            "INSERT INTO t SELECT i, 'in the middle' FROM generate_series(101, 110) i",
        )
        mirror = Mirror(middle, tmp_path, origin=asked)
        mirror.run_once()
        middle.execute(f"CREATE SUBSCRIPTION sub CONNECTION '{first.dsn}' PUBLICATION pub")

        def received() -> None:
            query = "SELECT * FROM t WHERE made = 'at first' ORDER BY 1"
            eventually(lambda: middle.rows(query) == first.rows(query))
            query = "SELECT * FROM pg_subscription_rel WHERE srsubstate <> 'r'"
            eventually(lambda: not middle.rows(query))

        received()
        first.execute(
            "INSERT INTO t VALUES (11, 'at first')",
            "DELETE FROM t WHERE id = 2",
            "UPDATE t SET id = 13 WHERE id = 3",
        )
        middle.execute(
            "INSERT INTO t VALUES (111, 'in the middle')",
            "DELETE FROM t WHERE id = 102",
            "UPDATE t SET id = 113 WHERE id = 103",
        )
        received()
        mirror.run_once()
        middle.execute("ALTER SUBSCRIPTION sub DISABLE")
        if asked == "none":
            middle.execute("DELETE FROM t WHERE made = 'at first'")
        mirror.assert_equal("t")
        middle.execute("DROP SUBSCRIPTION sub")


@pytest.mark.long
@SINCE
def test_with_none_a_change_of_our_own_may_meet_what_replication_did(database18: Database, tmp_path: Path) -> None:
    """A native subscriber skips update_missing, and stops at insert_exists. Here the row is as the source has it."""
    database = database18
    origin = f"origin_{database.name}"
    for table in ("t", "large"):
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, v text, n int)", f"INSERT INTO {table} VALUES (1, 'here', 0)"
        )
    database.execute("CREATE PUBLICATION pub FOR TABLE t, large", f"SELECT pg_replication_origin_create('{origin}')")
    mirror = Mirror(database, tmp_path, origin="none")
    mirror.run_once()
    database.execute(
        f"SELECT pg_replication_origin_session_setup('{origin}')",
        "DELETE FROM t WHERE id = 1",
        "INSERT INTO t VALUES (2, 'elsewhere', 0), (3, 'elsewhere', 0)",
        "INSERT INTO large SELECT 2, string_agg(md5(i::text), ''), 0 FROM generate_series(1, 1000) i",
        "SELECT pg_replication_origin_session_reset()",
        f"SELECT pg_replication_origin_drop('{origin}')",
        "INSERT INTO t VALUES (1, 'here again', 0)",
        "UPDATE t SET n = 1 WHERE id = 2",
        "UPDATE large SET n = 1 WHERE id = 2",  # without the large value: only a copy has it
    )
    mirror.run_once()
    assert sorted(mirror.rows("t").elements()) == [(1, "here again", 0), (2, "elsewhere", 1)]
    mirror.assert_equal("large")
