"""Story 12: large values that an UPDATE leaves alone are not sent, and are in the target all the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from conftest import Database
from mirror import Mirror

COLUMNS = "id, t, b, j::text, n"  # the target has jsonb as PostgreSQL's text


def create(database: Database) -> None:
    """A table of large values, and how to make them: not to be compressed away, and each different."""
    database.execute(
        "CREATE FUNCTION large(seed int, kilobytes int) RETURNS text LANGUAGE sql AS"
        " $$ SELECT string_agg(md5(seed || '/' || i), '') FROM generate_series(1, kilobytes * 32) i $$",
        "CREATE TABLE docs (id int PRIMARY KEY, t text, b bytea, j jsonb, n int)",
        "INSERT INTO docs SELECT i, large(i, 8), large(-i, 6)::bytea, jsonb_build_object('k', large(i, 4)), 0"
        " FROM generate_series(1, 40) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )


def out_of_line(database: Database, table: str) -> int:
    """How many values are in the TOAST table: to see that the story is about what it says."""
    toast = database.value("SELECT reltoastrelid::regclass::text FROM pg_class WHERE oid = %s::regclass", table)
    return int(database.value(f"SELECT count(DISTINCT chunk_id) FROM {toast}"))


@pytest.mark.long
def test_values_are_left_alone_over_many_updates_and_many_runs(database18: Database, tmp_path: Path) -> None:
    database = database18
    create(database)
    database.execute(
        "UPDATE docs SET t = large(100, 1500), b = large(101, 1200)::bytea, j = to_jsonb(large(102, 1100)) WHERE id = 1"
    )
    assert out_of_line(database, "docs")
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    mirror.assert_equal("docs", columns=COLUMNS)
    # one batch: rows updated many times, each of the values alone, to and from NULL, to and from what fits in line
    database.execute(
        "DO $$ BEGIN FOR i IN 1..100 LOOP UPDATE docs SET n = n + 1 WHERE id <= 5; END LOOP; END $$",
        "UPDATE docs SET t = 'short', n = -1 WHERE id = 6",
        "UPDATE docs SET n = n + 1 WHERE id = 6",
        "UPDATE docs SET b = NULL WHERE id = 7",
        "UPDATE docs SET n = n + 1 WHERE id = 7",
        "UPDATE docs SET t = large(200, 9) WHERE id = 8",
        "UPDATE docs SET j = jsonb_build_object('new', large(201, 3)) WHERE id = 8",
        "UPDATE docs SET n = n + 1 WHERE id = 8",
        "UPDATE docs SET t = large(202, 9) WHERE id = 8",
        "UPDATE docs SET n = n + 1 WHERE id = 8",
        "INSERT INTO docs VALUES (50, 'short', NULL, 'null', 0)",
        "UPDATE docs SET t = large(203, 9), b = large(204, 2000)::bytea WHERE id = 50",
        "UPDATE docs SET n = n + 1 WHERE id = 50",
        # new keys, once, twice and back again, with other updates before, between and after
        "UPDATE docs SET n = n + 1 WHERE id BETWEEN 10 AND 12",
        "UPDATE docs SET id = id + 100 WHERE id BETWEEN 10 AND 14",
        "UPDATE docs SET n = n + 1 WHERE id BETWEEN 111 AND 113",
        "UPDATE docs SET id = id + 100, n = 7 WHERE id BETWEEN 112 AND 113",
        "UPDATE docs SET b = large(205, 5)::bytea WHERE id = 213",
        "UPDATE docs SET id = 14 WHERE id = 114",
        "UPDATE docs SET n = n + 1",
    )
    mirror.run_once()
    mirror.assert_equal("docs", columns=COLUMNS)
    database.execute(  # now what is carried over is what the run before has carried over
        "UPDATE docs SET n = n + 1",
        "UPDATE docs SET id = id + 1000 WHERE id IN (1, 50, 213)",
        "UPDATE docs SET j = to_jsonb(n) WHERE id = 20",
        "DELETE FROM docs WHERE id = 30",
    )
    mirror.run_once()
    mirror.assert_equal("docs", columns=COLUMNS)
    assert mirror.rows("docs").total() == 40


@pytest.mark.long
def test_rows_exchange_their_keys_and_keep_their_own_values(database18: Database, tmp_path: Path) -> None:
    database = database18
    create(database)
    mirror = Mirror(database, tmp_path)
    mirror.run_once()

    def rotate(*ids: int, between: str = "") -> str:
        """The first takes the place of the second, and so on, in one transaction."""
        steps = [f"UPDATE docs SET id = -1 WHERE id = {ids[-1]}"]
        for one, other in reversed(list(pairwise(ids))):
            steps += [f"UPDATE docs SET id = {other} WHERE id = {one}", between]
        steps += [f"UPDATE docs SET id = {ids[0]} WHERE id = -1"]
        return "BEGIN; " + "; ".join(filter(None, steps)) + "; COMMIT"

    database.execute(
        rotate(1, 2),
        rotate(3, 4, 5),
        rotate(6, 7, between="UPDATE docs SET n = n + 1 WHERE id = 7"),
        rotate(8, 9, between="UPDATE docs SET t = large(300, 7) WHERE id = 9"),
        rotate(10, 11),
        rotate(10, 11),  # and back
        rotate(12, 13, 14, 15, 16),
        rotate(13, 16, 12),
        # among rows that the target does not have yet, and among one that it has and one that it has not
        "INSERT INTO docs SELECT i, large(i, 5), large(-i, 5)::bytea, NULL, i FROM generate_series(60, 62) i",
        rotate(60, 61),
        rotate(20, 62),
        # one of the two is not large
        "UPDATE docs SET t = 'small', b = NULL, j = NULL WHERE id = 21",
        rotate(21, 22),
        # one leaves, and another moves in
        "BEGIN; DELETE FROM docs WHERE id = 23; UPDATE docs SET id = 23 WHERE id = 24; COMMIT",
        "BEGIN; UPDATE docs SET id = 70 WHERE id = 25; INSERT INTO docs VALUES (25, 'moved in', '', '1', 1); COMMIT",
        "UPDATE docs SET n = n + 1 WHERE id IN (23, 25, 70)",
    )
    mirror.run_once()
    mirror.assert_equal("docs", columns=COLUMNS)
    database.execute(rotate(1, 2), rotate(60, 20, 3), rotate(22, 21, between="UPDATE docs SET n = -n"))
    mirror.run_once()
    mirror.assert_equal("docs", columns=COLUMNS)


@pytest.mark.long
def test_a_row_deleted_and_inserted_again_has_only_its_new_values(database18: Database, tmp_path: Path) -> None:
    database = database18
    create(database)
    database.execute(
        "CREATE TABLE emptied (id int PRIMARY KEY, t text, n int)",
        "INSERT INTO emptied SELECT i, large(i, 8), 0 FROM generate_series(1, 5) i",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    again = "INSERT INTO docs VALUES ({0}, large({0} + 400, 8), large({0} + 401, 8)::bytea, '{{}}', -{0})"
    database.execute(
        f"BEGIN; DELETE FROM docs WHERE id = 1; {again.format(1)}; COMMIT",
        "DELETE FROM docs WHERE id = 2",
        again.format(2),
        "UPDATE docs SET n = n + 1 WHERE id = 2",
        "UPDATE docs SET n = n + 1 WHERE id = 3",
        "DELETE FROM docs WHERE id = 3",
        again.format(3),
        "UPDATE docs SET n = n + 1 WHERE id = 3",
        "UPDATE docs SET id = 103 WHERE id = 3",
        # twice, and gone at last
        "DELETE FROM docs WHERE id = 4",
        again.format(4),
        "UPDATE docs SET n = n + 1 WHERE id = 4",
        "DELETE FROM docs WHERE id = 4",
        # without any large value, and rolled back
        "DELETE FROM docs WHERE id = 5",
        "INSERT INTO docs (id) VALUES (5)",
        "UPDATE docs SET n = 0 WHERE id = 5",
        f"BEGIN; SAVEPOINT s; DELETE FROM docs WHERE id = 6; {again.format(6)}; ROLLBACK TO s;"
        " UPDATE docs SET n = 6 WHERE id = 6; COMMIT",
        # comes and goes within the batch
        again.format(200),
        "UPDATE docs SET n = n + 1 WHERE id = 200",
        "DELETE FROM docs WHERE id = 200",
        # all at once
        "UPDATE emptied SET n = 1",
        "TRUNCATE emptied",
        "INSERT INTO emptied SELECT i, large(-i, 9), 0 FROM generate_series(1, 3) i",
        "UPDATE emptied SET n = n + 1",
        "UPDATE emptied SET id = 10 WHERE id = 1",
    )
    mirror.run_once()
    mirror.assert_equal("docs", columns=COLUMNS)
    mirror.assert_equal("emptied")
    database.execute("UPDATE docs SET n = coalesce(n, 0) + 1", "UPDATE emptied SET n = n + 1")
    mirror.run_once()
    mirror.assert_equal("docs", columns=COLUMNS)
    mirror.assert_equal("emptied")


@pytest.mark.long
def test_large_values_under_every_replica_identity(database18: Database, tmp_path: Path) -> None:
    database = database18
    create(database)
    tables = ("by_row", "by_row_and_key", "by_index", "by_large_key")
    database.execute(
        # the old row is sent, and has the values that the new one leaves out
        "CREATE TABLE by_row (id int, t text, n int)",
        "ALTER TABLE by_row REPLICA IDENTITY FULL",
        "CREATE TABLE by_row_and_key (id int PRIMARY KEY, t text, n int)",
        "ALTER TABLE by_row_and_key REPLICA IDENTITY FULL",
        "CREATE TABLE by_index (id int, t text, n int, email text NOT NULL UNIQUE)",
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_email_key",
        # a key may itself be out of line, up to a third of a page
        "CREATE TABLE by_large_key (id int, t text, n int, k text PRIMARY KEY)",
        "ALTER TABLE by_large_key ALTER k SET STORAGE EXTERNAL",
        *(
            f"INSERT INTO {table} SELECT i, large(i, 8), 0{more} FROM generate_series(1, 20) i"
            for table, more in zip(tables, ("", "", ", i || '@example.org'", ", large(i, 2) || i"), strict=True)
        ),
        "INSERT INTO by_row SELECT 1, large(1, 8), 0 FROM generate_series(1, 3)",  # rows that are equal
    )
    assert all(out_of_line(database, table) for table in tables)
    assert out_of_line(database, "by_large_key") == 2 * 20, "its keys, too"
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    for table in tables:
        database.execute(
            f"DO $$ BEGIN FOR i IN 1..10 LOOP UPDATE {table} SET n = n + 1 WHERE id <= 5; END LOOP; END $$",
            f"UPDATE {table} SET t = large(500, 9) WHERE id = 6",
            f"UPDATE {table} SET n = n + 1 WHERE id BETWEEN 6 AND 8",
            f"UPDATE {table} SET id = -id WHERE id BETWEEN 8 AND 10",
            f"UPDATE {table} SET n = n + 1 WHERE id < 0",
            f"UPDATE {table} SET t = NULL WHERE id = 12",
            f"DELETE FROM {table} WHERE id BETWEEN 14 AND 16",
        )
    database.execute(
        "UPDATE by_row SET n = 99 WHERE ctid = (SELECT ctid FROM by_row WHERE id = 1 LIMIT 1)",
        "UPDATE by_index SET email = 'new' || email WHERE id IN (3, 17)",
        "UPDATE by_index SET n = n + 1 WHERE id IN (3, 17)",
        "UPDATE by_large_key SET k = large(600, 2) || id WHERE id IN (3, 17)",
        "UPDATE by_large_key SET n = n + 1 WHERE id IN (3, 17)",
        "BEGIN; UPDATE by_large_key SET k = '' WHERE id = 18;"
        " UPDATE by_large_key SET k = large(18, 2) || 18 WHERE id = 19;"
        " UPDATE by_large_key SET k = large(19, 2) || 19 WHERE id = 18; COMMIT",
    )
    mirror.run_once()
    mirror.assert_equal(*tables)
    for table in tables:
        database.execute(f"UPDATE {table} SET n = n + 1", f"DELETE FROM {table} WHERE id = 20")
    mirror.run_once()
    mirror.assert_equal(*tables)
