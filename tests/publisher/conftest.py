"""Fixtures of the publisher's tests: roles that are not superusers, and servers that ask for passwords."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from conftest import Database
from servers import BINARIES
from walmere.config import Source
from walmere.testing.server import LOGICAL, Server

PASSWORD = "p@ss:w/rd 100% é'\\"


def source_of(database: Database, *publications: str, **more: Any) -> Source:
    """The source of a test's database, as its superuser unless `user` says another."""
    if "user" in more:
        more["dsn"] = database.server.dsn(database.name, more.pop("user"))
    return database.config(Path(), *publications, **more).source


@pytest.fixture
def shop(database: Database) -> Database:
    """A database with a table and a publication for it."""
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)", "CREATE PUBLICATION pub FOR TABLE item")
    return database


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """A role that may log in and replicate, and nothing else."""
    name = f"Role {database.name}"
    database.execute(f'CREATE ROLE "{name}" LOGIN REPLICATION')
    yield name
    database.execute(f'DROP OWNED BY "{name}"', f'DROP ROLE "{name}"')


@pytest.fixture
def private_database(private_server: Server) -> Iterator[Database]:
    """A database on a server that a test may stop or configure."""
    database = Database(private_server)
    yield database
    database.connection.close()


@pytest.fixture(scope="session")
def scram_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server where role `app` needs its password, and where no other role of its kind is let in."""
    server = Server(BINARIES[request.param], {**LOGICAL, "fsync": "off", "password_encryption": "scram-sha-256"})
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        quoted = psycopg.sql.Literal(PASSWORD).as_string(admin)
        admin.execute(f"CREATE ROLE app LOGIN REPLICATION PASSWORD {quoted}")
        admin.execute("CREATE ROLE stranger LOGIN")
    hba = "host all app 127.0.0.1/32 scram-sha-256\nhost all postgres,missing,mute 127.0.0.1/32 trust\n"
    (server.data / "pg_hba.conf").write_text(hba)
    server.restart()
    yield server
    server.remove()
