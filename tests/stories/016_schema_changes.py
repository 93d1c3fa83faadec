"""Story 16: no DDL stops the subscription. Where PostgreSQL does not rewrite, it is done in place; else by a copy."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg
import pytest

from conftest import Database
from mirror import Mirror
from walmere.lsn import Lsn
from walmere.subscription.state import TableState


def states(mirror: Mirror) -> dict[str, TableState]:
    return {each.table.name: each for each in mirror.tables()}


def snapshots(mirror: Mirror) -> dict[str, Lsn]:
    return {name: each.snapshot_lsn for name, each in states(mirror).items()}


IN_PLACE = {
    "add": ("ALTER TABLE {t} ADD n int",),
    "add_constant": ("ALTER TABLE {t} ADD n int DEFAULT 7",),
    "add_not_null": ("ALTER TABLE {t} ADD n text NOT NULL DEFAULT 'it''s {\"x\",y}'",),
    "add_stable": ("ALTER TABLE {t} ADD n timestamptz DEFAULT now()",),
    "add_jsonb": ('ALTER TABLE {t} ADD n jsonb DEFAULT \'{"a": [1, "\\""]}\'',),
    "add_array": ("ALTER TABLE {t} ADD n text[] DEFAULT '{a,NULL,\"b,c\"}'",),
    "add_bytea": ("ALTER TABLE {t} ADD n bytea DEFAULT '\\x00ff'",),
    "add_enum": ("ALTER TABLE {t} ADD n mood DEFAULT 'ok'",),
    "add_several": ("ALTER TABLE {t} ADD n int DEFAULT 1, ADD m numeric(6, 2) DEFAULT 1.5, ADD o date",),
    "add_then_other_default": ("ALTER TABLE {t} ADD n int DEFAULT 1", "ALTER TABLE {t} ALTER n SET DEFAULT 2"),
    "drop_it": ("ALTER TABLE {t} DROP v",),
    "drop_and_add": ("ALTER TABLE {t} DROP v, ADD v text DEFAULT 'another'",),
    "rename_it": ('ALTER TABLE {t} RENAME v TO "V of t"',),
    "rename_swap": (
        "BEGIN; ALTER TABLE {t} RENAME v TO x; ALTER TABLE {t} RENAME w TO v; ALTER TABLE {t} RENAME x TO w; COMMIT",
    ),
    "longer": ("ALTER TABLE {t} ALTER w TYPE varchar(50)",),
    "to_text": ("ALTER TABLE {t} ALTER w TYPE text",),
    "digits": ("ALTER TABLE {t} ALTER p TYPE numeric(20, 2)",),
    "enum_value": ("ALTER TYPE mood ADD VALUE IF NOT EXISTS 'great'", "UPDATE {t} SET f = 'great' WHERE id = 3"),
    "not_null": ("ALTER TABLE {t} ALTER v SET NOT NULL",),
    "new_default": ("ALTER TABLE {t} ALTER v SET DEFAULT 'd'",),
    "identity_full": ("ALTER TABLE {t} REPLICA IDENTITY FULL",),
    "identity_index": (
        "ALTER TABLE {t} ALTER v SET NOT NULL",
        "CREATE UNIQUE INDEX {t}_v ON {t} (v)",
        "ALTER TABLE {t} REPLICA IDENTITY USING INDEX {t}_v",
    ),
    "new_key": ("ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (id, v)",),
}
BY_COPY = {
    "volatile": ("ALTER TABLE {t} ADD n float8 DEFAULT random()",),
    "serial": ("ALTER TABLE {t} ADD n bigserial",),
    "stored": ("ALTER TABLE {t} ADD n int GENERATED ALWAYS AS (id * 2) STORED, ADD m int DEFAULT 1",),
    "widen": ("ALTER TABLE {t} ALTER i TYPE bigint",),
    "other_values": ("ALTER TABLE {t} ALTER i TYPE bigint USING i * 1000",),
    "incompatible": ("ALTER TABLE {t} ALTER i TYPE text USING 'n' || i",),
    "narrower": ("ALTER TABLE {t} ALTER p TYPE numeric(8, 1)",),
    "retyped": ("ALTER TABLE {t} ALTER v TYPE jsonb USING to_jsonb(v)",),
    "steps": ("ALTER TABLE {t} ADD n int DEFAULT 1", "UPDATE {t} SET n = 2 WHERE id = 4", "ALTER TABLE {t} DROP w"),
    "in_one_transaction": (
        "BEGIN; UPDATE {t} SET i = 100 WHERE id = 4; ALTER TABLE {t} ADD n int DEFAULT 5;"
        " UPDATE {t} SET n = 6 WHERE id = 5; ALTER TABLE {t} DROP w; DELETE FROM {t} WHERE id = 6; COMMIT",
    ),
}


def published(database: Database, table: str) -> list[str]:
    """The columns of a table that is published without more ado: none that is generated."""
    query = (
        "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped"
        " AND attgenerated = '' ORDER BY attnum"
    )
    return [name for (name,) in database.rows(query, table)]


def assert_equal(mirror: Mirror, *tables: str) -> None:
    """Equal in rows, and in the names and the order of columns."""
    for table in tables:
        columns = published(mirror.database, table)
        assert [field.name for field in mirror.delta(table).schema().fields] == columns
        mirror.assert_equal(table, columns=", ".join(f'"{column}"' for column in columns))


@pytest.mark.long
def test_each_change_of_a_definition_leads_to_equal_tables(database18: Database, tmp_path: Path) -> None:
    database = database18
    everything = {**IN_PLACE, **BY_COPY}
    database.execute("CREATE TYPE mood AS ENUM ('sad', 'ok')", "CREATE TABLE unharmed (id int PRIMARY KEY)")
    for table in everything:
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, v text, w varchar(20), p numeric(10, 2), i int, f mood)",
            f"INSERT INTO {table} SELECT i, 'v' || i, 'w' || i, i / 3.0, i, 'sad' FROM generate_series(1, 20) i",
        )
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    before = snapshots(mirror)
    for table, statements in everything.items():
        database.execute(
            f"UPDATE {table} SET i = 0 WHERE id = 1",  # in the old definition
            *(statement.replace("{t}", table) for statement in statements),
            f"UPDATE {table} SET id = 21 WHERE id = 2",  # in the new one
            f"DELETE FROM {table} WHERE id = 7",
        )
    database.execute("INSERT INTO unharmed VALUES (1)")
    mirror.run_once()
    assert_equal(mirror, "unharmed", *everything)
    after = snapshots(mirror)
    assert {table for table in everything if after[table] != before[table]} == set(BY_COPY)
    assert all(each.error is None for each in mirror.tables())
    for table in everything:  # and they go on from there
        database.execute(f"DELETE FROM {table} WHERE id = 8", f"UPDATE {table} SET id = 31 WHERE id = 9")
    mirror.run_once()
    assert_equal(mirror, "unharmed", *everything)
    assert snapshots(mirror) == after


@pytest.mark.long
def test_definitions_change_under_load_while_others_are_followed(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "CREATE TABLE other (id bigserial PRIMARY KEY, n int)",
        "INSERT INTO t SELECT i, 0 FROM generate_series(1, 100) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    stopping = threading.Event()

    def write() -> None:
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            number = 0
            while not stopping.is_set():
                number += 1
                connection.execute("UPDATE t SET n = n + 1 WHERE id = %s", [number % 100 + 1])
                connection.execute("INSERT INTO other (n) VALUES (%s)", [number])

    mirror = Mirror(database, tmp_path)
    writer = threading.Thread(target=write)
    with mirror.following():
        mirror.becomes_equal("t", "other")
        writer.start()
        try:
            for step in (
                "ALTER TABLE t ADD a text DEFAULT 'x'",
                "ALTER TABLE t RENAME a TO b",
                "ALTER TABLE t ALTER n TYPE bigint",
                "ALTER TABLE t REPLICA IDENTITY FULL",
                "ALTER TABLE t DROP b",
                "ALTER TABLE t REPLICA IDENTITY DEFAULT",
            ):
                database.execute(step)
                before = mirror.delta("other").version()
                mirror.becomes(lambda before=before: mirror.delta("other").version() > before)  # type: ignore[misc]
        finally:
            stopping.set()
            writer.join()
        mirror.becomes_equal("t", "other")
    assert_equal(mirror, "t", "other")


@pytest.mark.long
def test_a_partitioned_table_changes_with_its_partitions(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE root (id int, region text, v text, PRIMARY KEY (id, region)) PARTITION BY LIST (region)",
        "CREATE TABLE eu PARTITION OF root FOR VALUES IN ('eu')",
        "CREATE TABLE us PARTITION OF root FOR VALUES IN ('us')",
        "CREATE TABLE leaves (id int, region text, PRIMARY KEY (id, region)) PARTITION BY LIST (region)",
        "CREATE TABLE leaf_eu PARTITION OF leaves FOR VALUES IN ('eu')",
        "INSERT INTO root SELECT i, CASE i % 2 WHEN 0 THEN 'eu' ELSE 'us' END, 'v' FROM generate_series(1, 100) i",
        "INSERT INTO leaves VALUES (1, 'eu')",
        "CREATE PUBLICATION pub FOR TABLE root WITH (publish_via_partition_root = true)",
        "CREATE PUBLICATION by_leaf FOR TABLE leaves",
    )
    mirror = Mirror(database, tmp_path, "pub", "by_leaf")
    mirror.run_once()
    mirror.assert_equal("root", "leaf_eu")
    database.execute(
        "CREATE TABLE asia (id int, region text, v text, PRIMARY KEY (id, region))",
        "INSERT INTO asia VALUES (1000, 'asia', 'was there before')",
        "ALTER TABLE root ATTACH PARTITION asia FOR VALUES IN ('asia')",
        "INSERT INTO root VALUES (1001, 'asia', 'came later')",
        "ALTER TABLE root DETACH PARTITION us",
        "INSERT INTO us VALUES (999, 'us', 'not of the root any more')",
        "CREATE TABLE leaf_us PARTITION OF leaves FOR VALUES IN ('us')",
        "INSERT INTO leaves VALUES (2, 'us'), (3, 'eu')",
    )
    mirror.run_once()
    mirror.assert_equal("root", "leaf_eu", "leaf_us")
    database.execute(
        "ALTER TABLE root ADD n int DEFAULT 3",
        "UPDATE root SET n = 4 WHERE id = 2",
        "ALTER TABLE leaves ADD n int DEFAULT 3",
        "INSERT INTO leaves VALUES (4, 'us', 5), (4, 'eu', 5)",
    )
    mirror.run_once()
    mirror.assert_equal("root", "leaf_eu", "leaf_us")


def test_what_looks_the_same_in_the_stream_and_is_not(database18: Database, tmp_path: Path) -> None:
    """A Relation message has neither attnum nor filenode, and DDL alone has no message: the catalogs are looked at."""
    database = database18
    tables = ("dropped_and_added", "other_values", "listed", "boxed", "emptied", "unharmed", "published_in_part")
    for table in tables:
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, v int)",
            f"INSERT INTO {table} SELECT i, i FROM generate_series(1, 20) i",
        )
    database.execute(
        "CREATE TABLE root (id int, g text, PRIMARY KEY (id, g)) PARTITION BY LIST (g)",
        "CREATE TABLE leaf PARTITION OF root FOR VALUES IN ('a')",
        "CREATE TABLE middle (id int, g text NOT NULL, PRIMARY KEY (id, g)) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF middle FOR VALUES FROM (0) TO (100)",
        "INSERT INTO middle VALUES (1, 'b')",
        "INSERT INTO root VALUES (1, 'a')",
        f"CREATE PUBLICATION pub FOR TABLE dropped_and_added, other_values, listed{database.narrowed(' (id, v)')},"
        " boxed, emptied, unharmed, root WITH (publish_via_partition_root)",
        "CREATE PUBLICATION part FOR TABLE published_in_part WITH (publish = 'insert')",
    )
    mirror = Mirror(database, tmp_path, "pub", "part")
    mirror.run_once()
    before = snapshots(mirror)
    database.execute(
        "ALTER TABLE dropped_and_added DROP v, ADD v int DEFAULT 5",
        "ALTER TABLE other_values ALTER v TYPE int USING v * 100",
        "ALTER TABLE listed ADD x int DEFAULT 1",
        "UPDATE listed SET x = id",
        "ALTER PUBLICATION pub SET TABLE dropped_and_added, other_values, listed, boxed, emptied, unharmed, root",
        "UPDATE listed SET v = 0 WHERE id = 1",
        "ALTER TABLE boxed ADD b box DEFAULT '(1,1),(0,0)'",
        "UPDATE boxed SET v = 0 WHERE id = 1",
        "TRUNCATE emptied",
        "ALTER TABLE emptied ALTER v SET DEFAULT 3",
        "VACUUM FULL unharmed",
        "ALTER TABLE root ATTACH PARTITION middle FOR VALUES IN ('b')",
        "DELETE FROM published_in_part WHERE id = 1",
        "ALTER PUBLICATION part SET (publish = 'insert, update, delete, truncate')",
        "INSERT INTO published_in_part VALUES (1, -1)",
    )
    mirror.run_once()
    mirror.assert_equal(*tables, "root")
    again = {name for name, lsn in snapshots(mirror).items() if lsn != before[name]}
    assert "unharmed" not in again
    assert again >= {"dropped_and_added", "other_values", "boxed", "root", "published_in_part"}
    assert ("listed" in again) == (database.major >= 15), "a column that was added is a copy only if a list hid it"
    # what comes back between two looks
    database.execute(
        "ALTER TABLE root DETACH PARTITION leaf",
        "INSERT INTO leaf VALUES (2, 'a')",
        "ALTER TABLE root ATTACH PARTITION leaf FOR VALUES IN ('a')",
        "ALTER PUBLICATION pub DROP TABLE unharmed",
        "UPDATE unharmed SET v = 0",
        "ALTER PUBLICATION pub ADD TABLE unharmed",
    )
    mirror.run_once()
    mirror.assert_equal(*tables, "root")
