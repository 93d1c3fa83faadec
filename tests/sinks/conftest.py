"""Sinks to test, each with a way to read its tables back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from walmere.ledger.entry import Entry
from walmere.ledger.file import History
from walmere.ledger.lake import read_latest
from walmere.names import TableName
from walmere.sinks.base import Sink
from walmere.sinks.delta.sink import DeltaSink


@dataclass(frozen=True)
class Target:
    """A sink, and what its users see of it."""

    sink: Sink
    read: Callable[[TableName], pa.Table]
    read_at: Callable[[TableName, int], pa.Table]
    again: Callable[[], Sink]  # the same sink, made anew as another process would
    points: Callable[[str], list[Entry]]  # that a subscription has published
    newest: Callable[[str], Entry | None]
    races: int = 10  # how often two attempts are made at once


def delta(path: Path) -> Target:
    return _delta(str(path / "lake"))


def delta_by_url(path: Path) -> Target:
    """The way object stores are reached, on a disk."""
    url = f"file://{path}/lake"
    (path / "lake").mkdir()
    return _delta(url, races=5)


def _delta(location: str, **more: int) -> Target:
    sink = DeltaSink(location)
    return Target(
        sink,
        lambda table: sink.open(table).to_pyarrow_table(),
        lambda table, version: sink.open(table, version).to_pyarrow_table(),
        lambda: DeltaSink(location),
        lambda name: list(History(sink.ledger_directory(name)).entries()),
        lambda name: read_latest(sink.ledger_directory(name)),
        **more,
    )


SINKS = {"delta": delta, "delta_by_url": delta_by_url}


@pytest.fixture(params=sorted(SINKS))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return SINKS[request.param](tmp_path)


@pytest.fixture
def sink(target: Target) -> Sink:
    return target.sink
