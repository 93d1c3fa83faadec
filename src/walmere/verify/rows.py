"""Compares row by row, where fingerprints differ: which rows are missing, extra or different, and in which columns.

Only rows of buckets that differ are compared here. Spark shuffles them, so that the rows of a bucket of both sides are
in one task. This works for tables of any size, and for any number of differences.

A row is identified by its key. If both sides have a row with this key and the rows are not the same, it is *different*.
If one side has more rows with this key than the other, the surplus is *missing* or *extra*. A table without a key is a
multiset: its rows are missing or extra.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import duckdb
import pyarrow as pa

from walmere.verify.fingerprint import Side

COMPARED: Final = (
    "missing bigint, extra bigint, different bigint, name array<string>, source array<bigint>, target array<bigint>,"
    " source_texts array<string>, target_texts array<string>"
)
"""The columns of `compare`, as Spark's DDL: a row for each example, and one for all other rows."""

_COMPARE: Final = f"""
WITH net AS (
    SELECT name, row, sum(CASE side WHEN {Side.SOURCE.value} THEN copies ELSE -copies END) AS surplus,
           any_value(columns) AS columns, any_value(texts) AS texts
    FROM sides GROUP BY name, row HAVING surplus <> 0
), named AS (
    SELECT name, sum(greatest(surplus, 0)) AS here, sum(greatest(-surplus, 0)) AS there,
           any_value(columns) FILTER (surplus > 0) AS source, any_value(columns) FILTER (surplus < 0) AS target,
           any_value(texts) FILTER (surplus > 0) AS source_texts, any_value(texts) FILTER (surplus < 0) AS target_texts,
           row_number() OVER (ORDER BY name) <= $examples AS shown
    FROM net GROUP BY name
)
SELECT sum(here - least(here, there))::BIGINT AS missing, sum(there - least(here, there))::BIGINT AS extra,
       sum(least(here, there))::BIGINT AS different, example AS name,
       any_value(source) FILTER (shown) AS source, any_value(target) FILTER (shown) AS target,
       any_value(source_texts) FILTER (shown) AS source_texts, any_value(target_texts) FILTER (shown) AS target_texts
FROM (SELECT *, CASE WHEN shown THEN name END AS example FROM named) GROUP BY example
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """One row, or several with the same key."""

    what: str  # missing, extra, different
    key: dict[str, str | None]  # as text; empty if the table has no key
    columns: tuple[str, ...] = ()  # that differ
    source: dict[str, str | None] | None = None  # their values as text, with --show-values
    target: dict[str, str | None] | None = None


@dataclass(frozen=True, slots=True)
class Differences:
    """The number of differences of a table, and some examples."""

    missing: int
    extra: int
    different: int
    examples: tuple[Difference, ...]


def compare(both: pa.Table, examples: int) -> pa.Table:
    """Compare both sides of one bucket. Runs in a Spark task."""
    connection = duckdb.connect(config={"threads": 1})
    connection.register("sides", both)
    return connection.sql(_COMPARE, params={"examples": examples}).to_arrow_table()


def gather(found: Iterable[Any], columns: Sequence[str], key: Sequence[str], most: int) -> Differences:
    """The results of all buckets as one; examples in the order of their keys."""
    rows = list(found)
    named = sorted((row for row in rows if row.name is not None), key=lambda row: [part or "" for part in row.name])
    return Differences(
        sum(row.missing for row in rows),
        sum(row.extra for row in rows),
        sum(row.different for row in rows),
        tuple(_example(row, columns, key) for row in named[:most]),
    )


def _example(row: Any, columns: Sequence[str], key: Sequence[str]) -> Difference:
    name = dict(zip(key, row.name, strict=True)) if key else {}
    source, target = (
        dict(zip(columns, texts, strict=True)) if texts else None for texts in (row.source_texts, row.target_texts)
    )
    if not row.different:
        return Difference("missing" if row.missing else "extra", name, (), source, target)
    differ = tuple(column for column, one, other in zip(columns, row.source, row.target, strict=True) if one != other)
    only = [{each: side[each] for each in differ} if side is not None else None for side in (source, target)]
    return Difference("different", name, differ, *only)
