"""A database for each module, with the table of `target` for tests that ask for the sink."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conftest import Database, version_under_test
from servers import server_of
from sinks.postgres.target import CREATE, clean
from sinks.subjects import sink_of
from walmere.sinks.postgres.sink import PostgresSink


@pytest.fixture(scope="module")
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    made = Database(server_of(version_under_test(request.config)))
    made.connection.prepare_threshold = None  # each test has another table t
    yield made
    made.drop()


@pytest.fixture
def sink(database: Database) -> Iterator[PostgresSink]:
    database.execute(CREATE, "ALTER TABLE t ADD PRIMARY KEY (id)")
    yield sink_of(database)
    clean(database)
