"""A Delta table at one version as a DataFrame, without a jar.

`deltalake` lists the files of that version, and Spark's own Parquet reader reads them: columns and filters are pushed
down, batches stay columnar. A column that an older file does not have is NULL. Files with deletion vectors are read by
Python tasks, which leave out the deleted rows.
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
    "__globPaths__": "false",  # brackets in a path are not patterns
    "recursiveFileLookup": "true",  # a directory called a=b is not a partition column
    "datetimeRebaseMode": "CORRECTED",  # dates before 1582 are not converted
}


def dataframe(spark: SparkSession, pinned: Pinned) -> DataFrame:
    """The columns in order, and the rows at that version, whenever they are read."""
    schema = _schema(pinned.spark_schema)
    plain, marked = pinned.files()
    parts = []
    if plain:
        scheme = "file://" if pinned.directory.local else ""
        paths = [f"{scheme}{pinned.directory.location}/{file.name}" for file in plain]
        parts.append(spark.read.schema(schema).options(**_OPTIONS).parquet(*paths))
    if marked:
        references = [(pickle.dumps((pinned.sink, pinned.piece(file))),) for file in marked]
        files = spark.createDataFrame(references, "file binary").repartition(len(marked))
        parts.append(files.mapInArrow(_rows, schema))
    if not parts:
        return spark.createDataFrame([], schema)
    return functools.reduce(DataFrame.unionAll, parts)


def _schema(text: str) -> StructType:
    """Delta has the schema in Spark's format. The metadata of its fields, which is Walmere's, is removed."""
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
