"""Fingerprints: a small summary of any number of rows, in any order, by which the two sides are compared.

The rows of a table are divided among **buckets** by a hash of their key. For each bucket, a fingerprint has the number
of rows and the sum of their hashes. So rows may come in any order and in any number of pieces, and a row that exists
twice counts twice. Buckets that agree hold the same rows (the chance that one does not is 1 in 2^64). The rows of the
other buckets are read again and compared; there are few rows in a bucket.

The source gives text and the target gives values: `pg_text` says how the two are compared. DuckDB computes it, on whole
columns, with one batch in memory at a time. Equal means the same text or the same bits, and NULL equals NULL.

In DuckDB the columns are c0, c1, …, and what is compared of them v0, v1, …: DuckDB ignores case in names, and a table
may have a column with a name that is used here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from walmere.verify.pg_text import SourceType, source_terms, source_value, target_terms, target_value

BUCKET_ROWS: Final = 16_384
"""About this many rows in a bucket."""
_FEWEST, _MOST = 16, 65_536

DIFFERENT_ROWS: Final = (
    "bucket int, side int, name array<string>, row bigint, copies bigint, columns array<bigint>, texts array<string>"
)
"""The columns of `rows_of`, as Spark's DDL."""


class Side(IntEnum):
    """Where rows come from."""

    SOURCE = 0  # columns of text: `source_text.read`
    TARGET = 1  # columns of the target's types


def buckets_for(rows: int) -> int:
    """The number of buckets for about this many rows."""
    return min(max(1 << (rows // BUCKET_ROWS).bit_length(), _FEWEST), _MOST)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What is hashed of the rows of a table: the same on both sides."""

    schema: pa.Schema  # the target's
    key: tuple[str, ...]  # empty: whole rows are compared, as a multiset
    buckets: int
    source: tuple[SourceType, ...]  # of each column

    def values(self, side: Side) -> str:
        """What is compared of each column, as v0, v1, …: a SELECT list over c0, c1, …"""
        return ", ".join(f"{self._value(side, place)} AS v{place}" for place in range(len(self.schema)))

    def kinds(self, side: Side) -> list[pa.DataType]:
        """The types of c0, c1, …"""
        target = [without_zone(kind) for kind in self.schema.types]
        if side is Side.TARGET:
            return target
        return [kind if column.masked else pa.large_string() for kind, column in zip(target, self.source, strict=True)]

    def _is_text(self, side: Side, place: int) -> bool:
        return side is Side.SOURCE and not self.source[place].masked

    def _value(self, side: Side, place: int) -> str:
        if self._is_text(side, place):
            return source_value(f"c{place}", self.source[place])
        return target_value(f"c{place}", self.schema.field(place).type, self.source[place])

    def bucket(self, side: Side) -> str:
        """A row's bucket, in DuckDB's SQL."""
        return f"{self.hash(side, self.key or self.schema.names)} & {self.buckets - 1}"

    def hash(self, side: Side, columns: Sequence[str]) -> str:
        """Of these columns. Twice: DuckDB joins them by XOR, and sums of that may miss values that were exchanged."""
        terms = [term for name in columns for term in self._terms(side, self.schema.names.index(name))]
        return f"hash(hash({', '.join(terms)}))"

    def _terms(self, side: Side, place: int) -> Iterator[str]:
        if self._is_text(side, place):
            return source_terms(f"v{place}", self.source[place])
        return target_terms(f"v{place}", self.schema.field(place).type)

    def text(self, name: str) -> str:
        """A column's value as text."""
        return f"v{self.schema.names.index(name)}::VARCHAR"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of one side, or of a piece of it."""

    rows: NDArray[np.int64]
    low: NDArray[np.uint64]  # sums of the lower halves of all hashes
    high: NDArray[np.uint64]

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(self.rows + other.rows, self.low + other.low, self.high + other.high)

    @property
    def total(self) -> int:
        """How many rows there are."""
        return int(self.rows.sum())

    def differing(self, other: Fingerprint) -> NDArray[np.intp]:
        """The buckets in which both do not hold the same."""
        return np.flatnonzero((self.rows != other.rows) | (self.low != other.low) | (self.high != other.high))


def empty(buckets: int) -> Fingerprint:
    """The fingerprint of no rows."""
    return Fingerprint(np.zeros(buckets, np.int64), np.zeros(buckets, np.uint64), np.zeros(buckets, np.uint64))


def fingerprint(layout: RowLayout, side: Side, batches: Iterable[pa.RecordBatch], where: str = "true") -> Fingerprint:
    """Of all these rows. `where`: a condition on c0, c1, …"""
    bucket, whole = layout.bucket(side), layout.hash(side, layout.schema.names)
    found = register(layout.kinds(side), batches).sql(
        f"WITH compared AS (SELECT {layout.values(side)} FROM rows WHERE {where}),"
        f" hashed AS (SELECT {bucket} AS bucket, {whole} AS h FROM compared)"
        " SELECT bucket, count(*) AS n, sum(h & 4294967295)::UBIGINT AS low, sum(h >> 32)::UBIGINT AS high"
        " FROM hashed GROUP BY bucket"
    )
    columns = found.to_arrow_table()
    made = empty(layout.buckets)
    places = columns["bucket"].to_numpy().astype(np.intp)
    for into, name in ((made.rows, "n"), (made.low, "low"), (made.high, "high")):
        into[places] = columns[name].to_numpy()
    return made


def rows_of(
    layout: RowLayout,
    side: Side,
    batches: Iterable[pa.RecordBatch],
    differing: NDArray[np.intp],
    *,
    texts: bool,
    where: str = "true",
) -> Iterator[pa.RecordBatch]:
    """The rows of these buckets as DIFFERENT_ROWS: the key as text, and hashes of the row and of each column.

    `texts`: with all values as text.
    """
    names = layout.schema.names
    bucket, whole = layout.bucket(side), layout.hash(side, names)
    name = ", ".join(map(layout.text, layout.key)) or "row::VARCHAR"
    columns = ", ".join(f"{layout.hash(side, [each])} >> 1" for each in names)
    shown = ", ".join(map(layout.text, names)) if texts else ""
    connection = register(layout.kinds(side), batches)
    connection.register("wanted", pa.table({"bucket": pa.array(differing, pa.uint64())}))
    found = connection.sql(
        f"WITH compared AS (SELECT {layout.values(side)} FROM rows WHERE {where}),"
        f" hashed AS (SELECT *, {bucket} AS bucket, ({whole} >> 1)::BIGINT AS row FROM compared)"
        # equal rows as one: a table without a key may have any number of them
        f" SELECT bucket::INTEGER AS bucket, {side.value}::INTEGER AS side, [{name}]::VARCHAR[] AS name, row,"
        f" count(*) AS copies, any_value([{columns}]::BIGINT[]) AS columns, any_value([{shown}]::VARCHAR[]) AS texts"
        " FROM hashed WHERE bucket IN (SELECT bucket FROM wanted) GROUP BY ALL"
    )
    yield from found.to_arrow_reader(10_000)


def register(kinds: Sequence[pa.DataType], batches: Iterable[pa.RecordBatch]) -> Any:
    """A connection of DuckDB with the table `rows`, which can be read once, one batch at a time."""
    schema = pa.schema([(f"c{place}", kind) for place, kind in enumerate(kinds)])
    rows = (
        pa.RecordBatch.from_arrays(
            [
                column if column.type == kind else column.cast(kind)
                for column, kind in zip(batch.columns, kinds, strict=True)
            ],
            schema=schema,
        )
        for batch in batches
    )
    connection = duckdb.connect(config={"threads": 1})
    connection.register("rows", pa.RecordBatchReader.from_batches(schema, rows))
    return connection


def without_zone(kind: pa.DataType) -> pa.DataType:
    """DuckDB would write a timestamp with a zone in the zone of this machine. All of ours are UTC."""
    if pa.types.is_list(kind):
        return pa.list_(without_zone(kind.value_type))
    return pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind
