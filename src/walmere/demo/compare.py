"""Compares every row and every column of a table at the source and in the target.

The comparison shares no code with the subscription. Rows of the source are read in PostgreSQL's binary format and
converted by psycopg; the subscription reads text and casts it itself. Rows of the lake are read as any reader of Delta
reads them. Only columns that the lake has as PostgreSQL's text (enums, jsonb, uuid, numeric without precision) are read
as text from the source too. If the target is a database, each server computes a checksum of all its rows by SQL, and
rows are read only if the checksums differ.

Rows of both sides are sorted by key and compared as whole columns, one table at a time. Only if they differ, rows are
compared one by one, as multisets, so that a duplicate row is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from walmere.demo.shop import KEYS, SCHEMA
from walmere.publisher.connect import Connection

_COLUMNS: Final = """
SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_catalog.pg_attribute
WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
_CHECKSUM: Final = """
SELECT count(*), sum(hashtextextended(t::text, 0)), sum(hashtextextended(t::text, 1)) FROM {table} AS t
"""
_ROWS: Final = 20_000
_SHOWN: Final = 5

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TableComparison:
    """The result for one table, with the keys of a few rows that differ."""

    name: str
    rows: int  # at the source
    missing: int = 0  # in the target
    extra: int = 0  # in the target, including duplicates
    different: int = 0  # same key, different values
    keys: tuple[str, ...] = ()
    wrong: str | None = None  # about the table as a whole

    @property
    def equal(self) -> bool:
        """Whether both sides are the same."""
        return not (self.missing or self.extra or self.different or self.wrong)

    def __str__(self) -> str:
        if self.equal:
            return "equal"
        if self.wrong:
            return self.wrong
        counts = {"missing": self.missing, "extra": self.extra, "different": self.different}
        return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) + f": {', '.join(self.keys)}"


def compare(connection: Connection, lake: Path, name: str) -> TableComparison:
    """Compare one table of the shop. The writers must have stopped."""
    opened = DeltaTable(lake / SCHEMA / name)
    found = QueryBuilder().register("t", opened).execute("SELECT * FROM t").read_all()
    target = pa.table(found).cast(pa.schema(opened.schema().to_arrow()))
    columns = [column for column, _ in _columns(connection, name)]
    if columns != target.column_names:
        wrong = f"the columns are {', '.join(target.column_names)} instead of {', '.join(columns)}"
        return TableComparison(f"{SCHEMA}.{name}", 0, wrong=wrong)
    return compare_tables(name, _source(connection, name, target.schema), target, KEYS[name])


def compare_databases(source: Connection, target: Connection, name: str) -> TableComparison:
    """Compare one table of the shop in two databases. The writers must have stopped."""
    table = f"{SCHEMA}.{name}"
    wanted, found = _columns(source, name), _columns(target, name)
    if wanted != found:
        here, there = (", ".join(map(" ".join, columns)) for columns in (wanted, found))
        return TableComparison(table, 0, wrong=f"the columns are {there} instead of {here}")
    query = _CHECKSUM.format(table=table).encode()
    [here_sum], [there_sum] = source.execute(query).fetchall(), target.execute(query).fetchall()
    if here_sum == there_sum:
        return TableComparison(table, here_sum[0])
    return compare_tables(name, _text_rows(source, name), _text_rows(target, name), KEYS[name])


def _columns(connection: Connection, name: str) -> list[tuple[str, str]]:
    """The names and types of the columns."""
    rows = connection.execute(_COLUMNS.format(table=f"{SCHEMA}.{name}").encode())
    return [(column, kind) for column, kind in rows]


def _text_rows(connection: Connection, name: str) -> pa.Table:
    """The keys, and each row as text."""
    key = ", ".join(f"{column}::text" for column in KEYS[name])
    rows = connection.execute(f"SELECT {key}, t::text FROM {SCHEMA}.{name} AS t".encode()).fetchall()  # noqa: S608
    columns = [*KEYS[name], "row"]
    return pa.table(
        {column: pa.array([row[place] for row in rows], pa.string()) for place, column in enumerate(columns)}
    )


def _source(connection: Connection, name: str, schema: pa.Schema) -> pa.Table:
    """Read the table from the source, in the types of the lake; a value that does not fit into its type is an error."""
    columns = ", ".join(f'"{field.name}"' + ("::text" if pa.types.is_string(field.type) else "") for field in schema)
    batches = []
    with connection.transaction(), connection.cursor("compare", binary=True) as cursor:
        cursor.execute(f"SELECT {columns} FROM {SCHEMA}.{name}".encode())  # noqa: S608
        while rows := cursor.fetchmany(_ROWS):
            values = [
                pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)
            ]
            batches.append(pa.RecordBatch.from_arrays(values, schema=schema))
    return pa.Table.from_batches(batches, schema)


def compare_tables(name: str, source: pa.Table, target: pa.Table, key: Sequence[str]) -> TableComparison:
    """Compare two tables with the same columns."""
    qualified = f"{SCHEMA}.{name}"
    order = [(column, "ascending") for column in key]
    if source.num_rows == target.num_rows and source.sort_by(order).equals(target.sort_by(order)):
        return TableComparison(qualified, source.num_rows)
    here, there = _rows(source), _rows(target)
    places = [source.column_names.index(column) for column in key]
    missing, extra = _by_key(here - there, places), _by_key(there - here, places)
    changed = missing.keys() & extra.keys()
    return TableComparison(
        qualified,
        source.num_rows,
        missing=sum(missing[each] for each in missing.keys() - changed),
        extra=sum(extra[each] for each in extra.keys() - changed),
        different=len(changed),
        keys=tuple(f"({', '.join(map(str, each))})" for each in sorted(missing.keys() | extra.keys())[:_SHOWN]),
    )


def _rows(table: pa.Table) -> Counter[Row]:
    return Counter(zip(*(map(_hashable, column.to_pylist()) for column in table.columns), strict=True))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _by_key(rows: Iterable[Row] | Counter[Row], places: Sequence[int]) -> Counter[Row]:
    found: Counter[Row] = Counter()
    for row, times in Counter(rows).items():
        found[tuple(row[place] for place in places)] += times
    return found
