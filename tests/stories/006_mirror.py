"""Story 6: tables are copied in parallel, handed over to the stream, and stay equal to their source; on Spark."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg

from conftest import Database
from delta_rows import read_delta
from mirror import Mirror
from walmere.ledger.file import Ledger
from walmere.subscription.state import Phase


def test_existing_rows_are_copied_and_changes_follow(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE TABLE customers (id bigint PRIMARY KEY, name text, feels mood, amount numeric(12, 2), at timestamptz)",
        "CREATE TABLE orders (id int, region text, v text, PRIMARY KEY (id, region)) PARTITION BY LIST (region)",
        "CREATE TABLE orders_eu PARTITION OF orders FOR VALUES IN ('eu')",
        "CREATE TABLE orders_us PARTITION OF orders FOR VALUES IN ('us')",
        "CREATE TABLE nothing (id int PRIMARY KEY)",
        "CREATE TABLE equal (a int, b text)",
        "ALTER TABLE equal REPLICA IDENTITY FULL",
        "INSERT INTO customers SELECT i, 'n' || i, 'ok', i * 1.5, now() FROM generate_series(1, 20000) i",
        "INSERT INTO orders SELECT i, CASE i % 2 WHEN 0 THEN 'eu' ELSE 'us' END, 'v' FROM generate_series(1, 5000) i",
        "INSERT INTO equal SELECT i % 10, NULL FROM generate_series(1, 100) i",
        "CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    everything = ("customers", "orders", "nothing", "equal")
    mirror.assert_equal(*everything)
    assert {table.name: table.rows_copied for table in mirror.tables()} == {
        "public.customers": 20000,
        "public.equal": 100,
        "public.nothing": 0,
        "public.orders": 5000,
    }
    database.execute(
        "UPDATE customers SET amount = amount + 1 WHERE id <= 1000",
        "UPDATE customers SET id = -id WHERE id BETWEEN 2000 AND 2100",
        "DELETE FROM customers WHERE id BETWEEN 3000 AND 4000",
        "BEGIN; INSERT INTO customers VALUES (0); DELETE FROM customers WHERE id = 0; COMMIT",
        "INSERT INTO customers SELECT i, 'new', NULL, 0, NULL FROM generate_series(50000, 50100) i",
        "UPDATE orders SET region = 'us' WHERE id <= 100 AND region = 'eu'",
        "DELETE FROM equal WHERE ctid IN (SELECT ctid FROM equal WHERE a = 1 LIMIT 3)",
        "UPDATE equal SET b = 'x' WHERE a = 2",
        "INSERT INTO nothing VALUES (1)",
        "TRUNCATE nothing",
        "INSERT INTO nothing VALUES (2), (3)",
    )
    mirror.run_once()
    mirror.assert_equal(*everything)
    versions = {table: mirror.delta(table).version() for table in everything}
    mirror.run_once()
    assert {table: mirror.delta(table).version() for table in everything} == versions, "there was nothing to do"
    # a source that writes no WAL between two runs gives no batch to become ready with
    assert {table.phase for table in mirror.tables()} <= {Phase.SYNC_DONE, Phase.READY}
    last = Ledger(mirror.config.subscription.directory).last()
    assert last is not None
    assert last.versions == {f"public.{table}": version for table, version in versions.items()}


def test_the_hand_over_loses_and_doubles_nothing_while_writers_go_on(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE counters (id int PRIMARY KEY, n int)",
        "CREATE TABLE events (id bigserial PRIMARY KEY, counter int)",
        "INSERT INTO counters SELECT i, 0 FROM generate_series(1, 50) i",
        "INSERT INTO events (counter) SELECT i % 50 FROM generate_series(1, 20000) i",
        "CREATE PUBLICATION pub FOR TABLE counters, events",
    )
    stopping = threading.Event()

    def write() -> None:
        with psycopg.connect(database.dsn) as connection:
            number = 0
            while not stopping.wait(0.002):
                number += 1
                counter = number % 50 + 1
                connection.execute("UPDATE counters SET n = n + 1 WHERE id = %s", [counter])
                connection.execute("INSERT INTO events (counter) VALUES (%s)", [counter])
                if number % 20 == 0:
                    connection.execute("DELETE FROM events WHERE id = (SELECT min(id) FROM events)")
                connection.commit()

    writer = threading.Thread(target=write)
    writer.start()
    mirror = Mirror(database, tmp_path)
    try:
        mirror.run_once()
    finally:
        stopping.set()
        writer.join()
    mirror.run_once()
    mirror.assert_equal("counters", "events")


def test_unchanged_toast_values_and_rejects(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, big text, n int, at date)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i, repeat(i::text, 20000), 0, '2026-01-01' FROM generate_series(1, 5) i",
        "UPDATE t SET at = 'infinity' WHERE id = 5",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute(
        "UPDATE t SET n = n + 1",
        "UPDATE t SET id = id + 10 WHERE id <= 2",
        "UPDATE t SET n = n + 1 WHERE id > 10",
        "UPDATE t SET at = '0044-03-15 BC' WHERE id = 3",
    )
    mirror.run_once()
    mirror.assert_equal("t", columns="id, big, n, CASE WHEN isfinite(at) AND at > '0001-01-01' THEN at END")
    rejects = read_delta(mirror.delta("t", "_rejects.public")).sort_by("lsn").to_pylist()
    shown = [(row["key"], row["column"], row["value"]) for row in rejects]
    assert shown[0] == ('{"id": "5"}', "at", "infinity")
    assert ('{"id": "3"}', "at", "0044-03-15 BC") in shown
