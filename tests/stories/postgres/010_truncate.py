"""Story 10: TRUNCATE."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide


@pytest.mark.long
def test_truncate_empties_the_table_and_restarts_sequences_if_asked(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)")
    both.target(
        "CREATE SEQUENCE a_seq START 101 OWNED BY a.id",
        "CREATE SEQUENCE b_seq START 101 OWNED BY b.id",
        "SELECT nextval('a_seq'), nextval('a_seq'), nextval('b_seq'), nextval('b_seq')",
    )
    both.source("INSERT INTO a VALUES (1), (2)", "CREATE PUBLICATION pub FOR TABLE a, b")
    both.start()
    both.target("INSERT INTO a VALUES (10)", "INSERT INTO b VALUES (10)")
    both.source("TRUNCATE a", "TRUNCATE b RESTART IDENTITY", "INSERT INTO a VALUES (1)")
    both.sync()
    both.assert_equal(source=True)
    assert both.rows("SELECT nextval('a_seq'), nextval('b_seq')") == [(103, 101)]


@pytest.mark.long
def test_truncate_between_other_changes_of_a_transaction(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY)")
    both.source(
        "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 5) i",
        "INSERT INTO u VALUES (1)",
        "CREATE PUBLICATION pub FOR TABLE t, u",
    )
    both.start()
    both.target("INSERT INTO t VALUES (100, 'local')")
    both.source(
        "UPDATE t SET v = 'x' WHERE id = 1",
        "BEGIN; INSERT INTO t VALUES (6, 'gone'); INSERT INTO u VALUES (2); TRUNCATE t;"
        " INSERT INTO t VALUES (1, 'again'); UPDATE t SET v = 'twice'; COMMIT",
        "BEGIN; INSERT INTO t VALUES (7, 'stays'); SAVEPOINT s; TRUNCATE t, u; ROLLBACK TO s; COMMIT",
    )
    both.sync()
    both.assert_equal(source=True)
    assert both.rows("SELECT * FROM t ORDER BY id") == [(1, "twice"), (7, "stays")]


@pytest.mark.long
def test_truncate_is_left_out_if_not_published_and_for_tables_that_are_not_published(both: SideBySide) -> None:
    both.everywhere(
        "CREATE TABLE with_truncate (id int PRIMARY KEY)",
        "CREATE TABLE without (id int PRIMARY KEY)",
        "CREATE TABLE not_published (id int PRIMARY KEY)",
    )
    both.source(
        "CREATE PUBLICATION pub FOR TABLE with_truncate",
        "CREATE PUBLICATION inserts FOR TABLE without WITH (publish = 'insert')",
    )
    both.start("pub", "inserts")
    for table in ("with_truncate", "without", "not_published"):
        both.target(f"INSERT INTO {table} VALUES (1), (2)")
    both.source("TRUNCATE with_truncate, without, not_published")
    both.sync()
    both.assert_equal()
    assert [both.value(f"SELECT count(*) FROM {each}") for each in ("with_truncate", "without", "not_published")] == [
        0,
        2,
        2,
    ]
    both.source("ALTER PUBLICATION inserts SET (publish = 'insert, truncate')", "TRUNCATE without")
    both.sync()
    both.assert_equal()
    assert both.value("SELECT count(*) FROM without") == 0


@pytest.mark.long
def test_tables_with_foreign_keys_are_truncated_together(both: SideBySide) -> None:
    both.everywhere(
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent)",
    )
    both.source("CREATE PUBLICATION pub FOR TABLE parent, child")
    both.start()
    both.target("INSERT INTO parent VALUES (1), (2)", "INSERT INTO child VALUES (11, 1), (22, 2)")
    both.source("TRUNCATE parent, child", "INSERT INTO parent VALUES (3)")
    both.sync()
    both.assert_equal(source=True)
    both.target("INSERT INTO child VALUES (33, 3)")
    both.source("TRUNCATE parent CASCADE")  # which is sent as a truncate of both
    both.sync()
    both.assert_equal(source=True)


@pytest.mark.long
@pytest.mark.since(15, "disable_on_error")
def test_truncate_cascade_empties_referencing_tables_with_ours_and_stops_native(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE parent (id int PRIMARY KEY)")
    both.source("INSERT INTO parent VALUES (1)", "CREATE PUBLICATION pub FOR TABLE parent")
    both.target("CREATE TABLE local (id int PRIMARY KEY, parent int REFERENCES parent)")
    both.start()
    both.target("INSERT INTO local VALUES (11, 1)")
    both.source("TRUNCATE parent CASCADE")
    assert "foreign key" in both.native_stops()
    both.sync_ours()
    assert both.native.rows("SELECT parent.id, local.id FROM parent, local") == [(1, 11)]
    assert both.ours.rows("SELECT id FROM parent UNION ALL SELECT id FROM local") == []
    both.native.execute("ALTER TABLE local DROP CONSTRAINT local_parent_fkey")
    both.enable_native()
    both.sync()
    both.assert_equal("SELECT id FROM parent", source=True)
    assert both.native.rows("SELECT id FROM local") == [(11,)]
    assert both.ours.rows("SELECT id FROM local") == []


@pytest.mark.long
@pytest.mark.since(15, "disable_on_error")
def test_truncate_without_cascade_stops_both_if_a_table_of_the_subscriber_alone_references_it(
    both: SideBySide,
) -> None:
    both.everywhere("CREATE TABLE parent (id int PRIMARY KEY)")
    both.source("INSERT INTO parent VALUES (1)", "CREATE PUBLICATION pub FOR TABLE parent")
    both.target("CREATE TABLE local (id int PRIMARY KEY, parent int REFERENCES parent)")
    both.start()
    both.target("INSERT INTO local VALUES (11, 1)")
    both.source("TRUNCATE parent")
    log, error = both.both_stop()
    assert "foreign key" in log
    assert "foreign key" in str(error)
    both.assert_equal()
    both.target("ALTER TABLE local DROP CONSTRAINT local_parent_fkey")
    both.enable_native()
    both.sync()
    both.assert_equal()
    assert both.value("SELECT count(*) FROM local") == 1


@pytest.mark.long
def test_triggers_of_truncate_fire_if_enabled_for_replicas(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY)")
    both.source("INSERT INTO t VALUES (1)", "CREATE PUBLICATION pub FOR TABLE t")
    both.target(
        "CREATE TABLE fired (name text)",
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO public.fired VALUES (TG_NAME); RETURN NULL; END $$",
        "CREATE TRIGGER plain BEFORE TRUNCATE ON t EXECUTE FUNCTION note()",
        "CREATE TRIGGER always BEFORE TRUNCATE ON t EXECUTE FUNCTION note()",
        "CREATE TRIGGER replica AFTER TRUNCATE ON t EXECUTE FUNCTION note()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER always",
        "ALTER TABLE t ENABLE REPLICA TRIGGER replica",
    )
    both.start()
    both.source("TRUNCATE t", "INSERT INTO t VALUES (2)")
    both.sync()
    both.assert_equal()
