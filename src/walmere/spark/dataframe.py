"""A Delta table at one version as a DataFrame, without a jar.

The log says which files that version has, and Spark's own Parquet reader reads them: columns and filters are pushed
down, batches stay columnar. A column that an older file does not have is NULL.

Rows that a deletion vector has deleted are filtered by their row number, `_metadata.row_index`. The filter has the
vectors of all its files as one array of 64-bit words, with one bit per row, which it gets by a scalar subquery. In our
measurements this takes less time than a join with the deleted positions, and it costs the same for few and for many of
them. A large file has a filter of its own. Smaller files share one, so that the plan has few parts. There, the file of
a row is recognised by its size, because a hash of its name for every row costs more. Files of the same size are read by
different filters.

Spark itself reads an object store only with jars and settings of its own. So the files of a table there are read by
Python tasks, as Walmere writes them. Columns and filters are not pushed down to these.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from walmere.bins import bins
from walmere.directory import Directory
from walmere.sinks.delta.files.data_file import DataFile
from walmere.sinks.delta.log.snapshot import Pinned
from walmere.sinks.row_index import I64
from walmere.spark.interpreters import use_driver_python
from walmere.variant_type import for_spark

__all__ = ["DataFrame", "SparkSession", "dataframe"]

_OPTIONS: Final[Mapping[str, str]] = {
    "__globPaths__": "false",  # brackets in a path are not patterns
    "recursiveFileLookup": "true",  # a directory called a=b is not a partition column
    "datetimeRebaseMode": "CORRECTED",  # dates before 1582 are not converted
}
_MAX_ROWS: Final = 1 << 26
"""Of the files of one filter: its array is sent to all executors, and has one bit per row."""
_MAX_FILES: Final = 256
_LARGE_BYTES: Final = 16 << 20
_MAX_LARGE: Final = 64
"""So many files, the largest ones, have a filter of their own if they have at least so many bytes."""
_PIECE_BYTES: Final = 32 << 20
"""The size of the files that one task reads from an object store, about."""
_BATCH_ROWS: Final = 1 << 14


def dataframe(spark: SparkSession, pinned: Pinned) -> DataFrame:
    """The columns in order, and the rows at that version, whenever they are read."""
    schema = _schema(pinned.spark_schema)
    if not pinned.directory.local:
        return _read_by_tasks(spark, pinned, schema)

    def read(files: Iterable[DataFile]) -> DataFrame:
        paths = [f"file://{pinned.directory.location}/{file.name}" for file in files]
        return spark.read.schema(schema).options(**_OPTIONS).parquet(*paths)

    plain, marked = pinned.files()
    parts = [read(plain)] if plain else []
    marked.sort(key=lambda file: file.size, reverse=True)
    large = sum(file.size >= _LARGE_BYTES for file in marked[:_MAX_LARGE])
    for file in marked[:large]:
        rows = read([file])
        parts.append(rows.where(_is_not_deleted_of(spark, rows, file, pinned.directory)))
    for group in _groups(marked[large:], pinned.directory):
        rows = read(group.files)
        parts.append(rows.where(_is_not_deleted(spark, rows, group.files, pinned.directory)))
    if not parts:
        return spark.createDataFrame([], schema)
    return functools.reduce(DataFrame.unionAll, parts)


def _read_by_tasks(spark: SparkSession, pinned: Pinned, schema: StructType) -> DataFrame:
    """The rows of a table in an object store: each task reads some files."""
    files = [file for group in pinned.files() for file in group]
    if not files:
        return spark.createDataFrame([], schema)
    pieces = bins(files, lambda file: file.size, _PIECE_BYTES)
    # the number of rows is all that is needed of the statistics
    slim = [
        [replace(each, stats=json.dumps({"numRecords": each.rows(pinned.directory)})) for each in group]
        for group in pieces
    ]
    read = functools.partial(_read_pieces, pieces=slim, directory=pinned.directory, schema=pinned.schema)
    use_driver_python()  # the tasks import Walmere
    return spark.range(0, len(slim), 1, len(slim)).mapInArrow(read, schema)


def _read_pieces(
    numbers: Iterable[pa.RecordBatch], pieces: Sequence[Sequence[DataFile]], directory: Directory, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """In a task: the rows of some pieces."""
    for batch in numbers:
        for number in batch.column("id").to_pylist():
            for file in pieces[number]:
                for rows in file.tables(directory, schema):
                    yield from for_spark(rows).to_batches(max_chunksize=_BATCH_ROWS)


def _schema(text: str) -> StructType:
    """Delta has the schema in Spark's format. The metadata of its fields, which is Walmere's, is removed."""
    content: dict[str, Any] = json.loads(text)
    for each in content["fields"]:
        each["metadata"] = {}
    return StructType.fromJson(content)


@dataclass(slots=True)
class _Group:
    """Files of different sizes."""

    files: list[DataFile] = field(default_factory=list)
    sizes: set[int] = field(default_factory=set)
    rows: int = 0

    def has_room(self, size: int, rows: int) -> bool:
        return size not in self.sizes and self.rows + rows <= _MAX_ROWS and len(self.files) < _MAX_FILES


def _groups(files: Iterable[DataFile], directory: Directory) -> list[_Group]:
    """The files that one filter each can read."""
    groups: list[_Group] = []
    for file in files:
        rows = file.rows(directory)
        group = next((each for each in groups if each.has_room(file.size, rows)), None)
        if group is None:
            group = _Group()
            groups.append(group)
        group.files.append(file)
        group.sizes.add(file.size)
        group.rows += rows
    return groups


def _is_not_deleted_of(spark: SparkSession, rows: DataFrame, file: DataFile, directory: Directory) -> Column:
    """Whether a row of a file is not deleted."""
    row = rows.metadataColumn("_metadata")["row_index"]  # not by its name, which a column of the table may have
    return _is_zero(F.get(_array(spark, _words(file, directory)), F.shiftright(row, 6).cast("int")), row)


def _is_not_deleted(spark: SparkSession, rows: DataFrame, files: Sequence[DataFile], directory: Directory) -> Column:
    """Whether a row of these files, which have different sizes, is not deleted."""
    slots, words = _lookup(files, directory)
    array = _array(spark, words)
    metadata = rows.metadataColumn("_metadata")
    row, size = metadata["row_index"], metadata["file_size"]
    slot = (F.pmod(size, F.lit(slots)) * 2).cast("int")
    other_size = F.raise_error(F.lit(f"a file of {directory.location} has another size than in the table's log"))
    first = F.when(F.get(array, slot) == size, F.get(array, slot + 1)).otherwise(other_size.cast("bigint"))
    return _is_zero(F.get(array, (first + F.shiftright(row, 6)).cast("int")), row)


def _array(spark: SparkSession, words: I64) -> Column:
    """An array for all rows. Its elements are not nullable: then none is checked for every row."""
    kind = pa.list_(pa.field("element", pa.int64(), nullable=False))
    return spark.createDataFrame(pa.table({"words": pa.array([words], kind)})).scalar()


def _is_zero(word: Column, row: Column) -> Column:
    """Whether the bit of a row is not set. (`getbit` checks the position for every row, and takes longer.)"""
    return F.call_function("shiftright", word, row.bitwiseAND(63).cast("int")).bitwiseAND(F.lit(1)) == 0


def _lookup(files: Sequence[DataFile], directory: Directory) -> tuple[int, I64]:
    """A hash table without collisions: by the size of a file, where its vector begins. Then the vectors.

    Each slot is two words: the size, and the place of the first word of the vector.
    """
    slots = max(len(files), len(files) ** 2 // 8)  # with fewer slots, too many sizes are tried
    while len({file.size % slots for file in files}) < len(files):
        slots += 1
    table = np.full(2 * slots, -1, np.int64)
    vectors = [table]
    place = len(table)
    for file in files:
        vector = _words(file, directory)
        table[2 * (file.size % slots)] = file.size
        table[2 * (file.size % slots) + 1] = place
        vectors.append(vector)
        place += len(vector)
    return slots, np.concatenate(vectors)


def _words(file: DataFile, directory: Directory) -> I64:
    """The deletion vector of a file, with one bit per row."""
    deleted = np.zeros(-(-file.rows(directory) // 64) * 64, np.bool_)
    deleted[file.deleted_rows(directory)] = True
    words: I64 = np.packbits(deleted, bitorder="little").view("<i8").astype(np.int64)
    return words
