"""The text of a column as JSON: what `json.loads` makes of it is the value."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from walmere.types import PgType, TypType
from walmere.types.codec import codec
from walmere.types.jsontext import json_text

BOOL, BYTEA, INT4, TEXT, JSON, FLOAT8, TEXTS, INTS, DATE, NUMERIC, JSONS = (
    *(16, 17, 23, 25, 114, 701, 1009, 1007),
    *(1082, 1700, 199),
)
HSTORE, VECTOR, PRICE = 90001, 90002, 90003
CATALOG = {
    HSTORE: PgType(HSTORE, "public", "hstore", extension="hstore"),
    VECTOR: PgType(VECTOR, "public", "vector", extension="vector"),
    PRICE: PgType(PRICE, "public", "price", TypType.DOMAIN, NUMERIC),
}


def made(oid: int, *texts: str | None) -> list[str]:
    array = pa.array([None if text is None else text.encode() for text in texts], pa.binary())
    found: list[str] = json_text(codec(oid, -1, CATALOG), array).values.to_pylist()
    return found


@pytest.mark.parametrize(
    ("oid", "text", "expected"),
    [
        (INT4, "-7", "-7"),
        (NUMERIC, "0.10", "0.10"),
        (NUMERIC, "NaN", '"NaN"'),
        (PRICE, "1.50", "1.50"),
        (FLOAT8, "1e+300", "1e+300"),
        (FLOAT8, "-Infinity", '"-Infinity"'),
        (BOOL, "t", "true"),
        (BOOL, "f", "false"),
        (JSON, '{"a": [1, null]}', '{"a": [1, null]}'),
        (BYTEA, r"\x00ff", r'"\\x00ff"'),
        (DATE, "infinity", '"infinity"'),
        (TEXT, "", '""'),
        (TEXT, 'a"b\\c\n\x01', r'"a\"b\\c\n\u0001"'),
        (INTS, "{1,NULL,3}", "[1,null,3]"),
        (INTS, "{}", "[]"),
        (INTS, "{{1},{2}}", '"{{1},{2}}"'),
        (INTS, "[0:1]={1,2}", '"[0:1]={1,2}"'),
        (TEXTS, '{a,"NULL",NULL,"say \\"so\\""}', r'["a","NULL",null,"say \"so\""]'),
        (JSONS, '{"{\\"a\\": 1}",NULL}', '[{"a": 1},null]'),
        (VECTOR, "[1,2.5]", "[1,2.5]"),
        (HSTORE, '"a"=>"1", "b\\"c"=>NULL', r'{"a":"1","b\"c":null}'),
        (HSTORE, "", "{}"),
        (TEXT, None, "null"),
        (INTS, None, "null"),
        (HSTORE, None, "null"),
        (BOOL, None, "null"),
    ],
)
def test_each_family(oid: int, text: str | None, expected: str) -> None:
    assert made(oid, text) == [expected]
    # beside others, as it would be alone
    assert made(oid, None, text, None, text)[1:4] == [expected, "null", expected]


@given(st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))))
def test_any_text_comes_back(texts: list[str | None]) -> None:
    assert [json.loads(each) for each in made(TEXT, *texts)] == texts


PLAIN = st.none() | st.booleans() | st.integers() | st.text()


@given(st.recursive(PLAIN, lambda of: st.lists(of) | st.dictionaries(st.text(), of)))
def test_json_stays_as_it_is(value: Any) -> None:
    assert json.loads(made(JSON, json.dumps(value))[0]) == value


def test_what_is_no_text_is_rejected() -> None:
    cast = json_text(codec(TEXT, -1, {}), pa.array([b"good", b"\xff"]))
    assert cast.values.to_pylist() == ['"good"', "null"]
    assert cast.rejected is not None
    assert cast.rejected.tolist() == [False, True]
