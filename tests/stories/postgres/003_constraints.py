"""Story 3: which constraints, triggers and rules of the subscriber take effect."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide
from walmere.api import Subscription
from walmere.publisher.finding import Level

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


@pytest.mark.long
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


@pytest.mark.long
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


def test_row_triggers_fire_for_each_change_if_enabled_for_replicas(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY)")
    both.source("CREATE PUBLICATION pub FOR TABLE t, u")
    both.target(LOG_TRIGGER)
    for trigger, enable in (("plain", ""), ("replica", "REPLICA"), ("always", "ALWAYS"), ("off", "DISABLE")):
        for timing in ("BEFORE", "AFTER"):
            name = f"{trigger}_{timing.lower()}"
            both.target(
                f"CREATE TRIGGER {name} {timing} INSERT OR UPDATE OR DELETE ON t"
                " FOR EACH ROW EXECUTE FUNCTION log_activity()"
            )
            if enable:
                action = "DISABLE TRIGGER" if enable == "DISABLE" else f"ENABLE {enable} TRIGGER"
                both.target(f"ALTER TABLE t {action} {name}")
    both.start()
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
    fired = both.rows("SELECT trig, count(*) FROM activity GROUP BY 1 ORDER BY 1")
    assert fired == [(f"{name}_{timing}", 10) for name in ("always", "replica") for timing in ("after", "before")]


@pytest.mark.long
def test_statement_triggers_fire_for_each_changed_row_with_ours_and_never_with_native(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY)")
    both.source("CREATE PUBLICATION pub FOR TABLE t, u")
    both.target(LOG_TRIGGER)
    for trigger, enable in (("plain", ""), ("replica", "ENABLE REPLICA"), ("off", "DISABLE")):
        both.target(
            f"CREATE TRIGGER {trigger} AFTER INSERT OR UPDATE OR DELETE ON t"
            " FOR EACH STATEMENT EXECUTE FUNCTION log_activity()"
        )
        if enable:
            both.target(f"ALTER TABLE t {enable} TRIGGER {trigger}")
    both.start()
    found = {each.what: each.level for each in Subscription(both.file).check() if each.name == "target_table"}
    assert found == {
        "public.t has statement triggers that are enabled for replicas: they fire for each changed row": Level.WARNING,
        "public.u can be written": Level.OK,
    }
    assert both.rows("SELECT trig, op FROM activity") == [("replica", "INSERT")]  # of the copy, which has no rows
    both.target("TRUNCATE activity")
    both.source(
        "INSERT INTO t VALUES (1, 'one'), (2, 'two')",
        "UPDATE t SET v = v || '!'",
        "UPDATE t SET id = 3 WHERE id = 1",
        "DELETE FROM t WHERE id = 2",
        "INSERT INTO u VALUES (1)",
    )
    both.sync()
    both.assert_equal("SELECT * FROM t ORDER BY id", "SELECT * FROM u ORDER BY id")
    fired = "SELECT trig, op, count(*) FROM activity GROUP BY 1, 2 ORDER BY 2"
    assert both.native.rows(fired) == []
    assert both.ours.rows(fired) == [("replica", "DELETE", 1), ("replica", "INSERT", 2), ("replica", "UPDATE", 3)]


@pytest.mark.long
@pytest.mark.since(15, "ALTER SUBSCRIPTION SKIP")
@pytest.mark.parametrize("deferrable", ["", " DEFERRABLE INITIALLY DEFERRED"])
def test_foreign_keys_that_are_enabled_for_replicas_are_checked_in_the_order_of_the_source(
    both: SideBySide, deferrable: str
) -> None:
    both.everywhere(
        "CREATE TABLE child (id int PRIMARY KEY, parent int)",
        "CREATE TABLE parent (id int PRIMARY KEY, v int)",
        f"ALTER TABLE child ADD FOREIGN KEY (parent) REFERENCES parent{deferrable}",
    )
    both.target(
        "DO $$ DECLARE r record; BEGIN"
        " FOR r IN SELECT tgrelid::regclass AS t, tgname FROM pg_trigger WHERE tgisinternal"
        " LOOP EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', r.t, r.tgname); END LOOP; END $$"
    )
    both.source("INSERT INTO parent VALUES (1, 1), (2, 2)", "CREATE PUBLICATION pub FOR TABLE child, parent")
    both.start()
    found = {each.what: each.level for each in Subscription(both.file).check() if each.name == "target_table"}
    text = "has foreign keys or deferred constraints that are enabled for replicas, so its changes may be applied"
    assert found == {f"public.{each} {text} row by row": Level.OK for each in ("child", "parent")}
    both.source(
        "INSERT INTO child VALUES (1, 1)",  # the parent is deleted later
        "DELETE FROM child",
        "DELETE FROM parent WHERE id = 1",
        "BEGIN; INSERT INTO parent VALUES (9, 9); INSERT INTO child VALUES (9, 9); COMMIT",
    )
    if deferrable:
        both.source("BEGIN; INSERT INTO child VALUES (10, 10); INSERT INTO parent VALUES (10, 10); COMMIT")
    both.sync()
    both.assert_equal(source=True)
    both.target("DELETE FROM parent WHERE id = 2")
    both.source("BEGIN; UPDATE parent SET v = 90; INSERT INTO child VALUES (2, 2); COMMIT", "DELETE FROM child")
    log, error = both.both_stop()
    assert "child_parent_fkey" in log
    assert "child_parent_fkey" in str(error)
    assert str(both.skip()) in str(error)
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT v FROM parent WHERE id = 9") == [(9,)]


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_rules_fire_with_ours_if_enabled_for_replicas_and_never_with_native(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY, v text)")
    both.source(
        "INSERT INTO t VALUES (1, 'copied')",
        "INSERT INTO u VALUES (1, 'copied')",
        "CREATE PUBLICATION pub FOR TABLE t, u",
    )
    both.target("CREATE TABLE ruled (tab text, id int)")
    for table in ("t", "u"):
        both.target(
            f"CREATE RULE on_insert AS ON INSERT TO {table} DO ALSO INSERT INTO ruled VALUES ('{table}', NEW.id)",
            f"CREATE RULE on_delete AS ON DELETE TO {table} DO INSTEAD NOTHING",
        )
    both.target("ALTER TABLE t ENABLE ALWAYS RULE on_insert", "ALTER TABLE t ENABLE REPLICA RULE on_delete")
    both.start()
    assert both.rows("SELECT * FROM ruled") == []  # COPY fires no rules
    for table in ("t", "u"):
        both.source(
            f"INSERT INTO {table} VALUES (2, 'x'), (3, 'x')",
            f"UPDATE {table} SET v = 'y' WHERE id = 2",
            f"DELETE FROM {table} WHERE id = 3",
        )
    both.sync()
    both.assert_equal("SELECT * FROM u ORDER BY id", source=True)
    rows = [(1, "copied"), (2, "y")]
    assert both.native.rows("SELECT * FROM t ORDER BY id") == rows
    assert both.native.rows("SELECT * FROM ruled") == []
    assert both.ours.rows("SELECT * FROM t ORDER BY id") == [*rows, (3, "x")]
    assert both.ours.rows("SELECT * FROM ruled ORDER BY id") == [("t", 2), ("t", 3)]


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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
