"""Describing and dividing a table for its copy, and the copy itself, against what the server says it holds."""

from __future__ import annotations

import itertools
import threading
from contextlib import closing

import psycopg
import pytest
from psycopg.sql import SQL

from conftest import Database
from publisher.conftest import source_of as source_as
from walmere.config import Source
from walmere.errors import AccessRefused, SourceUnavailable
from walmere.pgoutput import messages as m
from walmere.pgoutput.decode import decode
from walmere.publisher import copy, snapshot, table
from walmere.publisher.catalog import may_have_come_with_rows
from walmere.publisher.connect import connect
from walmere.publisher.snapshot import Snapshot
from walmere.publisher.table import Part, Range, Table

_slots = itertools.count(1)


def new_slot() -> str:
    """A name of its own: the server may take its time to drop the temporary slot of a session that has ended."""
    return f"pg_t_sync_{next(_slots)}"


def source_of(database: Database, *publications: str) -> Source:
    content = {"dsn": database.dsn, "publications": publications or ("pub",), "slot": database.slot}
    return Source.model_validate(content, strict=False)


def described(database: Database, name: str, *publications: str) -> Table:
    oid = database.value("SELECT %s::regclass::oid", name)
    source = source_of(database, *publications)
    with snapshot.exported(source, new_slot()) as made, snapshot.imported(source, "test", made) as connection:
        return table.describe(connection, source.publications, oid)


def copied(database: Database, name: str, pieces: int = 3, *publications: str) -> list[tuple[str, ...]]:
    """All rows by the ranges of one snapshot, each on a connection of its own."""
    source = source_of(database, *publications)
    with snapshot.exported(source, new_slot()) as made:
        return _copied(database, source, made, name, pieces)


def _copied(database: Database, source: Source, made: Snapshot, name: str, pieces: int) -> list[tuple[str, ...]]:
    oid = database.value("SELECT %s::regclass::oid", name)
    with snapshot.imported(source, "test", made) as connection:
        found = table.describe(connection, source.publications, oid)
    rows: list[tuple[str, ...]] = []
    for piece in table.ranges(found, pieces):
        text = b"".join(copy.copy_out(source, "test", made, table.copy_command(found, piece)))
        rows += [tuple(line.split("\t")) for line in text.decode().splitlines()]
    return rows


def test_ranges_cover_a_table_once(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 5000) i",
        "DELETE FROM t WHERE id % 7 = 0",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    rows = copied(database, "t", 5)
    assert sorted(int(row[0]) for row in rows) == [i for i in range(1, 5001) if i % 7]
    pieces = table.ranges(described(database, "t"), 5)
    assert len(pieces) >= 5
    assert pieces[0].first == 0
    assert [piece.end for piece in pieces[:-1]] == [piece.first for piece in pieces[1:]]
    assert pieces[-1].end is None


def test_all_connections_see_the_snapshot_and_nothing_later(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t SELECT generate_series(1, 1000)",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    source = source_of(database)
    with snapshot.exported(source, new_slot()) as made:
        database.execute("DELETE FROM t WHERE id <= 500", "INSERT INTO t SELECT generate_series(2001, 9000)")
        rows = _copied(database, source, made, "t", 4)
    assert sorted(int(row[0]) for row in rows) == list(range(1, 1001))


def test_the_snapshots_lsn_separates_what_it_shows_from_what_the_stream_sends(database: Database) -> None:
    database.execute("CREATE TABLE t (id serial PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    database.execute(f"SELECT pg_create_logical_replication_slot('{database.slot}', 'pgoutput')")
    stopping = threading.Event()

    def write() -> None:
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            while not stopping.is_set():
                connection.execute("INSERT INTO t DEFAULT VALUES")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        source = source_of(database)
        with snapshot.exported(source, new_slot()) as made:
            rows = {int(row[0]) for row in _copied(database, source, made, "t", 1)}
    finally:
        stopping.set()
        writer.join()
    sent = database.rows(
        "SELECT lsn::text, data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
        " 'proto_version', '1', 'publication_names', 'pub')",
        database.slot,
    )

    before: set[int] = set()
    commit = 0
    for _, data in sent:
        message = decode(data)
        if isinstance(message, m.Begin):
            commit = message.final_lsn
        if isinstance(message, m.Insert) and commit < made.lsn:
            assert isinstance(message.new[0], bytes)
            before.add(int(message.new[0]))
    assert rows == before


def test_column_lists_and_row_filters_hold(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, secret text, v text)",
        "INSERT INTO t SELECT i, 'secret', 'v' || i FROM generate_series(1, 20) i",
        "CREATE PUBLICATION pub FOR TABLE t (id, v) WHERE (id > 10) WITH (publish = 'insert')",
        "CREATE PUBLICATION other FOR TABLE t (id, v) WHERE (id = 3)",
    )
    assert described(database, "t").key == ("id",)
    assert [column.name for column in described(database, "t").columns] == ["id", "v"]
    assert sorted(copied(database, "t")) == sorted((str(i), f"v{i}") for i in range(11, 21))
    assert len(copied(database, "t", 1, "pub", "other")) == 11


def test_the_key_of_an_index_is_without_what_it_includes(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (a text, b int NOT NULL, c date, d int NOT NULL)",
        "CREATE UNIQUE INDEX i ON t (d, b) INCLUDE (a, c)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX i",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    assert described(database, "t").key == ("b", "d")


def test_a_partitioned_table_is_copied_from_its_leaves(database: Database) -> None:
    database.execute(
        "CREATE TABLE p (id int, region text, PRIMARY KEY (id, region)) PARTITION BY LIST (region)",
        "CREATE TABLE p_eu PARTITION OF p FOR VALUES IN ('eu')",
        "CREATE TABLE p_rest PARTITION OF p DEFAULT PARTITION BY RANGE (id)",
        "CREATE TABLE p_rest_1 PARTITION OF p_rest FOR VALUES FROM (0) TO (500)",
        "CREATE TABLE p_rest_2 (region text NOT NULL, id int NOT NULL)",
        "ALTER TABLE p_rest ATTACH PARTITION p_rest_2 FOR VALUES FROM (500) TO (100000)",
        "INSERT INTO p SELECT i, CASE WHEN i % 3 = 0 THEN 'eu' ELSE 'us' END FROM generate_series(1, 2000) i",
        "CREATE PUBLICATION pub FOR TABLE p WITH (publish_via_partition_root = true)",
    )
    assert {part.name for part in described(database, "p").parts} == {"p_eu", "p_rest_1", "p_rest_2"}
    rows = copied(database, "p", 4)
    assert sorted(rows) == sorted((str(i), r) for i, r in database.rows("SELECT id, region FROM p"))


def test_rows_that_may_be_read_but_not_by_page_or_partition_are_one_piece(database: Database, role: str) -> None:
    database.execute(
        "CREATE TABLE parent (id int PRIMARY KEY, secret text)",
        "CREATE TABLE child () INHERITS (parent)",
        "CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE p_1 PARTITION OF p FOR VALUES FROM (0) TO (50000)",
        "CREATE TABLE p_2 PARTITION OF p FOR VALUES FROM (50000) TO (100000)",
        "INSERT INTO parent SELECT generate_series(1, 5000)",
        "INSERT INTO child SELECT generate_series(5001, 5100)",
        "INSERT INTO p SELECT generate_series(1, 100000, 20)",
        f'GRANT SELECT (id) ON parent TO "{role}"',
        f'GRANT SELECT ON p, p_1 TO "{role}"',
        "CREATE PUBLICATION pub FOR TABLE ONLY parent (id), p WITH (publish_via_partition_root = true)",
    )
    source = source_as(database, user=role)
    for name in ("parent", "p"):
        with snapshot.exported(source, new_slot()) as made:
            rows = _copied(database, source, made, name, 4)
        only = "ONLY" if name == "parent" else ""
        assert sorted(rows) == sorted((str(i),) for (i,) in database.rows(f"SELECT id FROM {only} {name}"))


def test_a_table_with_policies_for_the_role_is_refused(database: Database, role: str) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        f'GRANT SELECT ON t TO "{role}"',
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    source = source_as(database, user=role)
    with snapshot.exported(source, new_slot()) as made:
        with pytest.raises(AccessRefused) as refused:
            _copied(database, source, made, "t", 1)
        assert "public.t" in refused.value.wrong
        assert refused.value.hint.startswith(f'ALTER ROLE "{role}" BYPASSRLS;')
        database.execute(f'ALTER ROLE "{role}" BYPASSRLS')
        assert _copied(database, source, made, "t", 1) == []


def test_a_copy_that_cannot_even_be_asked_for_ends_with_its_error(database: Database) -> None:
    source = source_of(database)
    with snapshot.exported(source, new_slot()) as made, pytest.raises(UnicodeEncodeError):
        list(copy.copy_out(source, "test", made, SQL("COPY (SELECT '\ud800') TO STDOUT").format()))


def test_odd_names_and_empty_tables_work(database: Database) -> None:
    database.execute(
        'CREATE SCHEMA "od""d. 😀"',
        'CREATE TABLE "od""d. 😀"."T %s" ("a ""b" int PRIMARY KEY, "% c" text)',
        'CREATE PUBLICATION pub FOR TABLE "od""d. 😀"."T %s"',
    )
    name = '"od""d. 😀"."T %s"'
    assert copied(database, name) == []
    database.execute(f"INSERT INTO {name} VALUES (1, 'x')")
    assert copied(database, name) == [("1", "x")]


def test_generated_columns_are_copied_only_if_they_are_published(database18: Database) -> None:
    database18.execute(
        "CREATE TABLE t (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)",
        "INSERT INTO t VALUES (1), (2)",
        "CREATE PUBLICATION pub FOR TABLE t",
        "CREATE PUBLICATION generated FOR TABLE t WITH (publish_generated_columns = stored)",
    )
    assert sorted(copied(database18, "t")) == [("1",), ("2",)]
    assert sorted(copied(database18, "t", 1, "generated")) == [("1", "2"), ("2", "4")]


def test_the_temporary_slot_is_gone_with_its_connection(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    name = snapshot.slot_name("My Shop!", 16384, "7329763972895242536")
    assert name == "pg_my_shop__sync_16384_7329763972895242536"
    with snapshot.exported(source_of(database), name):
        assert database.rows("SELECT temporary FROM pg_replication_slots WHERE slot_name = %s", name) == [(True,)]
    for _ in range(100):
        if not database.rows("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", name):
            break
        threading.Event().wait(0.05)
    assert not database.rows("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", name)
    assert len(snapshot.slot_name("x" * 63, 4294967295, "7329763972895242536")) <= 63


@pytest.mark.parametrize(
    ("pages", "hands", "expected"),
    [(0, 4, 1), (1, 4, 1), (2, 4, 2), (100, 4, 4), (65536, 1, 8), (65536 + 8192, 2, 10), (65536, 12, 12)],
)
def test_a_table_is_divided_by_its_size_and_the_hands_there_are(pages: int, hands: int, expected: int) -> None:
    found = Table(1, "s", "t", "d", (), None, (Part("s", "t", pages),), 0)  # type: ignore[arg-type]
    assert len(table.ranges(found, hands)) == expected


def test_a_foreign_partition_is_one_piece() -> None:
    found = Table(1, "s", "t", "d", (), None, (Part("s", "f", None),), 0)  # type: ignore[arg-type]
    assert table.ranges(found, 9) == [Range(Part("s", "f", None), 0, None)]


def test_a_partition_that_was_made_as_one_has_no_rows_of_before(database: Database) -> None:
    database.execute(
        "CREATE TABLE root (id int, g text, PRIMARY KEY (id, g)) PARTITION BY LIST (g)",
        "CREATE INDEX ON root (id)",
        "CREATE TABLE made PARTITION OF root FOR VALUES IN ('made')",
        "BEGIN; SELECT 1; CREATE TABLE filled PARTITION OF root FOR VALUES IN ('filled');"
        " INSERT INTO root VALUES (1, 'filled'); COMMIT",
        "CREATE TABLE branch PARTITION OF root FOR VALUES IN ('branch') PARTITION BY RANGE (id)",
        "CREATE TABLE branch_leaf PARTITION OF branch FOR VALUES FROM (0) TO (9)",
        "CREATE TABLE attached (LIKE root)",
        "ALTER TABLE root ATTACH PARTITION attached FOR VALUES IN ('attached')",
        "BEGIN; CREATE TABLE at_once (id int NOT NULL, g text NOT NULL); SAVEPOINT s;"
        " INSERT INTO at_once VALUES (1, 'o'); RELEASE s;"
        " ALTER TABLE root ATTACH PARTITION at_once FOR VALUES IN ('o'); COMMIT",
        "CREATE TABLE tree (id int NOT NULL, g text NOT NULL) PARTITION BY RANGE (id)",
        "CREATE TABLE tree_leaf PARTITION OF tree FOR VALUES FROM (0) TO (9)",
        "ALTER TABLE root ATTACH PARTITION tree FOR VALUES IN ('tree')",
        # no text, no key: as few commands as can be
        "CREATE TABLE bare (id int) PARTITION BY LIST (id)",
        "CREATE TABLE bare_made PARTITION OF bare FOR VALUES IN (1)",
        "BEGIN; CREATE TABLE bare_attached (id int);"
        " ALTER TABLE bare ATTACH PARTITION bare_attached FOR VALUES IN (2); COMMIT",
    )
    without = ("made", "filled", "branch_leaf", "bare_made")
    with_rows = ("attached", "at_once", "tree_leaf", "bare_attached")
    with closing(connect(source_of(database), "test")) as connection:
        for name in (*without, *with_rows):
            oid = database.value("SELECT %s::regclass::oid", name)
            assert may_have_come_with_rows(connection, oid) == (name in with_rows), name


def test_a_table_rewritten_since_the_snapshot_is_not_taken_for_an_empty_one(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v int)",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 100) i",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    source = source_of(database)
    with snapshot.exported(source, new_slot()) as made:
        database.execute("ALTER TABLE t ADD r float8 DEFAULT random()")
        with pytest.raises(SourceUnavailable, match="rewritten since the snapshot"):
            _copied(database, source, made, "t", 2)
