"""Every type goes through COPY and through the stream, and comes out equal in both, and equal to what the server has.

One table has a column for every built-in type, one for every array of one, and one for each kind of type that people
make. What was cast is sent back to the server, which says whether that is what it has (as text, so that 1.50 is not 1.5
and -0 is not 0). What is to be rejected is written here, and nothing else may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

ASTRAL = "a\U0001f600ß\u0301\ufeff\u2028z"
TEXTS = [
    "",
    " ",
    "NULL",
    "null",
    "\\N",
    "\\.",
    "a,b",
    'say "so"',
    "it's",
    "l1\nl2\r\nl3\r",
    "\\",
    "\t",
    ASTRAL,
    "{}",
    "x" * 9000,
]
NINES = "9" * 38


@dataclass(frozen=True)
class Kind:
    """A type, texts that it takes, and those of them that the lake's type cannot hold."""

    arrow: str
    takes: list[str] = field(default_factory=list)
    rejects: list[str] = field(default_factory=list)
    back: str = "%s::{type}"  # how a value that was cast becomes the server's again


def text(*takes: str) -> Kind:
    return Kind("string", list(takes))


BUILT_IN = {
    "bool": Kind("bool", ["t", "f"]),
    "int2": Kind("int16", ["-32768", "0", "32767"]),
    "int4": Kind("int32", ["-2147483648", "0", "2147483647"]),
    "int8": Kind("int64", ["-9223372036854775808", "-1", "9223372036854775807"]),
    "oid": Kind("int64", ["0", "4294967295"]),
    "xid": Kind("int64", ["0", "4294967295"], back="%s::text::{type}"),
    "cid": Kind("int64", ["0", "4294967295"], back="%s::text::{type}"),
    "xid8": Kind(
        "int64",
        ["0", "9223372036854775807"],
        ["9223372036854775808", "18446744073709551615"],
        back="%s::text::{type}",
    ),
    "float4": Kind("float", ["NaN", "Infinity", "-Infinity", "-0", "0", "1e-45", "3.4028235e38", "0.1", "16777216"]),
    "float8": Kind(
        "double", ["NaN", "Infinity", "-Infinity", "-0", "0", "5e-324", "1.7976931348623157e308", "0.1", "1e23", "-1"]
    ),
    "numeric": text("NaN", "Infinity", "-Infinity", "0", "-1.50", NINES * 3, f"0.{NINES * 3}1", "1e-16383", "1e1000"),
    "bytea": Kind("binary", ["", "\\x00", "\\xff00ff", "\\x5c78", "\\x" + "ab" * 5000]),
    "date": Kind(
        "date32[day]",
        ["0001-01-01", "1582-10-10", "1969-12-31", "2000-02-29", "9999-12-31"],
        ["infinity", "-infinity", "0001-12-31 BC", "4713-01-01 BC", "10000-01-01", "5874897-12-31"],
    ),
    "timestamp": Kind(
        "timestamp[us]",
        ["0001-01-01 00:00:00", "1969-12-31 23:59:59.999999", "2024-02-29 12:00:00.5", "9999-12-31 23:59:59.999999"],
        ["infinity", "-infinity", "0001-12-31 23:59:59.999999 BC", "4713-01-01 00:00:00 BC", "294276-12-31 23:59:59"],
    ),
    "timestamptz": Kind(
        "timestamp[us, tz=UTC]",
        [
            "0001-01-01 00:00:00+00",
            "1850-01-01 00:00:00.1+01:22:03",
            "2024-03-31 02:30:00-05:30",
            "9999-12-31 23:59:59+00",
        ],
        [
            "infinity",
            "-infinity",
            "0001-01-01 00:00:00+00:00:01",
            "9999-12-31 23:59:59-00:01",
            "4713-01-01 00:00+00 BC",
        ],
    ),
    "text": text(*TEXTS),
    "varchar": text(*TEXTS),
    "bpchar": text("", "a  ", ASTRAL),
    "name": text("", "pg", "ü" * 31, "a b"),
    "char": text("", "a", "\\303", '"', ",", "\n", "\\"),
    "xml": text("<a b='&lt;'>x</a>", ASTRAL),
    "json": text('{"b":1,  "a":[null,"\\u0000\\""]}', '"😀"', "null", "1e400"),
    "jsonb": text('{"b":1,  "a":[null,"\\""]}', '"😀\\n"', "null", "1.50", NINES * 2),
    "jsonpath": text('$.a[*] ? (@ > 1 && @.b == "x\\"y")'),
    "uuid": text("00000000-0000-0000-0000-000000000000", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"),
    "interval": text("1 year -2 mons 3 days -04:05:06.789", "178000000 years", "-1 microsecond", "0"),
    "time": text("00:00:00", "24:00:00", "12:34:56.789012"),
    "timetz": text("00:00:00+15:59:59", "24:00:00-08", "12:34:56.789012+00"),
    "money": text("-92233720368547758.08", "92233720368547758.07", "0"),
    "bit": text("0", "1"),
    "varbit": text("", "101", "0" * 99),
    "inet": text("127.0.0.1", "10.1.2.3/8", "::1", "2001:db8::ff00:42:8329/64"),
    "cidr": text("10.0.0.0/8", "::/0"),
    "macaddr": text("08:00:2b:01:02:03"),
    "macaddr8": text("08:00:2b:01:02:03:04:05"),
    "point": text("(1.5,-0)", "(NaN,Infinity)"),
    "lseg": text("[(1,2),(3,4)]"),
    "path": text("[(0,0),(1,1)]", "((0,0),(1,1))"),
    "box": Kind("string", ["(3,4),(1,2)"], back="%s::text::{type}"),
    "polygon": text("((0,0),(1,1),(1,0))"),
    "line": text("{1,-1,0}"),
    "circle": text("<(1,2),3>"),
    "tsvector": text("", "'it''s':1A 'a b':2,3 'c\\\\d'"),
    "tsquery": text("", "'a b' & !'c' | 'd':*"),
    "gtsvector": text(),
    "regproc": text("-", "pg_catalog.now"),
    "regprocedure": text("-", "abs(integer)"),
    "regoper": text("0", "||/"),
    "regoperator": text("0", "+(integer,integer)"),
    "regclass": text("-", "pg_class", "123456789"),
    "regtype": text("-", "timestamp with time zone", "public.mood"),
    "regconfig": text("simple"),
    "regdictionary": text("simple"),
    "regnamespace": text("pg_catalog"),
    "regrole": text("postgres"),
    "regcollation": text('"C"'),
    "tid": text("(0,1)", "(4294967295,65535)"),
    "pg_lsn": text("0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF"),
    "pg_snapshot": text("10:20:10,14,15"),
    "txid_snapshot": text("10:20:10,14,15"),
    "aclitem": text("postgres=r*w/postgres"),
    "refcursor": text("", "c 1"),
    "int2vector": text("", "1 -2 3"),
    "oidvector": text("", "1 2"),
    # bookkeeping of the server that takes no input: such a column can only be null
    **dict.fromkeys(("pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list"), text()),
    **dict.fromkeys(("pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"), text()),
    "int4range": text("empty", "[1,10)", "(,)", "[2147483646,)"),
    "int8range": text("empty", "[1,10)"),
    "numrange": text("empty", "(1.50,NaN]"),
    "tsrange": text("[-infinity,2024-01-01)", '["0044-03-15 00:00:00 BC",)'),
    "tstzrange": text("[2024-01-01,infinity]"),
    "daterange": text("[2024-01-01,2024-02-01)", "[4713-01-01 BC,)"),
    "int4multirange": text("{}", "{[1,3),[5,7)}"),
    "int8multirange": text("{}", "{[1,3),[5,7)}"),
    "nummultirange": text("{}", "{[1.5,3),[5,7)}"),
    "tsmultirange": text("{}", "{[2024-01-01,2024-01-02)}"),
    "tstzmultirange": text("{}", "{[2024-01-01,2024-01-02)}"),
    "datemultirange": text("{}", "{[2024-01-01,2024-01-02),[2025-01-01,)}"),
}
"""By pg_type.typname."""

MADE = """
CREATE TYPE public.mood AS ENUM ('sad', 'so, so', 'say "so"', 'NULL', '😀');
CREATE DOMAIN public.price AS numeric(10,2);
CREATE DOMAIN public.discount AS public.price CHECK (value >= 0);
CREATE DOMAIN public.prices AS public.discount[];
CREATE DOMAIN public.days AS date[];
CREATE TYPE public.pair AS (a int, "b c" text, d numeric(5,1)[]);
CREATE TYPE public.floatrange AS RANGE (subtype = float8, multirange_type_name = floatmultirange);
CREATE SCHEMA mine;
CREATE TYPE mine.hstore AS (a text);
CREATE EXTENSION hstore SCHEMA public;
CREATE EXTENSION citext SCHEMA public;
"""
HSTORE = "(SELECT public.hstore(array_agg(k), array_agg(v)) FROM unnest(%s::text[], %s::text[]) AS x(k, v))"
HSTORES = ["", "a=>1", '"a b"=>NULL, c=>"NULL"', '"\\"=>\\\\"=>"\\", \\"", ""=>""', f'"{ASTRAL}"=>"{ASTRAL}"']

OTHERS = {
    "public.mood": text("sad", "so, so", 'say "so"', "NULL", "😀"),
    "public.mood[]": Kind("list<item: string>", ["{}", '{sad,"so, so","say \\"so\\"","NULL",NULL,😀}'], ["{{sad}}"]),
    "public.discount": Kind("decimal128(10, 2)", ["0", "99999999.99", "1.5"], ["NaN"]),
    "public.discount[]": Kind("list<item: decimal128(10, 2)>", ["{}", "{1.5,NULL,0.01}"], ["{1,NaN}"]),
    "public.prices": Kind("list<item: decimal128(10, 2)>", ["{}", "{1.5,NULL,0.01}"], ["{NaN}", "[0:0]={1}"]),
    "public.days": Kind("list<item: date32[day]>", ["{2024-01-01,NULL}"], ["{2024-01-01,infinity}", "{{2024-01-01}}"]),
    "public.pair": text("(,,)", '(1,"",)', '(-1,"a ""b"" \\\\ ,",{1.5})', f'(1,"{ASTRAL}",)'),
    "public.pair[]": Kind("list<item: string>", ['{"(1,\\"a b\\",)",NULL,"(,,)"}']),
    "public.floatrange": text("empty", "[0.1,Infinity)"),
    "public.floatmultirange": text("{}", "{[0.1,0.2),[1,2)}"),
    "public.floatmultirange[]": Kind("list<item: string>", ['{"{[0.1,0.2),[1,2)}"}']),
    "mine.hstore": text("(x)"),
    "public.citext": text("Ab", "aB", ""),
    "public.citext[]": Kind("list<item: string>", ["{Ab,aB}"]),
    "public.hstore": Kind("map<string, string>", HSTORES, back=HSTORE),
    "public.hstore[]": Kind(
        "list<item: map<string, string>>", ['{"\\"a\\"=>\\"1\\"",NULL,""}'], ['{{"a=>1"}}'], back=""
    ),
    "numeric(12,2)": Kind("decimal128(12, 2)", ["0", "-0.01", "9999999999.99", "-9999999999.99"], ["NaN"]),
    "numeric(38)": Kind("decimal128(38, 0)", ["0", NINES, f"-{NINES}"], ["NaN"]),
    "numeric(38,38)": Kind("decimal128(38, 38)", ["0", f"0.{NINES}", f"-0.{NINES}"], ["NaN"]),
    "numeric(38,10)": Kind("decimal128(38, 10)", ["0", f"{NINES[:28]}.{NINES[:10]}", f"-{NINES[:28]}.{NINES[:10]}"]),
    "numeric(5,-2)": Kind("decimal128(7, 0)", ["0", "9999900", "-149"], ["NaN"]),
    "numeric(3,5)": Kind("decimal128(5, 5)", ["0", "0.00999", "-0.00001"], ["NaN"]),
    "numeric(39,2)": text("NaN", f"{NINES[1:]}.99"),
    "numeric(30,-10)": text("NaN", f"{NINES[8:]}0000000000"),
    "numeric(2,40)": text("0", "0." + "0" * 38 + "99"),
    "numeric(12,2)[]": Kind("list<item: decimal128(12, 2)>", ["{1.5,NULL,-9999999999.99}", "{}"], ["{1,NaN}"]),
    "varchar(3)": text("", "abc", "ü😀"),
    "bpchar(4)": text("", "ab", "    "),
    "timestamptz(0)": Kind("timestamp[us, tz=UTC]", ["2024-01-01 00:00:00.6+00"], ["infinity"]),
    "bit(3)": text("101"),
    "text[][]": Kind(
        "list<item: string>",
        ["{}", '{"",NULL,"NULL",null,"a b","{","}","\\"","\\\\","\\\\\\"","a\\\\","l1\nl2",","}', f'{{"{ASTRAL}"}}'],
        ["{{a,b},{c,d}}", "[0:1]={a,b}", '[-5:-5]={"{"}', "{{{x}}}"],
    ),
    "int4[3]": Kind("list<item: int32>", ["{}", "{NULL}", "{-1,NULL,2147483647}"], ["{{1},{2}}", "[2:3]={1,2}"]),
    "bytea[]": Kind("list<item: binary>", ['{"\\\\x00ff",NULL,"\\\\x"}']),
    "timestamptz[]": Kind(
        "list<item: timestamp[us, tz=UTC]>", ['{"2024-01-01 00:00:00.5+00",NULL}'], ['{"2024-01-01 00:00+00",infinity}']
    ),
}
VECTORS = {
    "public.vector": Kind(
        "list<item: float>", ["[1,2.5,-3]", "[0,-0,1e-45]", "[3.4028235e38]"], back="%s::real[]::{type}"
    ),
    "public.vector(3)": Kind("list<item: float>", ["[1,2,3]"], back="%s::real[]::{type}"),
    "public.halfvec": Kind("list<item: float>", ["[65504,6e-8,-0.1]"], back="%s::real[]::{type}"),
    "public.vector[]": Kind("list<item: list<item: float>>", ['{"[1,2]",NULL}'], back=""),
    "public.sparsevec": text("{1:1.5,3:2}/5"),
}


def quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def sent_back(value: Any, kind: Kind) -> list[Any]:
    """The parameters that stand for a value that was cast."""
    if kind.arrow.startswith("map"):
        return [[key for key, _ in value], [item for _, item in value]]
    return [value]


@pytest.fixture
def kinds(source: Any) -> dict[str, Kind]:
    """Every type that the server has, by the name to create a column with."""
    database = source.database
    database.execute(*filter(None, MADE.strip().split(";\n")))
    built_in = {f'pg_catalog."{name}"': kind for name, kind in BUILT_IN.items()}
    try:
        database.value("SELECT '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:  # a server built without libxml
        built_in['pg_catalog."xml"'] = text()
    names = database.rows("SELECT oid, typname, typarray FROM pg_type WHERE oid < 10000 AND typtype IN ('b', 'r', 'm')")
    scalars = {name for _, name, _ in names if not name.startswith("_")}
    assert scalars == BUILT_IN.keys()
    arrays = {}
    for _, name, array in names:
        if array:
            kind = built_in[f'pg_catalog."{name}"']
            back = kind.back.replace("::text", "::text[]")
            arrays[f'pg_catalog."{name}"[]'] = Kind(f"list<item: {kind.arrow}>", kind.takes, kind.rejects, back)
    found = built_in | arrays | OTHERS
    if database.rows("SELECT FROM pg_available_extensions WHERE name = 'vector'"):
        database.execute("CREATE EXTENSION vector SCHEMA public")
        found |= VECTORS
    return found


def expressions(name: str, kind: Kind) -> list[str]:
    """What to insert into a column of that type: first what is cast, then what is rejected."""
    if name.endswith('"[]'):
        element = name.removesuffix("[]")
        good = [f"{quoted(value)}::{element}" for value in kind.takes]
        bad = [f"{quoted(value)}::{element}" for value in kind.rejects]
        return [
            f"ARRAY[]::{name}",
            f"ARRAY[NULL]::{name}",
            f"ARRAY[{', '.join([*good, 'NULL', *good])}]::{name}",
            *(f"ARRAY[{', '.join([*good, value])}]::{name}" for value in bad),
            *([f"ARRAY[ARRAY[{good[0]}]]::{name}"] if good else []),
        ]
    return [f"{quoted(value)}::{name}" for value in [*kind.takes, *kind.rejects]]


def test_every_type_comes_out_equal_in_both_ways_and_as_the_server_has_it(
    source: Any, kinds: dict[str, Kind], tmp_path: Path
) -> None:
    columns = {f"c{number}": name for number, name in enumerate(kinds)}
    cells = {column: ["NULL", *expressions(name, kinds[name])] for column, name in columns.items()}
    rows = max(len(each) for each in cells.values())
    padded = [each + ["NULL"] * (rows - len(each)) for each in cells.values()]
    landed = source.table(columns, [list(row) for row in zip(*padded, strict=True)])
    lake = {}
    for column, name in columns.items():
        kind, way = kinds[name], landed[column]
        assert way.copied.combine_chunks().equals(way.streamed), f"{name}: the texts differ"
        copied, streamed = way.codec.cast(way.copied), way.codec.cast(way.streamed)
        for each in (copied, streamed):
            each.values.validate(full=True)
            assert each.values.type == way.codec.arrow
        assert str(way.codec.arrow) == kind.arrow, name
        assert same(copied.values, streamed.values), name
        none = np.zeros(rows, np.bool_)
        rejected = none if copied.rejected is None else copied.rejected
        np.testing.assert_array_equal(rejected, none if streamed.rejected is None else streamed.rejected)
        assert not (rejected & copied.values.is_valid().to_numpy(zero_copy_only=False)).any()

        many = name.endswith('"[]') and bool(kind.takes)
        first = len(cells[column]) - len(kind.rejects) - many
        expected = np.array([first <= row < len(cells[column]) for row in range(rows)])
        np.testing.assert_array_equal(rejected, expected, name)

        texts = way.streamed.cast(pa.string()).to_pylist()
        for row, value in enumerate(copied.values.to_pylist()):
            if texts[row] is None or rejected[row]:
                assert value is None
            elif kind.back:
                back = f"format('%%s', {kind.back.format(type=name)})"  # by the type's output function, as we got it
                assert source.connection.execute(f"SELECT {back}", sent_back(value, kind)).fetchone() == (
                    texts[row],
                ), name
        lake[name] = copied.values

    table = pa.table(lake)
    write_deltalake(tmp_path / "delta", table)
    again = DeltaTable(tmp_path / "delta").to_pyarrow_table()
    for name in table.column_names:
        assert again[name].type == table[name].type
        assert same(again[name].combine_chunks(), lake[name]), name


def test_a_byte_order_mark_and_lines_that_are_empty_are_data(source: Any) -> None:
    """U+FEFF as the very first character of a copy is the value's, and an only column that is NULL is a row."""
    landed = source.table({"c": "text"}, [["U&'\\FEFFa'"], ["NULL"], ["''"], ["U&'\\FEFF'"], ["'\\.'"], ["NULL"]])
    copied = landed["c"].codec.cast(landed["c"].copied).values
    assert copied.to_pylist() == ["\ufeffa", None, "", "\ufeff", "\\.", None]
    assert copied.equals(landed["c"].codec.cast(landed["c"].streamed).values)


def same(one: pa.Array, other: pa.Array) -> bool:
    return bool(one.equals(other)) or repr(one.to_pylist()) == repr(other.to_pylist())  # NaN is not equal to NaN
