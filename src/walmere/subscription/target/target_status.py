"""The target's part of `walmere status`: how large its tables are, and the conflicts in a database.

The size of a table in a local lake is in its newest commit. A sink, with Arrow or a database driver, is opened only if
that is not enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from walmere.config import Config, DeltaTarget, PostgresTarget
from walmere.errors import SinkError, StoreError
from walmere.sinks.delta.log.recorded_size import NotRecorded, recorded_size
from walmere.sinks.delta.places import table_path
from walmere.sinks.table_size import TableSize
from walmere.subscription.state import TableState

if TYPE_CHECKING:
    from walmere.sinks.base import Sink

_REQUESTS: Final = 8
"""Tables that are read from an object store at the same time."""


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """What was read from the target."""

    sizes: Mapping[str, TableSize | None] = field(default_factory=dict)  # by name of a table; None: not known
    conflicts: Mapping[str, int] = field(default_factory=dict)  # by name, how many changes met a conflict
    error: str | None = None  # why an object store cannot say it


def read_target(config: Config, tables: Sequence[TableState], open_sink: Callable[[], Sink]) -> TargetStatus:
    """Look at the tables. `open_sink` is called if it is needed."""
    target = config.target
    if target is None:
        return TargetStatus()
    if isinstance(target, PostgresTarget):
        return TargetStatus(conflicts=_conflicts(open_sink()))
    sizes = _recorded(target, tables)
    left = [each for each in tables if each.name not in sizes]
    if not left:
        return TargetStatus(sizes)
    others, error = _replayed(left, open_sink(), 1 if isinstance(target.path, Path) else _REQUESTS)
    return TargetStatus({**sizes, **others}, error=error)


def _recorded(target: DeltaTarget, tables: Sequence[TableState]) -> dict[str, TableSize | None]:
    """The tables of a local lake whose newest commit says how large they are."""
    found: dict[str, TableSize | None] = {}
    if isinstance(target.path, Path):
        for each in tables:
            try:
                found[each.name] = recorded_size(target.path / table_path(each.table))
            except NotRecorded:
                continue
    return found


def _replayed(
    tables: Sequence[TableState], sink: Sink, together: int
) -> tuple[dict[str, TableSize | None], str | None]:
    """The sizes by the logs of the tables, so many at a time; and why an object store cannot say it."""
    failed: list[str] = []

    def size(table: TableState) -> TableSize | None:
        if failed:  # a store that does not answer is asked once: each question may take a minute
            return None
        try:
            return sink.extent(table.table)
        except SinkError:
            return None
        except StoreError as error:
            failed.append(f"{error.doing}: {error.wrong}")
            return None

    with ThreadPoolExecutor(together) as pool:
        found = dict(zip((each.name for each in tables), pool.map(size, tables), strict=True))
    return found, failed[0] if failed else None


def _conflicts(sink: Sink) -> Mapping[str, int]:
    from walmere.sinks.postgres.sink import PostgresSink  # noqa: PLC0415  a lake has none

    assert isinstance(sink, PostgresSink)
    try:
        return sink.conflicts()
    except SinkError:
        return {}
