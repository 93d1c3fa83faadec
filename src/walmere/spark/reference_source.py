"""The data source of the apply query. It imports nothing of ours until it has to.

For each query Spark starts half a dozen short-lived Python processes: to look the source up, to create it (twice), to
plan its reading. Each imports this module, and most need no more than the names in it. Only the one that runs along
with the query, beside the driver, plans batches.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

if TYPE_CHECKING:
    import pyarrow as pa

    from walmere.subscription.batches import Batches

SOURCE: Final = "walmere_apply"
Planned = TypeVar("Planned")


class _Partition(InputPartition):
    """A pickled ApplyJob, or the pickled Batch."""


class _References(DataSourceStreamReader):
    """References to what is to be applied, batch by batch."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        self._known: Batches | None = None

    @property
    def _batches(self) -> Batches:
        if self._known is None:
            from walmere.subscription.batches import Batches

            sink = bytes.fromhex(self._options["sink"])
            self._known = Batches(Path(self._options["directory"]), sink, int(self._options["parallelism"]))
        return self._known

    def initialOffset(self) -> dict[str, str]:
        return self._planned(lambda batches: batches.first())

    def latestOffset(self) -> dict[str, str]:
        return self._planned(lambda batches: batches.latest())

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        return [_Partition(pickle.dumps(each)) for each in self._planned(lambda batches: batches.plan(end))]

    def _planned(self, plan: Callable[[Batches], Planned]) -> Planned:
        """What is planned. An error is written to a file for the launcher: Spark would bring back its text only."""
        from walmere import paths
        from walmere.errors import WalmereError
        from walmere.storage import write_error

        try:
            return plan(self._batches)
        except WalmereError as error:
            write_error(Path(self._options["directory"], paths.PLANNER_ERROR), error)
            raise

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"reference": [partition.value]})


class ReferenceSource(DataSource):
    """`walmere_apply`."""

    @classmethod
    def name(cls) -> str:
        return SOURCE

    def schema(self) -> str:
        return "reference binary"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return _References(dict(self.options))
