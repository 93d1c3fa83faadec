"""Story 10: transactions of every kind come to the target whole, or not at all: large, nested, streamed, prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from conftest import Database
from mirror import Mirror
from processes import eventually
from receiving import files, named_files, summary
from walmere.testing.server import Server

BIG = 2000  # rows of about 100 bytes: more than the 64 kB after which the server streams here

Connection = psycopg.Connection[tuple[Any, ...]]


def insert(connection: Connection, first: int, count: int = BIG, table: str = "t") -> None:
    connection.execute(
        f"INSERT INTO {table} SELECT i, repeat(md5(i::text), 3) FROM generate_series({first}, {first + count - 1}) i"
    )


def create_streamed(database: Database) -> None:
    """Two tables whose larger transactions are streamed."""
    database.execute(
        f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'",
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE u (id int PRIMARY KEY, v text)",
        "CREATE PUBLICATION pub FOR TABLE t, u",
    )
    insert(database.connection, -1000, 1000)


def streamed(database: Database) -> int:
    """How many transactions the server has streamed while they were in progress."""
    query = "SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = %s"
    return int(database.value(query, database.slot))


@pytest.mark.long
def test_large_nested_and_empty_transactions_come_whole_or_not_at_all(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE accounts (id int PRIMARY KEY, balance numeric(12, 2), note text)",
        "CREATE TABLE entries (id int PRIMARY KEY, account int, amount numeric(12, 2))",
        "CREATE TABLE unpublished (id int)",
        "INSERT INTO accounts SELECT i, 100, repeat('n', i % 50) FROM generate_series(1, 20000) i",
        "CREATE PUBLICATION pub FOR TABLE accounts, entries",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    # large, over several tables, with rows that are written more than once
    database.execute(
        """
        BEGIN;
        INSERT INTO entries SELECT i, i % 20000 + 1, 1 FROM generate_series(1, 60000) i;
        UPDATE accounts SET balance = balance - 1;
        UPDATE accounts SET balance = balance + 3, note = NULL WHERE id % 3 = 0;
        DELETE FROM entries WHERE id % 5 = 0;
        UPDATE entries SET id = -id WHERE id % 7 = 0;
        COMMIT
        """,
        # savepoints within savepoints: kept, rolled back, released and then rolled back from outside
        """
        BEGIN;
        INSERT INTO entries VALUES (100001, 1, 1);
        SAVEPOINT a;
        INSERT INTO entries VALUES (100002, 1, 1);
        UPDATE accounts SET balance = 0;
        SAVEPOINT b;
        DELETE FROM accounts WHERE id <= 10;
        RELEASE SAVEPOINT b;
        ROLLBACK TO SAVEPOINT a;
        INSERT INTO entries VALUES (100002, 2, 2);
        SAVEPOINT c;
        UPDATE accounts SET note = 'kept' WHERE id = 1;
        SAVEPOINT d;
        UPDATE accounts SET note = 'lost' WHERE id = 1;
        ROLLBACK TO SAVEPOINT d;
        RELEASE SAVEPOINT c;
        COMMIT
        """,
        # more subtransactions than a backend's own cache has room for, every third rolled back
        """
        DO $$ BEGIN
            FOR i IN 1..300 LOOP
                BEGIN
                    INSERT INTO entries VALUES (200000 + i, i, i);
                    UPDATE accounts SET balance = balance + i WHERE id = i;
                    PERFORM 1 / (i % 3);
                EXCEPTION WHEN division_by_zero THEN
                    INSERT INTO entries VALUES (300000 + i, i, -i);
                END;
            END LOOP;
        END $$
        """,
        "BEGIN; DELETE FROM accounts; INSERT INTO entries VALUES (400001, 1, 1); ROLLBACK",
    )
    with pytest.raises(psycopg.errors.UniqueViolation):
        database.execute("INSERT INTO entries SELECT 500000 + i % 100, 1, 1 FROM generate_series(0, 100) i")
    mirror.run_once()
    mirror.assert_equal("accounts", "entries")
    versions = [mirror.delta(table).version() for table in ("accounts", "entries")]
    database.execute(
        "BEGIN; COMMIT",
        "BEGIN; SELECT pg_current_xact_id(); COMMIT",
        "BEGIN; SAVEPOINT a; DELETE FROM accounts; ROLLBACK TO SAVEPOINT a; COMMIT",
        "BEGIN; SELECT * FROM accounts WHERE id < 10 FOR UPDATE; COMMIT",
        "INSERT INTO unpublished VALUES (1)",
        "UPDATE accounts SET balance = 0 WHERE false",
        "BEGIN; CREATE TABLE short_lived (id int); INSERT INTO short_lived VALUES (1); DROP TABLE short_lived; COMMIT",
    )
    mirror.run_once()
    mirror.assert_equal("accounts", "entries")
    assert [mirror.delta(table).version() for table in ("accounts", "entries")] == versions, "nothing was to be done"


MERGE = """
    MERGE INTO stock USING (VALUES ('item1', 5), ('item2', -2), ('item3', 0), ('new', 7)) AS v (item, change)
    ON stock.item = v.item
    WHEN MATCHED AND change < 0 THEN DELETE
    WHEN MATCHED AND change > 0 THEN UPDATE SET amount = amount + change
    WHEN MATCHED THEN DO NOTHING
    WHEN NOT MATCHED THEN INSERT VALUES (v.item, change)
"""


def test_every_statement_that_writes_is_mirrored(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE copied (id int PRIMARY KEY, a text, b text)",
        "CREATE TABLE stock (item text PRIMARY KEY, amount int)",
        "CREATE TABLE places (id int PRIMARY KEY, place int UNIQUE DEFERRABLE INITIALLY DEFERRED)",
        "CREATE TABLE swapped (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, v text)",
        "ALTER TABLE swapped REPLICA IDENTITY FULL",
        "CREATE TABLE parents (id int PRIMARY KEY)",
        "CREATE TABLE children (id int PRIMARY KEY, "
        " parent int REFERENCES parents ON DELETE CASCADE ON UPDATE CASCADE DEFERRABLE INITIALLY DEFERRED,"
        " other int REFERENCES parents ON DELETE SET NULL)",
        "CREATE TABLE audit (id serial PRIMARY KEY, said text)",
        "CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO audit (said) VALUES (TG_OP || OLD.item); RETURN NULL; END $$",
        "CREATE TRIGGER audit AFTER UPDATE OR DELETE ON stock FOR EACH ROW EXECUTE FUNCTION audit()",
        "INSERT INTO stock SELECT 'item' || i, i FROM generate_series(1, 20) i",
        "INSERT INTO places SELECT i, i FROM generate_series(1, 10) i",
        "INSERT INTO swapped SELECT i, 'v' || i FROM generate_series(1, 10) i",
        "INSERT INTO parents SELECT generate_series(1, 10)",
        "INSERT INTO children SELECT i, i, i % 3 + 1 FROM generate_series(1, 10) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    with database.connection.cursor().copy("COPY copied FROM STDIN") as copy:  # heap_multi_insert: many in one record
        for number in range(3000):
            copy.write_row((number, "tab\tand\nline\\" + str(number), None if number % 2 else ""))
    database.execute(
        *([MERGE] if database.major >= 15 else []),
        "INSERT INTO stock VALUES ('item4', 100), ('upserted', 1) ON CONFLICT (item) DO UPDATE"
        " SET amount = stock.amount + excluded.amount",
        "INSERT INTO stock VALUES ('item4', 0), ('item5', 0), ('inserted', 2) ON CONFLICT DO NOTHING",
        "INSERT INTO stock VALUES ('upserted', 10) ON CONFLICT (item) DO UPDATE SET item = 'moved'",
        "WITH gone AS (DELETE FROM stock WHERE item IN ('item6', 'item7') RETURNING *)"
        " INSERT INTO stock SELECT 'was ' || item, amount FROM gone",
        "BEGIN; UPDATE places SET place = 11 - place; UPDATE places SET place = place % 10 + 1; COMMIT",
        "BEGIN; UPDATE swapped SET id = 3 - id WHERE id IN (1, 2); UPDATE swapped SET id = id % 10 + 1; COMMIT",
        "BEGIN; INSERT INTO children VALUES (11, 11, NULL); INSERT INTO parents VALUES (11); COMMIT",
        "DELETE FROM parents WHERE id IN (1, 4)",
        "UPDATE parents SET id = id + 100 WHERE id > 4",
    )
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        database.execute("BEGIN; INSERT INTO children VALUES (12, 12, NULL); DELETE FROM children WHERE id < 5; COMMIT")
    mirror.run_once()
    mirror.assert_equal("copied", "stock", "places", "swapped", "parents", "children", "audit")


def test_transactions_streamed_in_progress_are_mirrored_when_they_commit(database18: Database, tmp_path: Path) -> None:
    database = database18
    create_streamed(database)
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    with (
        psycopg.connect(database.dsn) as first,
        psycopg.connect(database.dsn) as second,
        psycopg.connect(database.dsn) as aborted,
    ):
        insert(first, 0)
        insert(aborted, 10_000)
        insert(second, 20_000, table="u")
        first.execute("SAVEPOINT a")
        first.execute("UPDATE t SET v = 'rolled back' WHERE id < 500")
        insert(first, 30_000)
        first.execute("SAVEPOINT b")
        insert(first, 30_000, table="u")
        first.execute("RELEASE SAVEPOINT b")
        insert(aborted, 10_000, table="u")
        first.execute("ROLLBACK TO SAVEPOINT a")
        aborted.execute("SAVEPOINT a")
        aborted.execute("DELETE FROM t WHERE id BETWEEN -500 AND -1")
        aborted.execute("ROLLBACK TO SAVEPOINT a")
        second.execute("UPDATE t SET id = id - 5000 WHERE id BETWEEN -1000 AND -900")
        insert(database.connection, 40_000, 3)
        mirror.run_once()  # which ends in the middle of all three
        mirror.assert_equal("t", "u")
        assert streamed(database) >= 3
        insert(first, 30_000, 10)  # the ids of a rolled back subtransaction
        first.execute("UPDATE t SET v = 'changed' WHERE id BETWEEN -800 AND 800")
        first.execute("SAVEPOINT c")
        first.execute("DELETE FROM t WHERE id BETWEEN 100 AND 1900")
        aborted.rollback()
        second.execute("DELETE FROM u WHERE id % 2 = 0")
        second.execute("SAVEPOINT d")
        second.execute("UPDATE u SET v = repeat(v, 2)")
        second.execute("ROLLBACK TO SAVEPOINT d")
        second.commit()
        insert(database.connection, 10_000, 5)
        insert(first, 50_000, table="u")
        first.commit()
        database.execute("UPDATE t SET v = 'after' WHERE id IN (1, -700, 30001)", "DELETE FROM u WHERE id < 21000")
    mirror.run_once()
    mirror.assert_equal("t", "u")
    assert files(mirror.config) == named_files(mirror.config), "nothing is left of what was rolled back"


def test_a_running_subscription_is_streamed_to_in_parallel_mode_where_the_server_has_it(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    create_streamed(database)
    mirror = Mirror(database, tmp_path)
    with mirror.following():
        mirror.becomes_equal("t", "u")
        query = "SELECT query FROM pg_stat_activity JOIN pg_replication_slots ON pid = active_pid WHERE slot_name = %s"
        eventually(lambda: "START_REPLICATION" in str(database.rows(query, database.slot)))
        asked = database.value(query, database.slot)
        protocol, streaming = {14: ("2", "on"), 15: ("3", "on")}.get(database.major, ("4", "parallel"))
        assert f"\"proto_version\" '{protocol}'" in asked
        assert f"\"streaming\" '{streaming}'" in asked
        with psycopg.connect(database.dsn) as first, psycopg.connect(database.dsn) as second:
            insert(first, 0)
            insert(second, 10_000, table="u")
            eventually(lambda: streamed(database) >= 2)
            insert(database.connection, 40_000, 3)
            mirror.becomes_equal("t", "u")  # as others see the source, too
            first.execute("SAVEPOINT a")
            insert(first, 20_000)
            first.execute("ROLLBACK TO SAVEPOINT a")
            second.rollback()
            first.commit()
        mirror.becomes_equal("t", "u")
    assert mirror.rows("t").total() == 1000 + BIG + 3


def prepare(database: Database, gid: str, *statements: str) -> None:
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        for statement in statements:
            connection.execute(statement)
        connection.execute(f"PREPARE TRANSACTION '{gid}'")


def prepare_several(database: Database) -> None:
    """Of each size one to be committed, and one to be rolled back; both in both tables."""
    for number, fate in enumerate(("commit", "rollback")):
        at = number * 100_000
        prepare(
            database,
            f"small {fate} {database.name}",
            f"INSERT INTO t VALUES ({at}, 'small')",
            f"UPDATE t SET v = '{fate}' WHERE id = {-1 - number}",
            "SAVEPOINT s",
            "DELETE FROM u",
            "ROLLBACK TO SAVEPOINT s",
            f"INSERT INTO u VALUES ({at}, 'small')",
        )
        large = "SELECT {} + i, repeat(md5(i::text), 3) FROM generate_series(1, {}) i"
        prepare(
            database,
            f"large {fate} {database.name}",
            "INSERT INTO t " + large.format(at, BIG),
            "SAVEPOINT s",
            "INSERT INTO u " + large.format(at, BIG),
            "ROLLBACK TO SAVEPOINT s",
            "INSERT INTO u " + large.format(at + 50_000, 10),
            f"DELETE FROM t WHERE id BETWEEN {-200 * number - 200} AND {-200 * number - 100}",
        )


def prepared(mirror: Mirror) -> set[str]:
    """What the log knows to be prepared, in short."""
    return {gid.rpartition(" ")[0] for gid in summary(mirror.config).prepared}


EVERY = {"small commit", "large commit", "small rollback", "large rollback"}


@pytest.mark.since(15, "two-phase commits in pgoutput")
def test_prepared_transactions_count_from_commit_prepared_whichever_run_sees_it(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    create_streamed(database)
    mirror = Mirror(database, tmp_path, two_phase=True)
    mirror.run_once()
    prepare_several(database)
    database.execute("UPDATE t SET v = 'meanwhile' WHERE id BETWEEN -20 AND -10")
    mirror.run_once()
    assert prepared(mirror) == EVERY
    assert streamed(database) >= 2
    mirror.assert_equal("t", "u")
    database.execute(
        f"COMMIT PREPARED 'large commit {database.name}'",
        "UPDATE t SET v = 'after it' WHERE id IN (1, 2)",
        f"ROLLBACK PREPARED 'small rollback {database.name}'",
        "UPDATE t SET v = 'not locked any more' WHERE id = -2",
    )
    mirror.run_once()
    assert prepared(mirror) == {"small commit", "large rollback"}
    mirror.assert_equal("t", "u")
    # a transaction that is prepared, and committed or not, between two runs
    prepare(database, f"short {database.name}", "DELETE FROM t WHERE id = -30")
    prepare(database, f"shorter {database.name}", "DELETE FROM t WHERE id = -31")
    database.execute(
        f"COMMIT PREPARED 'short {database.name}'",
        f"ROLLBACK PREPARED 'shorter {database.name}'",
        f"COMMIT PREPARED 'small commit {database.name}'",
        f"ROLLBACK PREPARED 'large rollback {database.name}'",
    )
    mirror.run_once()
    assert prepared(mirror) == set()
    mirror.assert_equal("t", "u")


@pytest.mark.long
@pytest.mark.since(15, "two-phase commits in pgoutput")
def test_prepared_transactions_outlive_a_restart_of_the_server(private_server: Server, tmp_path: Path) -> None:
    database = Database(private_server)
    create_streamed(database)
    mirror = Mirror(database, tmp_path, two_phase=True)
    mirror.run_once()
    prepare_several(database)
    mirror.run_once()
    assert prepared(mirror) == EVERY
    database.connection.close()
    private_server.restart()
    database.connection = psycopg.connect(database.dsn, autocommit=True)
    database.execute(
        f"COMMIT PREPARED 'small commit {database.name}'",
        f"ROLLBACK PREPARED 'small rollback {database.name}'",
        f"COMMIT PREPARED 'large commit {database.name}'",
        f"ROLLBACK PREPARED 'large rollback {database.name}'",
        "UPDATE t SET v = 'after it' WHERE id IN (0, 1, -2)",
    )
    mirror.run_once()
    assert prepared(mirror) == set()
    mirror.assert_equal("t", "u")
    database.connection.close()
