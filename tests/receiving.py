"""What stories about receiving have in common: receive all there is now, and say what the log holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conftest import Database
from walmere.changelog.manifest import Manifest, Summary, summarise
from walmere.changelog.reader import Reader
from walmere.config import Config
from walmere.lsn import INVALID_LSN, Lsn
from walmere.pgoutput import messages as m
from walmere.publisher.catalog import insert_position
from walmere.subscription.receiver import Receiver


def receive_all(database: Database, config: Config) -> Lsn:
    """Receive all that the source has now, and wait until the walsender has let go of the slot.

    To the insert position: a message outside transactions may be in no page that was written yet.
    """
    durable = Receiver(config).run(insert_position(database.connection))
    query = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
    deadline = time.monotonic() + 30
    while database.rows(query, config.source.slot) == [(True,)] and time.monotonic() < deadline:
        time.sleep(0.01)
    return durable


@dataclass(frozen=True)
class Logged:
    """A transaction of the log with its changes in short."""

    xid: int
    commit_lsn: Lsn
    origin: str | None
    changes: list[tuple[Any, ...]]


def logged(config: Config, start: Lsn = INVALID_LSN, table: str | None = None) -> list[Logged]:
    """The transactions of the log, in its order."""
    wanted = None if table is None else (lambda relation: relation.name == table)
    with Reader(config.changelog) as reader:
        return [
            Logged(t.xid, t.commit_lsn, t.origin, [short(change.message, change.relations) for change in t.changes])
            for t in reader.transactions(start, wanted=wanted)
        ]


def changes(config: Config, table: str | None = None) -> list[tuple[Any, ...]]:
    """All changes of the log, in its order."""
    return [change for transaction in logged(config, table=table) for change in transaction.changes]


def short(message: m.Message, relations: tuple[m.Relation, ...]) -> tuple[Any, ...]:
    """('I', table, {column: text}) and the like."""
    match message:
        case m.Insert():
            return ("I", relations[0].name, _row(relations[0], message.new))
        case m.Update():
            return (
                "U",
                relations[0].name,
                _row(relations[0], message.key or message.old),
                _row(relations[0], message.new),
            )
        case m.Delete():
            return ("D", relations[0].name, _row(relations[0], message.key or message.old))
        case m.Truncate():
            return ("T", *sorted(relation.name for relation in relations))
        case m.LogicalMessage():
            return ("M", message.prefix, message.content)
    raise AssertionError(message)


def _row(relation: m.Relation, values: m.Tuple | None) -> dict[str, Any] | None:
    if values is None:
        return None
    names = (column.name for column in relation.columns)
    return {n: v.decode() if isinstance(v, bytes) else v for n, v in zip(names, values, strict=True)}


def summary(config: Config) -> Summary:
    """What the manifest says."""
    with Manifest(config.changelog) as manifest:
        return summarise(manifest)


def files(config: Config) -> set[str]:
    """The segment files on disk."""
    return {path.name for path in config.changelog.glob("*.arrow*")}


def named_files(config: Config) -> set[str]:
    """The segment files that the manifest names."""

    def names() -> Iterator[str]:
        with Manifest(config.changelog) as manifest:
            for entry in manifest.entries():
                for segment in getattr(entry, "segments", ()):
                    yield segment.file

    return set(names())
