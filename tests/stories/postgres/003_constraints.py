"""Story 3: which constraints, triggers and rules of the subscriber take effect."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide

LOG_TRIGGER = """
CREATE TABLE activity (n int GENERATED ALWAYS AS IDENTITY, tab text, trig text, op text, lvl text, old text, new text);
CREATE FUNCTION log_activity() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO public.activity (tab, trig, op, lvl, old, new)
  SELECT TG_RELNAME, TG_NAME, TG_OP, TG_LEVEL,
    CASE WHEN TG_LEVEL = 'ROW' AND TG_OP <> 'INSERT' THEN OLD::text END,
    CASE WHEN TG_LEVEL = 'ROW' AND TG_OP <> 'DELETE' THEN NEW::text END;
  RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
END $$
"""
ACTIVITY = "SELECT tab, trig, op, lvl, old, new FROM activity ORDER BY n"


def test_foreign_keys_are_not_checked(both: SideBySide) -> None:
    both.source(
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (id int PRIMARY KEY, junk text, parent int REFERENCES parent)",
        "CREATE PUBLICATION pub FOR ALL TABLES",
        "INSERT INTO parent VALUES (1)",
        "INSERT INTO child VALUES (1, 'copied', 1)",
    )
    both.target(
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent ON DELETE CASCADE, junk text)",
    )
    both.start()
    both.source(
        "ALTER TABLE child DROP CONSTRAINT child_parent_fkey",
        "INSERT INTO child VALUES (2, repeat('3.14', 20000), 2)",
        "UPDATE child SET parent = 3 WHERE id = 1",
        "INSERT INTO child VALUES (4, 'x', 1)",
        "DELETE FROM parent",  # nothing cascades
    )
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT id, parent FROM child ORDER BY id") == [(1, 3), (2, 2), (4, 1)]
    assert both.value("SELECT count(*) FROM parent") == 0


def test_replica_triggers_can_leave_out_rows(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v int, w int)")
    both.source("INSERT INTO t VALUES (1, 1, 1)", "CREATE PUBLICATION pub FOR TABLE t")
    both.start()
    both.target(
        """CREATE FUNCTION leave_out() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          IF TG_OP = 'INSERT' AND NEW.id < 10 THEN NEW.w = NEW.w + 1000; RETURN NEW; END IF;
          RETURN NULL;
        END $$""",
        "CREATE TRIGGER leave_out BEFORE INSERT OR UPDATE OF v ON t FOR EACH ROW EXECUTE FUNCTION leave_out()",
        "ALTER TABLE t ENABLE REPLICA TRIGGER leave_out",
    )
    both.source(
        "INSERT INTO t VALUES (2, 2, 2)",
        "INSERT INTO t VALUES (10, 10, 10)",
        "UPDATE t SET v = -1 WHERE id = 1",
        "UPDATE t SET w = -1 WHERE id = 1",  # all columns are sent, so a trigger of column v fires, too
        "DELETE FROM t WHERE id = 2",
        "INSERT INTO t VALUES (3, 3, 3)",
    )
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT * FROM t ORDER BY id") == [(1, 1, 1), (3, 3, 1003)]


def test_row_triggers_fire_for_each_change_if_enabled_for_replicas_and_statement_triggers_do_not(
    both: SideBySide,
) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY)")
    both.source("CREATE PUBLICATION pub FOR TABLE t, u")
    both.target(LOG_TRIGGER)
    for trigger, enable in (("plain", ""), ("replica", "REPLICA"), ("always", "ALWAYS"), ("off", "DISABLE")):
        both.target(
            f"CREATE TRIGGER {trigger}_row BEFORE INSERT OR UPDATE OR DELETE ON t"
            " FOR EACH ROW EXECUTE FUNCTION log_activity()",
            f"CREATE TRIGGER {trigger}_after AFTER INSERT OR UPDATE OR DELETE ON t"
            " FOR EACH ROW EXECUTE FUNCTION log_activity()",
            f"CREATE TRIGGER {trigger}_statement AFTER INSERT OR UPDATE OR DELETE ON t"
            " FOR EACH STATEMENT EXECUTE FUNCTION log_activity()",
        )
        for level in ("row", "after", "statement"):
            if enable:
                action = "DISABLE TRIGGER" if enable == "DISABLE" else f"ENABLE {enable} TRIGGER"
                both.target(f"ALTER TABLE t {action} {trigger}_{level}")
    both.start()
    both.target("TRUNCATE activity")  # a statement trigger fires for the copy of a table, even if it has no rows
    both.source(
        "INSERT INTO t VALUES (1, 'one'), (2, 'two')",
        "UPDATE t SET v = v || '!'",
        "UPDATE t SET v = v || '!'",  # each change, not only the last one
        "UPDATE t SET id = 3 WHERE id = 1",
        "BEGIN; INSERT INTO t VALUES (9, 'short'); DELETE FROM t WHERE id = 9; COMMIT",
        "DELETE FROM t WHERE id = 2",
        "INSERT INTO u VALUES (1)",
    )
    both.sync()
    both.assert_equal("SELECT * FROM t ORDER BY id", "SELECT * FROM u ORDER BY id", ACTIVITY)
    fired = both.rows("SELECT DISTINCT trig FROM activity ORDER BY 1")
    assert fired == [("always_after",), ("always_row",), ("replica_after",), ("replica_row",)]


def test_triggers_of_several_tables_see_the_changes_in_commit_order(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE a (id int PRIMARY KEY, v int)", "CREATE TABLE b (id int PRIMARY KEY, v int)")
    both.source("CREATE PUBLICATION pub FOR TABLE a, b")
    both.target(LOG_TRIGGER)
    for table in ("a", "b"):
        both.target(
            f"CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON {table}"
            " FOR EACH ROW EXECUTE FUNCTION log_activity()",
            f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER audit",
        )
    both.start()
    for i in range(5):
        both.source(
            f"INSERT INTO a VALUES ({i}, 0)",
            f"BEGIN; INSERT INTO b VALUES ({i}, 0); UPDATE a SET v = v + 1; UPDATE b SET v = v + 1; COMMIT",
        )
    both.sync()
    both.assert_equal("SELECT * FROM a ORDER BY id", "SELECT * FROM b ORDER BY id", ACTIVITY)


def test_triggers_fire_for_copied_rows_as_for_the_command_copy(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    both.source("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 5) i", "CREATE PUBLICATION pub FOR TABLE t")
    both.target(LOG_TRIGGER)
    for trigger, enable in (("plain", ""), ("always", "ENABLE ALWAYS"), ("replica", "ENABLE REPLICA")):
        for level in ("ROW", "STATEMENT"):
            both.target(
                f"CREATE TRIGGER {trigger}_{level} AFTER INSERT ON t FOR EACH {level} EXECUTE FUNCTION log_activity()"
            )
            if enable:
                both.target(f"ALTER TABLE t {enable} TRIGGER {trigger}_{level}")
    both.start()
    both.assert_equal(
        "SELECT * FROM t ORDER BY id",
        "SELECT trig, op, lvl, new FROM activity ORDER BY trig, new",
    )
    assert both.value("SELECT count(*) FROM activity WHERE lvl = 'ROW'") == 10


def test_rules_do_not_change_what_is_applied(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    both.source("INSERT INTO t VALUES (1, 'copied')", "CREATE PUBLICATION pub FOR TABLE t")
    both.target(
        "CREATE TABLE ruled (id int)",
        "CREATE RULE on_insert AS ON INSERT TO t DO ALSO INSERT INTO ruled VALUES (NEW.id)",
        "CREATE RULE on_delete AS ON DELETE TO t DO INSTEAD NOTHING",
        "ALTER TABLE t ENABLE ALWAYS RULE on_insert",
        "ALTER TABLE t ENABLE REPLICA RULE on_delete",
    )
    both.start()
    both.source(
        "INSERT INTO t VALUES (2, 'x'), (3, 'x')", "UPDATE t SET v = 'y' WHERE id = 2", "DELETE FROM t WHERE id = 3"
    )
    both.sync()
    both.assert_equal()


@pytest.mark.since(15, "disable_on_error")
def test_a_check_constraint_or_not_null_of_the_subscriber_stops_both(both: SideBySide) -> None:
    both.source("CREATE TABLE t (id int PRIMARY KEY, v int)", "CREATE PUBLICATION pub FOR TABLE t")
    both.target("CREATE TABLE t (id int PRIMARY KEY, v int NOT NULL CONSTRAINT small CHECK (v < 100))")
    both.start()
    both.source("INSERT INTO t VALUES (1, 1)", "INSERT INTO t VALUES (2, 200)", "INSERT INTO t VALUES (3, 3)")
    log, error = both.both_stop()
    assert "small" in log
    assert "small" in str(error)
    assert both.ours.rows("SELECT * FROM t WHERE id <> 1") == []
    both.target("ALTER TABLE t DROP CONSTRAINT small")
    both.enable_native()
    both.sync()
    both.assert_equal()
    both.source("UPDATE t SET v = NULL WHERE id = 3", "INSERT INTO t VALUES (4, 4)")
    log, error = both.both_stop()
    assert "not-null" in log
    assert "not-null" in str(error)
    both.target("ALTER TABLE t ALTER v DROP NOT NULL")
    both.enable_native()
    both.sync()
    both.assert_equal()


def test_generated_and_identity_columns_of_the_subscriber(both: SideBySide) -> None:
    both.source(
        "CREATE TABLE g (id int PRIMARY KEY, v int)",
        "CREATE TABLE i (id int PRIMARY KEY, v int)",
        "INSERT INTO g VALUES (1, 1), (2, 2)",
        "INSERT INTO i VALUES (1, 1), (2, 2)",
        "CREATE PUBLICATION pub FOR TABLE g, i",
    )
    both.target(
        "CREATE TABLE g (id int PRIMARY KEY, v int, doubled int GENERATED ALWAYS AS (v * 2) STORED)",
        "CREATE TABLE i (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v int)",
    )
    both.start()
    for table in ("g", "i"):
        both.source(
            f"INSERT INTO {table} VALUES (3, 3), (4, 4)",
            f"UPDATE {table} SET v = v * 10 WHERE id IN (1, 3)",
            f"UPDATE {table} SET id = id + 100 WHERE id = 2",
            f"DELETE FROM {table} WHERE id = 4",
        )
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT * FROM g ORDER BY id") == [(1, 10, 20), (3, 30, 60), (102, 2, 4)]


def test_values_may_be_swapped_between_rows_of_a_unique_column(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, v text)")
    both.source("INSERT INTO t SELECT i, i, 'v' FROM generate_series(1, 6) i", "CREATE PUBLICATION pub FOR TABLE t")
    both.start()
    both.source(
        "BEGIN; UPDATE t SET u = -1 WHERE id = 1; UPDATE t SET u = 1 WHERE id = 2; UPDATE t SET u = 2 WHERE id = 1;"
        " COMMIT",
        "UPDATE t SET u = -3 WHERE id = 3",
        "UPDATE t SET u = 3 WHERE id = 4",
        "UPDATE t SET u = 4 WHERE id = 5",
        "BEGIN; DELETE FROM t WHERE id = 6; INSERT INTO t VALUES (7, 6, 'takes over'); COMMIT",
        "BEGIN; UPDATE t SET id = 100 WHERE id = 1; UPDATE t SET id = 1 WHERE id = 2; UPDATE t SET id = 2"
        " WHERE id = 100; COMMIT",
    )
    both.sync()
    both.assert_equal()
    both.assert_equal("SELECT * FROM t ORDER BY id", source=True)
