"""Story 15: TRUNCATE empties what it empties at the source, and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psycopg
import pytest

from conftest import Database
from mirror import Mirror


def fill(*tables: str, first: int = 1, count: int = 10) -> list[str]:
    return [f"INSERT INTO {table} SELECT generate_series({first}, {first + count - 1})" for table in tables]


def test_every_form_of_truncate_is_mirrored(database18: Database, tmp_path: Path) -> None:
    database = database18
    keyed = ("alone", "first", "second", "refilled", "changed", "twice", "untouched", "tail")
    plain = (*keyed, "by_row", "numbered")
    tied = ("parents", "children", "grandchildren")
    database.execute(
        *(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)" for table in keyed),
        "CREATE TABLE by_row (id int, v text)",
        "ALTER TABLE by_row REPLICA IDENTITY FULL",
        "CREATE TABLE numbered (id serial PRIMARY KEY, v text)",
        "CREATE TABLE parents (id int PRIMARY KEY)",
        "CREATE TABLE children (id int PRIMARY KEY REFERENCES parents)",
        "CREATE TABLE grandchildren (id int PRIMARY KEY REFERENCES children)",
        "CREATE TABLE hidden (id int PRIMARY KEY REFERENCES parents)",
        *fill(*plain, *tied, "hidden"),
        *fill("by_row"),
        f"CREATE PUBLICATION pub FOR TABLE {', '.join((*plain, *tied))}",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    mirror.assert_equal(*plain, *tied)
    database.execute(
        "TRUNCATE alone",
        "TRUNCATE TABLE ONLY first, second",
        "TRUNCATE parents CASCADE",
        "INSERT INTO parents VALUES (3)",
        "INSERT INTO children VALUES (3)",
        # in one transaction with what comes before and after; keys come back
        "BEGIN; INSERT INTO refilled VALUES (11); TRUNCATE refilled; INSERT INTO refilled VALUES (1, 'again');"
        " INSERT INTO second VALUES (5); COMMIT",
        "UPDATE refilled SET v = 'and updated' WHERE id = 1",
        "BEGIN; UPDATE changed SET id = -id WHERE id < 3; DELETE FROM changed WHERE id = 4; TRUNCATE changed; COMMIT",
        "BEGIN; TRUNCATE twice; INSERT INTO twice VALUES (1, 'between'); TRUNCATE twice; COMMIT",
        *fill("twice", first=2, count=2),
        "DELETE FROM by_row WHERE id = 1",
        "TRUNCATE by_row",
        *fill("by_row", "by_row", count=2),
        "DELETE FROM by_row WHERE ctid = (SELECT ctid FROM by_row WHERE id = 2 LIMIT 1)",
        "TRUNCATE numbered RESTART IDENTITY",
        "INSERT INTO numbered (v) VALUES ('first'), ('second')",
        "BEGIN; INSERT INTO tail VALUES (100); TRUNCATE tail; COMMIT",
    )
    assert database.rows("SELECT id FROM numbered ORDER BY id") == [(1,), (2,)]
    mirror.run_once()
    mirror.assert_equal(*plain, *tied)
    database.execute(
        *fill("alone", "tail"),
        "TRUNCATE numbered, first RESTART IDENTITY CASCADE",
        "INSERT INTO numbered (v) VALUES ('first again')",
        "TRUNCATE first",  # of a table that is empty on both sides
    )
    mirror.run_once()
    mirror.assert_equal(*plain, *tied)


@pytest.mark.long
def test_a_truncate_that_is_rolled_back_or_not_published_empties_nothing(database18: Database, tmp_path: Path) -> None:
    database = database18
    tables = ("rolled_back", "to_savepoint", "after_savepoint", "streamed")
    database.execute(
        f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'",
        *(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)" for table in (*tables, "kept")),
        *fill(*tables, "kept"),
        f"CREATE PUBLICATION pub FOR TABLE {', '.join(tables)}",
        "CREATE PUBLICATION changes FOR TABLE kept WITH (publish = 'insert, update, delete')",
    )
    mirror = Mirror(database, tmp_path, "pub", "changes")
    mirror.run_once()
    database.execute(
        "BEGIN; TRUNCATE rolled_back; INSERT INTO rolled_back VALUES (1, 'never'); ROLLBACK",
        "UPDATE rolled_back SET v = 'x' WHERE id = 2",
        "BEGIN; INSERT INTO to_savepoint VALUES (11); SAVEPOINT s; TRUNCATE to_savepoint;"
        " INSERT INTO to_savepoint VALUES (1, 'never'); ROLLBACK TO s; DELETE FROM to_savepoint WHERE id = 2; COMMIT",
        "BEGIN; SAVEPOINT s; DELETE FROM after_savepoint; ROLLBACK TO s; TRUNCATE after_savepoint; SAVEPOINT t;"
        " INSERT INTO after_savepoint VALUES (1, 'kept'); RELEASE t; COMMIT",
        "TRUNCATE kept",
        "INSERT INTO kept VALUES (11, 'after')",
    )
    large = "INSERT INTO streamed SELECT {}, repeat(md5(i::text), 3) FROM generate_series(1, 2000) i"
    with psycopg.connect(database.dsn) as other:
        other.execute(large.format("100 + i"))
        other.execute("TRUNCATE streamed")
        other.execute("SAVEPOINT s")
        other.execute(large.format("100 + i"))
        other.execute("TRUNCATE streamed")
        other.execute("ROLLBACK TO SAVEPOINT s")
        other.execute(large.format("i"))
        other.commit()
        other.execute("SAVEPOINT s")
        other.execute("TRUNCATE streamed")
        other.execute(large.format("10000 + i"))
        other.execute("ROLLBACK TO SAVEPOINT s")
        other.execute(large.format("20000 + i"))
        other.commit()
    mirror.run_once()
    mirror.assert_equal(*tables)
    assert mirror.rows("streamed").total() == 4000
    assert sorted(row[0] for row in mirror.rows("kept")) == list(range(1, 12)), "as a native subscriber would have it"


@pytest.mark.parametrize(
    "via_root", [pytest.param(True, id="via root"), pytest.param(False, id="as partitions", marks=pytest.mark.long)]
)
@pytest.mark.long
def test_truncate_of_partitioned_tables(database18: Database, tmp_path: Path, via_root: bool) -> None:
    database = database18
    roots = ("alone", "refilled", "one_part", "rolled_back")
    parts = ("low", "mid", "high")
    database.execute(
        *(
            statement
            for root in roots
            for statement in (
                f"CREATE TABLE {root} (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
                f"CREATE TABLE {root}_low PARTITION OF {root} FOR VALUES FROM (0) TO (100)",
                f"CREATE TABLE {root}_rest PARTITION OF {root} FOR VALUES FROM (100) TO (300) PARTITION BY RANGE (id)",
                f"CREATE TABLE {root}_mid PARTITION OF {root}_rest FOR VALUES FROM (100) TO (200)",
                f"CREATE TABLE {root}_high PARTITION OF {root}_rest FOR VALUES FROM (200) TO (300)",
                f"INSERT INTO {root} SELECT generate_series(0, 299, 10)",
            )
        ),
        f"CREATE PUBLICATION pub FOR TABLE {', '.join(roots)}"
        f" WITH (publish_via_partition_root = {str(via_root).lower()})",
    )
    tables = [*roots] if via_root else [f"{root}_{part}" for root in roots for part in parts]
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    mirror.assert_equal(*tables)
    assert sorted(each.table.name for each in mirror.tables()) == sorted(tables)
    database.execute(
        "TRUNCATE alone",
        "BEGIN; DELETE FROM refilled WHERE id = 0; TRUNCATE refilled;"
        " INSERT INTO refilled SELECT generate_series(0, 299, 50); COMMIT",
        "UPDATE refilled SET id = id + 105, v = 'moved to another part' WHERE id < 100",
        "BEGIN; TRUNCATE rolled_back; ROLLBACK",
        "BEGIN; SAVEPOINT s; TRUNCATE rolled_back_mid; ROLLBACK TO s; DELETE FROM rolled_back WHERE id < 20; COMMIT",
        "TRUNCATE one_part_mid",
        "INSERT INTO one_part VALUES (111, 'after'), (11, 'after')",
    )
    mirror.run_once()
    if via_root:  # PostgreSQL does not publish the TRUNCATE of a part then, so its old rows stay, until all go
        mirror.assert_equal("alone", "refilled", "rolled_back")
        left = Counter((number, None) for number in range(100, 200, 10))
        assert mirror.rows("one_part") == Counter(database.rows("TABLE one_part")) + left
        database.execute("TRUNCATE one_part")
    else:
        mirror.assert_equal(*tables)
        database.execute("TRUNCATE one_part_rest, one_part_low")
    database.execute("TRUNCATE ONLY alone_low, rolled_back_high", *fill("one_part", first=99, count=2))
    if via_root:
        database.execute("TRUNCATE alone, rolled_back")
    mirror.run_once()
    mirror.assert_equal(*tables)
