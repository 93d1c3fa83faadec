"""A version of a table with deletion vectors as a PyArrow dataset, which is read lazily.

PyArrow does not read deletion vectors, and its scans have no row numbers. But a scan without a filter returns all rows
of a file, in order, so rows can be counted. Here, PyArrow's scanner reads the columns that are needed, and evaluates
the filter as one more column. The rows that match and are not deleted are returned. Row groups whose statistics exclude
the filter are not read.

What PyArrow's C++ code reads by itself, around `scanner`, would have deleted rows. So the C++ part of this dataset is
one file that does not exist. `to_table`, `to_batches`, `head`, `take` and `count_rows` of PyArrow call `scanner`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from walmere.directory import Directory
from walmere.errors import LakeError
from walmere.sinks.base import Mask
from walmere.sinks.delta.files.data_file import DataFile
from walmere.sinks.delta.files.parquet import INT96_UNIT

_UNREADABLE: Final = "this dataset has deletion vectors: it is read by its own methods only"
"""The path of the file that does not exist. It is in the error of whatever tries to read it."""
_MATCHES: Final = "matches"
_FORMAT: Final = pads.ParquetFileFormat(pads.ParquetReadOptions(coerce_int96_timestamp_unit=INT96_UNIT))


def plain_dataset(directory: Directory, files: Sequence[DataFile], schema: pa.Schema) -> pads.Dataset:
    """All rows of some files, deleted ones too."""
    fragments = [_FORMAT.make_fragment(file.name, directory.filesystem) for file in files]
    return pads.FileSystemDataset(fragments, schema, _FORMAT, directory.filesystem)


class VectorDataset(pads.UnionDataset):  # type: ignore[misc]
    """The rows of some files that are not deleted, and that match a condition."""

    def __init__(
        self, directory: Directory, files: Sequence[DataFile], schema: pa.Schema, condition: Any = None
    ) -> None:
        unreadable = _FORMAT.make_fragment(_UNREADABLE, directory.filesystem)
        super().__init__(schema, [pads.FileSystemDataset([unreadable], schema, _FORMAT, directory.filesystem)])
        self._directory = directory
        self._files = files
        self._condition = condition

    def __reduce__(self) -> tuple[Any, ...]:
        return VectorDataset, (self._directory, self._files, self.schema, self._condition)

    def scanner(self, columns: Any = None, filter: Any = None, **options: Any) -> VectorScanner:  # noqa: A002
        """See `pyarrow.dataset.Dataset.scanner`."""
        projected = plain_dataset(self._directory, [], self.schema).scanner(columns).projected_schema
        if isinstance(columns, Mapping):
            expressions = list(columns.values())
        else:
            expressions = [pc.field(name) for name in (self.schema.names if columns is None else columns)]
        condition = _both(self._condition, filter)

        def read(schema: pa.Schema = projected, selected: Sequence[Any] = expressions) -> Iterator[pa.RecordBatch]:
            return self._read(schema, selected, condition, options)

        def count() -> int:
            if condition is None:
                return sum(file.rows(self._directory) - file.deleted for file in self._files)
            return sum(len(batch) for batch in read(pa.schema([]), []))

        return VectorScanner(self.schema, projected, read, count)

    def filter(self, expression: Any) -> VectorDataset:
        """See `pyarrow.dataset.Dataset.filter`."""
        return VectorDataset(self._directory, self._files, self.schema, _both(self._condition, expression))

    def replace_schema(self, schema: pa.Schema) -> VectorDataset:
        """See `pyarrow.dataset.Dataset.replace_schema`."""
        return VectorDataset(self._directory, self._files, schema, self._condition)

    def get_fragments(self, filter: Any = None) -> Iterator[Any]:  # noqa: A002, ARG002
        """Refuse: a fragment has deleted rows."""
        raise LakeError(
            "reading the fragments of a dataset",
            f"files of {self._directory.location} have deletion vectors, which PyArrow does not read",
            "use to_table, to_batches or scanner of the dataset",
        )

    def sort_by(self, sorting: Any, **options: Any) -> Any:
        """See `pyarrow.dataset.Dataset.sort_by`. All rows are read into memory."""
        return self._in_memory().sort_by(sorting, **options)

    def join(self, right_dataset: Any, *arguments: Any, **options: Any) -> Any:
        """See `pyarrow.dataset.Dataset.join`. All rows are read into memory."""
        return self._in_memory().join(_joinable(right_dataset), *arguments, **options)

    def join_asof(self, right_dataset: Any, *arguments: Any, **options: Any) -> Any:
        """See `pyarrow.dataset.Dataset.join_asof`. All rows are read into memory."""
        return self._in_memory().join_asof(_joinable(right_dataset), *arguments, **options)

    def _in_memory(self) -> Any:
        return pads.InMemoryDataset(self.to_table())

    def _read(
        self, schema: pa.Schema, expressions: Sequence[Any], condition: Any, options: Mapping[str, Any]
    ) -> Iterator[pa.RecordBatch]:
        """The rows that match a condition and are not deleted, with these expressions as columns."""
        # columns are numbered, because several may have the same name
        columns = {str(number): expression for number, expression in enumerate(expressions)}
        columns[_MATCHES] = pc.scalar(True) if condition is None else condition
        whole = plain_dataset(self._directory, self._files, self.schema)
        fragments = list(whole.get_fragments())
        if condition is not None:
            fragments = [each.subset(condition, self.schema) for each in fragments]
        found = [pair for pair in zip(fragments, self._files, strict=True) if condition is None or pair[0].row_groups]
        if not found:
            return
        files = {fragment.path: (fragment, file) for fragment, file in found}
        scanned = pads.FileSystemDataset([pair[0] for pair in found], self.schema, _FORMAT, self._directory.filesystem)
        tagged = scanned.scanner(columns, **options).scan_batches()
        for path, batches in itertools.groupby(tagged, lambda each: each.fragment.path):
            fragment, file = files[path]
            there = None if file.vector is None else self._not_deleted(file, None if condition is None else fragment)
            first = 0
            for batch in (each.record_batch for each in batches):
                mask = batch.column(_MATCHES)
                if there is not None:
                    mask = pc.and_(mask, pa.array(there[first : first + len(batch)]))
                first += len(batch)
                rows = pa.RecordBatch.from_arrays(batch.columns[:-1], schema=schema) if len(schema) else batch
                if condition is not None or there is not None:
                    rows = rows.filter(mask)
                yield rows if len(schema) else rows.select([])

    def _not_deleted(self, file: DataFile, fragment: Any | None) -> Mask:
        """Which rows of a file are not deleted: of all row groups, or of those of a fragment."""
        there = np.ones(file.rows(self._directory), np.bool_)
        there[file.deleted_rows(self._directory)] = False
        if fragment is None:
            return there
        metadata = fragment.metadata
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        ends = np.cumsum(sizes)
        return np.concatenate(
            [there[ends[group.id] - sizes[group.id] : ends[group.id]] for group in fragment.row_groups]
        )


@dataclass(frozen=True, slots=True)
class VectorScanner:
    """What PyArrow's `Scanner` does. Every method reads the rows again, in the thread of its caller.

    PyArrow's own class cannot be used. It would read in a thread of its pool, and wait there for threads of that pool.
    """

    dataset_schema: pa.Schema
    projected_schema: pa.Schema
    _read: Callable[[], Iterator[pa.RecordBatch]]
    _count: Callable[[], int]

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, a few at a time."""
        return self._read()

    def to_reader(self) -> pa.RecordBatchReader:
        """The same as a reader, which can be read once."""
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._read())

    def to_table(self) -> pa.Table:
        """All rows."""
        return pa.Table.from_batches(self._read(), self.projected_schema)

    def head(self, num_rows: int) -> pa.Table:
        """The first rows."""
        batches, count = [], 0
        for batch in self._read():
            batches.append(batch.slice(0, num_rows - count))
            count += len(batches[-1])
            if count >= num_rows:
                break
        return pa.Table.from_batches(batches, self.projected_schema)

    def take(self, indices: Any) -> pa.Table:
        """The rows with these numbers."""
        return self.to_table().take(indices)

    def count_rows(self) -> int:
        """How many rows there are."""
        return self._count()


def _both(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _joinable(dataset: Any) -> Any:
    return dataset._in_memory() if isinstance(dataset, VectorDataset) else dataset
