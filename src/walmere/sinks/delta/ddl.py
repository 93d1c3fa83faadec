"""Create a Delta table, claim it for its owner, and change its columns."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from walmere.errors import SinkConflict, SinkMismatch
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.owner import owned_by_another
from walmere.sinks.base import OVERWRITE, Run, StagedFile
from walmere.sinks.delta.files.data_file import DataFile
from walmere.sinks.delta.log import actions, retention
from walmere.sinks.delta.log.commit import ATTEMPTS, Change, put, try_commit
from walmere.sinks.delta.log.history import commit_info, with_size
from walmere.sinks.delta.log.names import LOG
from walmere.sinks.delta.log.replay import TableVersion
from walmere.sinks.delta.log.schema import delta_schema, require_different_names
from walmere.sinks.delta.tables import DeltaTables, owner_of
from walmere.sinks.table_size import TableSize


def create(tables: DeltaTables, table: TableName, schema: pa.Schema) -> int:
    """Create an empty table with these columns, if it does not exist. See `Sink.create`."""
    doing = f"creating the Delta table {table}"
    require_different_names(doing, schema)
    wanted = delta_schema(schema)
    location = tables.location(table)
    if tables.newest(table) is None:
        directory = tables.directory(table)
        if directory.local:
            directory.below(LOG).make()
        put(tables, table, 0, _first_commit(tables, table, schema))  # False: another attempt was faster
        directory.sync(LOG, "", "..", "../..")
    claim(tables, table)
    found = tables.current(table)
    if not _is_ours(tables, found) and found.schema.to_json() != wanted.to_json():
        raise SinkMismatch(
            doing,
            f"there is a table with other columns at {location}, which Walmere did not write",
            "move it to another directory",
        )
    return found.version


def _first_commit(tables: DeltaTables, table: TableName, schema: pa.Schema) -> list[dict[str, Any]]:
    """The commit that creates a table."""
    properties = {
        **retention.properties(tables.keep_hours),
        **tables.properties,
        **tables.owner_properties(),
        **({actions.VECTORS_PROPERTY: "true"} if tables.deletion_vectors else {}),
    }
    metadata = {
        "id": str(uuid.uuid4()),
        "name": str(table),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": delta_schema(schema).to_json(),
        "partitionColumns": [],
        "configuration": properties,
        "createdTime": time.time_ns() // 1_000_000,
    }
    return [
        with_size(commit_info("CREATE TABLE", {}, {}, {"tidy": "true"}), TableSize(0, 0, 0)),
        {"protocol": actions.new_protocol(schema, vectors=tables.deletion_vectors)},
        {"metaData": metadata},
    ]


def _is_ours(tables: DeltaTables, found: TableVersion) -> bool:
    """Whether Walmere has written all rows of the table."""
    return tables.lsn_of(found) is not None or not found.adds


def claim(tables: DeltaTables, table: TableName) -> bool:
    """Write the owner into a table of an earlier version, or take the table over. See `Sink.claim`."""
    doing = f"opening the Delta table {table}"
    for _ in range(ATTEMPTS):
        version = tables.newest(table)
        if version is None or tables.owner is None:
            return False
        found = owner_of(version)
        is_other = found is not None and not tables.owner.same(found)
        if found is not None and is_other and not tables.take_over:
            raise owned_by_another(doing, f"the table at {tables.location(table)}", found)
        if not is_other and (found == tables.owner or not _is_ours(tables, version) or not tables.owner.known):
            return False
        # LSN 0: the LSN of another source has no meaning here, and the table would look as if it had been copied
        reset = Lsn(0) if is_other and tables.lsn_of(version) else None
        change = Change(properties=tables.owner_properties(), operation="CLAIM")
        if try_commit(tables, table, version, change, reset) is not None:
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
    found = tables.current(table)
    tables.require_owner(table, found)
    columns = list(found.schema.fields)
    wanted = delta_schema(schema)
    if wanted.to_json() == found.schema.to_json():
        return found.version
    if wanted.fields[: len(columns)] == columns and not any(
        isinstance(value, str) or value.is_valid for value in values[len(columns) :]
    ):
        parameters = {"columns": json.dumps(schema.names[len(columns) :], ensure_ascii=False)}
        change = Change(schema=schema, operation="ADD COLUMNS", parameters=parameters)
    else:
        restage = _Restage(tables, table, found.arrow_schema, schema, tuple(values))
        staged = [file for group in run(restage, found.files) for file in group]
        parameters = {"columns": json.dumps(schema.names, ensure_ascii=False)}
        change = Change(staged, (), mode=OVERWRITE, schema=schema, operation="REPLACE COLUMNS", parameters=parameters)
    version = try_commit(tables, table, found, change, None)
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
