"""A table at one version as a DuckDB relation.

DuckDB's own Parquet reader reads the files: several threads, columns and filters pushed down, nothing held in memory. A
file with deleted rows is joined with its deletion vector, by the number of the file. The vector is a bit string, with
one bit per row, so the join costs the same for few and for many deleted rows. DuckDB's Delta extension is not needed.

A VARIANT column is two binary columns in the files, from which DuckDB makes its own VARIANT.

Tables in an object store are read by PyArrow. So are files with timestamps as INT96, which other programs may write:
DuckDB takes them for local times, and would shift them by the session's time zone. And so are files of other programs
with a VARIANT: they may mark it in a way that DuckDB sees no parts there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from walmere.sinks.delta.files.data_file import DataFile
from walmere.sinks.delta.files.parquet import has_int96, is_written_here
from walmere.sinks.delta.log.snapshot import Pinned
from walmere.variant_type import VARIANT

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation

_FILE: Final = "file_index"
_ROW: Final = "file_row_number"
"""Columns that DuckDB adds to those of the files. A column of the table would hide them."""


def relation(connection: DuckDBPyConnection, pinned: Pinned) -> DuckDBPyRelation:
    """All rows. The vectors are read now, everything else when it is needed."""
    plain, marked = pinned.files()
    hidden = {_FILE, _ROW} & {name.lower() for name in pinned.schema.names}
    if not pinned.directory.local or hidden or not (plain or marked):
        return _from_arrow(connection, pinned)
    by_arrow = [file for file in (*plain, *marked) if _needs_arrow(pinned, file)]
    plain, marked = ([file for file in files if file not in by_arrow] for files in (plain, marked))
    parts = [_from_arrow(connection, pinned, by_arrow)] if by_arrow else []
    if plain:
        parts.append(_named(_files(connection, pinned, plain), pinned))
    if marked:
        rows = _files(connection, pinned, marked).set_alias("rows")
        vectors = connection.from_arrow(_vectors(pinned, marked)).project("file, deleted::BIT AS deleted")
        both = rows.join(vectors.set_alias("vectors"), "rows.file = vectors.file")
        parts.append(_named(both.filter("get_bit(deleted, row::INTEGER) = 0"), pinned))
    return functools.reduce(lambda one, other: one.union(other), parts)


def _needs_arrow(pinned: Pinned, file: DataFile) -> bool:
    """Whether DuckDB would read the values of a file in another way."""
    if VARIANT in pinned.schema.types and not is_written_here(file.name):
        return True
    return has_int96(pinned.directory, file.name)


def _from_arrow(
    connection: DuckDBPyConnection, pinned: Pinned, files: Sequence[DataFile] | None = None
) -> DuckDBPyRelation:
    """All rows, or those of some files, which PyArrow reads."""
    rows = connection.from_arrow(pinned.dataset(files))
    if VARIANT not in pinned.schema.types:
        return rows
    columns = ((_identifier(field.name), field.type) for field in pinned.schema)
    return rows.project(", ".join(f"{_value(name, kind)} AS {name}" for name, kind in columns))


def _named(rows: DuckDBPyRelation, pinned: Pinned) -> DuckDBPyRelation:
    """The rows with the names of their columns."""
    columns = (
        f"{_value(f'c{number}', field.type)} AS {_identifier(field.name)}" for number, field in enumerate(pinned.schema)
    )
    return rows.project(", ".join(columns))


def _value(column: str, kind: pa.DataType) -> str:
    """A column as DuckDB should have it."""
    return f"variant_bytes_to_variant({column}.metadata || {column}.value)" if kind == VARIANT else column


def _files(connection: DuckDBPyConnection, pinned: Pinned, files: Sequence[DataFile]) -> DuckDBPyRelation:
    """All rows of some files, with the numbers of file and row. Columns are numbered, so that all names are free."""
    paths = ", ".join(_text(f"{pinned.directory.location}/{file.name}") for file in files)
    # Not `schema = …`, which opens no file in advance: DuckDB would then estimate that there is one row, and put the
    # rows, not the vectors, into the hash table of the join.
    source = f"read_parquet([{paths}], union_by_name = true, hive_partitioning = false)"
    present = {name.lower() for name in connection.sql(f"FROM {source} LIMIT 0").columns}
    types = connection.from_arrow(pinned.schema.empty_table()).types
    columns = ", ".join(
        f"{_identifier(name) if name.lower() in present else 'NULL'}::{kind} AS c{number}"
        for number, (name, kind) in enumerate(zip(pinned.schema.names, types, strict=True))
    )
    return connection.sql(f"SELECT {columns}, {_FILE} AS file, {_ROW} AS row FROM {source}")  # noqa: S608


def _vectors(pinned: Pinned, files: Sequence[DataFile]) -> pa.Table:
    """The deletion vectors of some files, in this order, with one bit per row."""
    vectors = []
    for file in files:
        deleted = np.zeros(file.rows(pinned.directory), np.bool_)
        deleted[file.deleted_rows(pinned.directory)] = True
        vectors.append(np.packbits(deleted).tobytes())
    return pa.table({"file": pa.array(range(len(files)), pa.uint64()), "deleted": pa.array(vectors, pa.binary())})


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
