"""A sample: some intervals of the key, the same on both sides, so that missing and extra rows in them are found.

The boundaries are keys of the target, chosen at random, so that all intervals have about the same number of rows. Some
of the intervals are chosen at random and compared. At the source an interval is a condition for which an index on the
key is used, and no other rows are sent. The first column of the key must have the same order on both sides. Otherwise
the whole table is compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from walmere.sinks.base import LakeSink
from walmere.verify.fingerprint import register, without_zone

_INTERVALS: Final = 200
_MOST: Final = 20_000

_QUOTE: Final = "'"
_TEXTS: Final = (25, 1043)
_CASTS: Final = {
    20: "int8",
    21: "int8",
    23: "int8",
    1082: "date",
    1114: "timestamp",
    1184: "timestamptz",
    1700: "numeric",
    2950: "uuid",
}
"""By type OID, the type that a key's text is cast to at the source."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Keys from `first` to `end`, without `end`, as text; None: no bound."""

    first: str | None
    end: str | None


@dataclass(frozen=True, slots=True)
class KeySample:
    """A task: sample keys of a piece."""

    sink: LakeSink
    piece: Any
    key: pa.Field  # the first column of the key
    count: int
    seed: int


def sample_keys(task: KeySample) -> list[str]:
    """Runs in a Spark task."""
    rows = register([without_zone(task.key.type)], task.sink.read(task.piece, [task.key.name]))
    found = rows.sql(
        "WITH keys AS (SELECT c0 FROM rows WHERE c0 IS NOT NULL)"
        f" SELECT c0::VARCHAR FROM keys USING SAMPLE reservoir({task.count} ROWS) REPEATABLE ({task.seed})"
    )
    return [text for (text,) in found.fetchall()]


def can_sample(type_oid: int, kind: pa.DataType) -> bool:
    """Whether keys of this type have the same order on both sides."""
    if type_oid == 1700:
        return bool(pa.types.is_decimal(kind))  # otherwise it is text in the target
    return type_oid in _CASTS or type_oid in _TEXTS


def order_of(kind: pa.DataType) -> Callable[[str], Any]:
    """The sort key of a key's text."""
    return Decimal if pa.types.is_integer(kind) or pa.types.is_decimal(kind) else str.encode


def boundaries(percent: float) -> int:
    """How many keys to sample."""
    return min(max(_INTERVALS, round(2 * 100 / percent)), _MOST)


def choose(keys: Sequence[str], order: Callable[[str], Any], percent: float, chooser: random.Random) -> list[Interval]:
    """Some of the intervals between these keys, with about this percentage of the rows."""
    bounds: list[str | None] = [None, *sorted(set(keys), key=order), None]
    wanted = max(1, round((len(bounds) - 1) * percent / 100))
    chosen: list[Interval] = []
    for place in sorted(chooser.sample(range(len(bounds) - 1), wanted)):
        first, end = bounds[place], bounds[place + 1]
        if chosen and chosen[-1].end == first and first is not None:
            first = chosen.pop().first
        chosen.append(Interval(first, end))
    return chosen


def at_source(column: str, type_oid: int, intervals: Sequence[Interval]) -> str:
    """As a condition of PostgreSQL. Text is compared by its bytes in UTF-8, in any encoding and collation."""
    name = '"' + column.replace('"', '""') + '"'
    if type_oid in _TEXTS:
        utf8 = f"pg_catalog.convert_to({name}, 'UTF8')"
        return _either(utf8, intervals, lambda text: f"'\\x{text.encode().hex()}'::bytea")
    zone = "+00" if _CASTS[type_oid] == "timestamptz" else ""
    return _either(name, intervals, lambda text: f"'{text.replace(_QUOTE, 2 * _QUOTE)}{zone}'::{_CASTS[type_oid]}")


def in_target(place: int, kind: pa.DataType, intervals: Sequence[Interval]) -> str:
    """As a condition of DuckDB, on c0, c1, …"""
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return _either(f"c{place}", intervals, str)
    cast = "DATE" if pa.types.is_date(kind) else "TIMESTAMP" if pa.types.is_timestamp(kind) else "VARCHAR"
    return _either(f"c{place}", intervals, lambda text: f"'{text.replace(_QUOTE, 2 * _QUOTE)}'::{cast}")


def _either(column: str, intervals: Sequence[Interval], literal: Callable[[str], str]) -> str:
    conditions = []
    for each in intervals:
        bounds = [f"{column} >= {literal(each.first)}"] if each.first is not None else []
        bounds += [f"{column} < {literal(each.end)}"] if each.end is not None else []
        conditions.append(" AND ".join(bounds) or "true")
    return " OR ".join(f"({each})" for each in conditions)
