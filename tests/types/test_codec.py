"""A cast does not depend on how the text lies in memory, and what is no value of its type is refused, not guessed."""

from __future__ import annotations

import pickle
import re
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from walmere.errors import CastError
from walmere.types import PgType
from walmere.types.base import Codec
from walmere.types.codec import codec
from walmere.types.numeric import typmod_of

CATALOG = {
    1: PgType(1, "public", "hstore", extension="hstore"),
    2: PgType(2, "public", "vector", extension="vector"),
    3: PgType(3, "public", "_hstore", elem=1),
}
INT4, TEXT, BYTEA, DATE, TIMESTAMP, TIMESTAMPTZ, FLOAT4, FLOAT8, BOOL = 23, 25, 17, 1082, 1114, 1184, 700, 701, 16
NUMERIC, INT4S, TEXTS, DATES, XID8, HSTORE, VECTOR, HSTORES = 1700, 1007, 1009, 1182, 5069, 1, 2, 3

GOOD: dict[str, tuple[int, int, list[str]]] = {
    "bool": (BOOL, -1, ["t", "f"]),
    "int4": (INT4, -1, ["1", "-2147483648"]),
    "xid8": (XID8, -1, ["1", "18446744073709551615"]),
    "float8": (FLOAT8, -1, ["NaN", "-0", "1e300", "Infinity"]),
    "numeric": (NUMERIC, typmod_of(38, 10), ["1.5", "NaN", "9" * 28, "9" * 30, "0.0000000001", "0.00000000001"]),
    "text": (TEXT, -1, ["", "a😀"]),
    "bytea": (BYTEA, -1, ["\\x", "\\x00ff"]),
    "date": (DATE, -1, ["2024-02-29", "infinity", "0044-03-15 BC", "10000-01-01"]),
    "timestamp": (TIMESTAMP, -1, ["2024-02-29 01:02:03.5", "-infinity", "0044-03-15 00:00:00 BC"]),
    "timestamptz": (
        TIMESTAMPTZ,
        -1,
        ["2024-02-29 01:02:03.5+00", "1850-01-01 00:00:00+01:22:03", "10000-01-01 02:00:00+05", "infinity"],
    ),
    "int4[]": (INT4S, -1, ["{}", "{1,NULL,3}", "{{1}}", "[0:0]={1}"]),
    "text[]": (TEXTS, -1, ["{}", '{"",NULL,"NULL","\\"","\\\\"}', "{{a}}"]),
    "date[]": (DATES, -1, ["{2024-01-01,infinity}", "{2024-01-01,NULL}"]),
    "hstore": (HSTORE, -1, ["", '"a"=>"1", "b"=>NULL', '"\\"=>"=>"\\\\"']),
    "hstore[]": (HSTORES, -1, ['{"\\"a\\"=>\\"1\\"",NULL}', "{}"]),
    "vector": (VECTOR, -1, ["[1,2.5]", "[0]"]),
}


def cast(made: Codec, text: Any) -> tuple[str, list[bool]]:
    done = made.cast(text)
    done.values.validate(full=True)
    assert done.values.type == made.arrow
    assert len(done.values) == len(text)
    rejected = np.zeros(len(text), np.bool_) if done.rejected is None else done.rejected
    assert all(value is None for value, flag in zip(done.values.to_pylist(), rejected, strict=True) if flag)
    return repr(done.values.to_pylist()), rejected.tolist()


@pytest.mark.parametrize("name", GOOD)
def test_how_the_text_lies_in_memory_makes_no_difference(name: str) -> None:
    oid, typmod, values = GOOD[name]
    made = pickle.loads(pickle.dumps(codec(oid, typmod, CATALOG)))
    texts = [None, *values, None, values[0], *reversed(values)]
    plain = pa.array(texts, pa.string())
    expected = cast(made, plain)
    assert expected[0] != repr([None] * len(texts))
    for kind in (pa.binary(), pa.large_binary(), pa.large_string()):
        assert cast(made, plain.cast(kind)) == expected
    around = pa.array(["other", None, *texts, "{", '"'], pa.binary())
    assert cast(made, around.slice(2, len(texts))) == expected
    assert cast(made, pa.chunked_array([plain[:3], plain[:0], plain[3:]])) == expected
    # under a null there may be anything
    junk = pa.array([text if text is not None else 'x"{\\' for text in texts], pa.binary())
    bitmap = pa.py_buffer(np.packbits([text is not None for text in texts], bitorder="little"))
    assert cast(made, pa.Array.from_buffers(pa.binary(), len(texts), [bitmap, *junk.buffers()[1:]])) == expected
    for row, text in enumerate(texts):
        alone = made.cast(pa.array([text], pa.string()))
        assert repr(alone.values.to_pylist()) == repr(made.cast(plain).values[row : row + 1].to_pylist())


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("none", [[], [None], [None, None]])
def test_nothing_and_only_nulls(name: str, none: list[None]) -> None:
    oid, typmod, _ = GOOD[name]
    made = codec(oid, typmod, CATALOG)
    assert cast(made, pa.array(none, pa.binary())) == (repr(none), [False] * len(none))
    assert cast(made, pa.chunked_array([], pa.binary())) == ("[]", [])


def test_only_text_is_taken() -> None:
    with pytest.raises(TypeError, match="int64"):
        codec(INT4, -1, {}).cast(pa.array([1]))


MALFORMED = {
    "bool": ["true", "", "T", "tf"],
    "int4": ["", "0x1f", " 1", "+1", "1.0", "2147483648", "1e3", "--1", "NaN"],
    "xid8": ["18446744073709551616", "", "0x1"],
    "float8": ["", "1e400", "1e-400", " 1", "0x1p3", "infinite", "1,5"],
    "numeric": ["", "abc", "1e5", ".5x", "nan", "-", "1.2.3", "9" * 40 + "x", " 1", "1/2"],
    "bytea": ["", "abc", "\\x0", "\\xzz", "\\x 0", "\\"],
    "date": ["", "2023-02-29", "2024-1-1", "2024-01-01 00:00:00", "Infinity", "44-03-15 BC", "01/02/2024", "today"],
    "timestamp": ["", "2024-01-01 24:00:01", "2024-01-01 00:00:00+00", "2024-01-01 00:00:00.1234567", "now"],
    "timestamptz": ["", "2024-01-01 00:00:00", "2024-01-01 00:00:00+01:22:99x", "2023-02-29 00:00:00+01:22:03"],
    "int4[]": ["", "{", "}", "{1", "1}", "{1,}", "{,1}", "{1}}", "{1}{2}", "{a}", "{1 ,2}", "{1.5}", '{"1}'],
    "text[]": [
        '{"a"b}',
        '{a"b"}',
        '{"}',
        '{"a""b"}',
        "{\\a}",
        '{"a\\"}',
        "x",
        "{a,{b}}",
        "{a}b",
        "{,}",
        "{{a}"[1:] + "}",
    ],
    "date[]": ["{2023-02-29}", "{infinityy}"],
    "hstore": [
        '"a"',
        '"a"=>',
        '"a"=>"b" ',
        '"a"=>"b","c"=>"d"',
        "a=>b",
        '"a"=>NULLx',
        ' "a"=>"b"',
        '"a"=>"b"=>"c"',
        "x",
    ],
    "hstore[]": ['{"a=>b"}'],
    "vector": ["[1,NULL]", "[1", "1,2", "[a]", "[]x", "[1,,2]", "{1}", "[1e50]"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_what_is_no_value_of_its_type_is_refused_and_not_shown(name: str, text: str) -> None:
    oid, typmod, values = GOOD[name]
    made = codec(oid, typmod, CATALOG)
    for texts in ([text], [*values, None, text, *values]):
        with pytest.raises(CastError) as refused:
            made.cast(pa.array(texts, pa.string()))
        error = refused.value
        assert made.name in str(error) or name.endswith("[]")
        assert error.__suppress_context__ or error.__context__ is None
        assert len(text) < 4 or text not in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_error_says_which_value_it_is() -> None:
    texts = ["1"] * 1000
    texts[617] = "secret"
    with pytest.raises(CastError, match=r"int4.*value 617 of 1000, of 6 bytes"):
        codec(INT4, -1, {}).cast(pa.array(texts))


def test_bytes_that_are_not_utf8_are_rejected_alone() -> None:
    texts = pa.array([b"ok", b"\xff", "é".encode(), None, b"\xc3", b"\xa9"], pa.binary())
    assert cast(codec(TEXT, -1, {}), texts) == (
        repr(["ok", None, "é", None, None, None]),
        [False, True, False, False, True, True],
    )
    texts = pa.array([b"{ok}", b'{ok,"\xff"}'], pa.binary())
    assert cast(codec(TEXTS, -1, {}), texts) == (repr([["ok"], None]), [False, True])
    texts = pa.array([b'"\xff"=>"a"', b'"a"=>"\xff"', b'"a"=>NULL'], pa.binary())
    assert cast(codec(HSTORE, -1, CATALOG), texts) == (repr([None, None, [("a", None)]]), [True, True, False])


def test_a_null_list_has_no_elements_left_in_it() -> None:
    made = codec(DATES, -1, {}).cast(pa.array(["{infinity,2024-01-01}", "{2024-01-01}", None, "{{2024-01-01}}"]))
    assert made.values.flatten().to_pylist() == [date(2024, 1, 1)]
    assert len(made.values.values) == 1


def test_the_digits_that_arrows_parser_overflows_on_are_never_another_number() -> None:
    made = codec(NUMERIC, typmod_of(38, 10), {})
    assert cast(made, pa.array(["1" * 30, "9" * 39, "1"])) == (
        repr([None, None, Decimal("1.0000000000")]),
        [True, True, False],
    )
    assert cast(codec(NUMERIC, typmod_of(38, 0), {}), pa.array(["9" * 39, "0" * 39])) == (
        repr([None, Decimal(0)]),
        [True, False],
    )


def array_of_text(text: str) -> list[str | None] | None:
    """`array_in` for what `array_out` writes, letter by letter; None is rejected, ValueError is no array."""
    if text.startswith(("{{", "[")) and len(text) >= 2:
        return None
    if not (text.startswith("{") and text.endswith("}") and len(text) >= 2):
        raise ValueError
    if text == "{}":
        return []
    item = re.compile(r'(?:"((?:[^"\\]|\\.)*)"|([^"\\{},]+))(?:,|\Z)', re.DOTALL)
    found: list[str | None] = []
    inside, at = text[1:-1], 0
    if inside.endswith(",") and not re.search(r'"(?:[^"\\]|\\.)*,\Z', inside):
        raise ValueError
    while at < len(inside) or not found:
        match = item.match(inside, at)
        if match is None or (match[0].endswith(",") and match.end() == len(inside)):
            raise ValueError
        bare = match[2]
        found.append((None if bare == "NULL" else bare) if bare else re.sub(r"\\(.)", r"\1", match[1], flags=re.DOTALL))
        at = match.end()
    return found


@settings(max_examples=600, deadline=None)
@given(st.lists(st.text('{}",\\aNUL[', max_size=9), min_size=1, max_size=3))
@example(["{\\", "}"])
@example(['{"a', 'b"}'])
@example(['{"a\\', '"}'])
@example(['{"",""}'])
def test_arrays_agree_with_a_parser_that_goes_letter_by_letter(texts: list[str]) -> None:
    """Broken ones as well, side by side: what is wrong with one must not lend sense to its neighbour."""
    texts = ["{x}", *(f"{{{text}}}" if index % 2 else text for index, text in enumerate(texts)), '{"y"}']
    try:
        expected = [array_of_text(text) for text in texts]
    except ValueError:
        with pytest.raises(CastError):
            codec(TEXTS, -1, {}).cast(pa.array(texts))
    else:
        values, rejected = cast(codec(TEXTS, -1, {}), pa.array(texts))
        assert values == repr(expected)
        assert rejected == [value is None for value in expected]


PAIR = r'"((?:[^"\\]|\\.)*)"=>(?:NULL|"((?:[^"\\]|\\.)*)")'


def hstore_of_text(text: str) -> list[tuple[str, str | None]]:
    if text and not re.fullmatch(f"{PAIR}(?:, {PAIR})*", text, re.DOTALL):
        raise ValueError

    def plain(part: str | None) -> str | None:
        return None if part is None else re.sub(r"\\(.)", r"\1", part, flags=re.DOTALL)

    return [(plain(match[1]) or "", plain(match[2])) for match in re.finditer(PAIR, text, re.DOTALL)]


TOKENS = st.sampled_from(['"', '"a"', "=>", ", ", "NULL", "\\", '"a"=>"b"', '"c"=>NULL', "a", '\\"', ""])


@settings(max_examples=600, deadline=None)
@given(st.lists(st.lists(TOKENS, max_size=7).map("".join), min_size=1, max_size=3))
@example(['"a"=>"b', '"c"=>"d"'])
@example(['"a"=>"', '"'])
def test_hstores_agree_with_a_parser_of_one_at_a_time(texts: list[str]) -> None:
    texts = ['"x"=>"y"', *texts, "", '"z"=>NULL']
    try:
        expected = [hstore_of_text(text) for text in texts]
    except ValueError:
        with pytest.raises(CastError):
            codec(HSTORE, -1, CATALOG).cast(pa.array(texts))
    else:
        assert cast(codec(HSTORE, -1, CATALOG), pa.array(texts))[0] == repr(expected)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(GOOD)), st.data())
def test_damaged_text_is_cast_rejected_or_refused_and_nothing_else_happens(name: str, data: st.DataObject) -> None:
    oid, typmod, values = GOOD[name]
    text = bytearray(data.draw(st.sampled_from(values)).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    made = codec(oid, typmod, CATALOG)
    try:
        cast(made, pa.array([values[0].encode(), bytes(text), None], pa.binary()))
    except CastError:
        return
    if made.arrow == pa.int32():
        assert re.fullmatch(rb"-?[0-9]+", text)
