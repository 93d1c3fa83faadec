"""Fixtures: real servers, one for each version that is on the machine, and a database of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from walmere.config import Config, Source, Subscription
from walmere.demo.server import LOGICAL, Server, binaries

VERSIONS = sorted({version for version in binaries() if version in (15, 18)}, reverse=True)
_numbers = itertools.count(1)
_servers: dict[int, Server] = {}


def server_of(version: int) -> Server:
    """The session's server of this version, started when first asked for."""
    if version not in _servers:
        server = Server(binaries()[version], {**LOGICAL, "fsync": "off", "max_wal_size": "2GB"})
        _servers[version] = server
        server.start()
    return _servers[version]


@pytest.fixture(scope="session", autouse=True)
def _remove_servers() -> Iterator[None]:
    yield
    for server in _servers.values():
        server.remove()


@pytest.fixture(params=VERSIONS, ids=lambda version: f"pg{version}")
def server(request: pytest.FixtureRequest) -> Server:
    """A running publisher, of every version there is."""
    return server_of(request.param)


@pytest.fixture
def server18() -> Server:
    """A running publisher of the version that comes with the package."""
    return server_of(18)


@pytest.fixture
def private_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that a test may stop, kill or configure."""
    marker = request.node.get_closest_marker("server")
    version = marker.kwargs.get("version", 18) if marker else 18
    if version not in binaries():
        pytest.skip(f"no PostgreSQL {version} on this machine")
    settings = dict(marker.kwargs.get("settings", {})) if marker else {}
    server = Server(binaries()[version], {**LOGICAL, **settings})
    server.start()
    yield server
    server.remove()


class Database:
    """A database on a test server, with a connection of its superuser."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.name = f"t{next(_numbers)}"
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            # copying files is faster than the default of 15 and later, which writes all pages to the WAL
            strategy = " STRATEGY file_copy" if admin.info.server_version >= 150_000 else ""
            admin.execute(f"CREATE DATABASE {self.name}{strategy}")
        self.connection = psycopg.connect(self.dsn, autocommit=True)

    @property
    def dsn(self) -> str:
        return self.server.dsn(self.name)

    @property
    def slot(self) -> str:
        return f"walmere_{self.name}"

    def execute(self, *statements: str) -> None:
        for statement in statements:
            self.connection.execute(statement)

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self.connection.execute(query, parameters or None).fetchall()

    def value(self, query: str, *parameters: Any) -> Any:
        return self.rows(query, *parameters)[0][0]

    def config(self, directory: Path, *publications: str, **source: Any) -> Config:
        return Config(
            source=Source.model_validate(
                {"dsn": self.dsn, "publications": publications or ("pub",), "slot": self.slot, "heartbeat": 0.0}
                | source,
                strict=False,
            ),
            subscription=Subscription(name="test", directory=directory),
        )

    def drop(self) -> None:
        self.connection.close()
        with psycopg.connect(self.server.dsn(), autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_replication r JOIN pg_stat_activity USING (pid)"
                " WHERE datname = %s",
                [self.name],
            )
            for (slot,) in admin.execute(
                "SELECT slot_name FROM pg_replication_slots WHERE database = %s", [self.name]
            ).fetchall():
                admin.execute("SELECT pg_drop_replication_slot(%s)", [slot])
            for (gid,) in admin.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = %s", [self.name]
            ).fetchall():
                with psycopg.connect(self.dsn, autocommit=True) as own:
                    own.execute(f"ROLLBACK PREPARED '{gid}'")
            admin.execute(f"DROP DATABASE {self.name} WITH (FORCE)")


@pytest.fixture
def database(server: Server) -> Iterator[Database]:
    """A fresh database on a server of every version there is."""
    database = Database(server)
    yield database
    database.drop()


@pytest.fixture
def database18(server18: Server) -> Iterator[Database]:
    """A fresh database on the version that comes with the package."""
    database = Database(server18)
    yield database
    database.drop()
