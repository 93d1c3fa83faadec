"""Story 29: a conflict stops the subscription. The transaction can be skipped, or the row removed."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide

pytestmark = pytest.mark.since(15, "ALTER SUBSCRIPTION SKIP")


def _start(both: SideBySide, *, two_phase: bool = False, **target: object) -> None:
    both.source(f"ALTER DATABASE {both.publisher.name} SET logical_decoding_work_mem = '64kB'")
    both.source(
        "CREATE TABLE t (i int, b bytea)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "CREATE TABLE other (i int PRIMARY KEY)",
        "INSERT INTO t VALUES (1, NULL)",
        "CREATE PUBLICATION pub FOR TABLE t, other",
    )
    both.target("CREATE TABLE t (i int PRIMARY KEY, b bytea)", "CREATE TABLE other (i int PRIMARY KEY)")
    both.start(two_phase=two_phase, target=target)


def test_the_failed_transaction_is_skipped_as_a_whole_and_the_next_ones_are_applied(both: SideBySide) -> None:
    _start(both)
    both.source(
        "INSERT INTO t VALUES (2, NULL)",
        "BEGIN; INSERT INTO other VALUES (1); INSERT INTO t VALUES (1, 'again'), (3, NULL); COMMIT",
        "INSERT INTO t VALUES (4, NULL)",
    )
    log, error = both.both_stop()
    assert "t_pkey" in log
    assert "t_pkey" in str(error)
    assert "walmere skip" in str(error)
    assert both.rows("SELECT i FROM t WHERE i > 2") == []
    assert both.rows("SELECT i FROM other") == []
    lsn = both.skip()
    assert str(lsn) in str(error)
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT i FROM t ORDER BY i") == [(1,), (2,), (4,)]


@pytest.mark.long
def test_after_the_conflicting_row_is_removed_the_transaction_is_applied(both: SideBySide) -> None:
    _start(both)
    both.target("INSERT INTO other VALUES (7)")
    both.source("BEGIN; INSERT INTO other VALUES (6), (7); INSERT INTO t VALUES (2, NULL); COMMIT")
    both.both_stop()
    assert both.rows("SELECT i FROM t ORDER BY i") == [(1,)]
    both.target("DELETE FROM other WHERE i = 7")
    both.enable_native()
    both.sync()
    both.assert_equal(source=True)


@pytest.mark.long
def test_a_prepared_transaction_is_skipped(both: SideBySide) -> None:
    _start(both, two_phase=True)
    both.source(
        "BEGIN; INSERT INTO t VALUES (1, 'again'); INSERT INTO other VALUES (5); PREPARE TRANSACTION 'gtx'",
        "COMMIT PREPARED 'gtx'",
        "INSERT INTO t VALUES (2, NULL)",
    )
    _, error = both.both_stop()
    both.skip(our_error=error)  # native fails at PREPARE TRANSACTION, ours at COMMIT PREPARED
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT i FROM t ORDER BY i") == [(1,), (2,)]
    assert both.value("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()") == 0


@pytest.mark.long
def test_a_large_transaction_is_skipped(both: SideBySide) -> None:
    _start(both)
    both.source(
        "BEGIN; INSERT INTO t SELECT i, sha256(i::text::bytea) FROM generate_series(1, 2000) i; COMMIT",
        "INSERT INTO t VALUES (2, NULL)",
    )
    both.both_stop()
    both.skip()
    both.sync()
    both.assert_equal()
    assert both.value("SELECT count(*) FROM t") == 2


@pytest.mark.long
def test_a_transaction_with_a_value_that_does_not_fit_is_skipped(both: SideBySide) -> None:
    both.source("CREATE TABLE t (i int PRIMARY KEY, v text)", "CREATE PUBLICATION pub FOR TABLE t")
    both.target("CREATE DOMAIN short AS varchar(3)", "CREATE TABLE t (i int PRIMARY KEY, v short)")
    both.source("INSERT INTO t VALUES (1, 'one')")
    both.start()
    refused = (
        "INSERT INTO t VALUES (2, 'too long')",
        "UPDATE t SET v = 'too long' WHERE i = 1",
        "BEGIN; UPDATE t SET v = 'two' WHERE i = 1; INSERT INTO t VALUES (3, 'too long'); COMMIT",
    )
    for number, statement in enumerate(refused):
        both.source(statement, f"INSERT INTO t VALUES ({10 + number}, 'x')")
        log, error = both.both_stop()
        assert "value too long" in log
        assert "column v: value too long" in str(error)
        lsn = both.skip()
        assert str(lsn) in str(error)
        both.sync()
        both.assert_equal()
    assert both.rows("SELECT * FROM t ORDER BY i") == [(1, "one"), (10, "x"), (11, "x"), (12, "x")]


@pytest.mark.long
def test_a_prepared_transaction_is_skipped_whose_trigger_uses_a_table_that_does_not_exist(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    both.source("CREATE PUBLICATION pub FOR TABLE t")
    both.target(
        "CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN IF NEW.v = 'no' THEN INSERT INTO absent VALUES (1); END IF; RETURN NEW; END $$",
        "CREATE TRIGGER fails BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION fails()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER fails",
    )
    both.start(two_phase=True)
    both.source("INSERT INTO t VALUES (1, 'yes')", "BEGIN; INSERT INTO t VALUES (2, 'no'); PREPARE TRANSACTION 'p'")
    both.both_stop()
    both.skip(both.ours_stops())  # tried twice, recorded once
    both.source("INSERT INTO t VALUES (3, 'yes')")
    both.sync()
    both.source("COMMIT PREPARED 'p'", "INSERT INTO t VALUES (4, 'yes')")
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT id FROM t ORDER BY id") == [(1,), (3,), (4,)]
    assert both.our_conflicts() == {"insert_failed": 1}
