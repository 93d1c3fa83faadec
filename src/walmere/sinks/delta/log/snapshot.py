"""A Delta table at one version, to read: as a PyArrow dataset, or as its files.

Later commits do not change a version. Any Parquet reader can read the files, if it leaves out the deleted rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.dataset as pads

from walmere.directory import Directory
from walmere.errors import LakeError, SinkMismatch
from walmere.names import TableName
from walmere.sinks.delta.files.data_file import DataFile
from walmere.sinks.delta.files.dataset import VectorDataset, plain_dataset
from walmere.sinks.delta.log import replay
from walmere.sinks.delta.log.actions import unreadable
from walmere.sinks.delta.sink import DeltaSink


class Pinned:
    """A table at one version."""

    def __init__(self, sink: DeltaSink, table: TableName, version: int) -> None:
        self._doing = f"reading the Delta table {table} at version {version}"
        try:
            self._found = replay.at(sink.directory(table), version)
        except SinkMismatch as error:
            raise self.gone(error) from error
        if self._found.metadata.get("partitionColumns"):
            raise LakeError(
                self._doing, "it is partitioned; Walmere makes no partitioned tables", "read it with `deltalake`"
            )
        if (why := unreadable(self._found)) is not None:
            raise LakeError(self._doing, why, "drop the feature, or read it with a program that supports it")
        self.directory = Directory(sink.location(table), sink.storage_options)
        self.schema: pa.Schema = self._found.arrow_schema
        self.spark_schema = self._found.schema.to_json()

    def gone(self, error: Exception) -> LakeError:
        """The error if the version, or one of its files, does not exist."""
        reason = str(error).partition("\n")[0]
        hint = "[target] keep_seconds sets how long versions are kept; read a newer point"
        return LakeError(self._doing, f"this version does not exist, or has been removed: {reason}", hint)

    def files(self) -> tuple[list[DataFile], list[DataFile]]:
        """The files without deleted rows, and those with deleted rows."""
        files = self._found.files
        return [each for each in files if each.vector is None], [each for each in files if each.vector is not None]

    def dataset(self, files: Sequence[DataFile] | None = None) -> pads.Dataset:
        """All rows, or those of some files, to be read lazily."""
        files = self._found.files if files is None else files
        if all(file.vector is None for file in files):
            return plain_dataset(self.directory, files, self.schema)
        return VectorDataset(self.directory, files, self.schema)
