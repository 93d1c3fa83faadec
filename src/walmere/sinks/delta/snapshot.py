"""A Delta table at one version, for those who only read: as a PyArrow dataset, or as the files that make it up.

A version is what the log says it is, so it stays the same whatever is committed meanwhile. Files with deletion vectors
(Spark may have left some) are read here, row by deleted row; all others may be read by anybody.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.dataset as pads
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from walmere.errors import LakeError, SinkMismatch
from walmere.names import TableName
from walmere.sinks.delta.rewrite import DataFile, files_of
from walmere.sinks.delta.scan import FilePiece
from walmere.sinks.delta.schema import arrow_schema
from walmere.sinks.delta.sink import DeltaSink
from walmere.storage import Directory


class Pinned:
    """See above."""

    def __init__(self, sink: DeltaSink, table: TableName, version: int) -> None:
        self._doing = f"reading the Delta table {table} at version {version}"
        try:
            self._opened: DeltaTable = sink.open(table, version)
        except (DeltaError, SinkMismatch) as error:
            raise self.gone(error) from error
        if self._opened.metadata().partition_columns:
            raise LakeError(
                self._doing, "it is partitioned; Walmere makes no partitioned tables", "read it with `deltalake`"
            )
        self.sink = sink
        self.directory = Directory(sink.location(table), sink.storage_options)
        self._table = table
        self.schema: pa.Schema = arrow_schema(self._opened)
        self.spark_schema = self._opened.schema().to_json()

    def gone(self, error: Exception) -> LakeError:
        """What there is to say if something of the version is not there."""
        said = str(error).partition("\n")[0]
        hint = "[target] keep_seconds sets how long versions are kept; read a newer point"
        return LakeError(self._doing, f"this version does not exist, or has been removed: {said}", hint)

    def piece(self, file: DataFile) -> FilePiece:
        """For `sink.read`."""
        return FilePiece(self._table, self.schema, (file,))

    def files(self) -> tuple[list[DataFile], list[DataFile]]:
        """Those that are read as they are, and those with deleted rows."""
        there, _ = files_of(self._opened)
        return [each for each in there if each.deleted is None], [each for each in there if each.deleted is not None]

    def dataset(self) -> pads.Dataset:
        """The rows. Those of files with deleted ones are held in memory, all others are read when asked for."""
        filesystem = self.directory.filesystem
        try:
            if "deletionVectors" not in (self._opened.protocol().reader_features or ()):
                return self._opened.to_pyarrow_dataset(filesystem=filesystem)
            plain, marked = self.files()
            rows = [part for file in marked for part in file.tables(self.directory, self.schema)]
        except (DeltaError, FileNotFoundError) as error:
            raise self.gone(error) from error
        read = pads.ParquetFileFormat()
        fragments = [read.make_fragment(file.path, filesystem) for file in plain]
        whole = pads.FileSystemDataset(fragments, self.schema, read, filesystem)
        if not rows:
            return whole
        return pads.dataset([whole, pads.dataset(pa.concat_tables(rows))], schema=self.schema)
