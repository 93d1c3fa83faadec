"""The points that subscriptions have written to a lake, and to whom they belong. See `walmere.ledger.lake`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from walmere.directory import Directory
from walmere.errors import ChangeLogError, SinkError
from walmere.ledger.entry import Entry
from walmere.ledger.file import History
from walmere.ledger.lake import LakeLedger, read_latest, read_owner
from walmere.names import TableName
from walmere.owner import owned_by_another
from walmere.sinks.delta.places import PLACE, quote, table_path, unquote
from walmere.sinks.delta.tables import DeltaTables


def directory(tables: DeltaTables, subscription: str) -> Directory:
    """Where the lake has the points of a subscription."""
    return Directory(tables.path, tables.storage_options).below(f"{PLACE}/{quote(subscription)}")


def subscriptions(tables: DeltaTables) -> list[str]:
    """The subscriptions that have points in the lake."""
    return [unquote(name) for name in Directory(tables.path, tables.storage_options).directories(PLACE)]


def read(tables: DeltaTables, subscription: str) -> list[Entry]:
    """The points of a subscription, oldest first; none if they cannot be read."""
    try:
        return list(History(directory(tables, subscription)).entries())
    except ChangeLogError:
        return []


def open_ledger(tables: DeltaTables, subscription: str, entries: Iterable[Entry]) -> LakeLedger:
    """Become the writer of a subscription's points. See `Sink.open_ledger`."""
    lake_ledger = _lake_ledger(tables, subscription)
    claim(tables, subscription)
    lake_ledger.begin(entries)
    if tables.owner is not None and tables.owner.known:
        lake_ledger.write_owner(tables.owner)
    return lake_ledger


def claim(tables: DeltaTables, subscription: str) -> None:
    """Refuse points that belong to another owner, or take them over. See `Sink.claim_points`."""
    place = directory(tables, subscription)
    try:
        found = None if tables.owner is None or tables.take_over else read_owner(place)
    except OSError as error:
        raise SinkError(
            f"reading the lake at {tables.path}", str(error), "make sure that it is a writable directory"
        ) from error
    if tables.owner is not None and found is not None and not tables.owner.same(found):
        raise owned_by_another(f"writing points to {place.location}", f"the name {subscription}", found)
    if tables.owner is not None and tables.owner.known and tables.take_over:
        _lake_ledger(tables, subscription).write_owner(tables.owner)


def tables_of_others(tables: DeltaTables, subscription: str) -> dict[str, str]:
    """The tables in the newest points of the other subscriptions, each with the name of its subscription."""
    found: dict[str, str] = {}
    for name in subscriptions(tables):
        with contextlib.suppress(ChangeLogError):  # points that cannot be read claim no table
            newest = read_latest(directory(tables, name)) if name != subscription else None
            found |= dict.fromkeys(newest.versions if newest is not None else (), name)
    return found


def readable_versions(tables: DeltaTables, table: TableName, time: int) -> set[int]:
    """The versions that a table has in the points of all subscriptions that must be readable at a time."""
    found: set[int] = set()
    for name in subscriptions(tables):
        place = directory(tables, name)
        try:
            known = History(place).points()
            found |= known.versions_of(str(table), known.first_readable(time))
        except ChangeLogError:  # readers find the newest point in another file
            with contextlib.suppress(ChangeLogError):
                newest = read_latest(place)
                if newest is not None and str(table) in newest.versions:
                    found.add(newest.versions[str(table)])
    return found


def _lake_ledger(tables: DeltaTables, subscription: str) -> LakeLedger:
    return LakeLedger(directory(tables, subscription), subscription, table_path, tables.keep_seconds)
