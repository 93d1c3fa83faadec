"""Rows of many pieces, brought together by a column. They pass through the JVM, because it shuffles and spills them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import Row, SparkSession

from walmere.spark.tasks import failure


class Piece(Protocol):
    """Something that gives rows, in a task."""

    def rows(self) -> Iterator[pa.RecordBatch]:
        """The rows."""


def _rows(items: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in items:
        for item in batch.column("item").to_pylist():
            yield from pickle.loads(item).rows()  # noqa: S301


class SparkShuffle:
    """Groups rows and reduces each group to few."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def reduce(
        self, pieces: Sequence[Piece], schema: str, by: str, function: Callable[[pa.Table], pa.Table], reduced: str
    ) -> list[Row]:
        """What the function makes of the rows of all pieces that have the same value in this column."""
        items: Any = self._spark.sparkContext.parallelize([(pickle.dumps(piece),) for piece in pieces], len(pieces))

        def grouped(rows: pa.Table) -> pa.Table:  # Spark reads the hints
            return function(rows)

        rows = self._spark.createDataFrame(items, "item binary").mapInArrow(_rows, schema)
        try:
            return list(rows.groupBy(by).applyInArrow(grouped, reduced).collect())
        except Exception as error:
            raise failure(error) from None
