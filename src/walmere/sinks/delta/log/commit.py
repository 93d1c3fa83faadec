"""The commit protocol: how two attempts at the same commit take effect once.

Every commit of rows has its LSN as an app transaction, and is a compare-and-set: it becomes the version right after the
one at which the LSN was read, or it fails, because its file in the log must not exist yet. Of two attempts one wins.
The other one reads the LSN again, and finds that nothing is left to do.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from walmere.errors import SinkConflict, SinkError, SinkMismatch, StoreError
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import TableName
from walmere.sinks.base import APPEND, OVERWRITE, Mode, StagedFile
from walmere.sinks.delta import points
from walmere.sinks.delta.files.data_file import DataFile, count
from walmere.sinks.delta.files.vectors import Vector
from walmere.sinks.delta.log import actions, history, retention
from walmere.sinks.delta.log.names import LOG, log_file
from walmere.sinks.delta.log.replay import TableVersion
from walmere.sinks.delta.log.schema import delta_schema
from walmere.sinks.delta.tables import DeltaTables

_log = logging.getLogger(__name__)

ATTEMPTS: Final = 10
_CHECKPOINT_INTERVAL: Final = "delta.checkpointInterval"


@dataclass(frozen=True, slots=True)
class Change:
    """What a commit does to a table."""

    added: Sequence[StagedFile] = ()
    removed: Sequence[str] = ()  # paths of files
    marked: Mapping[str, Vector] = field(default_factory=dict)  # by path, the new vector of a file, old or added
    mode: Mode = APPEND
    schema: pa.Schema | None = None  # new columns; None: they stay
    properties: Mapping[str, str] = field(default_factory=dict)  # table properties to set
    operation: str = "APPLY"
    parameters: Mapping[str, str] = field(default_factory=dict)  # for the table's history
    metrics: Mapping[str, int] = field(default_factory=dict)


def commit(
    tables: DeltaTables,
    table: TableName,
    lsn: Lsn,
    change: Callable[[TableVersion], Change],
    after: Lsn | None = None,
) -> int:
    """Commit what `change` returns for the newest version, unless the table has reached the LSN.

    `after` is described in `LakeSink.commit`.
    """
    for attempt in range(ATTEMPTS):
        time.sleep(0.01 * attempt)
        found = tables.current(table)
        tables.require_owner(table, found)
        reached = tables.lsn_of(found)
        if reached is not None and reached >= lsn:
            if after is not None and reached > lsn:  # the caller would take this version for that of `lsn`
                raise overtaken(table)
            return found.version
        if after is not None and (reached or INVALID_LSN) != after:
            raise overtaken(table)
        actions.require_supported(table, found)  # before rows are written
        try:
            wanted = change(found)
        except FileNotFoundError as error:
            if not (missing := missing_file(tables, table, found, error)).transient:
                raise missing from error
            continue
        version = try_commit(tables, table, found, wanted, lsn)
        if version is not None:
            return version
    raise SinkConflict(
        f"committing to the Delta table {table}",
        f"another program committed first, {ATTEMPTS} times in a row",
        "if another program writes to the table, stop it: a mirror has one writer",
    )


def overtaken(table: TableName) -> SinkConflict:
    """The error if another attempt has applied a part of the changes of a batch."""
    doing = f"committing to the Delta table {table}"
    return SinkConflict(doing, "other changes were applied since this batch was read", "the batch is retried")


def missing_file(tables: DeltaTables, table: TableName, found: TableVersion, error: FileNotFoundError) -> SinkError:
    """The error for a file that a version of a table should have: upkeep may have replaced and deleted it meanwhile."""
    doing, wrong = f"reading the Delta table {table}", f"a file of it does not exist: {error}"
    if tables.current(table).version != found.version:
        return SinkConflict(doing, wrong, "the batch is retried")
    return SinkMismatch(doing, wrong, "another program has deleted it; let the subscription copy the table again")


def try_commit(
    tables: DeltaTables, table: TableName, found: TableVersion, change: Change, lsn: Lsn | None
) -> int | None:
    """Commit the version right after the given one; None if another commit has taken its place.

    Without an LSN, the table keeps the one that it has.
    """
    actions.require_supported(table, found)
    version = found.version + 1
    lines = _actions(tables, table, found, change, lsn)
    if not put(tables, table, version, lines):
        return None
    interval = (found.properties.get(_CHECKPOINT_INTERVAL) or "").strip()
    if interval.isdigit() and int(interval) and version % int(interval) == 0:
        _checkpoint(tables, table, found.properties)
    return version


def put(tables: DeltaTables, table: TableName, version: int, lines: Sequence[Mapping[str, Any]]) -> bool:
    """Write the commit of a version, durably, unless it exists. Returns whether it was written."""
    content = "".join(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines)
    try:
        return tables.directory(table).create(log_file(version), content.encode())
    except OSError as error:
        raise tables.not_writable(f"committing to the Delta table {table}", error) from error


def _actions(
    tables: DeltaTables, table: TableName, found: TableVersion, change: Change, lsn: Lsn | None
) -> list[dict[str, Any]]:
    now = time.time_ns() // 1_000_000
    data_change = lsn is not None or change.schema is not None
    marked = {path: vector for path, vector in change.marked.items() if path in found.adds}
    removed = list(found.adds) if change.mode is OVERWRITE else [*change.removed, *marked]
    lines = [_commit_info(tables, table, found, change, lsn)]
    if lsn is not None:
        lines.append({"txn": {"appId": tables.app_id, "version": int(lsn), "lastUpdated": now}})
    lines += _definition(tables, found, change)
    lines += [actions.remove(found.adds[path], now, data_change=data_change) for path in removed]
    for path, vector in marked.items():
        rows = DataFile.from_action(found.adds[path]).rows(tables.directory(table))
        lines.append(actions.mark(found.adds[path], vector, rows, data_change=data_change))
    lines += [actions.add(file, change.marked.get(file.path), now, data_change=data_change) for file in change.added]
    return [history.with_size(lines[0], found.then(found.version + 1, lines).size), *lines[1:]]


def _commit_info(
    tables: DeltaTables, table: TableName, found: TableVersion, change: Change, lsn: Lsn | None
) -> dict[str, Any]:
    if lsn is None:
        return history.commit_info(change.operation, change.parameters, change.metrics, {"tidy": "true"})
    parameters, metrics = {history.TO: str(lsn), **change.parameters}, dict(change.metrics)
    marks = {"lsn": str(lsn)}
    reached = tables.lsn_of(found)
    if reached is not None:
        parameters[history.FROM] = marks["lsn_before"] = str(reached)
    if change.mode is OVERWRITE:
        metrics[history.DELETED] = count(tables.directory(table), found.files)
    return history.commit_info(change.operation, parameters, metrics, marks)


def _definition(tables: DeltaTables, found: TableVersion, change: Change) -> list[dict[str, Any]]:
    """The protocol and metadata, if the commit changes them."""
    lines: list[dict[str, Any]] = []
    schema = found.arrow_schema if change.schema is None else change.schema
    longer = retention.too_short(found.properties, tables.keep_hours)
    properties = {**found.properties, **longer, **change.properties}
    vectors = bool(change.marked) or actions.VECTORS in found.features
    if change.properties.get(actions.VECTORS_PROPERTY) == "false":
        vectors = False
    elif vectors:
        properties[actions.VECTORS_PROPERTY] = "true"
    protocol = actions.changed_protocol(found.protocol, schema, vectors=vectors)
    if protocol is not None:
        lines.append({"protocol": protocol})
    metadata = {**found.metadata, "configuration": properties}
    if change.schema is not None:
        text = delta_schema(change.schema).to_json()
        if json.loads(text) != json.loads(found.metadata["schemaString"]):
            metadata["schemaString"] = text
    if metadata != {**found.metadata, "configuration": dict(found.properties)}:
        lines.append({"metaData": metadata})
    return lines


def switch_off_vectors(tables: DeltaTables, found: TableVersion) -> dict[str, str]:
    """The properties of a commit after which no file has a deletion vector, if the table is to have none."""
    if tables.deletion_vectors or actions.VECTORS not in found.features:
        return {}
    return {actions.VECTORS_PROPERTY: "false"}


def _checkpoint(tables: DeltaTables, table: TableName, properties: Mapping[str, str]) -> None:
    """Write a checkpoint, and delete the commits that are no longer kept. If it fails, the next one does it."""
    try:
        opened = DeltaTable(tables.location(table), storage_options=tables.options)
        opened.create_checkpoint()
        # it takes the place of the commits that are deleted, so it must be durable before
        tables.directory(table).sync(f"{LOG}/{opened.version():020d}.checkpoint.parquet", LOG)
        readable = functools.partial(points.readable_versions, tables, table, time.time_ns() // 1000)
        retention.clean_up(tables.directory(table), properties, readable)
    except (DeltaError, StoreError, OSError) as error:
        _log.warning("no checkpoint of the Delta table %s could be written, the next one is tried: %s", table, error)
