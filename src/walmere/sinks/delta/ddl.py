"""Create a Delta table, claim it for its owner, and change its columns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError

from walmere.errors import SinkConflict, SinkMismatch
from walmere.names import TableName
from walmere.owner import owned_by_another
from walmere.sinks.base import OVERWRITE, Run, StagedFile
from walmere.sinks.delta import log_retention
from walmere.sinks.delta.commit import ATTEMPTS, Change, try_commit
from walmere.sinks.delta.rewrite import DataFile, files_of
from walmere.sinks.delta.schema import arrow_schema, delta_schema, require_different_names
from walmere.sinks.delta.tables import DeltaTables, log_file, owner_of


def create(tables: DeltaTables, table: TableName, schema: pa.Schema) -> int:
    """Create an empty table with these columns, if it does not exist. See `Sink.create`."""
    doing = f"creating the Delta table {table}"
    require_different_names(doing, schema)
    wanted = delta_schema(schema)
    location = tables.location(table)
    if tables.find(table) is None:
        try:
            DeltaTable.create(
                location,
                wanted,
                mode="error",
                name=str(table),
                configuration={
                    **log_retention.properties(tables.keep_hours),
                    **tables.properties,
                    **tables.owner_properties(),
                },
                storage_options=tables.options,
                commit_properties=CommitProperties(max_commit_retries=0),  # else the loser would create it again
                raise_if_key_not_exists=False,
            )
        except DeltaError as error:
            if tables.find(table) is None:  # else another attempt was faster
                raise tables.not_writable(doing, error) from error
        tables.directory(table).sync("_delta_log", "", "..", "../..")
    claim(tables, table)
    opened = tables.open(table)
    if not _is_ours(tables, opened) and opened.schema().to_json() != wanted.to_json():
        raise SinkMismatch(
            doing,
            f"there is a table with other columns at {location}, which Walmere did not write",
            "move it to another directory",
        )
    return opened.version()


def _is_ours(tables: DeltaTables, opened: DeltaTable) -> bool:
    """Whether Walmere has written all rows of the table."""
    return tables.lsn_of(opened) is not None or not opened.file_uris()


def claim(tables: DeltaTables, table: TableName) -> bool:
    """Write the owner into a table of an earlier version, or take the table over. See `Sink.claim`."""
    doing = f"opening the Delta table {table}"
    for _ in range(ATTEMPTS):
        opened = tables.find(table)
        if opened is None or tables.owner is None:
            return False
        found = owner_of(opened)
        is_other = found is not None and not tables.owner.same(found)
        if found is not None and is_other and not tables.take_over:
            raise owned_by_another(doing, f"the table at {tables.location(table)}", found)
        if not is_other and (found == tables.owner or not _is_ours(tables, opened) or not tables.owner.known):
            return False
        # LSN 0: the LSN of another source has no meaning here, and the table would look as if it had been copied
        reset = [Transaction(tables.app_id, 0, time.time_ns() // 1_000_000)]
        try:
            opened.alter.set_table_properties(
                tables.owner_properties(),
                raise_if_not_exists=False,
                commit_properties=CommitProperties(
                    max_commit_retries=0, app_transactions=reset if is_other and tables.lsn_of(opened) else None
                ),
            )
        except CommitFailedError:
            continue
        except DeltaError as error:
            raise tables.not_writable(doing, error) from error
        tables.directory(table).sync(log_file(opened.version()), "_delta_log")
        return is_other
    raise SinkConflict(doing, f"another program committed first, {ATTEMPTS} times in a row")


def evolve(
    tables: DeltaTables, table: TableName, schema: pa.Schema, values: Sequence[str | pa.Scalar], run: Run
) -> int:
    """Change the columns of a table. See `Sink.evolve`.

    New columns at the end without values change the log only. Everything else rewrites all files, one item of `run`
    each: a column that is only removed from the log would come back with its values, if one of its name were added.
    """
    doing = f"changing the columns of the Delta table {table}"
    require_different_names(doing, schema)
    opened = tables.open(table)
    tables.require_owner(table, opened)
    columns = list(opened.schema().fields)
    wanted = delta_schema(schema)
    if wanted.to_json() == opened.schema().to_json():
        return opened.version()
    added = wanted.fields[len(columns) :]
    if wanted.fields[: len(columns)] == columns and not any(
        isinstance(value, str) or value.is_valid for value in values[len(columns) :]
    ):
        try:
            opened.alter.add_columns(added)
        except DeltaError as error:
            raise tables.not_writable(doing, error) from error
        tables.directory(table).sync(log_file(opened.version()), "_delta_log")
        return opened.version()
    restage = _Restage(tables, table, arrow_schema(opened), schema, tuple(values))
    staged = [file for some in run(restage, files_of(opened)[0]) for file in some]
    version = try_commit(tables, table, opened, Change(staged, (), OVERWRITE, schema), None)
    if version is None:
        raise SinkConflict(doing, "another program committed at the same time")
    return version


@dataclass(frozen=True, slots=True)
class _Restage:
    """Writes the rows of a file with the new columns. Runs in a task."""

    tables: DeltaTables
    table: TableName
    old: pa.Schema
    new: pa.Schema
    values: tuple[str | pa.Scalar, ...]  # see `Sink.evolve`

    def __call__(self, file: DataFile) -> list[StagedFile]:
        rows = (self._convert(part) for part in file.tables(self.tables.directory(self.table), self.old))
        return self.tables.write(self.table, self.new, rows)

    def _convert(self, rows: pa.Table) -> pa.Table:
        columns = [
            rows[value].cast(field.type) if isinstance(value, str) else pa.repeat(value, len(rows))
            for field, value in zip(self.new, self.values, strict=True)
        ]
        return pa.Table.from_arrays(columns, schema=self.new)
