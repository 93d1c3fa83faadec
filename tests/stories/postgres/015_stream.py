"""Stories 15 to 19: large transactions, which are received while they are in progress."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from side_by_side import SideBySide

ROWS = "SELECT i, sha256(i::text::bytea) FROM generate_series({}, {}) i"


@pytest.fixture
def streamed(both: SideBySide) -> Iterator[SideBySide]:
    """Transactions of more than 64 kB are streamed."""
    both.source(f"ALTER DATABASE {both.publisher.name} SET logical_decoding_work_mem = '64kB'")
    both.everywhere("CREATE TABLE t (a int PRIMARY KEY, b bytea)", "ALTER TABLE t ALTER b SET STORAGE EXTERNAL")
    both.target("ALTER TABLE t ADD c timestamptz DEFAULT '2024-01-01', ADD d bigint DEFAULT 999")
    both.source("INSERT INTO t VALUES (1, 'one'), (2, 'two')", "CREATE PUBLICATION pub FOR TABLE t")
    both.start()
    yield both
    slot = f"{both.name}_native"
    count = both.publisher.value("SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = %s", slot)
    assert count > 0, "nothing was streamed"


def test_large_transactions_that_run_beside_others_arrive_in_commit_order(streamed: SideBySide) -> None:
    both = streamed
    with psycopg.connect(both.publisher.dsn) as first, psycopg.connect(both.publisher.dsn) as second:
        first.execute(f"INSERT INTO t {ROWS.format(3, 1500)}")
        second.execute(f"INSERT INTO t {ROWS.format(5000, 6500)}")
        both.source("INSERT INTO t VALUES (10000, 'small')", "UPDATE t SET b = 'changed' WHERE a = 1")
        first.execute("UPDATE t SET b = sha256(b) WHERE mod(a, 2) = 0 AND a < 1500")
        second.execute("DELETE FROM t WHERE mod(a, 3) = 0 AND a BETWEEN 5000 AND 6500")
        second.commit()
        both.source("UPDATE t SET b = 'after second' WHERE a = 5000")
        first.execute("DELETE FROM t WHERE mod(a, 3) = 0 AND a BETWEEN 3 AND 1500")
        first.commit()
        first.execute(f"INSERT INTO t {ROWS.format(20000, 21500)}")
        first.rollback()
    both.sync()
    both.assert_equal()
    both.assert_equal("SELECT a, b FROM t ORDER BY a", source=True)
    assert both.rows("SELECT count(*), count(c), count(*) FILTER (WHERE d = 999) FROM t")[0][0] > 1500


@pytest.mark.long
def test_rolled_back_subtransactions_leave_nothing(streamed: SideBySide) -> None:
    both = streamed
    both.source(
        f"BEGIN; INSERT INTO t {ROWS.format(3, 500)}; SAVEPOINT s1; INSERT INTO t {ROWS.format(501, 1000)};"
        f" SAVEPOINT s2; INSERT INTO t {ROWS.format(1001, 1500)}; UPDATE t SET b = 'gone' WHERE a < 100;"
        f" ROLLBACK TO s2; INSERT INTO t {ROWS.format(1501, 2000)}; ROLLBACK TO s1; SAVEPOINT s3;"
        f" INSERT INTO t {ROWS.format(2001, 2500)}; DELETE FROM t WHERE mod(a, 5) = 0; RELEASE s3; COMMIT",
        f"BEGIN; INSERT INTO t {ROWS.format(4000, 4500)}; SAVEPOINT s1; DELETE FROM t; ROLLBACK TO s1; TRUNCATE t;"
        f" ROLLBACK TO s1; INSERT INTO t VALUES (5000, 'last'); COMMIT",
        f"BEGIN; INSERT INTO t {ROWS.format(6000, 6500)}; SAVEPOINT s1; INSERT INTO t VALUES (6501, 'x'); ROLLBACK",
    )
    both.sync()
    both.assert_equal()
    both.assert_equal("SELECT a, b FROM t ORDER BY a", source=True)


@pytest.mark.long
def test_nested_subtransactions_that_commit_arrive_in_order(streamed: SideBySide) -> None:
    """Story 16, and changes of one key in several of them, beside a transaction that is rolled back."""
    both = streamed
    levels = " ".join(
        f"SAVEPOINT s{n}; INSERT INTO t {ROWS.format(n * 1000, n * 1000 + 400)};"
        f" UPDATE t SET b = sha256(b || '{n}') WHERE mod(a, 2) = 0; DELETE FROM t WHERE mod(a, 7) = {n};"
        for n in range(1, 5)
    )
    with psycopg.connect(both.publisher.dsn) as other:
        other.execute(f"INSERT INTO t {ROWS.format(50_000, 51_500)}")
        both.source(f"BEGIN; {levels} RELEASE s4; ROLLBACK TO s3; INSERT INTO t VALUES (9999, 'after'); COMMIT")
        other.execute("SAVEPOINT s")
        other.execute(f"INSERT INTO t {ROWS.format(52_000, 53_000)}")
        other.rollback()
    both.sync()
    both.assert_equal()
    both.assert_equal("SELECT a, b FROM t ORDER BY a", source=True)


@pytest.mark.long
def test_a_definition_of_a_subtransaction_that_is_rolled_back_is_forgotten(streamed: SideBySide) -> None:
    """Story 19: the rows after it have the old columns again."""
    both = streamed
    both.source(
        f"BEGIN; INSERT INTO t {ROWS.format(3, 600)}; SAVEPOINT s; ALTER TABLE t ADD d int DEFAULT 1;"
        " INSERT INTO t SELECT i, 'gone', i FROM generate_series(601, 1200) i; UPDATE t SET d = 2; ROLLBACK TO s;"
        f" INSERT INTO t {ROWS.format(601, 1200)}; UPDATE t SET b = 'kept' WHERE a = 1; COMMIT"
    )
    both.sync()
    both.assert_equal()
    both.assert_equal("SELECT a, b FROM t ORDER BY a", source=True)


@pytest.mark.long
def test_columns_are_added_and_dropped_inside_a_large_transaction(streamed: SideBySide) -> None:
    """Ours copies the table again, so it has the source's values in all published columns."""
    both = streamed
    both.target("ALTER TABLE t ADD e int, ADD f text")
    both.source(
        "INSERT INTO t VALUES (3, 'three')",
        f"BEGIN; INSERT INTO t {ROWS.format(4, 600)}; ALTER TABLE t ADD c timestamptz;"
        " INSERT INTO t SELECT i, 'b', '2001-02-03' FROM generate_series(601, 1200) i;"
        " ALTER TABLE t ADD d int; INSERT INTO t SELECT i, 'b', NULL, -i FROM generate_series(1201, 1500) i;"
        " UPDATE t SET d = a WHERE a < 10; COMMIT",
        "INSERT INTO t VALUES (2000, 'b', NULL, 1)",
        f"BEGIN; INSERT INTO t (a, b) {ROWS.format(3000, 3500)}; SAVEPOINT s; ALTER TABLE t ADD e int;"
        " INSERT INTO t SELECT i, 'gone', NULL, 1, 1 FROM generate_series(3501, 4000) i; ROLLBACK TO s;"
        " ALTER TABLE t ADD f text; INSERT INTO t SELECT i, 'b', NULL, 2, 'f' FROM generate_series(4001, 4500) i;"
        " ALTER TABLE t DROP d; UPDATE t SET f = 'set' WHERE a = 1; COMMIT",
    )
    both.sync()
    both.assert_equal("SELECT a, b, f FROM t ORDER BY a", source=True)
    published = "SELECT a, b, c, f FROM t ORDER BY a"
    assert both.ours.rows(published) == both.publisher.rows(published)
    some = "SELECT a, c = '2024-01-01', d FROM t WHERE a IN (1, 100, 700, 1300) ORDER BY a"
    # Native keeps the default of the subscriber in rows that were sent without the column.
    assert both.native.rows(some) == [(1, None, 1), (100, True, 999), (700, False, 999), (1300, None, -1300)]
    assert both.ours.rows(some) == [(1, None, 999), (100, None, 999), (700, False, 999), (1300, None, 999)]


@pytest.mark.long
def test_without_streaming_the_result_is_the_same(both: SideBySide) -> None:
    both.source(f"ALTER DATABASE {both.publisher.name} SET logical_decoding_work_mem = '64kB'")
    both.everywhere("CREATE TABLE t (a int PRIMARY KEY, b bytea)")
    both.source("CREATE PUBLICATION pub FOR TABLE t")
    both.start(streaming=False)
    both.source(
        f"BEGIN; INSERT INTO t {ROWS.format(1, 2000)}; SAVEPOINT s; UPDATE t SET b = 'gone'; ROLLBACK TO s;"
        " DELETE FROM t WHERE mod(a, 3) = 0; COMMIT"
    )
    both.sync()
    both.assert_equal(source=True)


@pytest.mark.long
def test_a_large_transaction_with_triggers_and_a_truncate(both: SideBySide) -> None:
    """It is applied in chunks: row by row where a trigger fires, and after the TRUNCATE by sets of rows."""
    tables = ("fires", "emptied", "plain")
    both.everywhere(*(f"CREATE TABLE {each} (id int PRIMARY KEY, v int, w text)" for each in tables))
    both.source("CREATE PUBLICATION pub FOR ALL TABLES", "INSERT INTO emptied VALUES (-1, 0, 'old')")
    both.target(
        "CREATE TABLE audit (n int GENERATED ALWAYS AS IDENTITY, what text)",
        "CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO public.audit (what) VALUES (TG_OP || coalesce(NEW, OLD)::text); RETURN NULL; END $$",
        "CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON fires FOR EACH ROW EXECUTE FUNCTION audit()",
        "ALTER TABLE fires ENABLE ALWAYS TRIGGER audit",
    )
    both.start()
    rows = "SELECT i, i, repeat(md5(i::text), 15) FROM generate_series(1, 25000) i"
    both.source(
        f"BEGIN; INSERT INTO emptied {rows}; TRUNCATE emptied; INSERT INTO emptied {rows}; INSERT INTO fires {rows};"
        " UPDATE fires SET v = v + 1 WHERE id % 100 = 0; UPDATE emptied SET id = -id, v = 5 WHERE id % 50 = 0;"
        f" DELETE FROM fires WHERE id % 77 = 0; INSERT INTO plain {rows}; COMMIT"
    )
    both.sync()
    both.assert_equal(*(f"SELECT * FROM {each} ORDER BY id" for each in tables), source=True)
    both.assert_equal("SELECT what FROM audit ORDER BY n")
