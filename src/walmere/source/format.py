"""The `pgoutput` data source: the changes of a publication as rows, for any query. It imports little until it has to.

    spark.readStream.format("pgoutput").option("directory", "…").option("table", "public.orders").load()

Spark finds it by itself, through the module `pyspark_pgoutput` beside this package, at the first use of any data source
in a session; and then starts a process for each step: one looks sources up, one asks for the schema, one plans, one
lives beside the driver as long as a stream does. So here are only the names; the work is in `queries` and `rows`.
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
    if partition is None:  # so says Spark of a read that has none
        return
    from walmere.source.change_rows import read
    from walmere.spark.daemon import settle

    yield from read(pickle.loads(partition.value))  # noqa: S301
    settle()


class _Stream(DataSourceStreamReader):
    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._known: StreamQuery | None = None

    @property
    def _query(self) -> StreamQuery:
        if self._known is None:
            from walmere.source.query import StreamQuery

            self._known = StreamQuery(self._options, self._schema)
        return self._known

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
        if self._known is not None:
            self._known.stop()


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
    """Make the format known to a session that does not find it by itself."""
    spark.dataSource.register(PgoutputSource)
