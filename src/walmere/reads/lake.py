"""Read a lake as of one point of the source: all tables at versions that belong together.

The tables of a lake are committed one by one. A reader of the newest versions of two tables may see a transaction in
one and not yet in the other. A `Point` has the versions of all tables at one LSN. Every table that is read through it
is as of that LSN and has only whole transactions.

    point = walmere.lake("/srv/lake").latest()
    point.lsn, point.commit_time, point.tables
    point.arrow("orders"), point.duckdb("public.lines"), point.dataframe(spark, "orders")

Nothing needs to be running: the subscription writes its points to the lake. Spark and DuckDB are imported only when
they are used, and neither needs an extension.
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
from walmere.sinks.delta.log.snapshot import Pinned
from walmere.sinks.delta.sink import DeltaSink

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
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Read one table of a lake as a DataFrame: as of an LSN or a time, by default as of the newest point.

    The lake is given by its path or URL, or by the `walmere.toml` of the subscription that writes it. To read several
    tables as of the same point, use `lake(…).at(…)`. `storage_options`: see `lake`.
    """
    path = os.fspath(lake_or_config)
    by_file = path.endswith(".toml") or Path(path).is_file()
    opened = configured(Path(path)) if by_file else lake(path, storage_options=storage_options)
    return opened.at(lsn, at=at).dataframe(spark, table)


def lake(
    path: str | os.PathLike[str],
    subscription: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Lake:
    """Open a lake, by its path or the URL of an object store. The subscription is needed only if several write to it.

    `storage_options` are what `[storage]` has: endpoint, region and others. Credentials come from the environment or
    the machine's role.
    """
    sink = DeltaSink(os.fspath(path), storage_options=storage_options)
    doing = f"opening the lake {sink.path}"
    names = sink.subscriptions()
    if not names:
        hint = "the path must be that of [target]; `walmere run` writes the first point after the tables are copied"
        raise LakeError(doing, "no subscription has written a point there", hint)
    if subscription is None and len(names) > 1:
        raise LakeError(doing, "several subscriptions write there", f"name one of them: {_listed(names)}")
    if subscription is not None and subscription not in names:
        raise LakeError(doing, f"no subscription {subscription} writes there", f"name one of these: {_listed(names)}")
    return Lake(sink, subscription or names[0])


def configured(file: Path) -> Lake:
    """Open the lake of a configuration file."""
    loaded = config.load(file)
    if loaded.target is None:
        raise ConfigError(f"reading {file}", "there is no [target]", "add [target], which names the lake")
    if not isinstance(loaded.target, config.DeltaTarget):
        raise ConfigError(f"opening the lake of {file}", "its target is a PostgreSQL database", "read it with SQL")
    settings = loaded.storage.settings if isinstance(loaded.target.path, str) else None
    return lake(loaded.target.path, loaded.subscription.name, settings)


class Lake:
    """The tables and points of one subscription."""

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
            raise LakeError(self._doing("the newest point"), "there is no point yet", "`walmere run` writes points")
        return self._point(entry)

    def points(self) -> list[Point]:
        """All points that can be read, oldest first."""
        known = History(self._directory).points()
        return [self._point(entry) for entry in list(known)[known.first_readable(points.now()) :]]

    def at(self, lsn: Lsn | str | None = None, *, at: str | datetime | None = None) -> Point:
        """The newest point at or before an LSN, or whose newest transaction had committed by a time.

        Without either, the newest point. Raises PointGone if the point is not kept any more, and NotApplied if the LSN
        or time is after the newest point: changes before it may still arrive.
        """
        if lsn is not None and at is not None:
            raise ConfigError("reading a lake", "both an LSN and a time are given", "give one of them")
        if lsn is not None:
            wanted = _lsn(lsn)
            return self._newest(f"LSN {wanted}", lambda known: known.lsns, wanted)
        if at is not None:
            time = points.microseconds(_time(at))
            return self._newest(f"{points.iso(time)}", lambda known: known.times, time)
        return self.latest()

    def _newest(self, wanted: str, values: Callable[[Points], Sequence[int]], limit: int) -> Point:
        doing = self._doing(wanted)
        known = History(self._directory).points()
        if not len(known):
            raise LakeError(doing, "there is no point yet", "`walmere run` writes points")
        oldest, ordered = known.first_readable(points.now()), values(known)
        if limit > ordered[-1]:
            hint = f"wait and try again, or read the newest point: {_described(known, len(known) - 1)}"
            raise NotApplied(doing, "not all changes up to there are applied yet", hint)
        index = points.newest(ordered, limit)
        if index < oldest:
            hint = f"the oldest point is {_described(known, oldest)}; [target] keep_seconds sets how long they are kept"
            raise PointGone(doing, "the lake has no point that old", hint)
        return self._point(known[index])

    def _doing(self, what: str) -> str:
        return f"reading the lake {self._sink.path} as of {what}"

    def _point(self, entry: Entry) -> Point:
        time = None if entry.commit_time is None else points.moment(entry.commit_time)
        return Point(entry.lsn, time, self._sink, entry.versions)


@dataclass(frozen=True, slots=True)
class Point:
    """All tables as of one LSN. A table is named schema.table, or only table if that is unique."""

    lsn: Lsn
    """The tables have everything that committed before it, and nothing else."""
    commit_time: datetime | None
    """Commit time of the newest transaction; None if there was none since the tables were copied."""
    _sink: DeltaSink
    _versions: Mapping[str, int]

    def __repr__(self) -> str:
        return f"<walmere.Point {self.lsn} of {self.commit_time}, {len(self._versions)} tables>"

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of all tables that can be read."""
        return tuple(self._versions)

    def version(self, table: str) -> int:
        """The version of the Delta table."""
        return self._versions[self._find(table)]

    def path(self, table: str) -> str:
        """The path of the Delta table."""
        return self._sink.location(TableName.parse(self._find(table)))

    def dataset(self, table: str) -> pads.Dataset:
        """The table as a PyArrow dataset, which is read lazily.

        If files have deleted rows, `get_fragments` is refused, and PyArrow's C++ code cannot read the dataset by
        itself (`pyarrow.dataset.write_dataset`, a union with others): use `to_batches`, or `scanner().to_reader()`.
        """
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
        """The table as a DuckDB relation; by default on DuckDB's default connection."""
        from duckdb import default_connection

        from walmere.reads.relation import relation

        pinned = self._pinned(table)
        try:
            return relation(connection or default_connection(), pinned)
        except FileNotFoundError as error:
            raise pinned.gone(error) from error

    def dataframe(self, spark: SparkSession, table: str) -> DataFrame:
        """The table as a Spark DataFrame. Spark reads the files of this version itself: it needs no jar."""
        from walmere.spark.dataframe import dataframe

        pinned = self._pinned(table)
        try:
            return dataframe(spark, pinned)
        except FileNotFoundError as error:
            raise pinned.gone(error) from error

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
            raise LakeError(doing, f"{len(found)} tables have this name", f"name one of them: {_listed(found)}")
        hint = "a table that is being copied, or whose columns are being changed, cannot be read until that is done"
        raise LakeError(doing, f"there is no such table; the tables are {_listed(self.tables) or 'none'}", hint)


def _described(known: Points, index: int) -> str:
    return f"LSN {known.lsns[index]} of {points.iso(known.times[index])}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _lsn(lsn: Lsn | str) -> Lsn:
    try:
        return Lsn(lsn)
    except ValueError as error:
        raise ConfigError("reading a lake as of an LSN", str(error)) from None


def _time(at: str | datetime) -> datetime:
    doing = f"reading a lake as of {at}"
    try:
        time = datetime.fromisoformat(at) if isinstance(at, str) else at
    except ValueError:
        raise ConfigError(doing, "this is not a time", "write it as 2026-11-15T12:00:00Z") from None
    if time.tzinfo is None:
        raise ConfigError(doing, "the time has no time zone", "write it as 2026-11-15T12:00:00Z")
    return time.astimezone(UTC)
