"""The data source of the apply query. All its processes run beside the driver.

For each query Spark starts about six short-lived Python processes: to look up the source, to create it (twice), to plan
the read. Each imports this module, and most need only the names in it. So all other modules of Walmere are imported
late, by the process that plans batches beside the driver.

Its partitions are references to blocks of the change log. The driver takes them from the plan of the batch, with
`planned`, and sends them to the tasks that apply them. If Spark read the partitions, each executor would start a second
Python process for each task, only to pass on a few bytes; and with the driver's interpreter, which a cluster does not
have.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from walmere.apply.jobs import ApplyJob, Batch
    from walmere.subscription.batches import Batches

SOURCE: Final = "walmere_apply"
Planned = TypeVar("Planned")


class _Partition(InputPartition):
    """The work of one task: its key, then pickled ApplyJobs, and in one of them the pickled Batch."""


class _References(DataSourceStreamReader):
    """References to the changes of each batch."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        self._opened: Batches | None = None

    @property
    def _batches(self) -> Batches:
        if self._opened is None:
            from walmere.lsn import Lsn
            from walmere.subscription.batches import Batches

            settings = {name: self._options[name] == "true" for name in ("spread", "transactional", "two_phase")}
            parallelism = int(self._options["parallelism"])
            directory = Path(self._options["directory"])
            until = Lsn.parse(self._options["until"]) if "until" in self._options else None
            self._opened = Batches(directory, parallelism, until=until, **settings)
        return self._opened

    def initialOffset(self) -> dict[str, str]:
        return self._planned(lambda batches: batches.first())

    def latestOffset(self) -> dict[str, str]:
        return self._planned(lambda batches: batches.latest())

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        tasks = self._planned(lambda batches: batches.together(batches.plan(end)))
        return [_Partition((_key(task), [pickle.dumps(each) for each in task])) for task in tasks]

    def _planned(self, plan: Callable[[Batches], Planned]) -> Planned:
        """Call the planner. Writes its error to a file for the launcher, because Spark would return only the text."""
        from walmere import paths
        from walmere.errors import WalmereError
        from walmere.storage import write_error

        path = Path(self._options["directory"], paths.PLANNER_ERROR)
        try:
            return plan(self._batches)
        except WalmereError as error:
            write_error(path, error)
            raise
        except Exception as error:  # Spark logs the traceback
            write_error(path, WalmereError("planning a batch", " ".join(repr(error).split())))
            raise

    def read(self, partition: InputPartition) -> Iterator[tuple[bytes]]:
        _, references = partition.value
        for reference in references:
            yield (reference,)


class ReferenceSource(DataSource):
    """`walmere_apply`."""

    @classmethod
    def name(cls) -> str:
        return SOURCE

    def schema(self) -> str:
        return "reference binary"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return _References(dict(self.options))


def _key(work: Sequence[ApplyJob | Batch]) -> str:
    """By which a task is placed: the table, and the part of its keys, of its largest job."""
    first = work[0]  # the largest one: see `Batches.together`
    part = getattr(first, "part", None)
    return f"{getattr(first, 'oid', 0)} {part.number if part is not None else 0}"


def planned(batch: DataFrame) -> list[tuple[str, list[bytes]]]:
    """What `partitions` has returned for a batch, without reading it: the key and the references of each task."""
    partitions = batch._jdf.queryExecution().analyzed().rdd().partitions()
    found = (each.inputPartitions().head().pickedPartition() for each in partitions)
    return [pickle.loads(partition).value for partition in found]  # noqa: S301
