"""json and jsonb as VARIANT: Spark's and DuckDB's decoders read what was in the text, or it is rejected."""

from __future__ import annotations

import decimal
import json
import random
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyspark.sql.variant_utils import VariantUtils

from walmere.errors import CastError
from walmere.types.base import Cast
from walmere.types.variant.codec import MAX_BYTES, Variant
from walmere.variant_type import VARIANT
from walmere.verify import json_text

CODEC = Variant("jsonb", VARIANT)
DEEP = "[" * 1000 + "]" * 1000
FORTY_KEYS = json.dumps({f"key {number}": number for number in range(40)})

HELD: dict[str, Any] = {
    "null": None,
    "true": True,
    " false ": False,
    "0": 0,
    "-0": 0,
    "-0.0": Decimal("0.0"),
    "127": 127,
    "128": 128,
    "-129": -129,
    "32768": 32768,
    "2147483648": 2147483648,
    "-9223372036854775808": -(1 << 63),
    "9223372036854775808": Decimal(1 << 63),
    "9" * 38: Decimal("9" * 38),
    "-" + "9" * 38: Decimal("-" + "9" * 38),
    "1.0": Decimal("1.0"),
    "1.00": Decimal("1.00"),
    "-0.10": Decimal("-0.10"),
    "123456789.123456789": Decimal("123456789.123456789"),
    "12345678901234567890.123456789012345678": Decimal("12345678901234567890.123456789012345678"),
    "0." + "0" * 37 + "1": Decimal("1e-38"),
    "1e2": 100,
    "1.50e1": Decimal("15.0"),
    "12E-3": Decimal("0.012"),
    "0e500": 0,
    "1e37": Decimal("1" + "0" * 37),
    '""': "",
    '"' + "x" * 63 + '"': "x" * 63,
    '"' + "é" * 32 + '"': "é" * 32,
    '"' + "x" * 70000 + '"': "x" * 70000,
    r'"\"\\\/\b\f\n\r\t\u0000\u001f\u00e9\u20ac\ud83d\ude00\uD83D\uDE00"': '"\\/\b\f\n\r\t\x00\x1fé€😀😀',
    r'"\\u0041\\"': r"\u0041" + "\\",
    '"{[]},:\\""': '{[]},:"',
    "[]": [],
    "{}": {},
    "[ [ ] , { } , null ]": [[], {}, None],
    '{"": {"": 1}}': {"": {"": 1}},
    '{"b": 1, "a": {"b": [1, {"é": 2}]}, "aa": 3}': {"a": {"b": [1, {"é": 2}]}, "aa": 3, "b": 1},
    r'{"\u0061\n": 1}': {"a\n": 1},
    FORTY_KEYS: json.loads(FORTY_KEYS),
    json.dumps(list(range(300))): list(range(300)),
    json.dumps([["x" * 100] * 200] * 10): [["x" * 100] * 200] * 10,
    json.dumps({f"k{number}": "x" * 50 for number in range(400)}): {f"k{number}": "x" * 50 for number in range(400)},
}
REJECTED = (
    "1" * 39,
    "1e400",
    f"{'1' * 5000}e-1",
    "1e38",
    "0." + "0" * 38 + "1",
    "1." + "0" * 39,
    "1e-39",
    "1e99999999999999999999",
    '{"a": 1, "a": 1}',
    '[{"b": {"a": 1, "c": 2, "a": 3}}]',
    r'{"a": 1, "\u0061": 2}',
    r'"\ud800"',
    r'"\udc00\ud800"',
    r'{"\ud83dx": 1}',
    "[" + DEEP + "]",
    '{"a":' * 1001 + "1" + "}" * 1001,
)


def cast(*texts: str | None) -> Cast:
    return CODEC.cast(pa.array([None if text is None else text.encode() for text in texts], pa.binary()))


def by_spark(row: dict[str, bytes]) -> Any:
    """Spark's own decoder. It rounds to the precision of the context."""
    with decimal.localcontext(prec=50):
        return VariantUtils.to_python(row["value"], row["metadata"])


def by_duckdb(values: pa.Array) -> list[str | None]:
    rows = pa.table({"v": values})  # noqa: F841 - DuckDB finds it by its name
    query = "SELECT variant_bytes_to_variant(v.metadata || v.value)::JSON::VARCHAR FROM rows"
    return [text for (text,) in duckdb.connect().sql(query).fetchall()]


def same(one: Any, other: Any) -> bool:
    """Also the digits of decimals, and the types."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return repr(one) == repr(other)


@pytest.mark.parametrize("text", HELD, ids=lambda text: text[:30])
def test_a_document_alone_is_what_the_text_says(text: str) -> None:
    made = cast(text)
    assert made.rejected is None
    assert same(by_spark(made.values[0].as_py()), HELD[text])


def test_documents_in_one_block_are_the_same_as_alone_and_null_is_not_json_null() -> None:
    texts = [None, *HELD, None, *REJECTED, "null"]
    made = cast(*texts)
    assert made.rejected is not None
    for text, row, rejected in zip(texts, made.values.to_pylist(), made.rejected.tolist(), strict=True):
        assert rejected == (text in REJECTED), text
        if text is None or rejected:
            assert row is None
        else:
            assert row == cast(text).values[0].as_py(), text
    assert made.values[-1].as_py() == {"metadata": b"\x11\x00\x00", "value": b"\x00"}


@pytest.mark.parametrize("text", REJECTED, ids=lambda text: text[:30])
def test_what_variant_cannot_hold_is_rejected_and_verify_knows_it(text: str) -> None:
    made = cast("[1]", text, DEEP)
    assert made.rejected is not None
    assert made.rejected.tolist() == [False, True, False]
    assert json_text.compared(text.encode()) is None
    assert json_text.compared(DEEP.encode()) is not None


def test_the_bytes_are_those_of_the_specification() -> None:
    [row] = cast('{"b": [1, 1.50], "a": "x"}').values.to_pylist()
    assert row["metadata"] == b"\x11\x02\x00\x01\x02ab"
    array = b"\x03\x02\x00\x02\x08" + b"\x0c\x01" + b"\x20\x02\x96\x00\x00\x00"
    assert row["value"] == b"\x02\x02\x00\x01" + bytes([len(array), 0, len(array) + 2]) + array + b"\x05x"


def test_a_text_of_more_than_16_mb_is_rejected_and_one_of_16_mb_is_not() -> None:
    longest = '"' + "x" * (MAX_BYTES - 2) + '"'
    made = cast("1", longest, longest + " ", "2")
    assert made.rejected is not None
    assert made.rejected.tolist() == [False, False, True, False]
    assert len(made.values[1].as_py()["value"]) == MAX_BYTES - 2 + 5
    assert json_text.compared(longest.encode() + b" ") is None


def test_bytes_that_are_not_utf8_are_rejected() -> None:
    made = CODEC.cast(pa.array([b'"\xff"', b'"x"'], pa.large_binary()))
    assert made.rejected is not None
    assert made.rejected.tolist() == [True, False]


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "{", "[", "]", "[1,]", "[,1]", "[1 2]", "[1}", "[1]]", '{"a"}', '{"a":}', '{"a":1,}', '{"a":1,2}'),
        *('{"a":1 "b":2}', '["a":1]', "{1:2}", '{"a"::1}', '{"a":1}{"b":2}', '"a":1', "1,2", "1 2", ",", ":"),
        *("tru", "nulll", "True", "NaN", "Infinity", "01", "1.", ".5", "+1", "-", "1e", "0x1", '"a', '"a"b', '"a""b"'),
        *("\\", '"\\', '"\\x"', '"\\u12"', '"\\u12g4"', '{"a":1,"b"}', "[1][2]", "{}{}", "{]"),
    ],
)
def test_what_is_not_json_is_refused(text: str) -> None:
    for others in ((), ("[1]", '{"q": "\\""}')):
        with pytest.raises(CastError, match="not JSON"):
            cast(*others, text, *others)


def _some(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random() if depth < 5 else 1
    if kind < 0.2:
        names = ["a", "bb", "é", "😀", "（", "x" * 70, "", 'q"\\\n']
        return {chance.choice(names) + str(chance.randrange(50)): _some(chance, depth + 1) for _ in range(6)}
    if kind < 0.35:
        return [_some(chance, depth + 1) for _ in range(chance.randrange(6))]
    digits = chance.randrange(-(10 ** chance.randrange(1, 38)), 10 ** chance.randrange(1, 38))
    text = "".join(chance.choices(["s", "é", "😀", "\n", '"', "\\", "\x01", "/", " "], k=chance.randrange(100)))
    return chance.choice([None, True, False, digits, Decimal(digits).scaleb(-chance.randrange(1, 38)), text])


def _json(value: Any, *, ascii_only: bool) -> str:
    if isinstance(value, dict):
        pairs = (
            f"{json.dumps(k, ensure_ascii=ascii_only)}: {_json(v, ascii_only=ascii_only)}" for k, v in value.items()
        )
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_json(each, ascii_only=ascii_only) for each in value) + "]"
    return f"{value:f}" if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=ascii_only)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_documents_that_nobody_has_chosen_are_read_back_by_duckdb(seed: int) -> None:
    """Their JSON is the same as `verify` makes of the text, which uses none of this code."""
    chance = random.Random(seed)
    with decimal.localcontext(prec=50):
        texts = [_json(_some(chance), ascii_only=bool(seed % 2)) for _ in range(1000)]
    made = cast(*texts)
    assert made.rejected is None
    assert by_duckdb(made.values) == [json_text.compared(text.encode()) for text in texts]
    for text, row in zip(texts[:200], made.values.to_pylist(), strict=False):
        wanted = json.loads(text, parse_float=Decimal)
        found = by_spark(row)
        assert found == wanted, text
