"""Which tables are published, without a lock: the same as `pg_publication_tables` says, on every version."""

from __future__ import annotations

from contextlib import closing

import psycopg
import pytest

from conftest import Database
from publisher.test_table import source_of
from walmere.publisher import catalog
from walmere.publisher.column_lists import conflicts
from walmere.publisher.connect import connect
from walmere.publisher.publication import published
from walmere.subscription.discovery import fingerprint_of_0_1

SCHEMA = """
CREATE SCHEMA s; CREATE TABLE plain (id int PRIMARY KEY, v text, g int GENERATED ALWAYS AS (id + 1) STORED);
ALTER TABLE plain DROP v; ALTER TABLE plain ADD w text; CREATE TABLE s.t (id int PRIMARY KEY);
CREATE UNLOGGED TABLE unlogged (id int); CREATE VIEW seen AS SELECT 1; CREATE TABLE heir () INHERITS (s.t);
CREATE TABLE root (id int, r int, PRIMARY KEY (id, r)) PARTITION BY LIST (r);
CREATE TABLE root_1 PARTITION OF root FOR VALUES IN (1);
CREATE TABLE s.root_2 PARTITION OF root FOR VALUES IN (2) PARTITION BY LIST (id);
CREATE TABLE root_2_1 PARTITION OF s.root_2 FOR VALUES IN (1); CREATE TABLE empty (id int) PARTITION BY LIST (id)
"""
VIA_ROOT = "WITH (publish_via_partition_root)"
PUBLICATIONS = {
    14: (
        "FOR ALL TABLES",
        f"FOR ALL TABLES {VIA_ROOT}",
        "FOR TABLE root, plain",
        f"FOR TABLE root, plain, s.root_2 {VIA_ROOT}",
        f"FOR TABLE s.root_2 {VIA_ROOT}",
        "FOR TABLE root_1, s.t",
        "FOR TABLE ONLY s.t",
        "",
    ),
    15: (
        "FOR TABLES IN SCHEMA s",
        f"FOR TABLES IN SCHEMA s {VIA_ROOT}",
        f"FOR TABLES IN SCHEMA public {VIA_ROOT}",
        "FOR TABLE plain (id) WHERE (id > 3)",
        "FOR TABLE plain, TABLES IN SCHEMA public",
    ),
    18: ("FOR ALL TABLES WITH (publish_generated_columns = stored)", "FOR TABLE plain (id, g)"),
}


def test_the_tables_and_columns_are_those_that_the_servers_own_view_has(database: Database) -> None:
    database.execute(SCHEMA)
    definitions = [each for since, some in PUBLICATIONS.items() if database.major >= since for each in some]
    for number, definition in enumerate(definitions):
        database.execute(f"CREATE PUBLICATION p{number} {definition}")
    generated = "AND attgenerated = ''" if database.major == 15 else ""  # it shows them, and does not send them
    columns = "attnames" if database.major >= 15 else "NULL"
    for number, definition in enumerate(definitions):
        theirs = database.rows(
            f"SELECT schemaname, tablename, ARRAY(SELECT attname FROM pg_attribute WHERE attrelid ="
            f" format('%%I.%%I', schemaname, tablename)::regclass AND attname = ANY({columns}) {generated}"
            " ORDER BY attnum) FROM pg_publication_tables WHERE pubname = %s ORDER BY 1, 2",
            f"p{number}",
        )
        ours = database.rows(
            published(database.connection) + " SELECT nspname, relname, ARRAY(SELECT attname FROM pg_attribute"
            " WHERE attrelid = relid AND attnum = ANY(attnums) ORDER BY attnum) FROM published"
            " JOIN pg_class c ON c.oid = relid JOIN pg_namespace n ON n.oid = relnamespace ORDER BY 1, 2",
            [f"p{number}"],
        )
        assert [row[: 3 if database.major >= 15 else 2] for row in ours] == [
            row[: 3 if database.major >= 15 else 2] for row in theirs
        ], definition


def test_a_table_that_somebody_has_locked_hides_no_other_and_is_named(database: Database) -> None:
    database.execute(SCHEMA, "CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root)")
    if database.major >= 15:
        database.execute("CREATE PUBLICATION filtered FOR TABLE plain WHERE (id > 1)")
    source = source_of(database, "pub", *(["filtered"] if database.major >= 15 else []))
    with psycopg.connect(database.dsn) as other, closing(connect(source, "test")) as connection:
        other.execute("LOCK TABLE plain, root, root_1 IN ACCESS EXCLUSIVE MODE")
        connection.execute("SET lock_timeout = '100ms'")
        tables = catalog.published_tables(connection, source.publications)
        assert [table.name for table in tables] == ["empty", "heir", "plain", "root", "t"]
        locked = catalog.locked_tables(connection, [table.oid for table in tables])
        names = {table.oid: table.name for table in tables}
        assert {names[oid] for oid in locked} == {"plain", "root"}
        assert all(f"process {other.info.backend_pid} " in who for who in locked.values())


@pytest.mark.since(15, "publications of schemas")
def test_a_table_that_was_in_another_schema_meanwhile_is_published_in_another_way(database: Database) -> None:
    """Otherwise nobody would notice that the stream lacks its changes of that time."""
    database.execute("CREATE SCHEMA s", "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int)")
    database.execute("CREATE PUBLICATION pub FOR TABLES IN SCHEMA public")
    source = source_of(database, "pub")
    with closing(connect(source, "test")) as connection:

        def fingerprints() -> list[str]:
            return [each.publication_fingerprint for each in catalog.published_tables(connection, ("pub",))]

        t, u = fingerprints()
        schema = database.value("SELECT oid FROM pg_publication_namespace")
        [first, _] = catalog.published_tables(connection, ("pub",))
        assert fingerprint_of_0_1(first) == f"pub t t t t f {schema}"
        database.execute("INSERT INTO t VALUES (1)", "ALTER TABLE t ADD v int", "ANALYZE t", "VACUUM FREEZE pg_depend")
        database.execute("ALTER TABLE t OWNER TO pg_read_all_data", "ALTER TABLE t RENAME TO a")
        assert fingerprints() == [t, u]
        database.execute(
            "ALTER TABLE a SET SCHEMA s", "INSERT INTO s.a VALUES (2)", "ALTER TABLE s.a SET SCHEMA public"
        )
        assert fingerprints()[0] != t
        assert fingerprints()[1] == u


@pytest.mark.since(15, "column lists")
def test_column_lists_of_a_leaf_are_compared_with_those_it_has_through_its_root(database: Database) -> None:
    database.execute(
        SCHEMA,
        "CREATE PUBLICATION a FOR TABLE root",
        "CREATE PUBLICATION b FOR TABLE root_1 (id, r)",
        "ALTER TABLE root ADD v int",
    )
    [found] = conflicts(database.connection, ["a", "b"])
    assert found.table == "public.root_1"
    database.execute(*found.fix.split("; "))
    assert conflicts(database.connection, ["a", "b"]) == []
