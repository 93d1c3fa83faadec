"""Story 13: partitioned tables of the publisher, of the subscriber, or of both."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide

pytestmark = pytest.mark.long

PUBLISHER = (
    "CREATE TABLE tab (a int PRIMARY KEY, b text) PARTITION BY LIST (a)",
    "CREATE TABLE tab_1 (b text, a int NOT NULL)",
    "ALTER TABLE tab ATTACH PARTITION tab_1 FOR VALUES IN (1, 2, 3)",
    "CREATE TABLE tab_2 PARTITION OF tab FOR VALUES IN (4, 5, 6)",
    "CREATE TABLE tab_def PARTITION OF tab DEFAULT",
)
CHANGES = (
    "INSERT INTO tab VALUES (1, 'one')",
    "INSERT INTO tab_1 (a) VALUES (3)",
    "INSERT INTO tab_2 VALUES (5)",
    "INSERT INTO tab VALUES (0, 'zero')",
    "UPDATE tab SET a = 2 WHERE a = 1",
    "UPDATE tab SET a = 6 WHERE a = 5",
    "UPDATE tab SET a = 4 WHERE a = 6",
    "UPDATE tab SET a = 6, b = 'six' WHERE a = 4",
    "UPDATE tab SET a = 1 WHERE a = 0",  # moves to another partition
    "UPDATE tab SET a = 4 WHERE a = 1",
    "DELETE FROM tab WHERE a = 3",
)
ACTIVITY = """
CREATE TABLE activity (n int GENERATED ALWAYS AS IDENTITY, tab text, op text, old int, new int);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO public.activity (tab, op, old, new) SELECT TG_RELNAME, TG_OP,
    CASE WHEN TG_OP <> 'INSERT' THEN OLD.a END, CASE WHEN TG_OP <> 'DELETE' THEN NEW.a END;
  RETURN NULL;
END $$
"""


def _watch(both: SideBySide, *tables: str) -> None:
    for table in tables:
        both.target(
            f"CREATE TRIGGER note_{table} AFTER INSERT OR UPDATE OR DELETE ON {table}"
            " FOR EACH ROW EXECUTE FUNCTION note()",
            f"ALTER TABLE ONLY {table} ENABLE REPLICA TRIGGER note_{table}",
        )


def test_partitions_of_the_publisher_go_to_tables_that_are_partitioned_otherwise(both: SideBySide) -> None:
    both.source(*PUBLISHER, "CREATE PUBLICATION pub FOR TABLE tab, tab_1", "INSERT INTO tab VALUES (7, 'copied')")
    both.target(
        "CREATE TABLE tab (c text, a int PRIMARY KEY, b text) PARTITION BY LIST (a)",
        "CREATE INDEX ON tab USING brin (c)",
        "CREATE TABLE tab_1 (b text, c text DEFAULT 'local', a int NOT NULL)",
        "ALTER TABLE tab ATTACH PARTITION tab_1 FOR VALUES IN (1, 2, 3)",
        "CREATE TABLE tab_2 PARTITION OF tab (c DEFAULT 'local') FOR VALUES IN (4, 5, 6) PARTITION BY LIST (a)",
        "CREATE TABLE tab_2_1 (c text, b text, a int NOT NULL)",
        "ALTER TABLE tab_2 ATTACH PARTITION tab_2_1 FOR VALUES IN (5)",
        "CREATE TABLE tab_2_2 PARTITION OF tab_2 FOR VALUES IN (4, 6)",
        "CREATE TABLE tab_def PARTITION OF tab (c DEFAULT 'local') DEFAULT",
        ACTIVITY,
    )
    _watch(both, "tab", "tab_2", "tab_2_2")
    both.start()
    both.source(*CHANGES)
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT tableoid::regclass::text, a, c FROM tab ORDER BY a") == [
        ("tab_1", 2, "local"),
        ("tab_2_2", 4, "local"),
        ("tab_2_2", 6, "local"),
        ("tab_def", 7, "local"),
    ]
    assert both.value("SELECT count(*) FROM activity") > 0
    both.target("INSERT INTO tab (a) VALUES (1), (5)")
    both.source("TRUNCATE tab_2")
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT a FROM tab ORDER BY a") == [(1,), (2,), (7,)]


def test_partitions_of_the_publisher_go_to_plain_tables(both: SideBySide) -> None:
    both.source(*PUBLISHER, "CREATE PUBLICATION pub FOR TABLE tab", "INSERT INTO tab VALUES (7, 'copied')")
    both.target(
        "CREATE TABLE tab (a int PRIMARY KEY, c text DEFAULT 'root', b text)",
        "CREATE TABLE tab_1 (a int PRIMARY KEY, c text DEFAULT 'first', b text)",
        "CREATE TABLE tab_2 (a int PRIMARY KEY, c text DEFAULT 'second', b text)",
        "CREATE TABLE tab_def (a int PRIMARY KEY, b text, c text DEFAULT 'default')",
        ACTIVITY,
    )
    _watch(both, "tab", "tab_2")
    both.start()
    both.source(*CHANGES)
    both.sync()
    both.assert_equal()
    both.source("TRUNCATE tab")
    both.sync()
    both.assert_equal()
    assert both.value("SELECT count(*) FROM tab_1") == 0


@pytest.mark.parametrize("layout", ["hash", "plain"])
def test_changes_via_the_root_go_to_a_root_of_any_layout(both: SideBySide, layout: str) -> None:
    both.source(
        *PUBLISHER,
        "INSERT INTO tab VALUES (7, 'copied'), (1, 'one')",
        "DELETE FROM tab WHERE a = 1",
        "CREATE PUBLICATION pub FOR TABLE tab, tab_1 WITH (publish_via_partition_root = true)",
    )
    both.target(ACTIVITY)
    if layout == "plain":
        both.target("CREATE TABLE tab (a int PRIMARY KEY, c text DEFAULT 'local', b text)")
        _watch(both, "tab")
    else:
        both.target(
            "CREATE TABLE tab (a int PRIMARY KEY, c text DEFAULT 'local', b text) PARTITION BY HASH (a)",
            "CREATE TABLE part_1 (b text, c text, a int NOT NULL)",
            "ALTER TABLE tab ATTACH PARTITION part_1 FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
            "CREATE TABLE part_2 PARTITION OF tab FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        )
        _watch(both, "tab", "part_2")
    both.start()
    both.source(*CHANGES, "TRUNCATE tab_def")  # a truncate of a partition is not sent
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT a FROM tab ORDER BY a") == [(2,), (4,), (6,), (7,)]
    both.source("TRUNCATE tab", "INSERT INTO tab VALUES (3, 'after')")
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT a, b FROM tab") == [(3, "after")]


def test_partitions_that_are_altered_on_either_side(both: SideBySide) -> None:
    both.source(
        "CREATE TABLE tab (a int NOT NULL, b int)",
        "CREATE UNIQUE INDEX tab_a ON tab (a)",
        "ALTER TABLE tab REPLICA IDENTITY USING INDEX tab_a",
        "CREATE PUBLICATION pub FOR TABLE tab",
    )
    both.target(
        "CREATE TABLE tab (a int NOT NULL, b int, c int) PARTITION BY LIST (a)",
        "CREATE TABLE tab_1 PARTITION OF tab DEFAULT",
        "CREATE UNIQUE INDEX tab_a ON tab (a)",
        "ALTER TABLE tab REPLICA IDENTITY USING INDEX tab_a",
        "ALTER TABLE tab_1 REPLICA IDENTITY USING INDEX tab_1_a_idx",
    )
    both.start()
    both.source("INSERT INTO tab VALUES (1, 1)", "UPDATE tab SET a = 2 WHERE a = 1")
    both.sync()
    both.target(
        "ALTER TABLE tab DETACH PARTITION tab_1",
        "ALTER TABLE tab_1 DROP b",
        "ALTER TABLE tab_1 ADD b int",
        "ALTER TABLE tab ATTACH PARTITION tab_1 DEFAULT",
    )
    both.source("UPDATE tab SET a = 3 WHERE a = 2", "INSERT INTO tab VALUES (10, 10)")
    both.sync()
    both.assert_equal("SELECT a, b, c FROM tab ORDER BY a")
    both.target("ALTER TABLE tab REPLICA IDENTITY NOTHING")
    both.source(
        "ALTER TABLE tab DROP b, ADD c int",
        "ALTER TABLE tab ADD b int",
        "UPDATE tab SET c = 1 WHERE a = 3",
        "UPDATE tab SET a = 4 WHERE a = 10",
    )
    both.sync()
    both.assert_equal("SELECT a, b, c FROM tab ORDER BY a")
    assert both.rows("SELECT a, b, c FROM tab ORDER BY a") == [(3, None, 1), (4, None, None)]


@pytest.mark.since(15, "disable_on_error")
def test_a_row_for_which_the_subscriber_has_no_partition_stops_both(both: SideBySide) -> None:
    both.source("CREATE TABLE tab (a int PRIMARY KEY, b text)", "CREATE PUBLICATION pub FOR TABLE tab")
    both.target(
        "CREATE TABLE tab (a int PRIMARY KEY, b text) PARTITION BY RANGE (a)",
        "CREATE TABLE tab_low PARTITION OF tab FOR VALUES FROM (0) TO (10)",
    )
    both.start()
    both.source("INSERT INTO tab VALUES (1, 'low')", "INSERT INTO tab VALUES (11, 'high')")
    log, error = both.both_stop()
    assert "no partition" in log
    assert "no partition" in str(error)
    both.target("CREATE TABLE tab_high PARTITION OF tab FOR VALUES FROM (10) TO (20)")
    both.enable_native()
    both.source("UPDATE tab SET a = 12 WHERE a = 1")  # moves
    both.sync()
    both.assert_equal()


def test_partitions_are_gathered_into_one_table_on_request(both: SideBySide) -> None:
    """Native applies the partitions of the publisher to tables of the same names."""
    both.source(*PUBLISHER, "INSERT INTO tab VALUES (1, 'copied'), (5, 'copied')")
    both.source("CREATE PUBLICATION pub FOR TABLE tab")
    both.target("CREATE TABLE tab (b text, a int PRIMARY KEY)")
    both.native.execute(*(f"CREATE TABLE {each} (a int PRIMARY KEY, b text)" for each in ("tab_1", "tab_2", "tab_def")))
    both.start(target={"gather_partitions": True})
    both.source("DELETE FROM tab", *CHANGES)
    both.sync()
    rows = "SELECT a, b FROM tab ORDER BY a"
    parts = "SELECT a, b FROM (TABLE tab_1 UNION ALL TABLE tab_2 UNION ALL TABLE tab_def) t ORDER BY a"
    assert both.ours.rows(rows) == both.publisher.rows(rows) == both.native.rows(parts)
    both.source("TRUNCATE tab", "INSERT INTO tab VALUES (2, 'after')")
    both.sync()
    assert both.ours.rows(rows) == both.publisher.rows(rows) == both.native.rows(parts) == [(2, "after")]
