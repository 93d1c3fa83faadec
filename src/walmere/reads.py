"""Reading a lake as of one point of the source: all tables at versions that belong together.

The tables of a lake are committed one by one. Who reads the newest version of two of them may see a transaction in one
and not yet in the other. A `Point` has the versions of all tables at one LSN, and every table that is read through it
is as of that LSN: whole transactions, and nothing else.

    point = walmere.lake("/srv/lake").latest()
    point.lsn, point.commit_time, point.tables
    point.arrow("orders"), point.duckdb("public.lines"), point.dataframe(spark, "orders")

Nothing runs for it: the subscription leaves its points in the lake. Spark and DuckDB are imported when they are asked
for, and neither needs an extension.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.dataset as pads

from walmere import config
from walmere.errors import ConfigError, LakeError, NotApplied, PointGone
from walmere.ledger import entry as points
from walmere.ledger.entry import Entry, Points
from walmere.ledger.file import History
from walmere.ledger.lake import read_latest
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.delta.snapshot import Pinned

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation

    from walmere.spark.dataframe import DataFrame, SparkSession


def read(
    spark: SparkSession,
    lake_or_config: str | os.PathLike[str],
    table: str,
    *,
    lsn: Lsn | str | None = None,
    at: str | datetime | None = None,
) -> DataFrame:
    """One table of a lake as a DataFrame: as of an LSN or a time, or else as of the newest point.

    The lake is given by its path, or by the `walmere.toml` of the subscription that writes it. To read several tables
    as of the same point, take the point: `lake(…).at(…)`.
    """
    path = os.fspath(lake_or_config)
    by_file = path.endswith(".toml") or Path(path).is_file()
    return (configured(Path(path)) if by_file else lake(path)).at(lsn, at=at).dataframe(spark, table)


def lake(
    path: str | os.PathLike[str],
    subscription: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Lake:
    """A lake that a subscription writes. Its name is needed only if there are several.

    `storage_options` are those of `deltalake`, for a lake that is not on a local disk.
    """
    sink = DeltaSink(os.fspath(path), storage_options=storage_options)
    doing = f"opening the lake {sink.path}"
    there = sink.subscriptions()
    if not there:
        hint = "is it the path in [target]? the first batch after the copies publishes one: `walmere run`"
        raise LakeError(doing, "no subscription has published a point there", hint)
    if subscription is None and len(there) > 1:
        raise LakeError(doing, "several subscriptions write there", f"say which one: {_listed(there)}")
    if subscription is not None and subscription not in there:
        raise LakeError(doing, f"no subscription {subscription} writes there", f"there is {_listed(there)}")
    return Lake(sink, subscription or there[0])


def configured(file: Path) -> Lake:
    """The lake of a configuration."""
    loaded = config.load(file)
    if loaded.target is None:
        raise ConfigError(f"reading {file}", "there is no [target]", "only a subscription with one has a lake")
    return lake(loaded.target.path, loaded.subscription.name)


class Lake:
    """What one subscription writes."""

    def __init__(self, sink: DeltaSink, subscription: str) -> None:
        self._sink = sink
        self.subscription = subscription
        self._directory = sink.ledger_directory(subscription)

    def __repr__(self) -> str:
        return f"<walmere.Lake {self._sink.path} of {self.subscription}>"

    def latest(self) -> Point:
        """The newest point."""
        entry = read_latest(self._directory)
        if entry is None:
            raise LakeError(self._doing("the newest point"), "none is published yet", "`walmere run` does it")
        return self._point(entry)

    def points(self) -> list[Point]:
        """All points that can be read, oldest first."""
        there = History(self._directory).points()
        return [self._point(entry) for entry in list(there)[there.first_readable(points.now()) :]]

    def at(self, lsn: Lsn | str | None = None, *, at: str | datetime | None = None) -> Point:
        """The newest point that is not after an LSN, or whose newest transaction had committed by a time.

        Raises PointGone if that is not kept any more, and NotApplied if it is not known yet what it will be: an LSN or
        a time behind the newest point is never answered with an older state. Without either, the newest point.
        """
        if lsn is not None and at is not None:
            raise ConfigError("reading a lake", "there is both an LSN and a time", "give one of them")
        if lsn is not None:
            wanted = _lsn(lsn)
            return self._newest(f"LSN {wanted}", lambda there: there.lsns, wanted)
        if at is not None:
            time = points.microseconds(_time(at))
            return self._newest(f"{points.iso(time)}", lambda there: there.times, time)
        return self.latest()

    def _newest(self, wanted: str, values: Callable[[Points], Sequence[int]], limit: int) -> Point:
        doing = self._doing(wanted)
        there = History(self._directory).points()
        if not len(there):
            raise LakeError(doing, "no point is published yet", "`walmere run` does it")
        oldest, known = there.first_readable(points.now()), values(there)
        if limit > known[-1]:
            hint = f"wait until it is applied, or read the newest point, {_told(there, len(there) - 1)}"
            raise NotApplied(doing, "what the source had then may not be applied yet", hint)
        place = points.newest(known, limit)
        if place < oldest:
            hint = f"the oldest that can be read is {_told(there, oldest)}; [target] keep_seconds says for how long"
            raise PointGone(doing, "that is not kept, or not any more", hint)
        return self._point(there[place])

    def _doing(self, what: str) -> str:
        return f"reading the lake {self._sink.path} as of {what}"

    def _point(self, entry: Entry) -> Point:
        time = None if entry.commit_time is None else points.moment(entry.commit_time)
        return Point(entry.lsn, time, self._sink, entry.versions)


@dataclass(frozen=True, slots=True)
class Point:
    """All tables as of one LSN. A table's name is schema.table, or without the schema if that is enough."""

    lsn: Lsn
    """Everything that committed before it is there, and nothing else."""
    commit_time: datetime | None
    """Of the newest transaction; None if there was none since the tables were copied."""
    _sink: DeltaSink
    _versions: Mapping[str, int]

    def __repr__(self) -> str:
        return f"<walmere.Point {self.lsn} of {self.commit_time}, {len(self._versions)} tables>"

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of all tables that can be read."""
        return tuple(self._versions)

    def version(self, table: str) -> int:
        """Which version of the Delta table it is."""
        return self._versions[self._find(table)]

    def path(self, table: str) -> str:
        """Where the Delta table is."""
        return self._sink.location(TableName.parse(self._find(table)))

    def dataset(self, table: str) -> pads.Dataset:
        """The table as a PyArrow dataset, which is read when it is asked for."""
        return self._pinned(table).dataset()

    def arrow(self, table: str) -> pa.Table:
        """The table as a PyArrow table."""
        pinned = self._pinned(table)
        dataset = pinned.dataset()
        try:
            return dataset.to_table()
        except FileNotFoundError as error:
            raise pinned.gone(error) from error

    def duckdb(self, table: str, connection: DuckDBPyConnection | None = None) -> DuckDBPyRelation:
        """The table as a DuckDB relation; on DuckDB's default connection, if none is given."""
        from duckdb import default_connection

        return (connection or default_connection()).from_arrow(self.dataset(table))

    def dataframe(self, spark: SparkSession, table: str) -> DataFrame:
        """The table as a Spark DataFrame. Spark reads the files of this version itself: it needs no jar."""
        from walmere.spark.dataframe import dataframe

        return dataframe(spark, self._pinned(table))

    def _pinned(self, table: str) -> Pinned:
        name = self._find(table)
        return Pinned(self._sink, TableName.parse(name), self._versions[name])

    def _find(self, table: str) -> str:
        """The table's name, with its schema."""
        if table in self._versions:
            return table
        found = [name for name in self._versions if TableName.parse(name).name == table]
        if len(found) == 1:
            return found[0]
        doing = f"reading table {table} as of LSN {self.lsn}"
        if found:
            raise LakeError(doing, f"{len(found)} tables are called so", f"say which one: {_listed(found)}")
        hint = "one that is being copied, or is changing its columns, is not there until that is done"
        raise LakeError(doing, f"there is none; the tables are {_listed(self.tables) or 'none'}", hint)


def _told(there: Points, place: int) -> str:
    return f"LSN {there.lsns[place]} of {points.iso(there.times[place])}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _lsn(lsn: Lsn | str) -> Lsn:
    try:
        return Lsn.parse(lsn) if isinstance(lsn, str) else Lsn(lsn)
    except ValueError as error:
        raise ConfigError("reading a lake as of an LSN", str(error)) from None


def _time(at: str | datetime) -> datetime:
    doing = f"reading a lake as of {at}"
    try:
        time = datetime.fromisoformat(at) if isinstance(at, str) else at
    except ValueError:
        raise ConfigError(doing, "that is no time", "one looks like 2026-11-15T12:00:00Z") from None
    if time.tzinfo is None:
        raise ConfigError(doing, "it does not say in which zone", "one looks like 2026-11-15T12:00:00Z")
    return time.astimezone(UTC)
