"""Story 2: values of all types are equal, whether they were copied or streamed, and whatever the settings of either
server are.
"""

from __future__ import annotations

import pytest

from side_by_side import SideBySide

pytestmark = pytest.mark.long

TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok', 'very \"happy\"')",
    "CREATE TYPE pair AS (x int, y text)",
    "CREATE DOMAIN positive AS int CHECK (value > 0)",
    "CREATE DOMAIN words AS text[]",
    "CREATE TYPE float_range AS RANGE (subtype = float8, subtype_diff = float8mi)",
)

# type, and values as SQL
VALUES: dict[str, tuple[str, ...]] = {
    "bool": ("true", "false"),
    "int2": ("-32768", "32767"),
    "int4": ("-2147483648", "0"),
    "int8": ("-9223372036854775808", "9223372036854775807"),
    "numeric": ("'NaN'", "-1e-100", "12345678901234567890.0987654321000"),
    "numeric(10,2)": ("1.10", "-0.01"),
    "float4": ("'NaN'", "'-Infinity'", "1.1", "'-0'"),
    "float8": ("'NaN'", "'Infinity'", "0.1::float8 + 0.2::float8", "'-0'", "5e-324"),
    "money": ("12.34", "'-0.01'"),
    "text": ("''", "E'tab\\t newline\\n return\\r backslash\\\\ quote'' double\" \\\\N'", "'ünïcödé €'", "'NULL'"),
    "varchar(10)": ("'  spaces  '", "''"),
    "char(5)": ("'a'", "''"),
    '"char"': ("'x'", "''"),
    "name": ("'a name'",),
    "bytea": ("'\\x00ff5c27'", "''", "'\\x5c5c'"),
    "date": ("'infinity'", "'0044-03-15 BC'", "'2024-02-29'", "'12345-01-02'"),
    "time": ("'24:00:00'", "'01:02:03.000004'"),
    "timetz": ("'01:02:03.4+05:30'", "'24:00:00-15:59'"),
    "timestamp": ("'-infinity'", "'2024-02-03 04:05:06.000007'", "'0001-01-01 BC'"),
    "timestamptz": ("'infinity'", "'2024-02-03 04:05:06.5+02'", "'0100-02-03 04:05:06 BC'"),
    "interval": ("'1 mon -2 days +03:04:05.6'", "'-1 day'", "'-1 year 2 mons'", "'0'"),
    "uuid": ("'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'",),
    "json": ("""'{"b": 1,  "a": [1, 2.50], "b": null}'""", "'null'"),
    "jsonb": ("""'{"b": 1,  "a": "q\\"\\\\\\u20ac"}'""", "'\"text\"'"),
    "inet": ("'10.1.2.3/8'", "'::1'"),
    "cidr": ("'10.0.0.0/8'",),
    "macaddr": ("'08:00:2b:01:02:03'",),
    "bit(5)": ("B'10101'",),
    "varbit": ("B''", "B'101'"),
    "point": ("'(1.5,-0)'",),
    "box": ("'(2,2),(0,0)'",),
    "polygon": ("'((0,0),(1,1),(2,0))'",),
    "circle": ("'<(1,2),3>'",),
    "tsvector": ("'a fat cat''s \"quoted\":1A'",),
    "tsquery": ("'fat & !(cat | ''rat x'':*)'",),
    "pg_lsn": ("'16/B374D848'",),
    "oid": ("4294967295",),
    "regclass": ("'pg_class'",),
    "int4range": ("'empty'", "'[1,)'", "'[3,7)'"),
    "tstzrange": ("""'["2024-01-01 00:00:00+00",infinity)'""",),
    "float_range": ("'(0.1,NaN]'",),
    "mood": ("'sad'", "'very \"happy\"'"),
    "pair": ("(1, 'a,\"b\" (c)')::pair", "(NULL, '')::pair", "(NULL, NULL)::pair"),
    "positive": ("1",),
    "int4[]": ("'{}'", "'{1,NULL,-3}'", "'[0:1]={7,8}'", "'{{1,2},{3,4}}'"),
    "text[]": ("""array['', 'NULL', NULL, 'a,b', 'c"d', E'e\\\\f', ' g ', '{h}']""",),
    "float8[]": ("'{NaN,Infinity,0.1}'",),
    "mood[]": ("array['ok', NULL, 'very \"happy\"']::mood[]",),
    "pair[]": ("""array[(1, 'x"\\y,{}')::pair, NULL]""",),
    "words": ("'{a,\"b c\"}'",),
    "int4range[]": ("array['[1,2]'::int4range, 'empty']",),
    "int4multirange": ("'{[1,3),[5,)}'", "'{}'"),
    "xid8": ("'123'",),
}


def _create(both: SideBySide) -> None:
    columns = ", ".join(f"c{i} {kind}" for i, kind in enumerate(VALUES))
    both.everywhere(*TYPES, f"CREATE TABLE t (id int PRIMARY KEY, {columns})")
    both.source("CREATE PUBLICATION pub FOR TABLE t")


def _rows(table: str, first: int) -> list[str]:
    """Rows that have each value of each type, and one of NULLs."""
    most = max(map(len, VALUES.values()))
    rows = [", ".join(f"({each[i % len(each)]})::{kind}" for kind, each in VALUES.items()) for i in range(most)]
    return [
        f"INSERT INTO {table} (id) VALUES ({first})",
        *(f"INSERT INTO {table} SELECT {first + 1 + i}, {row}" for i, row in enumerate(rows)),
    ]


def test_values_of_all_types_arrive_by_copy_and_by_stream(both: SideBySide) -> None:
    _create(both)
    both.source(*_rows("t", 0))
    both.start()
    both.source(
        *_rows("t", 100),
        "UPDATE t SET id = id + 1000 WHERE id < 100",
        "UPDATE t SET id = -id, c2 = 7 WHERE id BETWEEN 100 AND 199",
    )
    both.sync()
    both.assert_equal()
    both.assert_equal("SELECT t::text FROM t ORDER BY 1", source=True)


def test_settings_of_output_and_input_change_no_value(both: SideBySide) -> None:
    _create(both)
    both.source(
        f"ALTER DATABASE {both.publisher.name} SET DateStyle = 'SQL, DMY'",
        f"ALTER DATABASE {both.publisher.name} SET IntervalStyle = 'sql_standard'",
        f"ALTER DATABASE {both.publisher.name} SET extra_float_digits = -5",
        f"ALTER DATABASE {both.publisher.name} SET bytea_output = 'escape'",
        f"ALTER DATABASE {both.publisher.name} SET TimeZone = 'Asia/Kolkata'",
        f"ALTER DATABASE {both.publisher.name} SET client_encoding = 'LATIN9'",
        *_rows("t", 0),
    )
    for database in (both.native, both.ours):
        database.execute(
            f"ALTER DATABASE {database.name} SET DateStyle = 'Postgres, MDY'",
            f"ALTER DATABASE {database.name} SET IntervalStyle = 'iso_8601'",
            f"ALTER DATABASE {database.name} SET TimeZone = 'America/St_Johns'",
            f"ALTER DATABASE {database.name} SET standard_conforming_strings = off",
        )
    query = "SELECT t::text FROM t ORDER BY 1"  # in sessions that have the defaults
    if both.native.major < 15:  # a native subscription of 14 cannot read these dates: it asks for no settings
        both.subscribe()
        both.sync_ours()
        both.source(*_rows("t", 100))
        both.sync_ours()
        assert both.ours.rows(query) == both.publisher.rows(query)
        return
    both.start()
    both.source(*_rows("t", 100))
    both.sync()
    both.assert_equal(query, source=True)


def test_rows_are_found_by_all_values_with_replica_identity_full(both: SideBySide) -> None:
    without_equality = ("json", "point", "box", "polygon", "circle")
    columns = [i for i, kind in enumerate(VALUES) if kind not in without_equality]
    kinds = list(VALUES)
    both.everywhere(
        *TYPES,
        "CREATE TABLE f (id int, " + ", ".join(f"c{i} {kinds[i]}" for i in columns) + ")",
        "ALTER TABLE f REPLICA IDENTITY FULL",
    )
    most = max(map(len, VALUES.values()))
    rows = [
        ", ".join(f"({VALUES[kinds[c]][i % len(VALUES[kinds[c]])]})::{kinds[c]}" for c in columns) for i in range(most)
    ]
    both.source(
        *(f"INSERT INTO f SELECT 1, {row}" for row in rows for _ in range(2)),
        "INSERT INTO f (id) VALUES (NULL), (NULL), (1)",
        "CREATE PUBLICATION pub FOR TABLE f",
    )
    both.start()
    both.source(
        "UPDATE f SET id = 2 WHERE ctid IN (SELECT min(ctid) FROM f GROUP BY f::text)",
        "DELETE FROM f WHERE ctid IN (SELECT min(ctid) FROM f WHERE id = 2 AND c2 IS NOT NULL)",
        "DELETE FROM f WHERE ctid IN (SELECT min(ctid) FROM f WHERE id IS NULL)",
    )
    both.sync()
    both.assert_equal()
    both.assert_equal("SELECT f::text FROM f ORDER BY 1", source=True)


def test_types_of_the_subscriber_may_differ_if_the_text_fits(both: SideBySide) -> None:
    both.everywhere("CREATE TYPE mood AS ENUM ('sad', 'ok')")
    both.source(
        "CREATE TABLE t (id int PRIMARY KEY, a int, b numeric, c mood, d text, e json, f timestamptz, g varchar,"
        " h int[])",
        "INSERT INTO t VALUES (1, 1, 1.50, 'ok', '7', '{\"a\": 1}', '2024-01-01 12:00+00', 'sad', '{1,2}')",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    both.target(
        "CREATE TABLE t (id bigint PRIMARY KEY, a text, b float8, c text, d int, e jsonb, f text, g mood, h text)"
    )
    both.start()
    both.source(
        "INSERT INTO t VALUES (2, -1, 2.25, 'sad', '8', '{\"b\":  2}', '2024-01-01 12:00+00', 'ok', '{3,NULL}')",
        "UPDATE t SET a = 2, id = 11 WHERE id = 1",
        "UPDATE t SET b = 3.125, d = '9' WHERE id = 2",
    )
    both.sync()
    both.assert_equal()
    assert both.rows("SELECT id, a, b, c, d, g::text, h FROM t ORDER BY id") == [
        (2, "-1", 3.125, "sad", 9, "ok", "{3,NULL}"),
        (11, "2", 1.5, "ok", 7, "sad", "{1,2}"),
    ]
