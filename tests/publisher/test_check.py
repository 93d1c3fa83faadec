"""Each check is seen firing and quiet; where the fix is SQL or a command it is pasted, and the check falls silent."""

from __future__ import annotations

import subprocess
from contextlib import closing

import psycopg
import pytest

from conftest import Database
from processes import eventually
from publisher.checking import assert_fixed, paste, trouble
from publisher.conftest import PASSWORD, source_of
from walmere.config import Source
from walmere.errors import ConfigError
from walmere.lsn import INVALID_LSN
from walmere.publisher import check as preflight
from walmere.publisher import check_slot, slot
from walmere.publisher.check import check
from walmere.publisher.connect import Connection, connect
from walmere.publisher.finding import Check, Level
from walmere.publisher.stream import Stream
from walmere.testing.server import Server, binaries

NAMES = [
    "connection", "server_version", "options", "standby", "wal_level", "replication_slots", "wal_senders", "role",
    "publication", "column_lists", "select", "row_security", "replica_identity", "partition_identity", "locks",
    "unlogged_tables", "foreign_tables", "slot", "max_slot_wal_keep_size", "idle_database", "old_transactions",
]  # fmt: skip


def test_a_good_source_has_nothing_but_ok_and_the_missing_limit(shop: Database, role: str) -> None:
    shop.execute(f'GRANT SELECT ON item TO "{role}"')
    findings = check(source_of(shop, user=role, heartbeat=10.0))
    newest = ["idle_replication_slot_timeout"] if shop.connection.info.server_version >= 180_000 else []
    assert sorted(f.name for f in findings) == sorted(NAMES + newest)
    assert {f.name for f in findings if f.level is not Level.OK} == {"max_slot_wal_keep_size"}
    assert all(f.what and (f.level is Level.OK) == (not f.fix) for f in findings)
    assert shop.value("SELECT count(*) FROM pg_replication_slots WHERE database = %s", shop.name) == 0


def test_a_server_that_is_not_there_is_one_finding() -> None:
    source = Source.model_validate(
        {"dsn": "postgresql://u:s3cr3t@127.0.0.1:1/d%20b", "publications": ["p"], "slot": "s"}, strict=False
    )
    [finding] = check(source)
    assert (finding.name, finding.level) == ("connection", Level.PROBLEM)
    assert finding.fix == "pg_isready -d 'user=u dbname='\"'\"'d b'\"'\"' host=127.0.0.1 port=1'"
    assert "s3cr3t" not in repr(finding)
    if binaries():
        server_programs = str(next(iter(binaries().values())))
        done = subprocess.run(
            finding.fix, shell=True, text=True, capture_output=True, env={"PATH": server_programs}, check=False
        )
        assert "no response" in done.stdout


def test_a_refused_login_is_one_finding(scram_server: Server) -> None:
    source = Source.model_validate(
        {"dsn": scram_server.dsn(user="app"), "password": "wr0ng", "publications": ["p"], "slot": "s"}, strict=False
    )
    [finding] = check(source)
    assert (finding.name, finding.level) == ("connection", Level.PROBLEM)
    assert "WALMERE_SOURCE__PASSWORD" in finding.fix
    assert "wr0ng" not in repr(finding)
    assert PASSWORD not in repr(finding)


def test_a_string_that_is_no_connection_string_is_a_matter_of_configuration() -> None:
    with pytest.raises(ConfigError):
        check(Source.model_validate({"dsn": "nonsense", "publications": ["p"], "slot": "s"}, strict=False))


def test_a_connection_that_breaks_ends_the_preflight(shop: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(connection: Connection, _source: Source) -> Check:
        connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        yield from ()
        return ""

    monkeypatch.setattr(preflight, "_CHECKS", (breaking, preflight.wal_level))
    assert [(f.name, f.level) for f in check(source_of(shop))] == [
        ("connection", Level.OK),
        ("connection", Level.PROBLEM),
    ]


def test_a_check_that_may_not_look_says_so_and_the_others_go_on(shop: Database, role: str) -> None:
    shop.execute(
        f'GRANT SELECT ON item TO "{role}"',
        "REVOKE SELECT ON pg_publication_rel FROM PUBLIC",
        "REVOKE EXECUTE ON FUNCTION pg_is_in_recovery() FROM PUBLIC",
    )
    source = source_of(shop, user=role)
    blind = [f for f in check(source) if f.what.startswith("cannot be checked")]
    assert [f.name for f in blind][:2] == ["standby", "replication_slots"]
    assert "select" in {f.name for f in blind}
    assert {f.level for f in blind} == {Level.WARNING}
    assert {f.fix for f in blind} == {
        f'GRANT SELECT ON pg_catalog.pg_publication_rel TO "{role}";',
        f'GRANT EXECUTE ON FUNCTION pg_catalog.pg_is_in_recovery TO "{role}";',
    }
    for fix in {f.fix for f in blind}:
        assert paste(shop.server, shop.name, fix).returncode == 0
    assert not [f for f in check(source) if f.what.startswith("cannot be checked")]


def test_a_lock_on_a_table_does_not_hold_the_preflight_up_and_is_named(
    shop: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "LOCK_TIMEOUT", "50ms")
    with psycopg.connect(shop.dsn) as other:
        other.execute("LOCK TABLE item IN ACCESS EXCLUSIVE MODE")
        found = check(source_of(shop))
    assert not [each for each in found if each.what.startswith("cannot be checked")], "nothing waits for the lock"
    [(level, what)] = [(each.level, each.what) for each in found if each.name == "locks"]
    assert level == Level.WARNING
    assert what.startswith('"public"."item" is locked: process ')


def test_a_version_too_old_is_a_problem_and_one_too_new_a_warning(
    shop: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trouble(source_of(shop), "server_version") == []
    monkeypatch.setattr(preflight, "NEWEST_TESTED", 14)
    assert [level for level, _, _ in trouble(source_of(shop), "server_version")] == ["warning"]
    monkeypatch.setattr(preflight, "OLDEST", 99)
    assert [level for level, _, _ in trouble(source_of(shop), "server_version")] == ["problem", "warning"]


def test_an_option_that_the_version_does_not_have_is_a_problem(shop: Database) -> None:
    major = shop.connection.info.server_version // 10_000
    source = source_of(shop, two_phase=True, origin="none", failover=True)
    assert [(level, fix) for level, _, fix in trouble(source, "options")] == [
        ("problem", f"export WALMERE_SOURCE__{name}={default}")
        for name, default, since in (("ORIGIN", "any", 16), ("FAILOVER", "false", 17))
        if major < since
    ]


@pytest.mark.parametrize(
    ("private_server", "level"),
    [
        pytest.param(15, "problem", marks=pytest.mark.server(version=15)),
        pytest.param(18, "warning", marks=pytest.mark.server(version=18)),
    ],
    indirect=["private_server"],
)
def test_a_standby_is_a_problem_before_16_and_a_warning_after(private_server: Server, level: str) -> None:
    database = Database(private_server)
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    source = source_of(database, heartbeat=10.0)
    assert trouble(source, "standby") == []
    with closing(connect(source, "test", replication=True)) as connection:
        slot.create(connection, source)
    database.connection.close()
    private_server.stop()
    (private_server.data / "standby.signal").touch()
    private_server.start()
    findings = check(source)
    assert [f.level for f in findings if f.name == "standby"] == [level]
    assert not [f for f in findings if f.what.startswith("cannot be checked")]
    assert [f.level for f in findings if f.name == "wal_status"] == ["ok"]
    if level == "problem":
        assert paste(private_server, "postgres", next(f.fix for f in findings if f.name == "standby")).returncode == 0
        eventually(lambda: trouble(source, "standby") == [])


@pytest.mark.server(settings={"wal_level": "replica", "max_replication_slots": "1", "max_wal_senders": "1"})
def test_settings_that_leave_no_room_are_problems_until_they_are_changed(
    private_server: Server, private_database: Database
) -> None:
    database = private_database
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    source = source_of(database)
    findings = {f.name: f for f in check(source)}
    for name, setting, value in (
        ("wal_level", "wal_level", "logical"),
        ("replication_slots", "max_replication_slots", "2"),
        ("wal_senders", "max_wal_senders", "2"),
    ):
        assert findings[name].level is Level.PROBLEM
        assert findings[name].fix == f"ALTER SYSTEM SET {setting} = '{value}';  -- then restart the server"
    with closing(connect(source, "other", replication=True)):
        [(level, what, fix)] = trouble(source, "role")
        assert (level, "max_wal_senders" in what, "max_wal_senders" in fix) == ("warning", True, True)
    database.connection.close()
    assert paste(private_server, "postgres", findings["wal_level"].fix).returncode == 0
    private_server.restart()

    with closing(connect(source, "walmere_test", replication=True)) as connection:
        slot.create(connection, source)
        Stream(source, connection, INVALID_LSN)
        findings = {f.name: f for f in check(source)}
        for name in ("replication_slots", "wal_senders"):
            assert findings[name].level is Level.WARNING  # our own are there, and only tables cannot be synchronised
            assert paste(private_server, "postgres", findings[name].fix).returncode == 0
    private_server.restart()
    for name in ("wal_level", "replication_slots", "wal_senders", "role"):
        assert trouble(source, name) == []


def test_a_role_without_replication_is_a_problem(shop: Database, role: str) -> None:
    shop.execute(f'ALTER ROLE "{role}" NOREPLICATION')
    source = source_of(shop, user=role)
    [(level, what, fix)] = trouble(source, "role")
    assert (level, fix) == ("problem", f'ALTER ROLE "{role}" REPLICATION;')
    assert "cannot start a walsender" in what
    assert_fixed(shop, source, "role")


def test_on_a_managed_service_the_right_to_replicate_is_a_membership(shop: Database, role: str) -> None:
    shop.execute(f'ALTER ROLE "{role}" NOREPLICATION', "CREATE ROLE rds_replication")
    try:
        [(_, _, fix)] = trouble(source_of(shop, user=role), "role")
    finally:
        shop.execute("DROP ROLE rds_replication")
    assert fix == f'GRANT rds_replication TO "{role}";'


def test_each_right_to_read_that_is_missing_is_a_problem(shop: Database, role: str) -> None:
    shop.execute(
        'CREATE SCHEMA "Odd schema"',
        'CREATE TABLE "Odd schema"."Odd ""table" (id int PRIMARY KEY)',
        "CREATE TABLE partly (id int PRIMARY KEY, shown text, hidden text)",
        "CREATE TABLE derived (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)",
        "CREATE TABLE by_column (id int PRIMARY KEY, v text)",
        f'GRANT SELECT (id, v) ON by_column TO "{role}"',
        'ALTER PUBLICATION pub ADD TABLE "Odd schema"."Odd ""table", partly (id, shown), derived, by_column',
    )
    source = source_of(shop, user=role)
    assert [(level, fix) for level, _, fix in trouble(source, "select")] == [
        ("problem", f'GRANT USAGE ON SCHEMA "Odd schema" TO "{role}";'),
        ("problem", f'GRANT SELECT ON TABLE "Odd schema"."Odd ""table" TO "{role}";'),
        ("problem", f'GRANT SELECT ON TABLE public.derived TO "{role}";'),
        ("problem", f'GRANT SELECT ON TABLE public.item TO "{role}";'),
        ("problem", f'GRANT SELECT (id, shown) ON TABLE public.partly TO "{role}";'),
    ]
    assert_fixed(shop, source, "select")


def test_row_security_that_applies_to_the_role_is_a_problem(shop: Database, role: str) -> None:
    shop.execute(f'GRANT SELECT ON item TO "{role}"', "ALTER TABLE item ENABLE ROW LEVEL SECURITY")
    assert trouble(source_of(shop), "row_security") == []  # not to a superuser
    source = source_of(shop, user=role)
    [(level, what, fix)] = trouble(source, "row_security")
    assert (level, fix) == ("problem", f'ALTER ROLE "{role}" BYPASSRLS;')
    assert "public.item" in what
    assert_fixed(shop, source, "row_security")


def test_row_security_of_a_partition_is_a_problem_of_its_root(database: Database, role: str) -> None:
    database.execute(
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF root FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE high PARTITION OF root FOR VALUES FROM (10) TO (20)",
        "ALTER TABLE high ENABLE ROW LEVEL SECURITY",
        "CREATE PUBLICATION pub FOR TABLE root WITH (publish_via_partition_root)",
    )
    source = source_of(database, user=role)
    [(level, what, fix)] = trouble(source, "row_security")
    assert (level, fix) == ("problem", f'ALTER ROLE "{role}" BYPASSRLS;')
    assert "public.high" in what
    assert_fixed(database, source, "row_security")


def test_a_publication_that_is_missing_is_a_problem(shop: Database) -> None:
    source = source_of(shop, "pub", 'My "pub"')
    [(level, _, fix)] = trouble(source, "publication")
    assert (level, fix) == ("problem", 'CREATE PUBLICATION "My ""pub""" FOR ALL TABLES;')
    assert_fixed(shop, source, "publication")


def test_a_publication_without_tables_is_a_problem(shop: Database) -> None:
    shop.execute('CREATE TABLE "Other" (id int)', 'CREATE PUBLICATION "Empty"')
    source = source_of(shop, "Empty")
    [(level, _, fix)] = trouble(source, "publication")
    assert (level, fix) == ("problem", 'ALTER PUBLICATION "Empty" ADD TABLE public.item, public."Other";')
    assert_fixed(shop, source, "publication")


def test_a_publication_of_a_database_without_tables_is_a_warning(database: Database) -> None:
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES", "CREATE PUBLICATION listed")
    assert [level for level, _, _ in trouble(source_of(database), "publication")] == ["warning"]
    [(_, _, fix)] = trouble(source_of(database, "listed"), "publication")
    assert fix.startswith("--")
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    assert trouble(source_of(database), "publication") == []


def test_a_table_without_replica_identity_is_a_problem(database: Database) -> None:
    database.execute(
        "CREATE TABLE bare (id int)",
        "CREATE TABLE nullable (id int UNIQUE)",
        'CREATE TABLE "Unique" (id int NOT NULL, v int, CONSTRAINT "U" UNIQUE (id) INCLUDE (v))',
        "CREATE TABLE nothing (id int PRIMARY KEY)",
        "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
        "CREATE TABLE dropped (id int PRIMARY KEY, v int NOT NULL DEFAULT 0 UNIQUE)",
        "ALTER TABLE dropped REPLICA IDENTITY USING INDEX dropped_v_key",
        "ALTER TABLE dropped DROP CONSTRAINT dropped_v_key",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    source = source_of(database)
    tables = ["bare", '"Unique"', "dropped", "nothing", "nullable"]
    offered = trouble(source, "replica_identity")
    assert {level for level, _, _ in offered} == {"problem"}
    assert {fix.partition(";")[0] for _, _, fix in offered} == {
        f"ALTER TABLE public.{change}"
        for change in (
            "bare REPLICA IDENTITY FULL",
            "nullable REPLICA IDENTITY FULL",
            '"Unique" REPLICA IDENTITY USING INDEX "U"',
            "nothing REPLICA IDENTITY DEFAULT",
            "dropped REPLICA IDENTITY DEFAULT",
        )
    }
    for table in tables:
        database.execute(f"INSERT INTO {table} VALUES (1)")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="replica identity"):
            database.execute(f"DELETE FROM {table}")
    assert_fixed(database, source, "replica_identity")
    database.execute(*(f"DELETE FROM {table}" for table in tables))


def test_partitions_need_a_replica_identity_of_their_own(database: Database) -> None:
    database.execute(
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF root FOR VALUES FROM (0) TO (9)",
        "CREATE TABLE mid PARTITION OF root FOR VALUES FROM (9) TO (99) PARTITION BY RANGE (id)",
        "CREATE TABLE high PARTITION OF mid FOR VALUES FROM (9) TO (99)",
        "CREATE PUBLICATION pub FOR TABLE root WITH (publish_via_partition_root)",
        "CREATE PUBLICATION leaves FOR TABLE root",
    )
    sources = source_of(database), source_of(database, "leaves")
    assert [trouble(source, "replica_identity") for source in sources] == [[], []]
    database.execute("ALTER TABLE high REPLICA IDENTITY NOTHING", "ALTER TABLE root REPLICA IDENTITY NOTHING")
    of = {
        "high": "ALTER TABLE public.high REPLICA IDENTITY DEFAULT;",
        "root": "ALTER TABLE public.root REPLICA IDENTITY DEFAULT;",
    }
    assert [fix for _, _, fix in trouble(sources[0], "replica_identity")] == [of["high"], of["root"]]
    assert [fix for _, _, fix in trouble(sources[1], "replica_identity")] == [of["high"]]
    assert_fixed(database, sources[0], "replica_identity")


def test_no_replica_identity_is_needed_for_inserts_alone(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int)",
        "CREATE PUBLICATION pub FOR TABLE t WITH (publish = 'insert, truncate')",
        "CREATE TABLE u (id int)",
        "ALTER TABLE u REPLICA IDENTITY FULL",
        "CREATE PUBLICATION whole FOR TABLE u",
    )
    assert trouble(source_of(database, "pub", "whole"), "replica_identity") == []


@pytest.fixture
def half_published(database: Database) -> Database:
    """Tables that no publication can have, beside and below those that it has."""
    database.execute(
        "CREATE FOREIGN DATA WRAPPER nothing",
        'CREATE SERVER "Far away" FOREIGN DATA WRAPPER nothing',
        "CREATE SCHEMA other",
        "CREATE UNLOGGED TABLE passing (id int PRIMARY KEY)",
        'CREATE FOREIGN TABLE other.distant (id int) SERVER "Far away"',
        "CREATE TABLE root (id int) PARTITION BY LIST (id)",
        "ALTER TABLE root REPLICA IDENTITY FULL",
        "CREATE UNLOGGED TABLE other.part_u PARTITION OF root FOR VALUES IN (1)",
        'CREATE FOREIGN TABLE part_f PARTITION OF root FOR VALUES IN (2) SERVER "Far away"',
        "CREATE PUBLICATION all_tables FOR ALL TABLES",
        "CREATE PUBLICATION one_schema FOR TABLES IN SCHEMA public",
        "CREATE PUBLICATION other_schema FOR TABLES IN SCHEMA other",
        "CREATE PUBLICATION partitions FOR TABLE root WITH (publish_via_partition_root)",
        "CREATE TABLE apart (id int PRIMARY KEY)",
        "CREATE PUBLICATION neither FOR TABLE apart",
    )
    return database


def test_tables_that_a_publication_silently_leaves_out_are_named(half_published: Database) -> None:
    def named(publication: str) -> set[tuple[str, str]]:
        source = source_of(half_published, publication)
        said = trouble(source, "unlogged_tables") + trouble(source, "foreign_tables")
        return {(level, what.split()[0]) for level, what, _ in said}

    beside_u, beside_f = ("warning", "public.passing"), ("warning", "other.distant")
    below_u, below_f = ("problem", "other.part_u"), ("problem", "public.part_f")
    assert named("all_tables") == {beside_u, beside_f, below_u, below_f}
    assert named("one_schema") == {beside_u, below_u, below_f}  # a partition goes with its root
    assert named("other_schema") == {beside_f, below_u}
    assert named("partitions") == {below_u, below_f}
    assert named("neither") == set()


def test_tables_that_are_left_out_can_be_brought_in_or_taken_apart(half_published: Database) -> None:
    source = source_of(half_published, "partitions")
    assert_fixed(half_published, source, "unlogged_tables")
    assert_fixed(half_published, source, "foreign_tables")
    [(_, _, fix)] = [
        said for said in trouble(source_of(half_published, "all_tables"), "foreign_tables") if "distant" in said[1]
    ]
    assert fix == '-- publish it on the server that has its rows: foreign server "Far away"'


def test_an_idle_database_without_heartbeat_is_a_warning(shop: Database) -> None:
    assert [(level, fix) for level, _, fix in trouble(source_of(shop, heartbeat=0.0), "idle_database")] == [
        ("warning", "export WALMERE_SOURCE__HEARTBEAT=10")
    ]
    assert trouble(source_of(shop, heartbeat=10.0), "idle_database") == []


def test_a_role_that_may_not_write_the_heartbeat_is_a_warning(shop: Database, role: str) -> None:
    [signature] = [
        name
        for (name,) in shop.rows(
            "SELECT oid::regprocedure::text FROM pg_proc WHERE proname = 'pg_logical_emit_message'"
        )
        if "bytea" not in name
    ]
    shop.execute(f"REVOKE EXECUTE ON FUNCTION {signature} FROM PUBLIC")
    source = source_of(shop, user=role, heartbeat=10.0)
    [(level, _, fix)] = trouble(source, "idle_database")
    assert (level, fix) == ("warning", f'GRANT EXECUTE ON FUNCTION {signature} TO "{role}";')
    assert_fixed(shop, source, "idle_database")


def test_transactions_open_for_long_are_warned_of(shop: Database, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(shop, user=role)
    with psycopg.connect(shop.dsn) as writer, psycopg.connect(shop.dsn) as reader:
        writer.execute("INSERT INTO item VALUES (1)")
        reader.execute("SELECT * FROM item")  # has written nothing, so it holds nothing back
        shop.execute("BEGIN", "INSERT INTO item VALUES (2)", f"PREPARE TRANSACTION 'it''s {shop.name}'")
        assert trouble(source_of(shop), "old_transactions") == []  # not for long
        [(level, _, fix)] = trouble(source, "old_transactions")
        assert (level, fix) == ("warning", f'GRANT pg_read_all_stats TO "{role}";')
        assert_fixed(shop, source, "old_transactions")

        monkeypatch.setattr(check_slot, "OLD_SECONDS", 0)
        open_for_long, prepared = trouble(source, "old_transactions")
        assert f"(pid {writer.info.backend_pid})" in open_for_long[1]
        assert open_for_long[2] == f"SELECT pg_terminate_backend({writer.info.backend_pid});"
        assert f"prepared transaction 'it''s {shop.name}'" in prepared[1]
        writer.rollback()
        assert_fixed(shop, source, "old_transactions")
