"""Sinks to test, each with a way to read its tables back.

`target` is a lake. `subject` is a lake or a database, for what all sinks promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest

from conftest import Database, version_under_test
from delta_rows import read_delta
from object_stores import Bucket
from servers import server_of
from sinks.subjects import DatabaseSubjects, Subject, lake
from walmere.ledger.entry import Entry
from walmere.ledger.file import History
from walmere.ledger.lake import read_latest
from walmere.names import TableName
from walmere.sinks.base import LakeSink
from walmere.sinks.delta.sink import DeltaSink


@dataclass(frozen=True)
class Target:
    """A sink, and what its users see of it."""

    sink: LakeSink
    read: Callable[[TableName], pa.Table]
    read_at: Callable[[TableName, int], pa.Table]
    again: Callable[[], LakeSink]  # the same sink, made anew as another process would
    points: Callable[[str], list[Entry]]  # that a subscription has published
    newest: Callable[[str], Entry | None]
    races: int = 6  # how often two attempts are made at once


def delta(path: Path, request: pytest.FixtureRequest) -> Target:
    return _delta(DeltaSink(str(path / "lake"), index=str(path / "index")))


def delta_on_s3(path: Path, request: pytest.FixtureRequest) -> Target:
    """In an object store."""
    bucket: Bucket = request.getfixturevalue("bucket")
    sink = DeltaSink(f"{bucket.url}/{path.name}/lake", storage_options=bucket.options, index=str(path / "index"))
    return _delta(sink, races=3)


def delta_without_vectors(path: Path, request: pytest.FixtureRequest) -> Target:
    """For readers without deletion vectors: changes rewrite files."""
    return _delta(DeltaSink(str(path / "lake"), deletion_vectors=False), races=3)


def _delta(sink: DeltaSink, **more: int) -> Target:
    return Target(
        sink,
        lambda table: read_delta(sink.open(table)),
        lambda table, version: read_delta(sink.open(table, version)),
        lambda: replace(sink),
        lambda name: list(History(sink.ledger_directory(name)).entries()),
        lambda name: read_latest(sink.ledger_directory(name)),
        **more,
    )


SINKS = {"delta": delta, "delta_on_s3": delta_on_s3, "delta_without_vectors": delta_without_vectors}


@pytest.fixture(params=sorted(SINKS))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return SINKS[request.param](tmp_path, request)


@pytest.fixture
def sink(target: Target) -> LakeSink:
    return target.sink


DATABASES: dict[str, dict[str, bool]] = {
    "postgres": {},
    "postgres_row_by_row": {"row_by_row": True},
    "postgres_without_origins": {"origins": False},
}


@pytest.fixture(scope="session")
def database_subjects(request: pytest.FixtureRequest) -> Iterator[DatabaseSubjects]:
    made = DatabaseSubjects(Database(server_of(version_under_test(request.config))))
    yield made
    made.drop()


@pytest.fixture(params=[*sorted(SINKS), *DATABASES])
def new_subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], AbstractContextManager[Subject]]:
    """Makes a sink whose target is empty. What it has written is removed at the end of the block."""

    @contextmanager
    def made() -> Iterator[Subject]:
        if request.param in SINKS:
            found = SINKS[request.param](tmp_path_factory.mktemp("subject"), request)
            yield lake(found.sink, found.read, found.again, found.races)
            return
        subjects: DatabaseSubjects = request.getfixturevalue("database_subjects")
        try:
            yield subjects.subject(**DATABASES[request.param])
        finally:
            subjects.clean()

    return made


@pytest.fixture
def subject(new_subject: Callable[[], AbstractContextManager[Subject]]) -> Iterator[Subject]:
    with new_subject() as made:
        yield made
