"""A Delta table at one version, to read: as a PyArrow dataset, or as its files.

Later commits do not change a version. Files with deletion vectors (Spark may have written them) are read here; all
others can be read by any Parquet reader.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.dataset as pads

from walmere.errors import LakeError, SinkMismatch
from walmere.names import TableName
from walmere.sinks.delta import replay
from walmere.sinks.delta.files import DataFile
from walmere.sinks.delta.scan import FilePiece
from walmere.sinks.delta.sink import DeltaSink
from walmere.storage import Directory


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
        self.sink = sink
        self.directory = Directory(sink.location(table), sink.storage_options)
        self._table = table
        self.schema: pa.Schema = self._found.arrow_schema
        self.spark_schema = self._found.schema.to_json()

    def gone(self, error: Exception) -> LakeError:
        """The error if the version, or one of its files, does not exist."""
        reason = str(error).partition("\n")[0]
        hint = "[target] keep_seconds sets how long versions are kept; read a newer point"
        return LakeError(self._doing, f"this version does not exist, or has been removed: {reason}", hint)

    def piece(self, file: DataFile) -> FilePiece:
        """A file, for `sink.read`."""
        return FilePiece(self._table, self.schema, (file,))

    def files(self) -> tuple[list[DataFile], list[DataFile]]:
        """The files without deleted rows, and those with deleted rows."""
        files = self._found.files
        return [each for each in files if each.vector is None], [each for each in files if each.vector is not None]

    def dataset(self) -> pads.Dataset:
        """All rows. Files with deleted rows are read into memory, all others when they are needed."""
        filesystem = self.directory.filesystem
        try:
            plain, marked = self.files()
            rows = [part for file in marked for part in file.tables(self.directory, self.schema)]
        except FileNotFoundError as error:
            raise self.gone(error) from error
        read = pads.ParquetFileFormat()
        fragments = [read.make_fragment(file.name, filesystem) for file in plain]
        whole = pads.FileSystemDataset(fragments, self.schema, read, filesystem)
        if not rows:
            return whole
        return pads.dataset([whole, pads.dataset(pa.concat_tables(rows))], schema=self.schema)
