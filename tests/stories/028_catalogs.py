"""Story 28: what the stream does not say about a table is found in the catalogs, while it runs."""

from __future__ import annotations

import json
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest

from conftest import Database
from mirror import Mirror
from processes import Here
from walmere.errors import TableLocked
from walmere.publisher.connect import connect, translate_errors
from walmere.subscription import state
from walmere.subscription.state import Phase
from walmere.subscription.tablesync import look


def columns(mirror: Mirror, table: str) -> list[str]:
    return [field.name for field in mirror.delta(table).schema().fields]


def copies(mirror: Mirror) -> dict[str, float]:
    return {each.table.name: each.copied_at for each in mirror.tables()}


@pytest.mark.long
def test_columns_are_altered_without_a_row_and_the_table_has_them_within_seconds(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    for table in ("added", "dropped", "renamed", "several"):
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, v text, w int)",
            f"INSERT INTO {table} SELECT i, 'row ' || i, i FROM generate_series(1, 10) i",
        )
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    mirror = Mirror(database, tmp_path)
    with mirror.following():
        mirror.becomes_equal("added", "dropped", "renamed", "several")
        mirror.becomes(lambda: all(each.phase is Phase.READY for each in mirror.tables()))
        before = copies(mirror)
        database.execute(
            "ALTER TABLE added ADD n int DEFAULT 7, ADD m text",
            "ALTER TABLE dropped DROP v",
            "ALTER TABLE renamed RENAME v TO text",
            "ALTER TABLE several ADD a int",
            "INSERT INTO several VALUES (11, 'x', 1, 2)",
            "ALTER TABLE several DROP w",
            "ALTER TABLE several RENAME a TO b",
        )
        mirror.becomes(lambda: columns(mirror, "added") == ["id", "v", "w", "n", "m"])
        mirror.becomes(lambda: columns(mirror, "dropped") == ["id", "w"])
        mirror.becomes(lambda: columns(mirror, "renamed") == ["id", "text", "w"])
        mirror.assert_equal("added", "dropped", "renamed")
        for table in ("added", "dropped", "renamed"):
            assert copies(mirror)[table] == before[table], "in place: nothing was copied"
        mirror.becomes(lambda: columns(mirror, "several") == ["id", "v", "b"])
        mirror.becomes_equal("several")
        database.execute(
            "UPDATE added SET n = n + 1, m = 'new' WHERE id > 5",
            "INSERT INTO dropped VALUES (11, 11)",
            "UPDATE renamed SET text = 'changed'",
        )
        mirror.becomes_equal("added", "dropped", "renamed", "several")
    database.execute("ALTER TABLE added DROP v", "ALTER TABLE renamed ADD last date DEFAULT '2026-11-16'")
    mirror.run_once()
    assert columns(mirror, "added") == ["id", "w", "n", "m"], "also with --once"
    mirror.assert_equal("added", "dropped", "renamed", "several")


@pytest.mark.long
def test_rows_that_were_written_while_a_table_was_unlogged_or_a_partition_detached_are_there(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE wide (id int PRIMARY KEY, v text)",
        "CREATE TABLE narrow (id int PRIMARY KEY, v int)",
        "CREATE TABLE vacuumed (id int PRIMARY KEY, v int)",
        "CREATE TABLE root (id int, r int, v text, PRIMARY KEY (id, r)) PARTITION BY LIST (r)",
        "CREATE TABLE leaf PARTITION OF root FOR VALUES IN (1)",
        "CREATE TABLE other PARTITION OF root FOR VALUES IN (2)",
        *(f"INSERT INTO {t} SELECT i, i FROM generate_series(1, 9) i" for t in ("wide", "narrow", "vacuumed")),
        "INSERT INTO root SELECT i, 1 + i % 2, 'row' FROM generate_series(1, 10) i",
        "CREATE PUBLICATION loose FOR TABLE root",
        "CREATE TABLE daily (id int, r int, PRIMARY KEY (id, r)) PARTITION BY LIST (r)",
        "CREATE TABLE daily_1 PARTITION OF daily FOR VALUES IN (1)",
        "INSERT INTO daily SELECT i, 1 FROM generate_series(1, 10) i",
        "CREATE PUBLICATION by_root FOR TABLE daily WITH (publish_via_partition_root)",
        "CREATE SCHEMA s",
        "ALTER TABLE wide SET SCHEMA s",
        "ALTER TABLE narrow SET SCHEMA s",
        "ALTER TABLE vacuumed SET SCHEMA s",
        "CREATE PUBLICATION whole FOR "
        + ("TABLES IN SCHEMA s" if database.major >= 15 else "TABLE s.wide, s.narrow, s.vacuumed"),
    )
    mirror = Mirror(database, tmp_path, "loose", "whole", "by_root")
    mirror.run_once()
    before = copies(mirror)
    changed = []
    if database.major >= 15:  # a table that is published by name cannot become unlogged
        changed = ["narrow", "wide"]
        for table in changed:
            database.execute(
                f"BEGIN; ALTER TABLE s.{table} SET UNLOGGED; INSERT INTO s.{table} VALUES (100, 1);"
                f" ALTER TABLE s.{table} SET LOGGED; COMMIT"
            )
    database.execute(
        "VACUUM FULL s.vacuumed",
        "CREATE TABLE daily_2 PARTITION OF daily FOR VALUES IN (2)",
        "INSERT INTO daily VALUES (100, 2)",
        "BEGIN; ALTER TABLE root DETACH PARTITION leaf; INSERT INTO leaf VALUES (100, 1, 'detached');"
        " ALTER TABLE root ATTACH PARTITION leaf FOR VALUES IN (1); COMMIT",
    )
    mirror.run_once()
    mirror.assert_equal("leaf", "other", "daily")
    for table in ("wide", "narrow", "vacuumed"):
        mirror.assert_equal(table, schema="s")
    after = copies(mirror)
    assert sorted(name for name in after if after[name] != before[name]) == sorted(["leaf", *changed])


def test_a_table_that_is_locked_for_long_does_not_keep_the_others_from_following(
    database18: Database, tmp_path: Path, here: Here
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE held (id int PRIMARY KEY)",
        "CREATE TABLE free (id int PRIMARY KEY)",
        "INSERT INTO held VALUES (1)",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database, tmp_path)
    with mirror.following(), psycopg.connect(database.dsn) as other:
        mirror.becomes_equal("held", "free")
        other.execute("LOCK TABLE held IN ACCESS EXCLUSIVE MODE")
        database.execute("ALTER TABLE free ADD v int DEFAULT 1", "INSERT INTO free VALUES (1, 2)")
        mirror.becomes_equal("free")
        database.execute("ALTER TABLE free ADD w int DEFAULT 1")
        mirror.becomes_equal("free")
        code, said, _ = here("status", "-c", mirror.file, "--json")
        locked = {each["name"]: each["locked"] for each in json.loads(said)["tables"]}
        assert (code, locked["public.free"]) == (0, None)
        assert f"process {other.info.backend_pid} " in locked["public.held"]
        source = mirror.config.source
        with closing(connect(source, "test")) as connection:
            connection.execute("SET lock_timeout = '50ms'")
            with pytest.raises(TableLocked) as refused, translate_errors(source, "looking at public.held"):
                look(connection, source, mirror.oid("held"), gather=False)
        assert refused.value.transient
        assert "pg_locks" in refused.value.hint
        other.rollback()
        database.execute("INSERT INTO held VALUES (2)")
        mirror.becomes_equal("held", "free")


@pytest.mark.long
def test_a_copy_that_does_not_help_waits_until_the_table_is_altered_or_somebody_asks(
    database18: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Here
) -> None:
    monkeypatch.setattr(state, "SETBACK_WAITS", (0.0, 3600.0))
    database = database18
    database.execute(
        # with TOAST: the look at the catalogs does not take a TRUNCATE for a rewrite then
        "CREATE TABLE root (id int, r int, text text, PRIMARY KEY (id, r)) PARTITION BY LIST (r)",
        *(f"CREATE TABLE root_{n} PARTITION OF root FOR VALUES IN ({n})" for n in (1, 2)),
        "CREATE PUBLICATION pub FOR TABLE root",
    )
    mirror = Mirror(database, tmp_path)
    mirror.set("target", gather_partitions=True)

    def refuse() -> None:
        """A TRUNCATE of one of the gathered partitions cannot be applied; a copy has its effect."""
        database.execute("INSERT INTO root SELECT i, 1 + i % 2 FROM generate_series(1, 9) i ON CONFLICT DO NOTHING")
        mirror.becomes_equal("root")
        database.execute("TRUNCATE root_1")

    def waits() -> bool:
        known = next(iter(mirror.tables()))
        return known.setbacks == 2 and known.retry_at > time.time()

    with mirror.following():
        mirror.becomes_equal("root")
        refuse()
        mirror.becomes_equal("root")  # copied again at once
        refuse()
        mirror.becomes(waits)
        [shown] = json.loads(here("status", "-c", mirror.file, "--json")[1])["tables"]
        assert shown["next_copy"] > datetime.now(UTC).isoformat()
        assert "empties some of the partitions" in shown["error"]
        assert "walmere resync public.root" in here("status", "-c", mirror.file)[1]
        database.execute("ALTER TABLE root ADD v int")
        mirror.becomes_equal("root")
        refuse()
        mirror.becomes_equal("root")
        refuse()
        mirror.becomes(waits)
        code, _, said = here("resync", "-c", mirror.file, "root")
        assert code == 0, said
        mirror.becomes_equal("root")
