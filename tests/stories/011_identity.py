"""Story 11: rows are told apart by their replica identity, whatever it is made of, and also while it changes."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from random import Random

import psycopg
import pytest

from conftest import Database
from delta_rows import read_delta
from mirror import Mirror

KEYS: dict[str, tuple[str, list[str]]] = {
    "text": ("text", ["''", "' '", "'NULL'", r"E'\\N'", r"E'tab\tnew\nline'", "'Ümläut 😀'", "repeat('long ', 400)"]),
    "char": ("char(3)", ["''", "'a'", "'ab'", "'abc'", "' b'", "'äöü'", "'😀'"]),
    "uuid": ("uuid", [f"md5('{number}')::uuid" for number in range(7)]),
    "numeric": ("numeric", ["0", "-1.50", "1e30", "0.00000001", "12345678901234567890.123", "'NaN'", "1.000"]),
    "decimal": ("numeric(12, 2)", ["0", "-1.5", "9999999999.99", "-9999999999.99", "0.01", "1", "100"]),
    "timestamptz": (
        "timestamptz",
        [
            "'2026-11-01 01:30-04'",
            "'2026-11-01 01:30-05'",
            "'1970-01-01 00:00Z'",
            "'1969-12-31 23:59:59.999999Z'",
            "'2026-01-01 00:00:00.000001+05:45'",
            "'0002-02-02 00:00Z'",
            "'9998-12-31 00:00Z'",
        ],
    ),
    "timestamp": ("timestamp", [f"timestamp '2026-03-29 02:30' + interval '{number} us'" for number in range(7)]),
    "date": ("date", [f"date '1582-10-04' + {number}" for number in range(7)]),
    "bytea": ("bytea", [r"'\x'", r"'\x00'", r"'\x0000'", r"'\x00ff'", r"'\xff'", r"'\x5c78'", "decode('0a09', 'hex')"]),
    "float8": ("float8", ["0", "'NaN'", "'Infinity'", "'-Infinity'", "0.1", "1e-300", "-1.5"]),
    "smallint": ("smallint", ["-32768", "32767", "0", "1", "-1", "2", "3"]),
    "bigint": ("bigint", ["-9223372036854775808", "9223372036854775807", "0", "1", "-1", "2", "3"]),
    "interval": ("interval", [f"'{number} mons -1 days {number} us'" for number in range(7)]),
    "inet": ("inet", [f"'10.0.0.{number}/8'" for number in range(6)] + ["'::1'"]),
    "range": ("int4range", ["'empty'", "'[1,2)'", "'[1,3)'", "'(,)'", "'[1,)'", "'(,1)'", "'[5,9]'"]),
    "jsonb": ("jsonb", ["'{}'", "'[]'", "'null'", "'1'", "'\"1\"'", "'{\"a\": [1, null]}'", "'{\"a\": {}}'"]),
    "array": ("int[]", ["'{}'", "'{1}'", "'{1,2}'", "'{NULL}'", "'{1,NULL}'", "'{2,1}'", "'{12}'"]),
    "enum": ("mood", [f"'mood {number}'" for number in range(7)]),
    "domain": ("code", [f"'code {number}'" for number in range(7)]),
}
AS_TEXT = ("uuid", "numeric", "interval", "inet", "range", "jsonb")


def test_a_key_of_any_type_finds_its_row(database18: Database, tmp_path: Path) -> None:
    """One key of all types; any two rows differ in one or two of its columns."""
    database = database18
    columns = ", ".join(f'"{name}" {type_name}' for name, (type_name, _) in KEYS.items())
    quoted = ", ".join(f'"{name}"' for name in KEYS)
    database.execute(
        f"CREATE TYPE mood AS ENUM ({', '.join(KEYS['enum'][1])})",
        "CREATE DOMAIN code AS varchar(20) CHECK (value LIKE 'code%')",
        f"CREATE TABLE t (id int, n int DEFAULT 0, {columns}, PRIMARY KEY ({quoted}))",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )

    def insert(number: int, of: str, value: str) -> None:
        row = ", ".join(value if name == of else values[0] for name, (_, values) in KEYS.items())
        database.execute(f"INSERT INTO t (id, {quoted}) VALUES ({number}, {row})")

    insert(0, "", "")
    for number, (name, (_, values)) in enumerate(KEYS.items(), 1):
        for which, value in enumerate(values[1:5], 1):
            insert(10 * number + which, name, value)
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    for number, (name, (_, [_, updated, deleted, left, right, free, spare])) in enumerate(KEYS.items(), 1):
        first = 10 * number + 1
        database.execute(
            f"UPDATE t SET n = n + 1 WHERE id = {first}",
            f"DELETE FROM t WHERE id = {first + 1}",
            f'UPDATE t SET "{name}" = {spare} WHERE id = {first + 2}',
            f'UPDATE t SET "{name}" = {left} WHERE id = {first + 3}',
            f'UPDATE t SET "{name}" = {right} WHERE id = {first + 2}',
            f'UPDATE t SET "{name}" = {free} WHERE id = {first}',
        )
        insert(first + 4, name, deleted)
        insert(first + 5, name, updated)
        database.execute(f"UPDATE t SET n = n + 1 WHERE id IN ({first}, {first + 2}, {first + 5})")
    # equal for PostgreSQL, but not the same value: the key is what the row has
    database.execute(
        "UPDATE t SET numeric = 0.00 WHERE id = 0",
        "UPDATE t SET n = n + 1 WHERE numeric = 0.0",
        "UPDATE t SET float8 = '-0' WHERE id = 11",
        "UPDATE t SET interval = '1 mons -2 days 24:00:00.000001' WHERE interval = '1 mons -1 days 1 us'",
        "UPDATE t SET n = n + 1 WHERE interval = '1 mons -1 days 1 us'",
    )
    mirror.run_once()
    seen = ", ".join(f'"{name}"::text' if name in AS_TEXT else f'"{name}"' for name in KEYS)
    mirror.assert_equal("t", columns=f"id, n, {seen}")
    assert mirror.rows("t").total() == 1 + 5 * len(KEYS)


@pytest.mark.long
def test_rows_exchange_their_keys_within_one_transaction_and_across_several_of_one_batch(
    database18: Database, tmp_path: Path
) -> None:
    """With a TOASTed value that no update touches: it goes with its row, not with its key."""
    database = database18
    shapes = ("together", "apart")
    for name in shapes:
        database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, v text, big text)",
            f"ALTER TABLE {name} ALTER big SET STORAGE EXTERNAL",
            f"INSERT INTO {name} SELECT i, 'row ' || i, repeat(i || ' ', 3000) FROM generate_series(1, 20) i",
        )
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    for batch in range(2):
        for name in shapes:
            with database.connection.transaction() if name == "together" else contextlib.nullcontext():
                swap, chain, ring = ((1, 2), (3, 4, 5, 6, 7), (8, 9, 10))
                move = f"UPDATE {name} SET id = %s WHERE id = %s"
                for new, old in ((-1, swap[0]), (swap[0], swap[1]), (swap[1], -1)):
                    database.connection.execute(move, [new, old])
                # each to the next one's key, from the end; the first key is free then, and taken anew
                for old in reversed(chain):
                    database.connection.execute(move, [1000 * (batch + 1) if old == chain[-1] else old + 1, old])
                database.execute(f"INSERT INTO {name} VALUES ({chain[0]}, 'new {batch}', repeat('new ', 3000))")
                # all to others, and all back but by one place; then once more
                for _ in range(2):
                    for old in ring:
                        database.connection.execute(move, [-old, old])
                    for old, new in zip(ring, [*ring[1:], ring[0]], strict=True):
                        database.connection.execute(move, [new, -old])
                database.execute(
                    # onto the key of a row that is deleted just before, and away from one that comes back
                    f"DELETE FROM {name} WHERE id = 12",
                    f"UPDATE {name} SET id = 12, v = v || '!' WHERE id = 11",
                    f"INSERT INTO {name} VALUES (11, 'again {batch}', NULL)",
                    # there and back again
                    f"UPDATE {name} SET id = 99 WHERE id = 13",
                    f"UPDATE {name} SET id = 13 WHERE id = 99",
                    # a row that comes, moves and goes
                    f"INSERT INTO {name} VALUES (98, 'guest', NULL)",
                    f"UPDATE {name} SET id = 97 WHERE id = 98",
                    f"DELETE FROM {name} WHERE id = 97",
                    # all at once
                    f"UPDATE {name} SET id = id + 500 WHERE id BETWEEN 14 AND 20",
                    f"UPDATE {name} SET id = 34 - (id - 500) WHERE id BETWEEN 514 AND 520",
                )
        mirror.run_once()
        mirror.assert_equal(*shapes)
    assert mirror.rows("together") == mirror.rows("apart")


IDENTITIES = {
    "primary_key": "ALTER TABLE {0} ADD PRIMARY KEY (part, id)",
    "one_index": "ALTER TABLE {0} ADD PRIMARY KEY (code); CREATE UNIQUE INDEX {0}_i ON {0} (id, part);"
    " ALTER TABLE {0} REPLICA IDENTITY USING INDEX {0}_i",
    "including": "CREATE UNIQUE INDEX {0}_i ON {0} (part, id) INCLUDE (v);"
    " ALTER TABLE {0} REPLICA IDENTITY USING INDEX {0}_i",
    "whole_row": "ALTER TABLE {0} REPLICA IDENTITY FULL",
    "whole_row_and_key": "ALTER TABLE {0} ADD PRIMARY KEY (id, part); ALTER TABLE {0} REPLICA IDENTITY FULL",
}


@pytest.mark.long
def test_a_long_history_of_composite_keys_comes_out_the_same_for_every_identity(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    for name, identity in IDENTITIES.items():
        database.execute(
            f"CREATE TABLE {name} (gone int, part text NOT NULL, v int, code serial, id int NOT NULL, big text)",
            f"ALTER TABLE {name} DROP gone, ALTER big SET STORAGE EXTERNAL",
            *identity.format(name).split("; "),
        )
    random = Random(11)
    # parts that would be one if they were put together without a thought
    free = [(part, number) for part in ("1", "11", "", "a,1", "é") for number in (1, 11, 111)]
    there: list[tuple[str, int]] = []
    codes = itertools.count(1)

    def everywhere(statement: str, *parameters: object) -> None:
        for name in IDENTITIES:
            database.connection.execute(statement.format(name), parameters)

    def insert(key: tuple[str, int]) -> None:
        free.remove(key)
        big = "repeat(%s, 4000)" if random.random() < 0.5 else "%s"
        everywhere(
            f"INSERT INTO {{}} (part, id, v, big, code) VALUES (%s, %s, %s, {big}, %s)", *key, 0, "x", next(codes)
        )
        there.append(key)

    def take() -> tuple[str, int]:
        return there.pop(random.randrange(len(there)))

    def move(old: tuple[str, int], new: tuple[str, int]) -> None:
        everywhere("UPDATE {} SET part = %s, id = %s, v = v + 1 WHERE part = %s AND id = %s", *new, *old)

    def step() -> None:
        what = random.choice(["insert", "update", "toast", "move", "swap", "delete", "again"])
        if what == "insert" and free:
            insert(random.choice(free))
        elif what == "update":
            everywhere("UPDATE {} SET v = v + 1 WHERE part = %s AND id = %s", *random.choice(there))
        elif what == "toast":
            everywhere("UPDATE {} SET big = repeat(v::text, 4000) WHERE part = %s AND id = %s", *random.choice(there))
        elif what == "move" and free:
            old, new = take(), free.pop(random.randrange(len(free)))
            move(old, new)
            there.append(new)
            free.append(old)
        elif what == "swap" and len(there) > 3:
            one, other = random.sample(there, 2)
            move(one, ("away", 0))
            move(other, one)
            move(("away", 0), other)
        elif what in ("delete", "again") and len(there) > 3:
            key = take()
            everywhere("DELETE FROM {} WHERE part = %s AND id = %s", *key)
            free.append(key)
            if what == "again":
                insert(key)

    for key in random.sample(free, 8):
        insert(key)
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    for _ in range(24):
        with database.connection.transaction():
            for _ in range(random.randint(1, 8)):
                step()
    mirror.run_once()
    mirror.assert_equal(*IDENTITIES)
    assert len({frozenset(mirror.rows(name).items()) for name in IDENTITIES}) == 1


def test_an_index_as_identity_is_its_key_columns_and_no_others(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text, day date, code text NOT NULL, area int NOT NULL)",
        "CREATE UNIQUE INDEX by_code ON t (area, code) INCLUDE (note, day)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX by_code",
        "INSERT INTO t SELECT i, NULL, NULL, 'c' || i % 10, i / 10 FROM generate_series(0, 29) i",
        "UPDATE t SET day = 'infinity' WHERE id = 7",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute(
        "UPDATE t SET note = 'not of the key', day = '2026-01-01' WHERE id % 3 = 0",
        "UPDATE t SET id = -id WHERE id % 2 = 0",
        "UPDATE t SET area = 9 WHERE id = 5",
        "UPDATE t SET code = 'c5', area = 0 WHERE id = 15",
        "DELETE FROM t WHERE note IS NULL AND area = 2",
        "INSERT INTO t VALUES (100, 'n', '-infinity', 'c0', 2)",
    )
    mirror.run_once()
    mirror.assert_equal("t", columns="id, note, CASE WHEN isfinite(day) THEN day END, code, area")
    rejects = read_delta(mirror.delta("t", "_rejects.public")).sort_by("lsn").to_pylist()
    assert [(row["key"], row["value"]) for row in rejects] == [
        ('{"code": "c7", "area": "0"}', "infinity"),
        ('{"code": "c0", "area": "2"}', "-infinity"),
    ]


@pytest.mark.long
def test_of_equal_rows_as_many_go_as_went(database18: Database, tmp_path: Path) -> None:
    """REPLICA IDENTITY FULL without a key: the table is a multiset, and NULLs are equal."""
    database = database18
    database.execute(
        "CREATE TABLE bag (a int, b text, c float8, d int[], e jsonb, f numeric, g date, big text)",
        "ALTER TABLE bag REPLICA IDENTITY FULL, ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO bag SELECT i % 4 FROM generate_series(1, 40) i",
        "INSERT INTO bag SELECT NULL FROM generate_series(1, 10)",
        "INSERT INTO bag SELECT 9, '', 'NaN', '{1,NULL}', '{\"a\": 1}', 1.0, 'infinity', repeat('t', 5000)"
        " FROM generate_series(1, 10)",
        "CREATE TABLE single (a text)",
        "ALTER TABLE single REPLICA IDENTITY FULL",
        "INSERT INTO single SELECT CASE WHEN i % 2 = 0 THEN 'x' END FROM generate_series(1, 10) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    some = "ctid IN (SELECT ctid FROM bag WHERE {} LIMIT {})"
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute(
        f"DELETE FROM bag WHERE {some.format('a = 1', 4)}",
        f"DELETE FROM bag WHERE {some.format('a IS NULL', 3)}",
        f"UPDATE bag SET a = 3 WHERE {some.format('a = 2', 5)}",
        f"UPDATE bag SET b = 'not null' WHERE {some.format('a IS NULL', 3)}",
        f"UPDATE bag SET c = '-0', f = 1.00 WHERE {some.format('a = 9', 4)}",
        f"UPDATE bag SET c = 0 WHERE {some.format('a = 9 AND c = 0', 2)}",
        f"UPDATE bag SET d = '{{}}', g = '-infinity' WHERE {some.format('a = 9 AND c = 0', 3)}",
        f"DELETE FROM bag WHERE {some.format('a = 9 AND f = 1', 2)}",
        "UPDATE bag SET a = a WHERE a = 0",
        "BEGIN; INSERT INTO bag VALUES (7), (7), (7); DELETE FROM bag WHERE a = 7; INSERT INTO bag VALUES (7); COMMIT",
        "INSERT INTO bag SELECT NULL FROM generate_series(1, 2)",
        "UPDATE single SET a = 'y' WHERE a IS NULL",
        "UPDATE single SET a = NULL WHERE a = 'x'",
        "DELETE FROM single WHERE ctid = (SELECT min(ctid) FROM single WHERE a = 'y')",
    )
    mirror.run_once()
    mirror.assert_equal("bag", columns="a, b, c, d, e::text, f::text, CASE WHEN isfinite(g) THEN g END, big")
    mirror.assert_equal("single")


def test_a_table_without_identity_takes_inserts_and_truncates(database18: Database, tmp_path: Path) -> None:
    database = database18
    tables = ("without_key", "nothing", "nothing_but_a_key", "nullable_unique")
    database.execute(
        "CREATE TABLE without_key (a int, b text)",
        "CREATE TABLE nothing (a int, b text)",
        "CREATE TABLE nothing_but_a_key (a serial PRIMARY KEY, b text)",
        "CREATE TABLE nullable_unique (a int UNIQUE, b text)",
        "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
        "ALTER TABLE nothing_but_a_key REPLICA IDENTITY NOTHING",
        *(f"INSERT INTO {name} (b) SELECT NULL FROM generate_series(1, 10)" for name in tables),
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    for name in tables:
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):  # PostgreSQL's own word
            database.execute(f"UPDATE {name} SET b = 'x'")
        database.execute(f"INSERT INTO {name} (b) SELECT 'again' FROM generate_series(1, 5)")
    database.execute("TRUNCATE without_key, nothing_but_a_key", "INSERT INTO without_key (b) VALUES ('kept'), ('kept')")
    mirror.run_once()
    mirror.assert_equal(*tables)
    assert mirror.rows("without_key") == {(None, "kept"): 2}
