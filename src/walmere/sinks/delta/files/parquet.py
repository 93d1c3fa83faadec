"""Write rows to Parquet files of a table, with the statistics that Delta has of each file, and read them.

A file has a unique name, is written once, and is fsynced before it is used. Zstandard at its fastest level costs little
more than no compression. A dictionary helps only if values repeat, so the first rows decide, column by column. Several
row groups fit into memory.

With the least and greatest value of each column, readers and `rewrite` skip files. These must be true bounds. A value
that JSON cannot represent exactly is omitted. So are floats, because Parquet's bounds ignore NaN, which is the greatest
value in Spark.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from walmere.directory import Directory
from walmere.errors import SinkMismatch
from walmere.sinks.base import StagedFile
from walmere.sinks.row_index import one_array
from walmere.variant_type import VARIANT, file_schema, for_file

ROW_GROUP_ROWS: Final = 1 << 17
ROW_GROUP_BYTES: Final = 64 << 20
"""In memory. A row group ends when it has this many rows or bytes."""
_WIDE_ROW: Final = 1 << 10
_WIDE_GROUP_BYTES: Final = 8 << 20
"""The same for rows of more than `_WIDE_ROW` bytes: a value that is fetched by its row number costs a row group."""
_MAX_INDEX_BYTES: Final = 512 << 20
_INDEX_BYTES_PER_ROW: Final = 32
"""A file ends when its index takes so much memory while it is made: that of the keys, and about this per row."""

INT96_UNIT: Final = "us"
"""Spark writes timestamps as INT96, also in OPTIMIZE. In nanoseconds, years before 1677 and after 2262 overflow."""

_SAMPLE_ROWS: Final = 4096
_STATISTICS_COLUMNS: Final = 32
"""Statistics are written for the first so many columns: the default of Delta."""

_PREFIX_LENGTH: Final = 16
"""Characters of a text in the statistics. A batch writes them again for every file in which it marks rows."""
_GREATEST_CHARACTER: Final = "\U0010ffff"
_NAME: Final = re.compile(r"part-[0-9a-f]{24}\.parquet")


class Index(Protocol):
    """What is written beside each file, from some of its columns."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns."""

    def write(self, name: str, size: int, keys: Iterable[pa.Table]) -> object:
        """Write the index of a file, from the columns of its rows."""


def write(
    directory: Directory, schema: pa.Schema, tables: Iterable[pa.Table], file_size: int, index: Index | None = None
) -> list[StagedFile]:
    """Write rows into files of about this size; no file if there are no rows."""
    staged: list[StagedFile] = []
    groups = _row_groups(tables)
    group = next(groups, None)
    while group is not None:
        name = f"part-{secrets.token_hex(12)}.parquet"  # short: each batch names the files that it changes twice
        metadata: list[Any] = []
        keys: list[pa.Table] = []
        rows = held = 0
        with (
            directory.filesystem.open_output_stream(name) as stream,
            pq.ParquetWriter(
                stream,
                file_schema(schema),
                compression="zstd",
                compression_level=1,
                use_dictionary=_repeating(group),
                store_schema=False,
                store_decimal_as_integer=True,
                metadata_collector=metadata,
            ) as writer,
        ):
            while group is not None:
                writer.write_table(for_file(group), row_group_size=max(len(group), 1))
                rows += len(group)
                if index is not None:
                    keys.append(group.select(list(index.columns)))
                    held += keys[-1].nbytes + _INDEX_BYTES_PER_ROW * len(group)
                group = next(groups, None)
                if stream.tell() >= file_size or held >= _MAX_INDEX_BYTES:
                    break
            writer.close()
            size = stream.tell()
        directory.sync(name)
        staged.append(StagedFile(name, size, rows, statistics(metadata[0], schema)))
        if index is not None:
            index.write(name, size, keys)
    if staged:
        directory.sync("")
    return staged


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in pieces of the size of a row group."""
    waiting: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        if not len(table):
            continue
        limit = _WIDE_GROUP_BYTES if table.nbytes > _WIDE_ROW * len(table) else ROW_GROUP_BYTES
        step = ROW_GROUP_ROWS if len(table) > ROW_GROUP_ROWS else len(table)
        step = max(1, min(step, len(table) * limit // max(table.nbytes, 1)))
        for start in range(0, len(table), step):
            piece = table.slice(start, step)
            if waiting and (rows + len(piece) > ROW_GROUP_ROWS or size + piece.nbytes > limit):
                yield pa.concat_tables(waiting)
                waiting, rows, size = [], 0, 0
            waiting.append(piece)
            rows += len(piece)
            size += piece.nbytes
    if waiting:
        yield pa.concat_tables(waiting)


def _repeating(table: pa.Table) -> list[str] | bool:
    """The columns whose values repeat enough for a dictionary."""
    sample = table.slice(0, _SAMPLE_ROWS)
    names = []
    for field in sample.schema:
        kind, values = field.type, one_array(sample[field.name])
        name = field.name
        if kind == VARIANT:  # documents with the same keys have the same metadata
            name, values = f"{name}.metadata", values.field("metadata")
        elif pa.types.is_nested(kind) or pa.types.is_boolean(kind):
            continue
        if len(pc.unique(values)) * 4 <= len(sample):
            names.append(name)
    return names or False


def statistics(metadata: Any, schema: pa.Schema) -> str:
    """Delta's statistics of a file, from those of its Parquet row groups."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    leaf = 0
    for field in list(schema)[:_STATISTICS_COLUMNS]:
        at, leaf = leaf, leaf + _leaves(field.type)
        if pa.types.is_nested(field.type):
            continue
        groups = [metadata.row_group(i).column(at).statistics for i in range(metadata.num_row_groups)]
        if not groups or any(group is None or not group.has_null_count for group in groups):
            continue
        nulls[field.name] = sum(group.null_count for group in groups)
        if nulls[field.name] == metadata.num_rows:
            continue
        filled = [group for group in groups if group.num_values]
        if not filled or not all(group.has_min_max for group in filled):
            continue
        lower = _json(min(group.min for group in filled), field.type, upper=False)
        upper = _json(max(group.max for group in filled), field.type, upper=True)
        if lower is not None and upper is not None:
            least[field.name], greatest[field.name] = lower, upper
    found = {"numRecords": metadata.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}
    # no \u escapes: deltalake decodes those of characters from U+20000 on wrongly
    return json.dumps(found, separators=(",", ":"), ensure_ascii=False)


def _leaves(kind: Any) -> int:
    """The number of Parquet columns of a type."""
    if pa.types.is_map(kind):
        return _leaves(kind.key_type) + _leaves(kind.item_type)
    if pa.types.is_struct(kind):
        return sum(_leaves(field.type) for field in kind)
    return _leaves(kind.value_type) if pa.types.is_nested(kind) else 1


def _json(value: Any, kind: Any, *, upper: bool) -> Any:
    """A bound as Delta writes it; None if JSON cannot represent it."""
    if pa.types.is_integer(kind):
        return int(value)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _upper_prefix(value) if upper else value[:_PREFIX_LENGTH]
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(timespec="microseconds") + ("Z" if kind.tz else "")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        text = repr(float(value))
        return float(value) if "e" not in text and Decimal(text) == value else None
    return None


def _upper_prefix(text: str) -> str:
    """A short text that is not less than this one: its beginning, followed by the greatest character."""
    if len(text) <= _PREFIX_LENGTH or text[_PREFIX_LENGTH] == _GREATEST_CHARACTER:
        return text
    return text[:_PREFIX_LENGTH] + _GREATEST_CHARACTER


class RowGroup:
    """One row group of an open file. Its columns are read when they are needed."""

    def __init__(self, file: Any, number: int, first: int, schema: pa.Schema) -> None:
        self.file, self.number, self.first, self.schema = file, number, first, schema
        self.rows = file.metadata.row_group(number).num_rows

    def column(self, name: str) -> pa.Array:
        return one_array(self.table((name,))[name])

    def table(self, names: tuple[str, ...] | None = None) -> pa.Table:
        """These columns; None: all of the schema. A column that is newer than the file is all NULL."""
        schema = self.schema if names is None else pa.schema([self.schema.field(name) for name in names])
        present = set(self.file.schema_arrow.names)
        table = self.file.read_row_group(self.number, columns=[name for name in schema.names if name in present])
        return conform(table, schema, missing_is_null=True)


def row_groups(directory: Directory, name: str, schema: pa.Schema) -> Iterator[RowGroup]:
    """The row groups of a file, in order. Each one is usable until the next."""
    # the columns of a row group are near each other: in a store, they are read by few requests
    with (
        directory.filesystem.open_input_file(name) as source,
        pq.ParquetFile(source, pre_buffer=not directory.local, coerce_int96_timestamp_unit=INT96_UNIT) as file,
    ):
        first = 0
        for number in range(file.num_row_groups):
            group = RowGroup(file, number, first, schema)
            yield group
            first += group.rows


def is_written_here(name: str) -> bool:
    """Whether a file is not of another program, by its name."""
    return _NAME.fullmatch(name) is not None


def has_int96(directory: Directory, name: str) -> bool:
    """Whether a file has timestamps as INT96. Those that are written here have not."""
    if is_written_here(name):
        return False
    with directory.filesystem.open_input_file(name) as source:
        schema = pq.read_metadata(source).schema
    return any(schema.column(number).physical_type == "INT96" for number in range(len(schema)))


def conform(table: pa.Table, schema: pa.Schema, *, missing_is_null: bool = False) -> pa.Table:
    """The table with exactly this schema. Raises SinkMismatch if it has other columns."""
    if table.schema.equals(schema):
        return table
    names = table.schema.names
    if not missing_is_null and names != schema.names:
        raise SinkMismatch(
            "writing rows", f"they have the columns {names}, and the table has {schema.names}", "copy the table again"
        )
    columns = []
    for field in schema:
        if field.name not in names:
            columns.append(pa.nulls(len(table), field.type))
            continue
        column = table[field.name]
        columns.append(column if column.type.equals(field.type) else column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=schema)
