"""Sinks to test, each with a way to read its tables back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from walmere.sinks.base import Sink, TableName
from walmere.sinks.delta import DeltaSink


@dataclass(frozen=True)
class Target:
    """A sink, and what its users see of it."""

    sink: Sink
    read: Callable[[TableName], pa.Table]
    again: Callable[[], Sink]  # the same sink, made anew as another process would
    races: int = 25  # how often two attempts are made at once


def delta(path: Path) -> Target:
    sink = DeltaSink(str(path / "lake"))
    return Target(sink, lambda table: sink.open(table).to_pyarrow_table(), lambda: DeltaSink(str(path / "lake")))


def delta_by_url(path: Path) -> Target:
    """The way object stores are reached, on a disk."""
    url = f"file://{path}/lake"
    (path / "lake").mkdir()
    sink = DeltaSink(url)
    return Target(sink, lambda table: sink.open(table).to_pyarrow_table(), lambda: DeltaSink(url), races=5)


SINKS = {"delta": delta, "delta_by_url": delta_by_url}


@pytest.fixture(params=sorted(SINKS))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return SINKS[request.param](tmp_path)


@pytest.fixture
def sink(target: Target) -> Sink:
    return target.sink
