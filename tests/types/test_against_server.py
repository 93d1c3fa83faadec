"""Made-up values, written by a real server: what is cast is what was sent there."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from walmere.types.codec import codec
from walmere.types.numeric import precision_and_scale, typmod_of

ONE_SERVER = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# what text can hold: all characters but the null byte and halves of a pair, and those that arrays care about often
CHARACTERS = st.one_of(
    st.sampled_from('"\\{},; \n\tNULaé😀=>\ufeff'), st.characters(exclude_characters="\0", exclude_categories=["Cs"])
)
TEXTS = st.one_of(st.text(CHARACTERS, max_size=8), st.sampled_from(["NULL", "null", "", "\\", '"', "{}"]))


@ONE_SERVER
@given(lists=st.lists(st.one_of(st.none(), st.lists(st.one_of(st.none(), TEXTS), max_size=6)), min_size=1, max_size=8))
@example(lists=[["\\"], ['"'], ["\\", '"'], ['\\"', "\\\\"], [], None, [None], ["NULL"]])
def test_arrays_of_text(source18: Any, lists: list[list[str | None] | None]) -> None:
    query = " UNION ALL ".join(f"SELECT {i}, %s::text[]::text" for i in range(len(lists)))
    texts = source18.texts(f"SELECT text FROM ({query}) AS q(i, text) ORDER BY i", *lists)
    assert codec(1009, -1, {}).cast(texts).values.to_pylist() == lists


@ONE_SERVER
@given(maps=st.lists(st.dictionaries(TEXTS, st.one_of(st.none(), TEXTS), max_size=5), min_size=1, max_size=6))
def test_hstore(source18: Any, maps: list[dict[str, str | None]]) -> None:
    source18.database.execute("CREATE EXTENSION IF NOT EXISTS hstore SCHEMA public")
    oid = source18.database.value("SELECT 'public.hstore'::regtype::oid")
    hstore = codec(oid, -1, source18.types_of([oid]))
    query = " UNION ALL ".join(f"SELECT {i}, public.hstore(%s::text[], %s::text[])::text" for i in range(len(maps)))
    parameters = [part for each in maps for part in (list(each), list(each.values()))]
    texts = source18.texts(f"SELECT text FROM ({query}) AS q(i, text) ORDER BY i", *parameters)
    assert [dict(value) for value in hstore.cast(texts).values.to_pylist()] == maps


@st.composite
def numerics(draw: st.DrawFn) -> tuple[int, int, list[Decimal]]:
    """Precision, scale, and numbers that numeric(precision, scale) takes, or nearly."""
    precision = draw(st.integers(1, 38))
    scale = draw(st.one_of(st.integers(0, precision), st.integers(-5, 42)))
    limit = 10**precision - 1
    digits = st.one_of(st.sampled_from([0, limit, -limit]), st.integers(-limit, limit))
    return (
        precision,
        scale,
        [Decimal(f"{number}E{-scale}") for number in draw(st.lists(digits, min_size=1, max_size=8))],
    )


@ONE_SERVER
@given(made=numerics())
def test_numerics_of_any_precision_and_scale(source18: Any, made: tuple[int, int, list[Decimal]]) -> None:
    precision, scale, numbers = made
    exact = [format(number, "f") for number in numbers]
    texts = source18.texts(f"SELECT unnest(%s::numeric({precision},{scale})[])::text", exact)
    cast = codec(1700, typmod_of(precision, scale), {}).cast(texts)
    assert cast.rejected is None
    assert [Decimal(value) for value in cast.values.to_pylist()] == numbers


@ONE_SERVER
@given(made=numerics(), target=st.tuples(st.integers(1, 38), st.integers(0, 38)).filter(lambda t: t[1] <= t[0]))
def test_a_numeric_that_does_not_fit_the_decimal_asked_for_is_rejected_and_never_another_number(
    made: tuple[int, int, list[Decimal]], target: tuple[int, int]
) -> None:
    _, _, numbers = made
    precision, scale = target
    texts = [format(number, "f").encode() for number in numbers]
    cast = codec(1700, typmod_of(precision, scale), {}).cast(pa.array(texts, pa.binary()))
    for row, number in enumerate(numbers):
        scaled = Fraction(number) * 10**scale
        fits = scaled.denominator == 1 and abs(scaled) < 10**precision
        assert cast.values[row].as_py() == (number if fits else None)
        assert (cast.rejected is not None and bool(cast.rejected[row])) != fits


def test_the_type_modifier_of_numeric_is_read_as_the_server_means_it(source18: Any) -> None:
    for precision, scale in [(1, 0), (38, 38), (1000, 0), (5, -2), (3, 5), (1, -1000), (1, 1000), (12, 2)]:
        source18.database.execute(f"CREATE TABLE n (n numeric({precision},{scale}))")
        typmod = source18.database.value(
            "SELECT atttypmod FROM pg_attribute WHERE attrelid = 'n'::regclass AND attnum = 1"
        )
        source18.database.execute("DROP TABLE n")
        assert precision_and_scale(typmod) == (precision, scale)
        assert typmod_of(precision, scale) == typmod
    assert precision_and_scale(-1) is None


DATES = st.one_of(st.dates(), st.sampled_from([date.min, date.max]))
FIRST, LAST = datetime.min, datetime.max  # noqa: DTZ901
TIMES = st.one_of(st.datetimes(), st.sampled_from([FIRST, LAST]))


@ONE_SERVER
@given(dates=st.lists(DATES, min_size=1), times=st.lists(TIMES, min_size=1))
def test_dates_and_timestamps(source18: Any, dates: list[date], times: list[datetime]) -> None:
    texts = source18.texts("SELECT unnest(%s::date[])::text", [str(each) for each in dates])
    assert codec(1082, -1, {}).cast(texts).values.to_pylist() == dates
    texts = source18.texts("SELECT unnest(%s::timestamp[])::text", [each.isoformat() for each in times])
    assert codec(1114, -1, {}).cast(texts).values.to_pylist() == times


@pytest.mark.parametrize(
    "zone",
    [
        "UTC",
        "Europe/Amsterdam",
        "Asia/Kolkata",
        "America/St_Johns",
        "Africa/Monrovia",
        "Pacific/Kiritimati",
        "Pacific/Niue",
    ],
)
@settings(ONE_SERVER, max_examples=15)
@given(times=st.lists(TIMES, min_size=1))
@example(times=[FIRST, LAST, FIRST + timedelta(hours=3), LAST - timedelta(hours=3), FIRST.replace(year=1850)])
def test_a_timestamptz_is_the_same_in_whatever_zone_it_is_written(
    source18: Any, zone: str, times: list[datetime]
) -> None:
    source18.connection.execute("SELECT set_config('TimeZone', %s, false)", [zone])
    texts = source18.texts("SELECT unnest(%s::timestamptz[])::text", [f"{each.isoformat()}+00" for each in times])
    cast = codec(1184, -1, {}).cast(texts)
    assert cast.rejected is None
    assert cast.values.to_pylist() == [each.replace(tzinfo=UTC) for each in times]


@ONE_SERVER
@given(
    days=st.lists(
        st.one_of(st.integers(-2_451_507, 2_145_031_948), st.integers(-800_000, 3_000_000)), min_size=1, max_size=9
    )
)
def test_days_outside_of_the_years_1_to_9999_are_rejected_and_only_those(source18: Any, days: list[int]) -> None:
    """Days since 2000; the widest that a date takes."""
    texts = source18.texts("SELECT (date '2000-01-01' + n)::text FROM unnest(%s::int[]) AS n", days)
    cast = codec(1082, -1, {}).cast(texts)
    for row, number in enumerate(days):
        inside = 1 - 730_120 <= number + 1 <= 2_921_939 + 1
        expected = date(2000, 1, 1) + timedelta(number) if inside else None
        assert cast.values[row].as_py() == expected
        assert (cast.rejected is not None and bool(cast.rejected[row])) != inside


@ONE_SERVER
@given(
    doubles=st.lists(st.floats(width=64), min_size=1),
    singles=st.lists(st.floats(width=32), min_size=1),
)
def test_floats_to_the_last_bit(source18: Any, doubles: list[float], singles: list[float]) -> None:
    for oid, kind, numbers in ((701, "float8", doubles), (700, "float4", singles)):
        texts = source18.texts(f"SELECT unnest(%s::{kind}[])::text", [repr(number) for number in numbers])
        assert [repr(number) for number in codec(oid, -1, {}).cast(texts).values.to_pylist()] == [*map(repr, numbers)]


@ONE_SERVER
@given(values=st.lists(st.one_of(st.none(), st.binary(max_size=40)), min_size=1))
def test_bytes(source18: Any, values: list[bytes | None]) -> None:
    texts = source18.texts("SELECT unnest(%s::bytea[])::text", values)
    assert codec(17, -1, {}).cast(texts).values.to_pylist() == values
