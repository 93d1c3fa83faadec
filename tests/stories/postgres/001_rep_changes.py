"""Story 1: inserts, updates and deletes of tables with every kind of replica identity."""

from __future__ import annotations

import threading

import psycopg
import pytest

from side_by_side import SideBySide


def test_changes_of_all_replica_identities_arrive(both: SideBySide) -> None:
    both.everywhere(
        "CREATE TABLE keyed (a int PRIMARY KEY)",
        "CREATE TABLE full_identity (a int, b text)",
        "ALTER TABLE full_identity REPLICA IDENTITY FULL",
        "CREATE TABLE full_and_key (a int PRIMARY KEY, b text)",
        "ALTER TABLE full_and_key REPLICA IDENTITY FULL",
        "CREATE TABLE covering (a int, b text, PRIMARY KEY (a) INCLUDE (b))",
        "CREATE TABLE by_index (a int NOT NULL, b int NOT NULL, c text)",
        "CREATE UNIQUE INDEX by_index_b ON by_index (b)",
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_b",
        "CREATE TABLE no_identity (a int)",
        "ALTER TABLE no_identity REPLICA IDENTITY NOTHING",
        "CREATE TABLE no_key (a int)",
        "CREATE INDEX ON no_key (a)",
        "CREATE TABLE only_inserts (a int)",
        "CREATE TABLE not_published (a int)",
    )
    both.source(
        "CREATE TABLE mixed (a int PRIMARY KEY, b text, c numeric)",
        "INSERT INTO mixed VALUES (1, 'copied', 1.10)",
        "INSERT INTO full_identity VALUES (1, 'x'), (1, 'x'), (2, NULL), (2, NULL), (3, 'y')",
        "INSERT INTO only_inserts SELECT generate_series(1, 100)",
        "INSERT INTO not_published VALUES (1)",
        "CREATE PUBLICATION pub FOR TABLE keyed, full_identity, full_and_key, covering, by_index, no_identity, no_key,"
        " mixed",
        "CREATE PUBLICATION inserts FOR TABLE only_inserts WITH (publish = 'insert')",
    )
    both.target("CREATE TABLE mixed (d text DEFAULT 'local', c numeric, b text, a int PRIMARY KEY)")
    both.start("pub", "inserts")
    both.assert_equal()
    both.source(
        "INSERT INTO keyed SELECT generate_series(1, 50)",
        "DELETE FROM keyed WHERE a > 20",
        "UPDATE keyed SET a = -a",
        "INSERT INTO full_and_key VALUES (1, 'a'), (2, 'b'), (3, NULL)",
        "UPDATE full_and_key SET b = 'c' WHERE a = 1",
        "UPDATE full_and_key SET a = 4 WHERE a = 3",
        "DELETE FROM full_and_key WHERE a = 2",
        "INSERT INTO covering SELECT i, 'v' || i FROM generate_series(1, 20) i",
        "DELETE FROM covering WHERE a > 15",
        "UPDATE covering SET a = -a, b = 'negative'",
        "INSERT INTO by_index VALUES (1, 1, 'one'), (1, 2, 'two'), (1, 3, NULL)",
        "UPDATE by_index SET b = 20 WHERE b = 2",
        "UPDATE by_index SET a = 9, c = 'changed' WHERE b = 1",
        "DELETE FROM by_index WHERE b = 3",
        "INSERT INTO no_identity SELECT generate_series(1, 5)",
        "INSERT INTO no_key VALUES (1), (1)",
        "INSERT INTO mixed VALUES (2, 'streamed', 2.2)",
        "UPDATE mixed SET c = 1.250 WHERE a = 1",
        "INSERT INTO only_inserts SELECT generate_series(1, 50)",
        "DELETE FROM only_inserts WHERE a > 20",
        "UPDATE only_inserts SET a = -a",
        "INSERT INTO not_published VALUES (2)",
        # one of two equal rows
        "DELETE FROM full_identity WHERE ctid = (SELECT min(ctid) FROM full_identity WHERE a = 1)",
        "UPDATE full_identity SET b = 'set' WHERE ctid = (SELECT min(ctid) FROM full_identity WHERE a = 2)",
        "INSERT INTO full_identity VALUES (4, 'new'), (4, 'new')",
        "UPDATE full_identity SET a = a * 10",
    )
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT count(*), min(a), max(a) FROM keyed") == [(20, -20, -1)]
    assert both.rows("SELECT count(*), min(a), max(a) FROM only_inserts") == [(150, 1, 100)]
    assert both.rows("SELECT * FROM mixed ORDER BY a") == [
        ("local", both.publisher.value("SELECT 1.250"), "copied", 1),
        ("local", both.publisher.value("SELECT 2.2"), "streamed", 2),
    ]
    both.assert_equal("SELECT a, b FROM full_identity ORDER BY 1, 2", source=True)


@pytest.mark.long
def test_rows_that_the_subscriber_has_deleted_are_not_changed(both: SideBySide) -> None:
    both.everywhere(
        "CREATE TABLE keyed (a int PRIMARY KEY, b text)",
        "CREATE TABLE full_identity (a int, b text)",
        "ALTER TABLE full_identity REPLICA IDENTITY FULL",
    )
    both.source(
        "INSERT INTO keyed SELECT i, 'v' FROM generate_series(1, 6) i",
        "INSERT INTO full_identity SELECT i % 3, 'v' FROM generate_series(1, 6) i",
        "CREATE PUBLICATION pub FOR TABLE keyed, full_identity",
    )
    both.start()
    both.target("DELETE FROM keyed WHERE a <= 3", "DELETE FROM full_identity WHERE a = 1")
    both.source(
        "UPDATE keyed SET b = 'updated' WHERE a IN (1, 4)",
        "UPDATE keyed SET a = 12 WHERE a = 2",  # an update of the key adds no row either
        "DELETE FROM keyed WHERE a IN (3, 5)",
        "UPDATE full_identity SET b = 'updated'",
        "DELETE FROM full_identity WHERE a = 1",
        "INSERT INTO keyed VALUES (7, 'new')",
    )
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT * FROM keyed ORDER BY a") == [(4, "updated"), (6, "v"), (7, "new")]


@pytest.mark.long
def test_large_values_that_are_not_sent_stay_as_they_are(both: SideBySide) -> None:
    both.everywhere(
        "CREATE TABLE t (a int PRIMARY KEY, b text, c numeric)",
        "ALTER TABLE t ALTER b SET STORAGE EXTERNAL",
    )
    both.source(
        "INSERT INTO t SELECT i, repeat(md5(i::text), 500), 0 FROM generate_series(1, 5) i",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    both.start()
    both.source(
        "UPDATE t SET c = 1",
        "UPDATE t SET b = repeat('xyzzy', 10000) WHERE a = 2",
        "UPDATE t SET c = 2 WHERE a IN (2, 3)",
        "UPDATE t SET a = 13 WHERE a = 3",  # the key changes, the value is not sent
        "INSERT INTO t VALUES (6, repeat('new', 5000), 0)",
        "UPDATE t SET c = 3 WHERE a = 6",
        "UPDATE t SET b = b || 'x', a = 14 WHERE a = 4",
        "DELETE FROM t WHERE a = 5",
    )
    both.sync()
    both.assert_equal("SELECT a, md5(b), length(b), c FROM t ORDER BY a", source=True)


@pytest.mark.long
def test_columns_that_are_dropped_on_either_side(both: SideBySide) -> None:
    both.source(
        "CREATE TABLE t (a int PRIMARY KEY, b text, c int)",
        "INSERT INTO t VALUES (1, 'one', 1), (2, 'two', 2)",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    both.target("CREATE TABLE t (d text DEFAULT 'local', c int, b text, a int PRIMARY KEY)")
    both.start()
    both.source("ALTER TABLE t DROP b", "UPDATE t SET c = 10 WHERE a = 1", "INSERT INTO t VALUES (3, 3)")
    both.sync()
    assert both.rows("SELECT a, b, c, d FROM t ORDER BY a") == [
        (1, "one", 10, "local"),
        (2, "two", 2, "local"),
        (3, None, 3, "local"),
    ]
    both.target("ALTER TABLE t DROP d")
    both.source("UPDATE t SET c = 20 WHERE a = 2", "INSERT INTO t VALUES (4, 4)")
    both.sync()
    both.assert_equal()


@pytest.mark.long
def test_operations_that_a_publication_does_not_publish_do_not_arrive(both: SideBySide) -> None:
    both.everywhere(
        "CREATE TABLE few (a int PRIMARY KEY, b int)",
        "CREATE TABLE all_kinds (a int PRIMARY KEY, b int)",
    )
    both.source(
        "INSERT INTO few VALUES (1, 1), (2, 2)",
        "CREATE PUBLICATION few_pub FOR TABLE few WITH (publish = 'insert')",
        "CREATE PUBLICATION all_pub FOR TABLE all_kinds",
    )
    both.start("few_pub", "all_pub")
    both.source(
        "INSERT INTO few VALUES (3, 3), (4, 4)",
        "UPDATE few SET b = -b",
        "DELETE FROM few WHERE a = 1",
        "INSERT INTO all_kinds VALUES (1, 1), (2, 2)",
        "UPDATE all_kinds SET b = 10 WHERE a = 1",
        "DELETE FROM all_kinds WHERE a = 2",
    )
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT * FROM few ORDER BY a") == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert both.rows("SELECT * FROM all_kinds") == [(1, 10)]
    both.source(
        "ALTER PUBLICATION few_pub SET (publish = 'insert, delete')",
        "UPDATE few SET b = b * 10",
        "DELETE FROM few WHERE a = 2",
    )
    both.sync()
    # The table is published in another way. Native applies later changes. Ours copies the table again.
    assert both.native.rows("SELECT * FROM few ORDER BY a") == [(1, 1), (3, 3), (4, 4)]
    assert both.ours.rows("SELECT * FROM few ORDER BY a") == [(3, -30), (4, -40)]
    both.source("UPDATE few SET b = 0", "DELETE FROM few WHERE a = 3")
    both.sync()
    assert both.native.rows("SELECT * FROM few ORDER BY a") == [(1, 1), (4, 4)]
    assert both.ours.rows("SELECT * FROM few ORDER BY a") == [(4, -40)]


@pytest.mark.long
def test_a_table_that_leaves_the_publication_has_what_committed_before(both: SideBySide) -> None:
    tables = ("removed", "dropped", "moved", "stays")
    both.everywhere(
        *(f"CREATE TABLE {each} (a int PRIMARY KEY)" for each in tables),
        "CREATE SCHEMA s",
        "CREATE TABLE s.moved (a int)",
    )
    both.source(
        "DROP SCHEMA s CASCADE",
        *(f"INSERT INTO {each} VALUES (1), (-1)" for each in tables),
        f"CREATE PUBLICATION pub FOR TABLE {', '.join(tables)}",
    )
    both.start()
    both.source(
        *(f"INSERT INTO {each} VALUES (2)" for each in tables),
        *(f"DELETE FROM {each} WHERE a = -1" for each in tables),
        "ALTER PUBLICATION pub DROP TABLE removed",
        "INSERT INTO removed VALUES (3)",
        "DROP TABLE dropped",
        "CREATE SCHEMA s",
        "ALTER TABLE moved SET SCHEMA s",
        "INSERT INTO stays VALUES (3)",
    )
    both.sync()
    both.assert_equal("SELECT a FROM stays ORDER BY a", source=True)
    for each in ("removed", "dropped", "moved"):
        assert both.rows(f"SELECT a FROM {each} ORDER BY a") == [(1,), (2,)], each


@pytest.mark.long
@pytest.mark.since(15, "publications of schemas")
def test_a_table_that_leaves_a_published_schema_and_comes_back_misses_nothing_with_ours(both: SideBySide) -> None:
    """Ours copies the table again. Native goes on without the changes that were not published."""
    both.everywhere("CREATE SCHEMA s", "CREATE TABLE t (a int PRIMARY KEY)", "CREATE TABLE stays (a int PRIMARY KEY)")
    both.source("INSERT INTO t VALUES (1)", "CREATE PUBLICATION pub FOR TABLES IN SCHEMA public")
    both.start()
    both.source(
        "INSERT INTO t VALUES (2)",
        "ALTER TABLE t SET SCHEMA s",
        "INSERT INTO s.t VALUES (3)",
        "ALTER TABLE s.t SET SCHEMA public",
        "INSERT INTO t VALUES (4)",
        "INSERT INTO stays VALUES (1)",
    )
    both.sync()
    assert both.native.rows("SELECT a FROM t ORDER BY a") == [(1,), (2,), (4,)]
    assert both.ours.rows("SELECT a FROM t ORDER BY a") == [(1,), (2,), (3,), (4,)]
    both.assert_equal("SELECT a FROM stays", source=True)


@pytest.mark.long
def test_a_table_without_columns(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE empty ()")
    both.source("INSERT INTO empty DEFAULT VALUES", "CREATE PUBLICATION pub FOR TABLE empty")
    both.start()
    both.source("INSERT INTO empty DEFAULT VALUES")
    both.sync()
    assert both.value("SELECT count(*) FROM empty") == 2


@pytest.mark.long
def test_a_reader_of_a_subscriber_never_sees_half_of_a_transaction(both: SideBySide) -> None:
    both.everywhere(
        "CREATE TABLE debit (id int PRIMARY KEY, amount int NOT NULL)",
        "CREATE TABLE credit (id int PRIMARY KEY, amount int NOT NULL)",
    )
    both.source(
        "INSERT INTO debit SELECT i, 0 FROM generate_series(1, 20) i",
        "INSERT INTO credit SELECT i, 0 FROM generate_series(1, 20) i",
        "CREATE PUBLICATION pub FOR TABLE debit, credit",
    )
    both.start()
    halves: list[tuple[int, int]] = []
    stopping = threading.Event()

    def read(dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not stopping.wait(0.005):
                row = connection.execute(
                    "SELECT (SELECT sum(amount) FROM debit), (SELECT sum(amount) FROM credit)"
                ).fetchone()
                if row is not None and row[0] != row[1]:
                    halves.append(row)

    readers = [threading.Thread(target=read, args=(each.dsn,)) for each in (both.native, both.ours)]
    for reader in readers:
        reader.start()
    try:
        with both.following():
            for i in range(100):
                amount = f"SET amount = amount + {i} WHERE id = {i % 20 + 1}"
                both.source(f"BEGIN; UPDATE debit {amount}; UPDATE credit {amount}; COMMIT")
            both.becomes_equal()
    finally:
        stopping.set()
        for reader in readers:
            reader.join()
    assert not halves


@pytest.mark.long
def test_writers_go_on_during_copy_and_apply(both: SideBySide) -> None:
    both.everywhere(
        "CREATE TABLE counters (id int PRIMARY KEY, n int)",
        "CREATE TABLE events (id bigint PRIMARY KEY, counter int)",
    )
    both.source(
        "INSERT INTO counters SELECT i, 0 FROM generate_series(1, 20) i",
        "INSERT INTO events SELECT i, i % 20 FROM generate_series(1, 5000) i",
        "CREATE PUBLICATION pub FOR TABLE counters, events",
    )
    stopping = threading.Event()

    def write() -> None:
        with psycopg.connect(both.publisher.dsn) as connection:
            number = 5000
            while not stopping.wait(0.002):
                number += 1
                connection.execute("UPDATE counters SET n = n + 1 WHERE id = %s", [number % 20 + 1])
                connection.execute("INSERT INTO events VALUES (%s, %s)", [number, number % 20])
                if number % 20 == 0:
                    connection.execute("DELETE FROM events WHERE id = (SELECT min(id) FROM events)")
                connection.commit()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        both.start()
    finally:
        stopping.set()
        writer.join()
    both.sync()
    both.assert_equal(source=True)
