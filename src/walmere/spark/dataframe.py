"""A Delta table at one version as a DataFrame, without a jar: Spark reads the files of that version itself.

`deltalake` says which files they are, and Spark's own Parquet reader does the rest, with all that it has: columns and
filters are pushed down, batches stay columns. A column that a file has not, being older than it, is NULL. Only files
with deletion vectors are read by Python, in tasks, so that deleted rows stay deleted.
"""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from walmere.sinks.delta.snapshot import Pinned

__all__ = ["DataFrame", "SparkSession", "dataframe"]

_OPTIONS: Final[Mapping[str, str]] = {
    "__globPaths__": "false",  # a path is a path, also with a bracket in it
    "recursiveFileLookup": "true",  # and a directory called a=b is no column
    "datetimeRebaseMode": "CORRECTED",  # dates before 1582 are what they are
}


def dataframe(spark: SparkSession, pinned: Pinned) -> DataFrame:
    """The table, exactly: its columns in order, and its rows at that version, whenever they are read."""
    schema = _schema(pinned.spark_schema)
    plain, marked = pinned.files()
    parts = []
    if plain:
        scheme = "file://" if pinned.directory.local else ""
        paths = [f"{scheme}{pinned.directory.location}/{file.path}" for file in plain]
        parts.append(spark.read.schema(schema).options(**_OPTIONS).parquet(*paths))
    if marked:
        references = [(pickle.dumps((pinned.sink, pinned.piece(file))),) for file in marked]
        files = spark.createDataFrame(references, "file binary").repartition(len(marked))
        parts.append(files.mapInArrow(_rows, schema))
    if not parts:
        return spark.createDataFrame([], schema)
    return functools.reduce(DataFrame.unionAll, parts)


def _schema(text: str) -> StructType:
    """Delta writes the schema of a table as Spark does; what is ours in it stays behind."""
    content: dict[str, Any] = json.loads(text)
    for field in content["fields"]:
        field["metadata"] = {}
    return StructType.fromJson(content)


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of files with deletion vectors. Runs in a task."""
    for batch in batches:
        for reference in batch.column("file").to_pylist():
            sink, piece = pickle.loads(reference)  # noqa: S301
            yield from sink.read(piece)
