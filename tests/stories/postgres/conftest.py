"""Two servers for all stories: the publisher is the session's server, the subscriber's server is one more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import version_under_test
from servers import BINARIES
from side_by_side import Pair, SideBySide
from walmere.testing.server import LOGICAL, Server

SUBSCRIBER = {
    **LOGICAL,
    "fsync": "off",
    "max_wal_size": "2GB",
    "max_worker_processes": "16",
    "max_logical_replication_workers": "8",
    "max_sync_workers_per_subscription": "4",
    "wal_retrieve_retry_interval": "100ms",  # a worker that has ended is started again only after this time
    "wal_receiver_status_interval": "1s",
    "track_commit_timestamp": "on",  # conflicts with rows of another origin are found only with this
}


@pytest.fixture(scope="session")
def more_servers() -> Iterator[Callable[[str, int], Server]]:
    """Start servers when first asked for, by role and version."""
    servers: dict[tuple[str, int], Server] = {}

    def server(role: str, version: int) -> Server:
        if (role, version) not in servers:
            servers[role, version] = Server(BINARIES[version], SUBSCRIBER)
            servers[role, version].start()
        return servers[role, version]

    yield server
    for each in servers.values():
        each.remove()


@pytest.fixture
def both(
    request: pytest.FixtureRequest,
    server_under_test: Server,
    more_servers: Callable[[str, int], Server],
    tmp_path: Path,
) -> Iterator[SideBySide]:
    """Databases for a native subscription and for ours. A parameter `Pair` says on which versions."""
    pair: Pair = getattr(request, "param", Pair())
    tested = version_under_test(request.config)
    if pair.publisher is not None and request.config.getoption("--postgres") not in (None, pair.publisher):
        pytest.skip(f"this is about PostgreSQL {pair.publisher}")
    for version in (pair.publisher, pair.subscriber):
        if version is not None and version not in BINARIES:
            pytest.skip(f"no PostgreSQL {version} on this machine")
    publisher = server_under_test if pair.publisher is None else more_servers("publisher", pair.publisher)
    subscriber = more_servers("subscriber", pair.subscriber or tested)
    made = SideBySide(publisher, subscriber, tmp_path, pair.subscriber_options)
    yield made
    made.drop()
