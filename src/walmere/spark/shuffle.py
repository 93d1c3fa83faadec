"""Groups rows of many pieces by a column. The rows pass through the JVM, which shuffles and spills them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import pyarrow as pa
from pyspark.sql import Row, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from walmere.spark.executors import Versions, require_same
from walmere.spark.failures import Failure, attempts, result_or_failure
from walmere.spark.sealing import Secrets
from walmere.spark.tasks import SparkTasks


class Piece(Protocol):
    """Produces rows in a task."""

    def rows(self) -> Iterator[pa.RecordBatch]: ...


class SparkShuffle:
    """Groups rows and reduces each group. Its jobs are cancelled together with those of `tasks`."""

    def __init__(self, spark: SparkSession, tasks: SparkTasks) -> None:
        self._spark = spark
        self._tasks = tasks

    def reduce(
        self, pieces: Sequence[Piece], schema: str, by: str, function: Callable[[pa.Table], pa.Table], reduced: str
    ) -> list[Row]:
        """Call the function with the rows of all pieces that have the same value in column `by`."""
        context = self._spark.sparkContext
        tries = attempts(context)
        secrets, driver = Secrets(), Versions.here()
        items: Any = context.parallelize([(sealed,) for sealed in secrets.seal(pieces)], len(pieces))

        nothing = to_arrow_schema(cast(StructType, StructType.fromDDL(reduced))).empty_table()

        with self._tasks.job() as failures:

            def grouped(rows: pa.Table) -> pa.Table:  # Spark reads the annotations
                result = result_or_failure(tries, function, rows)
                if isinstance(result, Failure):
                    failures.add([result])
                    return nothing
                return result

            def open_piece(sealed: bytes) -> Iterator[pa.RecordBatch]:
                require_same(driver)
                piece: Piece = secrets.open(sealed)
                yield from piece.rows()

            def rows_of(items: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                for batch in items:
                    for item in batch.column("item").to_pylist():
                        rows = open_piece(item)
                        while (found := result_or_failure(tries, next, rows, None)) is not None:
                            if isinstance(found, Failure):
                                failures.add([found])
                                return
                            yield found

            rows = self._spark.createDataFrame(items, "item binary").mapInArrow(rows_of, schema)
            return list(rows.groupBy(by).applyInArrow(grouped, reduced).collect())
