"""Story 18: databases and roles have settings of their own; values are the same, and no row is hidden silently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from conftest import Database
from delta_rows import read_delta
from mirror import Mirror
from processes import eventually
from walmere import Subscription
from walmere.errors import WalmereError
from walmere.publisher.check import check
from walmere.publisher.finding import Level
from walmere.testing.server import Server


@pytest.fixture
def role(database18: Database) -> Iterator[str]:
    """A role that may log in and replicate, and nothing else."""
    name = f"Rôle {database18.name}"
    database18.execute(f'CREATE ROLE "{name}" LOGIN REPLICATION')
    yield name
    database18.execute(f'DROP OWNED BY "{name}"', f'DROP ROLE "{name}"')


@pytest.fixture(params=["LATIN1", "SQL_ASCII"])
def encoded(server18: Server, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database of another encoding than everybody's."""
    database = Database(server18, f"ENCODING '{request.param}' TEMPLATE template0")
    database.execute("SET client_encoding = 'UTF8'")
    yield database
    database.drop()


def test_names_and_values_come_through_from_a_database_of_another_encoding(encoded: Database, tmp_path: Path) -> None:
    database = encoded
    passing = "\"Schlüssel\" <> 'ß13'"
    database.execute(
        'CREATE SCHEMA "été"',
        "CREATE TYPE größe AS ENUM ('groß', 'klein')",
        'CREATE TABLE "été"."Bücher & Co" ("Schlüssel" text PRIMARY KEY, "Größe" größe, "ÿ" text[], "Maß" jsonb)',
        "INSERT INTO \"été\".\"Bücher & Co\" SELECT 'ß' || i, 'groß', ARRAY['é', NULL, ''], '{\"ä\": \"ö\"}'"
        " FROM generate_series(1, 20) i",
        'CREATE PUBLICATION "publié" FOR TABLE "été"."Bücher & Co"' + database.narrowed(f" WHERE ({passing})"),
    )
    if database.value("SHOW server_encoding") == "SQL_ASCII":  # which is none: whatever bytes there are
        database.execute("""INSERT INTO "été"."Bücher & Co" VALUES ('日本 😀', 'klein', '{😀}', '"😀"')""")
    mirror = Mirror(database, tmp_path, "publié")
    mirror.run_once()
    published = {"columns": '"Schlüssel", "Größe", "ÿ", "Maß"::text', "where": database.narrowed(passing) or "true"}
    mirror.assert_equal("Bücher & Co", schema="été", **published)
    database.execute(
        'UPDATE "été"."Bücher & Co" SET "ÿ" = ARRAY[\'½ Å\'] WHERE "Schlüssel" > \'ß5\'',
        'UPDATE "été"."Bücher & Co" SET "Schlüssel" = \'Ä\' || "Schlüssel", "Größe" = NULL WHERE "Schlüssel" < \'ß12\'',
        'DELETE FROM "été"."Bücher & Co" WHERE "Schlüssel" = \'ß6\'',
        "INSERT INTO \"été\".\"Bücher & Co\" VALUES ('¿qué?', 'klein', '{}', '[\"ÿ\"]')",
    )
    mirror.run_once()
    mirror.assert_equal("Bücher & Co", schema="été", **published)
    assert mirror.delta("Bücher & Co", "été").schema().to_arrow().names == ["Schlüssel", "Größe", "ÿ", "Maß"]


def test_bytes_that_are_not_utf8_are_rejects_from_a_copy_and_from_the_stream(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE CAST (bytea AS text) WITHOUT FUNCTION",  # makes text that no client could have written
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "INSERT INTO t VALUES (1, '\\x636166e9205c20ff'::bytea::text), (2, 'fine')",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute(
        "INSERT INTO t VALUES (3, '\\xfe'::bytea::text)", "UPDATE t SET note = '\\xc3'::bytea::text WHERE id = 2"
    )
    mirror.run_once()
    rows = read_delta(mirror.delta("t")).to_pylist()
    assert sorted(row["id"] for row in rows if row["note"] is None) == [1, 2, 3]
    rejects = read_delta(mirror.delta("t", "_rejects.public")).select(["key", "column", "value"])
    assert sorted(tuple(row.values()) for row in rejects.to_pylist()) == [
        ('{"id": "1"}', "note", r"caf\xe9 \ \xff"),
        ('{"id": "2"}', "note", r"\xc3"),
        ('{"id": "3"}', "note", r"\xfe"),
    ]
    assert Subscription(mirror.file).verify().equal


LOOKS = {
    "DateStyle": ("SQL, DMY", "German"),
    "IntervalStyle": ("iso_8601", "sql_standard"),
    "TimeZone": ("'Asia/Kathmandu'", "'America/St_Johns'"),
    "extra_float_digits": ("-15", "0"),
    "bytea_output": ("escape", "escape"),
    "client_encoding": ("LATIN1", "WIN1252"),
    "lc_monetary": ("'C.UTF-8'", "'POSIX'"),
    "lc_numeric": ("'C.UTF-8'", "'POSIX'"),
    "search_path": ("shadow, pg_catalog", "shadow"),
    "standard_conforming_strings": ("off", "off"),
    "quote_all_identifiers": ("on", "on"),
    "default_transaction_isolation": ("serializable", "'repeatable read'"),
    "default_transaction_read_only": ("on", "on"),
    "default_transaction_deferrable": ("on", "on"),
    "row_security": ("on", "on"),
    "xmlbinary": ("hex", "hex"),
}
"""On the role, and on the database."""


def test_values_look_the_same_whatever_role_and_database_have_set(
    database18: Database, role: str, tmp_path: Path
) -> None:
    database = database18
    types = {
        "d": ("date", "2026-02-01"),
        "t": ("timestamp", "2026-02-01 13:14:15.123456"),
        "z": ("timestamptz", "2026-02-01 13:14:15.123456+05:30"),
        "i": ("interval", "-1 year 2 mons -3 days +04:05:06.7"),
        "f": ("float8", "0.1234567890123456789"),
        "r": ("float4", "3.14159274"),
        "b": ("bytea", r"\x00ff5c27"),
        "m": ("money", "-1234.56"),
        "n": ("numeric", "1234567.890"),
        "c": ("regclass", "shadow.t"),
        "a": ("timestamptz[]", '{"2026-02-01 13:14:15+00",NULL}'),
        "p": ("daterange", "[2026-02-01,2026-02-03)"),
        "o": ("pair", r'("2026-02-01","\\x00ff")'),
        "s": ("text", r"back\slash ' € 😀"),
    }
    database.execute(
        "CREATE SCHEMA shadow",
        "CREATE TYPE shadow.pair AS (day date, bytes bytea)",
        "CREATE VIEW shadow.pg_class AS SELECT 'nonsense' AS oid",
        "CREATE FUNCTION shadow.set_config(text, text, boolean) RETURNS text LANGUAGE sql AS $$SELECT 'nothing'$$",
        "SET search_path = pg_catalog, shadow",
        f"CREATE TABLE shadow.t (id int PRIMARY KEY, {', '.join(f'{k} {kind}' for k, (kind, _) in types.items())})",
    )
    insert = f"INSERT INTO shadow.t VALUES (%s, {', '.join(f'%s::{kind}' for kind, _ in types.values())})"
    values = [value for _, value in types.values()]
    for number in (1, 2):
        database.connection.execute(insert, [number, *values])
    database.execute(
        "CREATE PUBLICATION pub FOR TABLE shadow.t" + database.narrowed(r" WHERE (s <> E'other\\slash')"),
        "ALTER TABLE shadow.t REPLICA IDENTITY FULL",
        f'GRANT USAGE ON SCHEMA shadow TO "{role}"',
        f'GRANT SELECT ON shadow.t TO "{role}"',
    )
    for setting, (of_role, of_database) in LOOKS.items():
        database.execute(
            f'ALTER ROLE "{role}" SET {setting} = {of_role}',
            f"ALTER DATABASE {database.name} SET {setting} = {of_database}",
        )
    mirror = Mirror(database, tmp_path, user=role)
    mirror.run_once()
    database.connection.execute(insert, [3, *values])
    database.connection.execute(insert, [4, *values])
    database.execute("UPDATE shadow.t SET id = id + 10 WHERE id IN (2, 4)")
    mirror.run_once()
    # as every session of Walmere has it: this one's own settings were made before those of the database
    database.execute(
        "SET search_path = ''", "SET DateStyle = ISO", "SET TimeZone = 'UTC'", "SET standard_conforming_strings = on"
    )
    exact = ("d", "t", "z", "f", "b", "a", "s")
    columns = ", ".join(["id", *(name if name in exact else f"{name}::text" for name in types)])
    columns = columns.replace("r::text", "r::float8")
    mirror.assert_equal("t", schema="shadow", columns=columns)
    copied, followed = (
        {row[1:] for row in mirror.rows("t", "shadow") if row[0] % 10 in some} for some in ((1, 2), (3, 4))
    )
    assert copied == followed
    assert len(copied) == 1


TIMEOUTS = {
    "statement_timeout": 14,
    "lock_timeout": 14,
    "idle_in_transaction_session_timeout": 14,
    "idle_session_timeout": 14,
    "transaction_timeout": 17,
}
"""And the first of our versions that has it."""


def test_no_timeout_that_is_meant_for_people_ends_a_session(database18: Database, role: str, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t SELECT generate_series(1, 1000)",
        f'GRANT SELECT ON t TO "{role}"',
        "CREATE PUBLICATION pub FOR TABLE t",
        *(
            f"ALTER ROLE \"{role}\" SET {timeout} = '1s'"
            for timeout, since in TIMEOUTS.items()
            if since <= database.major
        ),
    )
    mirror = Mirror(database, tmp_path, user=role)
    waiting = (
        "SELECT FROM pg_stat_activity WHERE usename = %s AND wait_event_type = 'Lock'"
        " AND query_start < clock_timestamp() - interval '1.5 s'"
    )
    with psycopg.connect(database.dsn) as writer:
        writer.execute("INSERT INTO t VALUES (1001)")  # a new slot waits for it
        with mirror.following():
            eventually(lambda: database.rows(waiting, role))
            writer.commit()
            mirror.becomes_equal("t")
            database.execute("DELETE FROM t WHERE id > 500")
            mirror.becomes_equal("t")
    mirror.assert_equal("t")
    assert "due to" not in (tmp_path / "subscription/receiver.log").read_text()
    assert [table.error for table in mirror.tables()] == [None]


def test_a_role_needs_replication_and_select_on_what_is_published_and_nothing_else(
    database18: Database, role: str, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE SCHEMA private",
        "CREATE TABLE private.t (id int PRIMARY KEY, v text)",
        "CREATE TABLE columns (id int PRIMARY KEY, shown text, secret text)",
        "CREATE TABLE filtered (id int PRIMARY KEY, v text)",
        # SELECT on the root is all that SELECT … FROM the root needs
        "CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF root FOR VALUES FROM (MINVALUE) TO (50)",
        "CREATE TABLE private.high PARTITION OF root FOR VALUES FROM (50) TO (MAXVALUE)",
        *(
            f"INSERT INTO {table} SELECT i, 'v' FROM generate_series(1, 100) i"
            for table in ("private.t", "columns", "filtered", "root")
        ),
        f"CREATE PUBLICATION pub FOR TABLE private.t, columns{database.narrowed(' (id, shown)')},"
        f" filtered{database.narrowed(' WHERE (id > 10)')}, root WITH (publish_via_partition_root)",
        f'GRANT USAGE ON SCHEMA private TO "{role}"',
        f'GRANT SELECT ON private.t, filtered, root TO "{role}"',
        f'GRANT SELECT{database.narrowed(" (id, shown)")} ON columns TO "{role}"',
        f"REVOKE ALL ON DATABASE {database.name} FROM PUBLIC",
        f'GRANT CONNECT ON DATABASE {database.name} TO "{role}"',
        "REVOKE ALL ON SCHEMA public FROM PUBLIC",
        f'GRANT USAGE ON SCHEMA public TO "{role}"',
    )
    mirror = Mirror(database, tmp_path, user=role)
    assert [finding for finding in check(mirror.config.source) if finding.level is Level.PROBLEM] == []
    mirror.run_once()
    assert [table.rows_copied for table in mirror.tables()] == [100, 100, 90 if database.major >= 15 else 100, 100]
    for table in ("private.t", "columns", "filtered", "root"):
        database.execute(
            f"UPDATE {table} SET id = id + 1000 WHERE id % 10 = 0", f"DELETE FROM {table} WHERE id % 10 = 1"
        )
    mirror.run_once()
    mirror.assert_equal("root")
    mirror.assert_equal("t", schema="private")
    mirror.assert_equal("columns", columns=database.narrowed("id, shown") or "*")
    mirror.assert_equal("filtered", where=database.narrowed("id > 10") or "true")


def told(mirror: Mirror) -> str:
    """What a run says of tables that it cannot copy."""
    with pytest.raises(WalmereError):
        mirror.run_once()
    return "\n".join(table.error for table in mirror.tables() if table.error)


def test_a_table_that_the_role_may_not_read_is_named_with_the_way_out(
    database18: Database, role: str, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE readable (id int PRIMARY KEY)",
        "CREATE TABLE unreadable (id int PRIMARY KEY)",
        "INSERT INTO readable VALUES (1)",
        "INSERT INTO unreadable VALUES (1)",
        f'GRANT SELECT ON readable TO "{role}"',
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database, tmp_path, user=role)
    said = told(mirror)
    assert "permission denied for table unreadable" in said
    assert "walmere check" in said
    [fix] = [finding.fix for finding in check(mirror.config.source) if finding.level is Level.PROBLEM]
    database.execute(fix, "INSERT INTO unreadable VALUES (2)")
    mirror.run_once()
    mirror.assert_equal("readable", "unreadable")


@pytest.mark.long
def test_a_table_whose_rows_are_hidden_from_the_role_is_refused_with_the_way_out(
    database18: Database, role: str, tmp_path: Path
) -> None:
    """The stream has every row; a copy of those that the role may see would never become whole."""
    database = database18
    database.execute(
        "CREATE TABLE secured (id int PRIMARY KEY, owner name)",
        "ALTER TABLE secured ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY own ON secured USING (owner = current_user)",
        f"INSERT INTO secured SELECT i, CASE i % 2 WHEN 0 THEN '{role}' ELSE 'other' END FROM generate_series(1, 10) i",
        "CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF root FOR VALUES FROM (MINVALUE) TO (50)",
        "CREATE TABLE high PARTITION OF root FOR VALUES FROM (50) TO (MAXVALUE)",
        "INSERT INTO root SELECT i, 'v' FROM generate_series(1, 100) i",
        "ALTER TABLE high ENABLE ROW LEVEL SECURITY",  # hides rows of the root
        "CREATE POLICY few ON high USING (id < 60)",
        f'GRANT SELECT ON secured, root, low, high TO "{role}"',
        "CREATE PUBLICATION pub FOR TABLE secured, root WITH (publish_via_partition_root)",
    )
    mirror = Mirror(database, tmp_path, user=role)
    said = told(mirror)
    way_out = f'ALTER ROLE "{role}" BYPASSRLS'
    assert "public.secured" in said
    assert "public.high" in said
    assert said.count(way_out) == 2
    database.execute(way_out)
    mirror.run_once()
    database.execute("UPDATE root SET v = 'w' WHERE id % 2 = 0", "DELETE FROM secured WHERE id < 4")
    mirror.run_once()
    mirror.assert_equal("secured", "root")
