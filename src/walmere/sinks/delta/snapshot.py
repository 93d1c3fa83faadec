"""A Delta table at one version, to read: as a PyArrow dataset, or as its files.

Later commits do not change a version. Files with deletion vectors (Spark may have written them) are read here; all
others can be read by any Parquet reader.
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
    """A table at one version."""

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
        """The error if the version, or one of its files, does not exist."""
        reason = str(error).partition("\n")[0]
        hint = "[target] keep_seconds sets how long versions are kept; read a newer point"
        return LakeError(self._doing, f"this version does not exist, or has been removed: {reason}", hint)

    def piece(self, file: DataFile) -> FilePiece:
        """A file, for `sink.read`."""
        return FilePiece(self._table, self.schema, (file,))

    def files(self) -> tuple[list[DataFile], list[DataFile]]:
        """The files without deleted rows, and those with deleted rows."""
        files, _ = files_of(self._opened)
        return [each for each in files if each.deleted is None], [each for each in files if each.deleted is not None]

    def dataset(self) -> pads.Dataset:
        """All rows. Files with deleted rows are read into memory, all others when they are needed."""
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
