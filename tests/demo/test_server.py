from __future__ import annotations

import os
import signal
import time

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from walmere.demo.server import Server, binaries, embedded
from walmere.errors import NotConfigured, SourceUnavailable


def setting(server: Server, name: str) -> str:
    with psycopg.connect(server.dsn()) as connection:
        [(value,)] = connection.execute(f"SHOW {name}").fetchall()
        return str(value)


def test_the_binaries_are_of_the_version_that_they_are_listed_under() -> None:
    assert binaries()
    for version, directory in binaries().items():
        assert version >= 10
        assert (directory / "initdb").exists()


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
    with pytest.raises(NotConfigured, match="version 9") as caught, embedded(9):
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


def test_a_connection_string_quotes_what_it_has_to(server18: Server) -> None:
    parameters = conninfo_to_dict(server18.dsn("d/b 1", "us@er", options="-c work_mem=1MB"))
    assert (parameters["dbname"], parameters["user"]) == ("d/b 1", "us@er")
    assert (parameters["host"], parameters["options"]) == ("127.0.0.1", "-c work_mem=1MB")
