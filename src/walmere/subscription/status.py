"""What `walmere status` shows: the positions of source and subscription, and which tables are behind.

The order matters: the source is read first, then the log, then the tables. If the log has reached the source's
position, and no table lacks changes of the log, then everything that was committed before the call is applied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from walmere import paths
from walmere.changelog import manifest_file
from walmere.changelog.search import ManifestSearch
from walmere.changelog.segment_entry import segment_bytes_in
from walmere.config import Config
from walmere.errors import ChangeLogError, StoreError
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.publisher.slot import Slot
from walmere.shaping.table_choice import TableChoice
from walmere.sinks.table_size import TableSize
from walmere.storage import Lock
from walmere.subscription import copy_progress
from walmere.subscription.copy_progress import CopyProgress
from walmere.subscription.lag import Missing, oldest_missing
from walmere.subscription.progress import TARGET, SinkPositions
from walmere.subscription.requests import pausing
from walmere.subscription.source_status import SourceReader, SourceStatus
from walmere.subscription.state import TableState, to_json, waiting_for_copy
from walmere.subscription.tables import Tables
from walmere.subscription.target.pace import next_batch
from walmere.subscription.target.target_status import TargetStatus, read_target
from walmere.subscription.target.upkeep_record import read_status

if TYPE_CHECKING:
    from walmere.sinks.base import Sink


@dataclass(slots=True)
class _Log:
    """What was read from the change log."""

    end: Lsn | None = None
    reached: Lsn | None = None  # the log has everything before it; with a store, it may be after the log's end
    last_commit_time: int | None = None
    missing: dict[str, Missing] = field(default_factory=dict)
    error: str | None = None


def status(
    config: Config, open_sink: Callable[[], Sink] | None = None, reader: SourceReader | None = None
) -> dict[str, Any]:
    """The status as JSON values. If the source does not answer, its values are null, and `error` has the reason.

    `open_sink`: to show how large the tables of the target are, if their newest commits do not say it; None: do not
    look at the target. `reader`: of a caller that asks again and again.
    """
    store, paused, store_error = _read_store(config)
    source = _read_source(config, reader)
    log, tables = _read_log(config, source)
    positions = SinkPositions(config.subscription.directory).positions()
    applied = positions.pop(TARGET, None)
    receiver = _receiver(config, source, log)
    target = TargetStatus() if open_sink is None else read_target(config, tables, open_sink)
    copies = _copies(config)
    upkeep, next_at = read_status(config.subscription.directory), next_batch(config.subscription.directory)
    # without a target nothing is applied, and no table can be behind
    behind = [each.name for each in tables if config.target is not None and _is_behind(each, log)]
    receiving = receiver["running"] and receiver["lag_bytes"] == 0
    reached = source.wal if receiving else log.reached
    return {
        "subscription": config.subscription.name,
        "paused": paused,
        "slot": _slot(source.slot),
        "source_lsn": _text(source.wal),
        "received_lsn": _text(_received(config, log.end)),
        "durable_lsn": _text(log.end),
        "applied_lsn": _text(applied),
        "lag_bytes": _lag_bytes(source, applied if behind else reached),
        "lag_seconds": _lag_seconds(source, log, receiving=receiving),
        "caught_up": not behind and source.wal is not None and log.reached is not None and log.reached >= source.wal,
        "behind": behind,
        "receiver": receiver,
        "tables": [
            {
                **_table(each, source, log, reached, copies.get(each.oid)),
                **_size(each, target.sizes.get(each.name), upkeep),
                "conflicts": target.conflicts.get(each.name, 0),
            }
            for each in tables
        ],
        "disk": {"log_bytes": _log_bytes(config, running=receiver["running"]), "lake_bytes": _lake_bytes(target.sizes)},
        # without deletion vectors: batches wait if they would rewrite too many bytes
        "next_batch": None if next_at is None else _time(next_at),
        # the log is kept for these, too
        "queries": [{"name": name.removeprefix("query-"), "lsn": _text(lsn)} for name, lsn in positions.items()],
        "store": store,
        "error": source.error or store_error or log.error or target.error,
    }


def lag(config: Config, reader: SourceReader) -> tuple[int | None, float | None]:
    """`lag_bytes` and `lag_seconds` of the status, read with less effort."""
    source = reader.read(tables=False)
    log, tables = _read_log(config, source)
    applied = SinkPositions(config.subscription.directory).positions().get(TARGET)
    receiver = _receiver(config, source, log)
    receiving = receiver["running"] and receiver["lag_bytes"] == 0
    reached = source.wal if receiving else log.reached
    behind = any(_is_behind(each, log) for each in tables)
    return _lag_bytes(source, applied if behind else reached), _lag_seconds(source, log, receiving=receiving)


def _read_source(config: Config, reader: SourceReader | None) -> SourceStatus:
    if reader is not None:
        return reader.read()
    with closing(SourceReader(config)) as own:
        return own.read()


def _read_store(config: Config) -> tuple[dict[str, Any] | None, bool, str | None]:
    """What the store says, whether it is paused, and an error. Brings the local copies of log and state up to date."""
    if config.subscription.store is None:
        return None, pausing.is_paused(config.subscription.directory), None
    from walmere.subscription.shared.state import refresh_state  # noqa: PLC0415  only with a store
    from walmere.subscription.shared.store import describe, is_paused, refresh_log  # noqa: PLC0415

    try:
        refresh_log(config)
        refresh_state(config)
        return describe(config), is_paused(config), None
    except StoreError as error:
        return None, pausing.is_paused(config.subscription.directory), f"{error.doing}: {error.wrong}"


def _read_log(config: Config, source: SourceStatus) -> tuple[_Log, list[TableState]]:
    """The log and the tables, including those that are not published any more."""
    found = _Log()
    if not (config.changelog / manifest_file.NAME).exists():
        return found, _tables(config, source)
    reported = _reported(config, "nothing_until")  # first: what was committed before it is in the log by now
    with ManifestSearch(config.changelog) as log:
        found.end = log.end_lsn
        found.reached = max(found.end, reported or found.end)
        found.last_commit_time = log.last_commit_time
        tables = _tables(config, source)
        try:
            found.missing = oldest_missing(config.changelog, log, tables)
        except ChangeLogError as error:
            found.missing = {each.name: Missing(None) for each in tables}
            found.error = f"{error.doing}: {error.wrong}"
    return found, tables


def _tables(config: Config, source: SourceStatus) -> list[TableState]:
    known = Tables(config.subscription.directory)
    if source.published is None:
        return list(known)
    shown = {table.oid for table in source.published}
    choice = TableChoice(config.table)
    names = [TableName(table.schema, table.name) for table in source.published]
    states = [
        known.get(table.oid) or waiting_for_copy(choice.target(name), name, table.oid)
        for name, table in zip(names, source.published, strict=True)
    ]
    return states + [each for each in known if not each.published or each.oid not in shown]


def _is_behind(table: TableState, log: _Log) -> bool:
    """Whether it lacks received changes, or has no copy yet."""
    return table.published and (not table.follows or table.name in log.missing)


def _lag_seconds(source: SourceStatus, log: _Log, *, receiving: bool) -> float | None:
    """The age of the oldest commit that was received and is not applied. None: unknown."""
    times = [each.commit_time for each in log.missing.values()]
    known = [commit_time for commit_time in times if commit_time is not None]
    if known:  # commits that were not received are newer
        return _age(min(known), source)
    if times or not (receiving or (source.wal is not None and log.reached is not None and log.reached >= source.wal)):
        return None
    return 0.0


def _lag_bytes(source: SourceStatus, applied: Lsn | None) -> int | None:
    """The WAL after a position. None: not known, because nothing is applied yet."""
    return _bytes(source.wal, applied or None)


def _receiver(config: Config, source: SourceStatus, log: _Log) -> dict[str, Any]:
    """How far the log is behind the source."""
    running = Lock.holder(config.changelog) is not None
    if config.subscription.store is not None:  # or on another machine
        running |= source.slot is not None and source.slot.active
    reached = source.sent if running and source.sent is not None else _received(config, log.end)
    behind = _bytes(source.wal, reached)
    seconds: float | None = None
    if behind == 0:
        seconds = round(source.sent_after, 3) if running else 0.0
    elif behind is not None and running and log.last_commit_time is not None:
        seconds = _age(log.last_commit_time, source)  # everything before that was received
    return {"running": running, "lag_bytes": behind, "lag_seconds": seconds}


def _copies(config: Config) -> dict[int, CopyProgress]:
    """The copies that are running, by table."""
    directory = config.subscription.directory
    return {} if Lock.holder(directory / paths.RUN) is None else copy_progress.read(directory)


def _log_bytes(config: Config, *, running: bool) -> int:
    """How much of the disk the change log uses; with a store, its local copy."""
    counted = _receiver_file(config).get("log_bytes") if running else None
    return counted if isinstance(counted, int) else segment_bytes_in(config.changelog)


def _lake_bytes(sizes: Mapping[str, TableSize | None]) -> int | None:
    """The size of the tables of a lake: of the files of their newest versions. None: not known."""
    known = [each.bytes for each in sizes.values() if each is not None]
    return sum(known) if known else None


def _table(
    table: TableState, source: SourceStatus, log: _Log, reached: Lsn | None, copying: CopyProgress | None
) -> dict[str, Any]:
    """`reached`: everything before it was received."""
    stored = to_json(table)
    position = table.position
    if position is not None and table.name not in log.missing:  # it lacks only what was not received
        position = max(position, reached or position)
    if copying is not None and table.copying:
        stored["rows_copied"] = copying.rows
    keys = ("phase", "rows_copied", "snapshot_lsn", "applied_lsn", "rejects", "error", "published")
    return {
        "name": table.name,
        "source_table": str(table.source_table),
        **{key: stored[key] for key in keys},
        "rows_estimated": source.estimated.get(table.oid),
        "lag_bytes": _lag_bytes(source, position),
        "lag_seconds": _table_seconds(table, source, log.missing),
        "locked": _locked(table, source),
        "next_copy": _next_copy(table),
    }


def _size(table: TableState, found: TableSize | None, upkeep: Mapping[str, Any]) -> dict[str, Any]:
    """How large the target's table is, and what upkeep does with it."""
    known = upkeep.get(table.name, {})
    return {
        "files": None if found is None else found.files,
        "bytes": None if found is None else found.bytes,
        "deleted_rows": None if found is None else found.deleted,
        "written_bytes_per_hour": known.get("written_bytes_per_hour"),
        "upkeep_waits_for": known.get("upkeep_waits_for"),
    }


def _locked(table: TableState, source: SourceStatus) -> str | None:
    """The lock that keeps it, or a partition of it, from being read."""
    published = next((each for each in source.published or () if each.oid == table.oid), None)
    relations = [table.oid] if published is None else [table.oid, *(leaf for leaf, _ in published.leaves)]
    return next((source.locked[oid] for oid in relations if oid in source.locked), None)


def _next_copy(table: TableState) -> str | None:
    """When a table is copied again after copies that did not help."""
    if not table.waits_for_copy or not table.retry_at:
        return None
    return _time(table.retry_at)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _table_seconds(table: TableState, source: SourceStatus, missing: Mapping[str, Missing]) -> float | None:
    if table.position is None:
        return None
    oldest = missing.get(table.name)
    if oldest is None:
        return 0.0
    return None if oldest.commit_time is None else _age(oldest.commit_time, source)


def _slot(found: Slot | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "name": found.name,
        "active": found.active,
        "wal_status": found.wal_status,
        "confirmed_lsn": _text(found.confirmed_lsn),
        "retained_bytes": found.retained_bytes,
    }


def _received(config: Config, durable: Lsn | None) -> Lsn | None:
    """The position that a running receiver has reported, or the end of the log if that is later."""
    reported = _reported(config, "received_lsn")
    return max((lsn for lsn in (reported, durable) if lsn is not None), default=None)


def _reported(config: Config, key: str) -> Lsn | None:
    """An LSN in the receiver's own file."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        return Lsn.parse(_receiver_file(config)[key])
    return None


def _receiver_file(config: Config) -> Mapping[str, Any]:
    """What the receiver has written about itself; empty if there is nothing."""
    with suppress(OSError, ValueError):  # missing, or half written: not fsynced
        content = json.loads((config.subscription.directory / paths.RECEIVER).read_text())
        return content if isinstance(content, dict) else {}
    return {}


def _age(commit_time: int, source: SourceStatus) -> float:
    return max(0.0, round(source.now - commit_time / 1e6, 3))


def _bytes(end: Lsn | None, begin: Lsn | None) -> int | None:
    return None if end is None or begin is None else max(0, end - begin)


def _text(lsn: Lsn | None) -> str | None:
    return str(lsn) if lsn else None  # 0/0 is the position before the first one
