"""Both sides of a value: PostgreSQL's text, and what the target has. A right cast is equal, a wrong one is not."""

from __future__ import annotations

import importlib
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from conftest import Database
from walmere.errors import CastError
from walmere.publisher import catalog, connect
from walmere.types import copytext
from walmere.types.codec import Codec, codec
from walmere.verify import source_text
from walmere.verify.fingerprint import RowLayout, Side, rows_of
from walmere.verify.pg_text import SourceType
from walmere.verify.proof import source_type

paths: Any = importlib.import_module("tests.types.test_paths")  # mypy knows that file by another name
Kind = paths.Kind

MORE = {
    "numeric(2,2)": Kind("", ["0", "0.01", "-0.99"]),
    "float4[]": Kind("", ["{}", "{NULL}", "{-0,0,NaN,1e-45,NULL,0.1}"]),
    "float8[]": Kind("", ["{}", "{NULL}", "{-0,0,NaN,Infinity,-Infinity,1e-320,NULL,0.1}"], ["{{1}}", "[0:0]={1}"]),
    "int8[]": Kind("", ["{-9223372036854775808,9223372036854775807,NULL}"]),
    "xid8[]": Kind("", ["{9223372036854775807,NULL,0}"], ["{1,9223372036854775808}", "{18446744073709551615}"]),
    "public.floats": Kind("", ["{1,2}"]),
    "public.floats[]": Kind("", ['{"{1,NULL,-0}",NULL,"{}"}', "{}"], ['{"{{1}}"}', '{"{}","[0:0]={1}"}']),
    "public.floatss[]": Kind("", ['{"{\\"{1,NULL,-0}\\",NULL,\\"{}\\"}",NULL,"{}"}']),
    "public.texts[]": Kind("", ['{"{\\"a b\\",\\"\\\\\\"{{\\",NULL}","{\\"[0:1]=\\"}"}']),
    "public.boxes[]": Kind("", ['{"{(3,4),(1,2);(1,1),(0,0)}";"{}"}']),
}
DOMAINS = (
    "CREATE DOMAIN public.floats AS float8[]",
    "CREATE DOMAIN public.floatss AS public.floats[]",
    "CREATE DOMAIN public.texts AS text[]",
    "CREATE DOMAIN public.boxes AS box[]",
)

ARROW_TYPES = {
    *("bool", "int16", "int32", "int64", "float", "double", "binary", "string", "date32[day]", "timestamp[us]"),
    *("timestamp[us, tz=UTC]", "decimal128(12, 2)", "map<string, string>", "list<item: list<item: double>>"),
}


class Rows:
    """A table on a real server: what COPY sends of it, and its codecs."""

    def __init__(self, database: Database, columns: Mapping[str, Sequence[str]]) -> None:
        """`columns`: by type, SQL expressions. Rows of columns that have fewer end with NULL."""
        self.types = list(columns)
        longest = max(map(len, columns.values()))
        cells = [[*each, *["NULL"] * (longest - len(each))] for each in columns.values()]
        names = [f"c{place}" for place in range(len(columns))]
        database.execute(
            f"CREATE TABLE public.v (id serial, {', '.join(map(' '.join, zip(names, columns, strict=True)))})"
        )
        rows = [f"({', '.join(row)})" for row in zip(*cells, strict=True)]
        database.execute(*(f"INSERT INTO public.v ({', '.join(names)}) VALUES {row}" for row in rows))
        connection = connect.connect(database.config(Path()).source, "test")
        with (
            connection.cursor() as cursor,
            cursor.copy(f"COPY public.v TO STDOUT ({copytext.COPY_OPTIONS})".encode()) as copy,
        ):
            self.copied = b"".join(copy)
        described = connection.execute(
            "SELECT atttypid::int8, atttypmod FROM pg_attribute WHERE attrelid = 'public.v'::regclass AND attnum > 0"
            " ORDER BY attnum"
        ).fetchall()
        types = catalog.types_of(connection, [oid for oid, _ in described])
        connection.close()
        self.codecs: list[Codec] = [codec(oid, typmod, types) for oid, typmod in described]
        self.schema = pa.schema([(name, each.arrow) for name, each in zip(["id", *names], self.codecs, strict=True)])
        self.layout = RowLayout(self.schema, ("id",), 1, tuple(source_type(oid, types) for oid, _ in described))
        text = copytext.read(self.copied, self.schema.names)
        self.casts = [each.cast(column) for each, column in zip(self.codecs, text.columns, strict=True)]

    @property
    def target(self) -> list[pa.Array]:
        """As the mirror casts it."""
        return [each.values for each in self.casts]

    def differing(self, target: Sequence[pa.Array]) -> set[tuple[str, int]]:
        """The types and rows whose value in the target is not equal to the source's."""
        source = source_text.read(self.copied, self.schema).batch
        rows = pa.RecordBatch.from_arrays(target, schema=self.schema)
        one, other = (self._hashes(side, batch) for side, batch in ((Side.SOURCE, source), (Side.TARGET, rows)))
        assert one.keys() == other.keys()
        assert len(one) == rows.num_rows
        return {
            (self.types[place], int(key) - 1)
            for key in one
            for place, (mine, theirs) in enumerate(zip(one[key][1:], other[key][1:], strict=True))
            if mine != theirs
        }

    def _hashes(self, side: Side, batch: pa.RecordBatch) -> dict[str, list[int]]:
        found = pa.Table.from_batches(rows_of(self.layout, side, [batch], np.array([0]), texts=False))
        return {row["name"][0]: row["columns"] for row in found.to_pylist()}


@pytest.fixture
def kinds(database18: Database) -> dict[str, Any]:
    """Every type, and arrays of them."""
    database18.execute(*filter(None, paths.MADE.strip().split(";\n")), *DOMAINS)
    found = {f'pg_catalog."{name}"': kind for name, kind in paths.BUILT_IN.items()}
    try:
        database18.value("SELECT '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:  # a server built without libxml
        del found['pg_catalog."xml"']
    arrays = {f"{name}[]": kind for name, kind in found.items() if kind.takes}
    found |= arrays | paths.OTHERS | MORE
    if database18.rows("SELECT FROM pg_available_extensions WHERE name = 'vector'"):
        database18.execute("CREATE EXTENSION vector SCHEMA public")
        found |= paths.VECTORS
    return found


def test_every_type_is_equal_to_what_the_mirror_casts_and_the_same_values_are_rejected(
    database18: Database, kinds: dict[str, Any]
) -> None:
    rows = Rows(database18, {name: ["NULL", *paths.expressions(name, kind)] for name, kind in kinds.items()})
    assert not rows.differing(rows.target)
    assert {str(each.arrow) for each in rows.codecs} >= ARROW_TYPES
    rejected = source_text.read(rows.copied, rows.schema).rejected
    text = copytext.read(rows.copied, rows.schema.names)
    for place, cast in enumerate(rows.casts):
        expected = [] if cast.rejected is None else text.column(place).filter(pa.array(cast.rejected)).to_pylist()
        assert rejected.get(place, pa.array([])).to_pylist() == expected, rows.types[place - 1]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_many_values_are_equal_to_what_the_mirror_casts(database18: Database, seed: int) -> None:
    """Values that nobody has chosen, a thousand of each type."""
    database18.execute("CREATE EXTENSION hstore SCHEMA public")
    chance = random.Random(seed)
    characters = [*'"\\\\{},; \n\t\r\v\b=>', "NULL", "null", "a", "é", "😀", "\ufeff", "'"]

    def some_text() -> str:
        return "".join(chance.choices(characters, k=chance.randrange(5)))

    def some_list(element: Callable[[], str]) -> str:
        return f"ARRAY[{', '.join('NULL' if chance.random() < 0.2 else element() for _ in range(chance.randrange(4)))}]"

    def some_float(code: str) -> str:
        bits = chance.randbytes(struct.calcsize(code))
        return f"'{float(np.frombuffer(bits, code)[0])!r}'"

    def some_number(digits: int, scale: int) -> str:
        number = chance.randrange(10 ** chance.randint(1, digits)) * chance.choice((1, -1))
        return format(Decimal(number).scaleb(-scale), "f")

    def some_moment() -> str:
        micros = chance.randrange(-(10 ** chance.randint(1, 18)), 10 ** chance.randint(1, 18))
        return f"'2000-01-01 00:00:00+00'::timestamptz + {micros % (20 * 10**16) - 10**17} * interval '1 microsecond'"

    def some_map() -> str:
        keys = chance.sample(["", "a", "NULL", '"', "\\\\", "b=>c", "é, "], chance.randrange(4))
        values = [paths.quoted(some_text()) if chance.random() < 0.8 else "NULL" for _ in keys]
        return f"public.hstore(ARRAY[{', '.join(map(paths.quoted, keys))}]::text[], ARRAY[{', '.join(values)}]::text[])"

    def text() -> str:
        return str(paths.quoted(some_text()))

    made: dict[str, Callable[[], str]] = {
        "float8": lambda: some_float("<d"),
        "float4": lambda: some_float("<f"),
        "float8[]": lambda: some_list(lambda: some_float("<d")) + "::float8[]",
        "numeric(38,9)": lambda: some_number(38, 9),
        "numeric(5,5)": lambda: some_number(5, 5),
        "numeric(12,2)[]": lambda: some_list(lambda: some_number(12, 2)) + "::numeric[]",
        "int8": lambda: some_number(18, 0),
        "date": lambda: f"'2000-01-01'::date + {chance.randrange(-800_000, 3_000_000)}",
        "timestamp": lambda: f"({some_moment()}) AT TIME ZONE 'UTC'",
        "timestamptz": some_moment,
        "timestamptz[]": lambda: some_list(some_moment) + "::timestamptz[]",
        "bytea": lambda: f"'\\x{chance.randbytes(chance.randrange(9)).hex()}'",
        "bytea[]": lambda: some_list(lambda: f"'\\x{chance.randbytes(chance.randrange(4)).hex()}'") + "::bytea[]",
        "text": text,
        "text[]": lambda: some_list(text) + "::text[]",
        "public.hstore": some_map,
        "public.hstore[]": lambda: some_list(some_map) + "::public.hstore[]",
    }
    rows = Rows(database18, {kind: [make() for _ in range(1000)] for kind, make in made.items()})
    assert not rows.differing(rows.target)
    rejected = source_text.read(rows.copied, rows.schema).rejected
    assert {rows.types[place - 1]: len(texts) for place, texts in rejected.items()} == {
        kind: int(cast.rejected.sum())
        for kind, cast in zip(rows.types, rows.casts[1:], strict=True)
        if cast.rejected is not None
    }


def put(array: pa.Array, row: int, value: Any) -> pa.Array:
    """The same array, with another value in one row."""
    values = array.to_pylist()
    values[row] = value
    return pa.array(values, array.type)


WRONG: list[tuple[str, str, Any]] = [
    ("bool", "true", False),
    ("bool", "true", None),
    ("int4", "7", 8),
    ("int8", "9223372036854775807", -1),
    ("xid8", "'9223372036854775808'", -(1 << 63)),
    ("numeric(10,2)", "1.25", Decimal("1.20")),
    ("numeric(10,2)", "1.25", Decimal("12.50")),
    ("numeric(38,10)", "0.0000000001", Decimal(0)),
    ("numeric(10,2)", "'NaN'", Decimal(0)),
    ("numeric", "1.50", "1.5"),
    ("float8", "0.1", 0.10000000149011612),
    ("float8", "0.1", 0.09999999999999999),
    ("float8", "1e23", 1.0000000000000001e23),
    ("float8", "'-0'", 0.0),
    ("float8", "'NaN'", None),
    ("float8", "1e-320", 0.0),
    ("float4", "16777216", 16777218.0),
    ("bytea", r"'\x00ff'", b"\\x00ff"),
    ("bytea", r"'\x00ff'", b"\x00"),
    ("bytea", r"'\x00'", b""),
    ("date", "'2026-01-31'", date(2026, 2, 1)),
    ("date", "'0044-03-15 BC'", date(44, 3, 15)),
    ("date", "'infinity'", date(9999, 12, 31)),
    ("timestamp", "'2026-01-31 12:00:00.5'", datetime(2026, 1, 31, 12, 0, 0, 5)),  # noqa: DTZ001
    ("timestamp", "'2026-01-31 12:00:00.5'", datetime(2026, 1, 31, 12)),  # noqa: DTZ001
    ("timestamptz", "'2026-01-31 12:00:00+00'", datetime(2026, 1, 31, 13, tzinfo=UTC)),
    ("timestamptz", "'2026-07-31 12:00:00+02'", datetime(2026, 7, 31, 12, tzinfo=UTC)),
    ("timestamptz", "'10000-01-01 00:00:00+00'", datetime(1000, 1, 1, tzinfo=UTC)),
    ("text", "'a '", "a"),
    ("text", "''", None),
    ("text", "NULL", ""),
    ("text", "NULL", "\\N"),
    ("text", r"'\n'", "\n"),
    ("text", r"E'\n'", r"\n"),
    ("bpchar(3)", "'a'", "a"),
    ("int4[]", "'{1,2}'", [2, 1]),
    ("int4[]", "'{}'", None),
    ("int4[]", "'{NULL}'", []),
    ("int4[]", "'{{1,2}}'", [1, 2]),
    ("int4[]", "'[0:1]={1,2}'", [1, 2]),
    ("text[]", "'{\"a,b\"}'", ["a", "b"]),
    ("text[]", "'{\"NULL\"}'", [None]),
    ("text[]", "'{NULL}'", ["NULL"]),
    ("text[]", "'{NULL}'", [""]),
    ("text[]", r"""'{"\""}'""", ['\\"']),
    ("float8[]", "'{0,1}'", [-0.0, 1.0]),
    ("float8[]", "'{1,2}'", [2.0, 1.0]),
    ("float8[]", "'{}'", [None]),
    ("float8[]", "'{}'", None),
    ("timestamptz[]", "'{2026-01-31 12:00:00+00}'", [datetime(2026, 1, 31, 13, tzinfo=UTC)]),
    ("public.hstore", "'a=>1, b=>NULL'", [("a", "1")]),
    ("public.hstore", "'a=>1, b=>NULL'", [("a", "1"), ("b", "NULL")]),
    ("public.hstore", "''", None),
]
"""A type, a value of the source, and what a wrong cast would make of it."""


def test_a_wrong_cast_of_any_type_is_different(database18: Database) -> None:
    database18.execute("CREATE EXTENSION hstore SCHEMA public")
    values: dict[str, list[str]] = {}
    for kind, value, _ in WRONG:
        values.setdefault(kind, []).append(value)
    rows = Rows(database18, {kind: [f"{value}::{kind}" for value in each] for kind, each in values.items()})
    assert not rows.differing(rows.target)
    target = rows.target
    for place, kind in enumerate(rows.types, 1):
        for row, wrong in enumerate(wrong for each, _, wrong in WRONG if each == kind):
            target[place] = put(target[place], row, wrong)
    found = rows.differing(target)
    assert found == {(kind, row) for kind, each in values.items() for row in range(len(each))}


CODECS: dict[str, Callable[[Any], Any]] = {
    "numeric(10,2)": lambda value: value.quantize(Decimal("0.1")),
    "timestamptz": lambda value: value + timedelta(hours=1),
    "timestamp": lambda value: value.replace(microsecond=0),
    "float8": lambda value: float(np.float32(value)),
    "bytea": lambda value: value.hex().encode(),
    "text": str.strip,
    "int4[]": lambda value: value[::-1],
    "date": lambda value: value + timedelta(days=1),
}


def test_a_codec_that_is_broken_on_purpose_is_found(database18: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "numeric(10,2)": "1.23",
        "timestamptz": "'2026-01-31 12:00:00+00'",
        "timestamp": "'2026-01-31 12:00:00.25'",
        "float8": "0.1",
        "bytea": r"'\x00ff'",
        "text": "' a'",
        "int4[]": "'{1,2}'",
        "date": "'2026-01-31'",
    }
    rows = Rows(database18, {kind: [f"{values[kind]}::{kind}", "NULL"] for kind in CODECS})
    text = copytext.read(rows.copied, rows.schema.names)
    target = rows.target
    for place, kind in enumerate(CODECS, 1):
        broken = rows.codecs[place]
        with monkeypatch.context() as patched:
            right = type(broken)._cast

            def wrong(self: Codec, text: pa.Array, right: Any = right, change: Any = CODECS[kind]) -> Any:
                cast = right(self, text)
                changed = [None if value is None else change(value) for value in cast.values.to_pylist()]
                return type(cast)(pa.array(changed, cast.values.type), cast.rejected)

            patched.setattr(type(broken), "_cast", wrong)
            target[place] = broken.cast(text.column(place)).values
    assert rows.differing(target) == {(kind, 0) for kind in CODECS}


def hashes(layout: RowLayout, side: Side, batch: pa.RecordBatch) -> list[list[int]]:
    """Of each column, in the order of the keys."""
    rows = pa.Table.from_batches(rows_of(layout, side, [batch], np.array([0]), texts=False)).to_pylist()
    return [row["columns"] for row in sorted(rows, key=lambda row: str(row["name"]))]


def test_vectors_are_lists_of_floats() -> None:
    """pgvector is not on every server."""
    schema = pa.schema([("id", pa.int64()), ("v", pa.list_(pa.float32())), ("vs", pa.list_(pa.list_(pa.float32())))])
    layout = RowLayout(schema, ("id",), 1, (SourceType(), SourceType("FLOAT", ","), SourceType("FLOAT", ",,")))
    copied = b'1\t[1,2.5,-0]\t{"[1,2]",NULL,"[-0]"}\n2\t\\N\t{}\n3\t[1e-45]\t{NULL}\n'
    right = [[1, [1, 2.5, -0.0], [[1, 2], None, [-0.0]]], [2, None, []], [3, [1e-45], [None]]]

    def target(rows: list[Any]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)

    found = source_text.read(copied, schema)
    assert not found.rejected
    source = hashes(layout, Side.SOURCE, found.batch)
    assert source == hashes(layout, Side.TARGET, target(right))
    wrong = [[1, [1, 2.5, 0.0], [[1, 2], None, [0.0]]], [2, [], None], [3, [3e-45], []]]
    for mine, theirs in zip(source, hashes(layout, Side.TARGET, target(wrong)), strict=True):
        assert [one == other for one, other in zip(mine, theirs, strict=True)] == [True, False, False]


@pytest.mark.parametrize(
    ("source", "copied", "value"),
    [
        (SourceType("DOUBLE"), b"0.1", pa.scalar(0.1, pa.float32())),
        (SourceType("DOUBLE", ","), b"{0.1}", pa.scalar([0.1], pa.list_(pa.float32()))),
        (SourceType(), b"0.1", pa.scalar(0.1, pa.float64())),
        (SourceType(), b"2026-01-01 12:00:00+00", pa.scalar(datetime(2026, 1, 1, 12), pa.timestamp("us"))),  # noqa: DTZ001
        (SourceType(), b"0.123", pa.scalar(Decimal("0.12"), pa.decimal128(10, 2))),
        (SourceType(), b"1", pa.scalar(True, pa.bool_())),
        (SourceType(), b"\\\\x6869", pa.scalar("hi", pa.string())),
    ],
)
def test_a_type_of_the_target_that_loses_something_is_different(
    source: SourceType, copied: bytes, value: pa.Scalar
) -> None:
    schema = pa.schema([("id", pa.int32()), ("v", value.type)])
    layout = RowLayout(schema, ("id",), 1, (SourceType(), source))
    [[_, mine]] = hashes(layout, Side.SOURCE, source_text.read(b"1\t" + copied + b"\n", schema).batch)
    rows = pa.RecordBatch.from_arrays([pa.array([1], pa.int32()), pa.array([value.as_py()], value.type)], schema=schema)
    [[_, theirs]] = hashes(layout, Side.TARGET, rows)
    assert mine != theirs


ESCAPED = (
    *("", "\\", "\\\\", "\n", "\\n", "\\\n", "\n\\", "\t", "\\t\\\\t\t", "\b\f\r\v"),
    *("\\.", "\\N", "a\\\\Nb", "\ufeff", "é\n😀\\"),
)


def test_what_copy_escapes_is_read_as_it_was(database18: Database) -> None:
    expected = [value.encode() for value in ESCAPED]
    query = "COPY (SELECT v, NULL, 'x' || v FROM unnest(%s::text[]) AS v) TO STDOUT"
    with database18.connection.cursor() as cursor, cursor.copy(query, [list(ESCAPED)]) as copy:
        data = b"".join(copy)
    columns = source_text.split(data, 3)
    assert [each.to_pylist() for each in columns] == [expected, [None] * len(expected), [b"x" + v for v in expected]]
    for value, line in zip(expected, data.splitlines(keepends=True), strict=True):  # each alone: other ways to unescape
        assert [each.to_pylist() for each in source_text.split(line, 3)] == [[value], [None], [b"x" + value]]


@pytest.mark.parametrize("data", [b"1\n", b"1\t2\t3\n", b"1\t2", b"1\t2\n3\n", b"1\n2\t3\t4\n"])
def test_rows_with_other_columns_are_refused(data: bytes) -> None:
    with pytest.raises(CastError, match="2 columns"):
        source_text.split(data, 2)


def test_bytes_that_are_not_utf8_cannot_be_held() -> None:
    schema = pa.schema([("id", pa.int32()), ("note", pa.string())])
    found = source_text.read(b"1\t\xff\n2\t\xc3\xa9\n3\t\\N\n", schema)
    assert found.batch.column(1).to_pylist() == [None, "é", None]
    assert {place: texts.to_pylist() for place, texts in found.rejected.items()} == {1: [b"\xff"]}
