"""Fingerprints: what is left of any number of rows, in whatever order they come, so that two sides can be compared.

The rows of a table are divided among **buckets** by a hash of their key. Of each bucket a fingerprint has the number of
rows and the sum of their hashes: rows may come in any order and in any number of pieces, and a row that is there twice
counts twice. Buckets that agree hold the same rows, but for one chance in 2^64 each. Of those that do not, the rows
themselves are looked at, and a bucket holds few enough of them.

DuckDB computes it, by whole columns and with nothing in memory but the batch at hand: twenty million rows a second, so
that comparing costs hardly more than reading. Equal means the same bits, and NULL equals NULL. DuckDB takes 0.0 and
-0.0 for the same, so floats go by their bits here; and an empty list for NULL, so of lists their length counts as well.

To DuckDB the columns are c0, c1, …, whatever their names: it does not tell capitals apart, and a table may have a
column that is called as one of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

ROWS: Final = 16_384
"""In a bucket, about."""
_FEWEST, _MOST = 16, 65_536

DIFFERENT_ROWS: Final = (
    "bucket int, side int, name array<string>, row bigint, copies bigint, columns array<bigint>, texts array<string>"
)
"""What `rows_of` gives, in Spark's words."""


def buckets_for(rows: int) -> int:
    """How many, for about so many rows."""
    return min(max(1 << (rows // ROWS).bit_length(), _FEWEST), _MOST)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How the rows of a table are hashed: the same on both sides."""

    schema: pa.Schema
    key: tuple[str, ...]  # none: whole rows are compared, as a multiset
    buckets: int

    @property
    def bucket(self) -> str:
        """In DuckDB's SQL."""
        return f"{self.hash(self.key or self.schema.names)} & {self.buckets - 1}"

    def hash(self, columns: Sequence[str]) -> str:
        """Of these columns. Twice: DuckDB joins them by XOR, and sums of that may miss values that were exchanged."""
        return f"hash(hash({', '.join(term for name in columns for term in self._terms(name))}))"

    def _terms(self, name: str) -> Iterator[str]:
        place = self.schema.names.index(name)
        kind = self.schema.field(place).type
        yield f"c{place}"
        if pa.types.is_nested(kind):
            length = f"cardinality(c{place})" if pa.types.is_map(kind) else f"len(c{place})"
            yield f"CASE WHEN c{place} IS NULL THEN -1 ELSE {length}::BIGINT END"

    def text(self, name: str) -> str:
        """What people see of a column."""
        place = self.schema.names.index(name)
        return f"{'f' if pa.types.is_floating(self.schema.field(place).type) else 'c'}{place}::VARCHAR"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of one side, or a piece of it."""

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


def nothing(buckets: int) -> Fingerprint:
    """The fingerprint of no rows."""
    return Fingerprint(np.zeros(buckets, np.int64), np.zeros(buckets, np.uint64), np.zeros(buckets, np.uint64))


def fingerprint(layout: RowLayout, batches: Iterable[pa.RecordBatch], where: str = "true") -> Fingerprint:
    """Of all these rows."""
    found = query(
        layout,
        batches,
        f"SELECT {layout.bucket} AS bucket, {layout.hash(layout.schema.names)} AS h FROM rows WHERE {where}",
        "SELECT bucket, count(*) AS n, sum(h & 4294967295)::UBIGINT AS low, sum(h >> 32)::UBIGINT AS high"
        " FROM hashed GROUP BY bucket",
    ).to_arrow_table()
    made = nothing(layout.buckets)
    at = found["bucket"].to_numpy().astype(np.intp)
    for into, name in ((made.rows, "n"), (made.low, "low"), (made.high, "high")):
        into[at] = found[name].to_numpy()
    return made


def rows_of(
    layout: RowLayout,
    batches: Iterable[pa.RecordBatch],
    side: int,
    differing: NDArray[np.intp],
    *,
    texts: bool,
    where: str = "true",
) -> Iterator[pa.RecordBatch]:
    """The rows of these buckets as DIFFERENT_ROWS: what they are called, and hashes of the whole and of each column."""
    wanted = pa.table({"bucket": pa.array(differing, pa.uint64())})
    names = layout.schema.names
    name = ", ".join(map(layout.text, layout.key)) or "row::VARCHAR"
    columns = ", ".join(f"{layout.hash([each])} >> 1" for each in names)
    shown = ", ".join(map(layout.text, names)) if texts else ""
    hashed = f"SELECT *, {layout.bucket} AS bucket, ({layout.hash(names)} >> 1)::BIGINT AS row FROM rows WHERE {where}"
    found = query(
        layout,
        batches,
        hashed,
        # equal rows as one: of a table without a key there may be any number
        f"SELECT bucket::INTEGER AS bucket, {side}::INTEGER AS side, [{name}]::VARCHAR[] AS name, row,"
        f" count(*) AS copies, any_value([{columns}]::BIGINT[]) AS columns, any_value([{shown}]::VARCHAR[]) AS texts"
        " FROM hashed WHERE bucket IN (SELECT bucket FROM wanted) GROUP BY ALL",
        wanted=wanted,
    )
    yield from found.to_arrow_reader(10_000)


def query(layout: RowLayout, batches: Iterable[pa.RecordBatch], hashed: str, sql: str, **tables: pa.Table) -> Any:
    """Run DuckDB's SQL over `hashed`, which is made of `rows`: one pass, with one batch in memory at a time."""
    connection = duckdb.connect(config={"threads": 1})
    floats = [place for place, field in enumerate(layout.schema) if pa.types.is_floating(field.type)]
    schema = pa.schema(
        [(f"c{place}", _plain(field.type)) for place, field in enumerate(layout.schema)]
        + [(f"f{place}", layout.schema.field(place).type) for place in floats]
    )
    rows = (
        pa.RecordBatch.from_arrays(
            [*map(_view, batch.columns), *(batch.column(place) for place in floats)], schema=schema
        )
        for batch in batches
    )
    connection.register("rows", pa.RecordBatchReader.from_batches(schema, rows))
    for name, table in tables.items():
        connection.register(name, table)
    return connection.sql(f"WITH hashed AS ({hashed}) {sql}")


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_float64(kind):
        return pa.int64()
    if pa.types.is_float32(kind):
        return pa.int32()
    return pa.timestamp("us") if pa.types.is_timestamp(kind) else kind


def _view(column: pa.Array) -> pa.Array:
    kind = _plain(column.type)
    return column if kind.equals(column.type) else column.view(kind)
