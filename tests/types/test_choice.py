"""Other types of the target than the usual ones: exact, or rejected."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from walmere.errors import CastError
from walmere.types.builtin import BUILT_IN
from walmere.types.choice import by_type, choose
from walmere.types.numeric import typmod_of
from walmere.types.pgtype import PgType, TypType

OIDS = {each.name: each.oid for each in BUILT_IN.values()}


def cast(name: str, lake_type: str, *texts: str | None) -> tuple[list[Any], list[bool]]:
    found = choose(OIDS[name], -1, {}, lake_type)
    made = found.cast(pa.array([None if text is None else text.encode() for text in texts], pa.binary()))
    rejected = [False] * len(texts) if made.rejected is None else made.rejected.tolist()
    return made.values.to_pylist(), rejected


def test_a_numeric_is_a_decimal_if_it_fits() -> None:
    values, rejected = cast(
        "numeric", "decimal(6,3)", "1.5", "-0.0010000", "999.999", "1000", "0.0001", "NaN", None, "Infinity"
    )
    assert values == [Decimal("1.500"), Decimal("-0.001"), Decimal("999.999"), None, None, None, None, None]
    assert rejected == [False, False, False, True, True, True, False, True]


def test_integers_can_be_wider_and_all_types_can_be_text() -> None:
    assert cast("int4", "bigint", "-2147483648", None) == ([-2147483648, None], [False, False])
    assert cast("int8", "decimal(20,0)", "9223372036854775807")[0] == [Decimal(9223372036854775807)]
    assert cast("timestamptz", "string", "infinity") == (["infinity"], [False])
    assert cast("numeric", "string", "1.50")[0] == ["1.50"]


def test_a_uuid_can_be_its_bytes() -> None:
    text = "00112233-4455-6677-8899-aabbccddeeff"
    its = bytes.fromhex(text.replace("-", ""))
    assert cast("uuid", "binary", text, None, text)[0] == [its, None, its]
    with pytest.raises(CastError, match="not a uuid"):
        cast("uuid", "binary", "00112233-4455-6677-8899-aabbccddeef")


@pytest.mark.parametrize(
    ("text", "months", "days", "microseconds"),
    [
        ("00:00:00", 0, 0, 0),
        ("1 year", 12, 0, 0),
        ("-1 years -2 mons", -14, 0, 0),
        ("1 year 2 mons 3 days 04:05:06.7", 14, 3, 14706700000),
        ("-1 mons +2 days -00:00:00.000001", -1, 2, -1),
        ("-3 days +04:05:06.123456", 0, -3, 14706123456),
        ("1 day", 0, 1, 0),
        ("2562047788:00:54.775807", 0, 0, (1 << 63) - 1),
        ("-2562047788:00:54.775808", 0, 0, -(1 << 63)),
        ("178956970 years 7 mons", (1 << 31) - 1, 0, 0),
    ],
)
def test_an_interval_can_be_its_three_parts(text: str, months: int, days: int, microseconds: int) -> None:
    values, rejected = cast("interval", "struct", text, None)
    assert values == [{"months": months, "days": days, "microseconds": microseconds}, None]
    assert rejected == [False, False]


def test_an_infinite_interval_is_rejected_and_another_style_refused() -> None:
    assert cast("interval", "struct", "infinity", "-infinity", "1 day")[1] == [True, True, False]
    for text in ("", "P1Y", "@ 1 year", "1-2", "1 year ago", "5"):
        with pytest.raises(CastError, match="not an interval"):
            cast("interval", "struct", text)


@pytest.mark.parametrize(
    ("name", "lake_type"),
    [
        ("numeric", "double"),
        ("int8", "int"),
        ("text", "bigint"),
        ("uuid", "bigint"),
        ("jsonb", "struct"),
        ("text", "variant"),
        ("_jsonb", "variant"),
        ("_int4", "bigint"),
    ],
)
def test_what_would_not_be_exact_is_refused(name: str, lake_type: str) -> None:
    with pytest.raises(ValueError, match="cannot be exact as"):
        choose(OIDS[name], -1, {}, lake_type)


def test_a_choice_for_a_type_holds_for_domains_over_it_and_not_for_arrays() -> None:
    chosen = {"numeric": "decimal(38,18)"}
    domain = PgType(99_999, "public", "amount", TypType.DOMAIN, basetype=OIDS["numeric"])
    found = by_type(99_999, -1, {99_999: domain}, chosen)
    assert found is not None
    assert found.arrow == pa.decimal128(38, 18)
    assert by_type(OIDS["numeric"], typmod_of(10, 2), {}, chosen) is None
    assert by_type(OIDS["numeric"], typmod_of(50, 2), {}, chosen) is not None
    assert by_type(OIDS["_numeric"], -1, {}, chosen) is None
    assert by_type(OIDS["text"], -1, {}, chosen) is None
