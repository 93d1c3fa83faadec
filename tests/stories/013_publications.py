"""Story 13: the target has what the publications publish: these tables, these columns, these rows, these operations."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg.sql import SQL, Identifier

from conftest import Database
from mirror import Mirror


def names(mirror: Mirror) -> list[str]:
    return sorted(table.name for table in mirror.tables())


def tables_in(database: Database, schemas: str, tables: str) -> str:
    """Schemas of a publication, or their tables by name if the server has no such publication."""
    return f"TABLES IN SCHEMA {schemas}" if database.major >= 15 else f"TABLE {tables}"


def test_a_row_comes_once_however_many_publications_have_its_table(database18: Database, tmp_path: Path) -> None:
    database = database18
    tables = [("public", "item"), ("sales", "item"), ("archive", "item"), ("sales", "only")]
    database.execute("CREATE SCHEMA sales", "CREATE SCHEMA archive", "CREATE TABLE unpublished (id int PRIMARY KEY)")
    for schema, name in tables:
        database.execute(
            f"CREATE TABLE {schema}.{name} (id int PRIMARY KEY, v text)",
            f"INSERT INTO {schema}.{name} SELECT i, '{schema}' FROM generate_series(1, 10) i",
        )
    database.execute(
        "CREATE PUBLICATION listed FOR TABLE item, sales.item",
        "CREATE PUBLICATION again FOR TABLE item, archive.item",
        f"CREATE PUBLICATION by_schema FOR {tables_in(database, 'sales', 'sales.item, sales.only')}",
        "CREATE PUBLICATION empty",
    )
    mirror = Mirror(database, tmp_path, "listed", "again", "by_schema", "empty")
    mirror.run_once()
    for schema, name in tables:
        database.execute(
            f"INSERT INTO {schema}.{name} SELECT i, 'more of {schema}' FROM generate_series(11, 15) i",
            f"UPDATE {schema}.{name} SET v = v || '!' WHERE id % 2 = 0",
            f"UPDATE {schema}.{name} SET id = -id WHERE id % 3 = 0",
            f"DELETE FROM {schema}.{name} WHERE id % 5 = 0",
        )
    database.execute("TRUNCATE sales.only, archive.item", "INSERT INTO sales.only VALUES (1, 'again')")
    mirror.run_once()
    for schema, name in tables:
        mirror.assert_equal(name, schema=schema)
    assert names(mirror) == ["archive.item", "public.item", "sales.item", "sales.only"]


def test_a_publication_for_all_tables_has_those_of_every_schema_beside_others(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE SCHEMA other",
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE other.t (v text, id int PRIMARY KEY)",
        "CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY)",
        "CREATE VIEW seen AS SELECT * FROM t",
        "CREATE MATERIALIZED VIEW held AS SELECT * FROM t",
        "INSERT INTO t SELECT i, 'public' FROM generate_series(1, 10) i",
        "INSERT INTO other.t SELECT 'other', i FROM generate_series(1, 10) i",
        "CREATE PUBLICATION everything FOR ALL TABLES",
        f"CREATE PUBLICATION one FOR TABLE t{database.narrowed(' WHERE (id > 5)')}",
        f"CREATE PUBLICATION two FOR {tables_in(database, 'public, other', 'public.t, other.t')}",
    )
    mirror = Mirror(database, tmp_path, "everything", "one", "two")
    mirror.run_once()
    database.execute(
        "UPDATE t SET v = 'changed' WHERE id IN (1, 9)",
        "UPDATE other.t SET id = id + 5 WHERE id > 5",
        "REFRESH MATERIALIZED VIEW held",
        "INSERT INTO unlogged VALUES (1)",
        "DELETE FROM t WHERE id IN (2, 8)",
    )
    mirror.run_once()
    mirror.assert_equal("t")
    mirror.assert_equal("t", schema="other")
    assert names(mirror) == ["other.t", "public.t"]


@pytest.mark.since(15, "row filters")
def test_rows_move_into_and_out_of_filters_and_a_row_passes_if_it_passes_one(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE places (id int PRIMARY KEY, region text, v int, big text)",
        "ALTER TABLE places REPLICA IDENTITY FULL, ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO places SELECT i, CASE i % 3 WHEN 0 THEN 'eu' WHEN 1 THEN 'us' END, 0, repeat(i::text, 3000)"
        " FROM generate_series(1, 60) i",
        "CREATE TABLE either (id int PRIMARY KEY, a int, b int)",
        "ALTER TABLE either REPLICA IDENTITY FULL",
        "INSERT INTO either SELECT i, i % 4, i % 3 FROM generate_series(1, 48) i",
        "CREATE TABLE whole (id int PRIMARY KEY, v text)",
        "INSERT INTO whole SELECT i, 'x' FROM generate_series(1, 10) i",
        "CREATE TABLE by_key (id int PRIMARY KEY, v text)",
        "INSERT INTO by_key SELECT i, 'row ' || i FROM generate_series(1, 20) i",
        r"CREATE PUBLICATION one FOR TABLE places WHERE (region = 'eu' OR region = E'back\\slash'),"
        " either WHERE (a = 1), whole WHERE (id < 5), by_key WHERE (id <= 10)",
        "CREATE PUBLICATION other FOR TABLE either WHERE (b = 1), whole",
    )
    passing = {
        "places": r"region = 'eu' OR region = E'back\\slash'",
        "either": "a = 1 OR b = 1",
        "whole": "true",
        "by_key": "id <= 10",
    }
    mirror = Mirror(database, tmp_path, "one", "other")
    mirror.run_once()
    for table, where in passing.items():
        mirror.assert_equal(table, where=where)
    database.execute(
        "UPDATE places SET region = 'eu' WHERE id BETWEEN 1 AND 20",
        r"UPDATE places SET region = E'back\\slash' WHERE id = 21",
        "UPDATE places SET region = NULL WHERE id BETWEEN 15 AND 30",
        "UPDATE places SET v = v + 1",
        "UPDATE places SET region = 'eu', id = id + 1000 WHERE id IN (25, 33)",
        "DELETE FROM places WHERE id BETWEEN 50 AND 60",
        "INSERT INTO places VALUES (61, 'eu', 0, 'new'), (62, 'us', 0, 'new'), (63, NULL, 0, 'new')",
        "BEGIN; UPDATE places SET region = 'us' WHERE id = 36; UPDATE places SET region = 'eu' WHERE id = 36; COMMIT",
        "UPDATE either SET a = 1 - a WHERE id <= 24",
        "UPDATE either SET b = (b + 1) % 3 WHERE id BETWEEN 12 AND 36",
        "UPDATE either SET id = -id WHERE id % 5 = 0",
        "DELETE FROM either WHERE id > 40",
        "INSERT INTO either VALUES (100, 1, 0), (101, 0, 1), (102, 1, 1), (103, 0, 0)",
        "UPDATE whole SET v = 'y' WHERE id IN (1, 9)",
        "DELETE FROM whole WHERE id IN (2, 8)",
        # the filter's column is the key: a row moves by changing it
        "UPDATE by_key SET id = id + 100 WHERE id IN (1, 2)",
        "UPDATE by_key SET id = id - 10 WHERE id IN (11, 12)",
        "UPDATE by_key SET id = 3 - id WHERE id = 3",
        "DELETE FROM by_key WHERE id IN (4, 14)",
        "UPDATE by_key SET v = 'changed' WHERE id IN (5, 15)",
    )
    mirror.run_once()
    for table, where in passing.items():
        mirror.assert_equal(table, where=where)


@pytest.mark.long
@pytest.mark.since(15, "row filters")
def test_a_row_that_moves_into_the_filter_brings_its_large_values(database18: Database, tmp_path: Path) -> None:
    """By its key alone: the server sends an Insert without a TOASTed value, so only a new copy has it."""
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, big text)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i, repeat(i::text, 3000) FROM generate_series(1, 20) i",
        "CREATE PUBLICATION pub FOR TABLE t WHERE (id <= 10)",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute("UPDATE t SET id = -id WHERE id = 15")
    mirror.run_once()
    mirror.assert_equal("t", where="id <= 10")


@pytest.mark.since(15, "column lists")
def test_a_column_list_hides_columns_in_copy_and_stream(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE narrow (hidden text, id int PRIMARY KEY, secret text, gone int, shown text)",
        "ALTER TABLE narrow DROP gone",
        "INSERT INTO narrow SELECT 'h', i, 's', 'shown ' || i FROM generate_series(1, 10) i",
        "CREATE TABLE by_index (secret text, b int NOT NULL, a int NOT NULL, id int PRIMARY KEY, v text)",
        "CREATE UNIQUE INDEX by_ab ON by_index (a, b)",
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_ab",
        "INSERT INTO by_index SELECT 's', i, -i, i, 'v' FROM generate_series(1, 10) i",
        "CREATE TABLE only_key (id int PRIMARY KEY, secret text)",
        "INSERT INTO only_key SELECT i, 's' FROM generate_series(1, 10) i",
        "CREATE TABLE whole (id int PRIMARY KEY, v text)",
        # in an order of its own, which is not the table's
        "CREATE PUBLICATION one FOR TABLE narrow (shown, id), by_index (v, a, b), only_key (id)",
        "CREATE PUBLICATION other FOR TABLE narrow (id, shown) WHERE (id < 5), whole",
    )
    shown = {"narrow": "id, shown", "by_index": "b, a, v", "only_key": "id", "whole": "*"}
    mirror = Mirror(database, tmp_path, "one", "other")
    mirror.run_once()
    for table, columns in shown.items():
        mirror.assert_equal(table, columns=columns)
    database.execute(
        "UPDATE narrow SET secret = 'changed', hidden = NULL WHERE id <= 5",
        "UPDATE narrow SET shown = NULL WHERE id > 8",
        "UPDATE narrow SET id = -id WHERE id IN (3, 7)",
        "INSERT INTO narrow VALUES ('h', 11, 's', 'new')",
        "UPDATE by_index SET id = -id, secret = 't' WHERE id < 3",
        "UPDATE by_index SET a = 100, v = 'moved' WHERE id = 5",
        "DELETE FROM by_index WHERE id = 6",
        "INSERT INTO by_index VALUES ('s', 6, -6, 60, 'again')",
        "UPDATE only_key SET secret = 'changed' WHERE id < 5",
        "UPDATE only_key SET id = id + 10 WHERE id > 8",
        "DELETE FROM only_key WHERE id = 1",
        "INSERT INTO whole VALUES (1, 'v')",
    )
    mirror.run_once()
    for table, columns in shown.items():
        mirror.assert_equal(table, columns=columns)
    assert mirror.delta("narrow").schema().to_arrow().names == ["id", "shown"]


def test_only_the_operations_that_are_published_follow_the_copy(database18: Database, tmp_path: Path) -> None:
    database = database18
    published = ("insert", "update", "delete", "truncate", "insert, update, delete", "truncate, insert")
    tables = {what.replace(", ", "_"): what for what in published}
    for table, what in tables.items():
        database.execute(
            f'CREATE TABLE "{table}" (id int PRIMARY KEY, v text)',
            f"INSERT INTO \"{table}\" SELECT i, 'copied' FROM generate_series(1, 4) i",
            f'CREATE PUBLICATION "{table}" FOR TABLE "{table}" WITH (publish = \'{what}\')',
        )
    mirror = Mirror(database, tmp_path, *tables)
    mirror.run_once()
    mirror.assert_equal(*tables)
    for table in tables:
        database.execute(
            f"INSERT INTO \"{table}\" VALUES (5, 'inserted')",
            f"UPDATE \"{table}\" SET v = 'updated' WHERE id = 1",
            f'DELETE FROM "{table}" WHERE id = 2',
            f'TRUNCATE "{table}"',
            f"INSERT INTO \"{table}\" VALUES (6, 'after')",
        )
    mirror.run_once()
    copied = {(number, "copied") for number in (1, 2, 3, 4)}
    inserted = {(5, "inserted"), (6, "after")}
    updated = (copied - {(1, "copied")}) | {(1, "updated")}
    assert {table: set(mirror.rows(table)) for table in tables} == {
        "insert": copied | inserted,
        "update": updated,
        "delete": copied - {(2, "copied")},
        "truncate": set(),
        "insert_update_delete": (updated | inserted) - {(2, "copied")},
        "truncate_insert": {(6, "after")},
    }
    mirror.assert_equal("truncate_insert")


@pytest.mark.long
def test_a_key_inserted_again_is_there_once_although_its_end_was_not_published(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    tables = ("deleted", "truncated", "moved")
    for table, publish in zip(tables, ("insert", "insert, update, delete", "insert, delete"), strict=True):
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, v text)",
            f"INSERT INTO {table} SELECT i, 'copied' FROM generate_series(1, 3) i",
            f"CREATE PUBLICATION {table} FOR TABLE {table} WITH (publish = '{publish}')",
        )
    mirror = Mirror(database, tmp_path, *tables)
    mirror.run_once()
    database.execute(
        "DELETE FROM deleted WHERE id = 1",
        "INSERT INTO deleted VALUES (1, 'again')",
        "TRUNCATE truncated",
        "INSERT INTO truncated SELECT i, 'again' FROM generate_series(1, 3) i",
        "UPDATE moved SET id = 4 WHERE id = 1",
        "INSERT INTO moved VALUES (1, 'again')",
        "DELETE FROM moved WHERE id = 4",
    )
    mirror.run_once()
    mirror.assert_equal(*tables)


@pytest.mark.long
def test_an_update_of_a_row_that_was_never_sent_brings_all_of_it(database18: Database, tmp_path: Path) -> None:
    """A native subscriber passes over it (`update_missing`). If the update is not the whole row, a new copy has it."""
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, big text)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i, 'copied', repeat('x', 3000) FROM generate_series(1, 3) i",
        "CREATE PUBLICATION pub FOR TABLE t WITH (publish = 'update, delete')",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute(
        "INSERT INTO t VALUES (4, 'not sent', repeat('x', 3000)), (5, 'not sent', NULL)",
        "UPDATE t SET v = 'updated'",
    )
    mirror.run_once()
    mirror.assert_equal("t")


def tree(name: str) -> tuple[str, ...]:
    """Partitions on two levels; one in another schema, and one whose columns are in another order."""
    return (
        f"CREATE SCHEMA IF NOT EXISTS {name}_old",
        f"CREATE TABLE {name} (id int, day date, region text, v text, big text, PRIMARY KEY (id, day, region))"
        " PARTITION BY RANGE (day)",
        f"CREATE TABLE {name}_old.{name}_2024 PARTITION OF {name} FOR VALUES FROM ('2024-01-01') TO ('2025-01-01')",
        f"CREATE TABLE {name}_2025 PARTITION OF {name} FOR VALUES FROM ('2025-01-01') TO ('2026-01-01')"
        " PARTITION BY LIST (region)",
        f"CREATE TABLE {name}_2025_eu PARTITION OF {name}_2025 FOR VALUES IN ('eu')",
        f"CREATE TABLE {name}_2025_us (big text, gone int, v text, region text NOT NULL, day date NOT NULL,"
        " id int NOT NULL)",
        f"ALTER TABLE {name}_2025_us DROP gone",
        f"ALTER TABLE {name}_2025 ATTACH PARTITION {name}_2025_us FOR VALUES IN ('us')",
        f"CREATE TABLE {name}_rest PARTITION OF {name} DEFAULT",
        f"INSERT INTO {name} SELECT i, date '2024-01-01' + i * 20, CASE i % 2 WHEN 0 THEN 'eu' ELSE 'us' END, 'v',"
        " repeat(i::text, 2000) FROM generate_series(1, 60) i",
    )


def changes_of(name: str) -> tuple[str, ...]:
    return (
        f"UPDATE {name} SET v = 'changed' WHERE id % 4 = 0",
        f"UPDATE {name} SET region = CASE region WHEN 'eu' THEN 'us' ELSE 'eu' END WHERE id BETWEEN 20 AND 30",
        f"UPDATE {name} SET day = day + 365 WHERE id BETWEEN 10 AND 25",
        f"UPDATE {name} SET id = id + 100 WHERE id BETWEEN 1 AND 50 AND id % 7 = 0",
        f"DELETE FROM {name} WHERE id % 11 = 0",
        f"INSERT INTO {name} SELECT i, date '2023-12-01' + i * 40, 'us', 'new', NULL FROM generate_series(200, 230) i",
        f"INSERT INTO {name}_2025_us (id, region, day, v) VALUES (300, 'us', '2025-05-05', 'into the leaf')",
        f"UPDATE {name}_2025_us SET v = v || '!'",
    )


@pytest.mark.long
def test_a_partitioned_table_comes_as_its_root_or_as_its_leaves(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        *tree("root"),
        *tree("leaf"),
        # partitions have identities of their own
        "ALTER TABLE root_2025_us ALTER big SET STORAGE EXTERNAL",
        "ALTER TABLE root_2025_eu REPLICA IDENTITY FULL",
        "ALTER TABLE leaf_2025_eu REPLICA IDENTITY FULL",
        "CREATE PUBLICATION by_root FOR TABLE root WITH (publish_via_partition_root = true)",
        "CREATE PUBLICATION by_leaf FOR TABLE leaf",
    )
    leaves = ("leaf_2025_eu", "leaf_2025_us", "leaf_rest")
    mirror = Mirror(database, tmp_path, "by_root", "by_leaf")
    mirror.run_once()
    assert names(mirror) == ["leaf_old.leaf_2024", *(f"public.{leaf}" for leaf in leaves), "public.root"]
    database.execute(*changes_of("root"), *changes_of("leaf"))
    mirror.run_once()
    mirror.assert_equal("root", *leaves)
    mirror.assert_equal("leaf_2024", schema="leaf_old")
    database.execute(
        "TRUNCATE leaf_2025",
        "INSERT INTO leaf VALUES (1, '2025-01-01', 'us', 'again', 'x'), (2, '2025-01-01', 'eu', 'again', 'x')",
        "TRUNCATE root",
        "INSERT INTO root VALUES (1, '2025-01-01', 'us', 'again', 'x'), (2, '2024-01-01', 'eu', 'again', 'x')",
    )
    mirror.run_once()
    mirror.assert_equal("root", *leaves)
    mirror.assert_equal("leaf_2024", schema="leaf_old")


def test_what_one_publication_has_by_its_root_is_that_root_whatever_others_say(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        *tree("t"),
        "CREATE PUBLICATION by_root FOR TABLE t WITH (publish_via_partition_root = true)",
        "CREATE PUBLICATION by_leaf FOR TABLE t",
        f"CREATE PUBLICATION one_leaf FOR TABLE t_2025_us{database.narrowed(' WHERE (id < 10)')}",
        "CREATE PUBLICATION a_branch FOR TABLE t_2025 WITH (publish_via_partition_root = true)",
    )
    mirror = Mirror(database, tmp_path, "by_leaf", "by_root", "one_leaf", "a_branch")
    mirror.run_once()
    assert names(mirror) == ["public.t"]
    database.execute(*changes_of("t"))
    mirror.run_once()
    mirror.assert_equal("t")


def test_generated_columns_are_left_out_unless_they_are_published(database18: Database, tmp_path: Path) -> None:
    database = database18
    # later ones refuse to update a row whose identity has a column that is not published
    tables = ("by_key", "by_row") if database.major < 18 else ("by_key",)
    for table in tables:
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, v int)",
            f"INSERT INTO {table} (id, v) SELECT i, i FROM generate_series(1, 10) i",
            f"CREATE PUBLICATION {table} FOR TABLE {table}",
        )
    if "by_row" in tables:
        database.execute("ALTER TABLE by_row REPLICA IDENTITY FULL")
    mirror = Mirror(database, tmp_path, *tables)
    mirror.run_once()
    mirror.assert_equal(*tables, columns="id, v")
    for table in tables:
        database.execute(
            f"UPDATE {table} SET v = v + 100 WHERE id < 4",
            f"UPDATE {table} SET id = -id WHERE id IN (4, 5)",
            f"DELETE FROM {table} WHERE id = 6",
            f"INSERT INTO {table} (id, v) VALUES (6, NULL), (11, 11)",
        )
    mirror.run_once()
    mirror.assert_equal(*tables, columns="id, v")


@pytest.mark.long
@pytest.mark.since(18, "generated columns that are published")
def test_generated_columns_come_if_they_are_published(database18: Database, tmp_path: Path) -> None:
    database = database18
    columns = (
        "id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, v int,"
        " sum int GENERATED ALWAYS AS (id + v) STORED, virtual int GENERATED ALWAYS AS (v * 2) VIRTUAL"
    )
    tables = ("left_out", "published", "listed", "whole_row")
    database.execute(
        *(f"CREATE TABLE {table} ({columns})" for table in tables),
        "ALTER TABLE whole_row DROP virtual",  # it would be of the identity, and cannot be published
        "CREATE TABLE key_is_generated (a int, k int GENERATED ALWAYS AS (a * 10) STORED NOT NULL PRIMARY KEY, v int)",
        "ALTER TABLE whole_row REPLICA IDENTITY FULL",
        *(f"INSERT INTO {table} (id, v) SELECT i, i FROM generate_series(1, 10) i" for table in tables),
        "INSERT INTO key_is_generated (a, v) SELECT i, i FROM generate_series(1, 10) i",
        "CREATE PUBLICATION plain FOR TABLE left_out, listed (id, sum)",
        "CREATE PUBLICATION generated FOR TABLE published, whole_row, key_is_generated"
        " WITH (publish_generated_columns = stored)",
    )
    shown = {
        "left_out": "id, v",
        "published": "id, twice, v, sum",
        "listed": "id, sum",
        "whole_row": "id, twice, v, sum",
        "key_is_generated": "a, k, v",
    }
    mirror = Mirror(database, tmp_path, "plain", "generated")
    mirror.run_once()
    for table, visible in shown.items():
        mirror.assert_equal(table, columns=visible)
    for table in tables:
        database.execute(
            f"UPDATE {table} SET v = v + 100 WHERE id < 4",
            f"UPDATE {table} SET id = -id WHERE id IN (4, 5)",
            f"DELETE FROM {table} WHERE id = 6",
            f"INSERT INTO {table} (id, v) VALUES (6, NULL), (11, 11)",
        )
    database.execute(
        "UPDATE key_is_generated SET a = a + 100 WHERE a < 4",
        "UPDATE key_is_generated SET v = 0 WHERE a = 5",
        "DELETE FROM key_is_generated WHERE a = 6",
        "INSERT INTO key_is_generated (a, v) VALUES (1, 1)",
    )
    mirror.run_once()
    for table, visible in shown.items():
        mirror.assert_equal(table, columns=visible)


LONG = "é" * 31 + "x"  # 63 bytes
ODD = [
    "Capitals", "two words", 'quo"ted', "quo'ted", "dot.ted", "sl/ash", "back\\slash", "com,ma;", "per%s cent%",
    "line\nbreak", "{brace}", "a=b", "-- comment", "😀", "select", "user", "table", "_delta_log",
]  # fmt: skip


@pytest.mark.long
def test_publications_schemas_tables_and_columns_may_have_any_name(database18: Database, tmp_path: Path) -> None:
    database = database18
    run = database.connection.execute
    columns = SQL(", ").join(SQL("{} text").format(Identifier(name)) for name in ODD)
    tables = [("select", "user"), ('quo"ted', "com,ma;"), ("com,ma;", 'quo"ted'), ("😀", "back\\slash"), (LONG, LONG)]
    for number, (schema, name) in enumerate(tables):
        run(SQL("CREATE SCHEMA {}").format(Identifier(schema)))
        run(
            SQL("CREATE TABLE {} ({} int PRIMARY KEY, {} int, {})").format(
                Identifier(schema, name), Identifier(LONG), Identifier("group"), columns
            )
        )
        run(SQL("INSERT INTO {} VALUES (1, {}, 'copied'), (2, 0, NULL)").format(Identifier(schema, name), number))
    publications = [*ODD, LONG]
    for number, publication in enumerate(publications):  # each has two tables, and each table is in several
        one, other = (Identifier(*tables[place % len(tables)]) for place in (number, number + 1))
        where = SQL(database.narrowed(" WHERE ({} < {})")).format(Identifier(LONG), number)
        run(SQL("CREATE PUBLICATION {} FOR TABLE {}{}, {}").format(Identifier(publication), one, where, other))
    mirror = Mirror(database, tmp_path, *publications)
    mirror.run_once()
    for schema, name in tables:
        table = Identifier(schema, name)
        changed = map(Identifier, ("😀", "group", LONG))
        run(SQL("UPDATE {} SET {} = 'new', {} = 200 WHERE {} = 1").format(table, *changed))
        run(SQL("UPDATE {} SET {} = 20 WHERE {} = 2").format(table, Identifier(LONG), Identifier(LONG)))
        run(SQL("INSERT INTO {} VALUES (3, 300, {})").format(table, name))
    mirror.run_once()
    for schema, name in tables:
        mirror.assert_equal(name, schema=schema)
    assert mirror.delta(LONG, LONG).schema().to_arrow().names == [LONG, "group", *ODD]
