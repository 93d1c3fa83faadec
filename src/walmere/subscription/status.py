"""What `walmere status` tells: where the source is, where we are, and what lies between."""

from __future__ import annotations

import json
import time
from typing import Any

from walmere.changelog import manifest
from walmere.changelog.manifest import Manifest, Summary
from walmere.config import Config
from walmere.errors import SourceError
from walmere.lsn import Lsn
from walmere.publisher import catalog, slot
from walmere.publisher.catalog import PublishedTable
from walmere.publisher.connect import connect, speaking
from walmere.sinks.base import TableName
from walmere.subscription.origin import TARGET, Origins
from walmere.subscription.state import TableState, to_json
from walmere.subscription.tables import Tables


def status(config: Config) -> dict[str, Any]:
    """Everything, as JSON would have it. A source that does not answer leaves its part null, and says why."""
    source = _source(config)
    log = _log(config)
    durable = log.end_lsn if log is not None else None
    received = max((lsn for lsn in (_received(config), durable) if lsn is not None), default=None)
    origins = Origins(config.subscription.directory).positions()
    applied = origins.pop(TARGET, None)
    behind = applied if applied is not None else durable
    wal: Lsn | None = source["wal"]
    lag = None if wal is None or behind is None else max(0, wal - behind)
    committed = log.commit_time if log is not None else None
    return {
        "subscription": config.subscription.name,
        "slot": source["slot"],
        "source_lsn": _text(wal),
        "received_lsn": _text(received),
        "durable_lsn": _text(durable),
        "applied_lsn": _text(applied),
        "lag_bytes": lag,
        # of the newest commit we have; when nothing is missing there is no lag, however old that is
        "lag_seconds": 0.0 if lag == 0 else None if committed is None else round(time.time() - committed / 1e6, 3),
        "tables": source["tables"],
        # that the log is kept for, besides
        "queries": [{"origin": name.removeprefix("query-"), "lsn": str(lsn)} for name, lsn in origins.items()],
        "error": source["error"],
    }


def _source(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = {"slot": None, "wal": None, "tables": [], "error": None}
    try:
        with connect(config.source, "walmere status") as connection, speaking(config.source, "reading the source"):
            found["wal"] = catalog.wal_position(connection)
            known = Tables(config.subscription.directory)
            gather = config.target is not None and config.target.gather_partitions
            published = catalog.published_tables(connection, config.source.publications, gather)
            found["tables"] = [_table(known, table) for table in published]
            shown = {table.oid for table in published}
            found["tables"] += [_shown(each) for each in known if not each.published or each.oid not in shown]
            if (its := slot.read(connection, config.source.slot)) is not None:
                found["slot"] = {
                    "name": its.name,
                    "active": its.active,
                    "wal_status": its.wal_status,
                    "confirmed_lsn": _text(its.confirmed_lsn),
                    "retained_bytes": its.retained_bytes,
                }
    except SourceError as error:
        found["error"] = f"{error.doing}: {error.wrong}"
    return found


def _table(known: Tables, table: PublishedTable) -> dict[str, Any]:
    state = known[table.oid] if table.oid in known else TableState(TableName(table.schema, table.name), table.oid)
    return _shown(state)


def _shown(state: TableState) -> dict[str, Any]:
    stored = to_json(state)
    keys = ("phase", "rows_copied", "snapshot_lsn", "applied_lsn", "rejects", "error", "published")
    return {"name": state.name, **{key: stored[key] for key in keys}}


def _log(config: Config) -> Summary | None:
    if not (config.changelog / manifest.NAME).exists():
        return None
    with Manifest(config.changelog) as source:
        return manifest.summarise(source)


def _received(config: Config) -> Lsn | None:
    """What a running receiver says of itself."""
    try:
        return Lsn.parse(json.loads((config.subscription.directory / "receiver.json").read_text())["received_lsn"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or torn by a crash: it is not fsynced
        return None


def _text(lsn: Lsn | None) -> str | None:
    return None if lsn is None else str(lsn)
