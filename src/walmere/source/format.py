"""The `pgoutput` data source: the changes of a publication as rows, for any query.

    spark.readStream.format("pgoutput").option("directory", "…").option("table", "public.orders").load()

Spark finds it through the module `pyspark_pgoutput` beside this package. It starts a Python process for each step: to
look up data sources, to get the schema, to plan, and one beside the driver that runs as long as a stream. Most of them
need only the names here, so everything else is imported late, from `query` and `change_rows`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from walmere.source.query import StreamQuery

FORMAT: Final = "pgoutput"


class _Partition(InputPartition):
    """A pickled ReadJob."""


def _read(partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
    if partition is None:  # Spark passes this for a read without partitions
        return
    from walmere.source.change_rows import read
    from walmere.spark.daemon import keep_imports

    yield from read(pickle.loads(partition.value))  # noqa: S301
    keep_imports()


class _Stream(DataSourceStreamReader):
    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._opened: StreamQuery | None = None

    @property
    def _query(self) -> StreamQuery:
        if self._opened is None:
            from walmere.source.query import StreamQuery

            self._opened = StreamQuery(self._options, self._schema)
        return self._opened

    def initialOffset(self) -> dict[str, str]:
        return self._query.first()

    def latestOffset(self) -> dict[str, str]:
        return self._query.latest()

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        return [_Partition(pickle.dumps(each)) for each in self._query.plan(start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition)

    def commit(self, end: dict[str, str]) -> None:
        self._query.commit(end)

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.stop()


class _Batch(DataSourceReader):
    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        from walmere.source.query import plan_once

        return [_Partition(pickle.dumps(each)) for each in plan_once(self._options, self._schema)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition)


class PgoutputSource(DataSource):
    """`pgoutput`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        from walmere.source.query import schema_of

        return schema_of(dict(self.options))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return _Stream(dict(self.options), schema)

    def reader(self, schema: Any) -> DataSourceReader:
        return _Batch(dict(self.options), schema)


def register(spark: SparkSession) -> None:
    """Register the format in a session that does not find it by itself.

    Spark looks for formats with the first `python3` on the PATH, or PYSPARK_PYTHON, which may not have Walmere. With a
    local master, this session's Python processes run the interpreter of this process from now on, unless PYSPARK_PYTHON
    is set. On a cluster, the executors' Python has to have Walmere; and Spark plans with the same path on this machine.
    """
    from walmere.spark.interpreters import require_python_here, use_driver_python

    use_driver_python()
    require_python_here()
    spark.dataSource.register(PgoutputSource)
