"""Fixtures: real servers, one for each version that is on the machine, and a database of its own for each test."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from azure_server import AzureServer
from gcs_server import GcsServer
from object_stores import ENVIRONMENT, Bucket, S3Server
from processes import Here
from s3_proxy import S3Proxy
from servers import BINARIES, remove_servers, server_of
from walmere.config import Config, Source, SubscriptionSettings
from walmere.testing.server import LOGICAL, Server

VERSIONS = sorted({version for version in BINARIES if version in (15, 18)}, reverse=True)

# here, because Spark's Python workers have the environment that its JVM was started with
os.environ.update(ENVIRONMENT)
os.environ["WALMERE_WARM"] = "0"  # `make test` does it

# a shell starts what it has in the background with SIGINT ignored, and children of ours would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--postgres", type=int, metavar="N", help="the only version to test on (default: 18, and 15)")


def pytest_configure(config: pytest.Config) -> None:
    version = config.getoption("--postgres")
    if version is not None and version not in BINARIES:
        raise pytest.UsageError(f"no PostgreSQL {version} on this machine; there is {', '.join(map(str, BINARIES))}")


def versions(config: pytest.Config) -> list[int]:
    """The versions that a test runs on which is to run on several."""
    version = config.getoption("--postgres")
    return VERSIONS if version is None else [version]


def version_under_test(config: pytest.Config) -> int:
    """The version that a test runs on which is to run on one."""
    version: int | None = config.getoption("--postgres")
    return 18 if version is None else version


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Here, and not where the fixtures are: what stands there is read before the options are."""
    several = ["server", "scram_server"]
    marker = metafunc.definition.get_closest_marker("server")
    if marker and marker.kwargs.get("every_version"):
        several.append("private_server")
    which = versions(metafunc.config)
    if metafunc.definition.path.parent.name == "stories":
        which = which[:1]  # the others are for `make test-matrix`
    for name in sorted({*several} & {*metafunc.fixturenames}):
        metafunc.parametrize(name, which, indirect=True, ids=lambda version: f"pg{version}")


def _skip_before(request: pytest.FixtureRequest, version: int) -> None:
    """Skip a test that is about what this version does not have yet."""
    for marker in request.node.iter_markers("since"):
        since, what = marker.args
        if version < since:
            pytest.skip(f"PostgreSQL {version} has no {what}")


@pytest.fixture(scope="session", autouse=True)
def _remove_servers() -> Iterator[None]:
    yield
    remove_servers()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Server:
    """A running publisher, of every version under test."""
    _skip_before(request, request.param)
    return server_of(request.param)


@pytest.fixture
def server_under_test(request: pytest.FixtureRequest) -> Server:
    """A running publisher of the version under test; 18 unless told otherwise."""
    version = version_under_test(request.config)
    _skip_before(request, version)
    return server_of(version)


@pytest.fixture
def server18(server_under_test: Server) -> Server:
    """The version under test; 18 unless told otherwise."""
    return server_under_test


@pytest.fixture
def private_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that a test may stop, kill or configure: of the version under test, unless its marker says another."""
    marker = request.node.get_closest_marker("server")
    wanted = marker.kwargs if marker else {}
    default = request.param if wanted.get("every_version") else version_under_test(request.config)
    version = wanted.get("version", default)
    if version not in BINARIES:
        pytest.skip(f"no PostgreSQL {version} on this machine")
    if request.config.getoption("--postgres") not in (None, version):
        pytest.skip(f"this is about PostgreSQL {version}")
    _skip_before(request, version)
    server = Server(BINARIES[version], {**LOGICAL, **wanted.get("settings", {})})
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A running S3 server."""
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def gs_server() -> Iterator[GcsServer]:
    """A running emulator of Google Cloud Storage."""
    server = GcsServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def az_server() -> Iterator[AzureServer]:
    """A running emulator of Azure's storage."""
    server = AzureServer()
    yield server
    server.stop()


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """A new bucket on an S3 server, or on that of the parameter: gs or az. Its credentials are in the environment."""
    server: S3Server | GcsServer | AzureServer = request.getfixturevalue(f"{getattr(request, 'param', 's3')}_server")
    return server.bucket()


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[S3Proxy]:
    """A bucket whose requests can be delayed, refused or lost."""
    with S3Proxy(bucket) as made:
        yield made


class Database:
    """A database on a test server, with a connection of its superuser."""

    def __init__(self, server: Server, options: str = "") -> None:
        self.server = server
        # no counter: pytest has this module under a name of its own, and tests that import it have another one
        self.name = f"t{secrets.token_hex(4)}"
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            # copying files is faster than the default of 15 and later, which writes all pages to the WAL
            strategy = " STRATEGY file_copy" if admin.info.server_version >= 150_000 else ""
            admin.execute(f"CREATE DATABASE {self.name}{strategy} {options}")
        self.connection = psycopg.connect(self.dsn, autocommit=True)

    @property
    def dsn(self) -> str:
        return self.server.dsn(self.name)

    @property
    def slot(self) -> str:
        return f"walmere_{self.name}"

    @property
    def major(self) -> int:
        return self.connection.info.server_version // 10_000

    def narrowed(self, clause: str) -> str:
        """A column list or a row filter if the server has such: for a test that is about more than that."""
        return clause if self.major >= 15 else ""

    def execute(self, *statements: str) -> None:
        for statement in statements:
            self.connection.execute(statement)

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self.connection.execute(query, parameters or None).fetchall()

    def value(self, query: str, *parameters: Any) -> Any:
        return self.rows(query, *parameters)[0][0]

    def streaming(self, slot: str | None = None) -> bool:
        """Whether somebody receives. A slot is active already while it is being made."""
        query = "SELECT 1 FROM pg_replication_slots JOIN pg_stat_replication r ON pid = active_pid WHERE slot_name = %s"
        return bool(self.rows(query + " AND r.state IN ('catchup', 'streaming')", slot or self.slot))

    def config(self, directory: Path, *publications: str, **source: Any) -> Config:
        return Config(
            source=Source.model_validate(
                {"dsn": self.dsn, "publications": publications or ("pub",), "slot": self.slot, "heartbeat": 0.0}
                | source,
                strict=False,
            ),
            subscription=SubscriptionSettings(name="test", directory=directory),
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
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Here]:
    """Runs commands. What they put into the environment, such as a password, is removed after the test."""
    before = dict(os.environ)
    yield Here(monkeypatch, capsys)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def database(server: Server) -> Iterator[Database]:
    """A fresh database on a server of every version under test."""
    database = Database(server)
    yield database
    database.drop()


@pytest.fixture
def database_under_test(server_under_test: Server) -> Iterator[Database]:
    """A fresh database on the version under test; 18 unless told otherwise."""
    database = Database(server_under_test)
    yield database
    database.drop()


@pytest.fixture
def database18(database_under_test: Database) -> Database:
    """A fresh database on the version under test; 18 unless told otherwise."""
    return database_under_test
