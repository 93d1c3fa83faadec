from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import psycopg2
import pytest

from conftest import Database
from processes import eventually
from publisher.conftest import PASSWORD, source_of
from walmere.config import Source, load
from walmere.errors import AccessRefused, SourceError, SourceUnavailable
from walmere.libpq import SESSION, conninfo_of, parameters_of, self_contained
from walmere.publisher.connect import connect
from walmere.publisher.stream import identify_system
from walmere.testing.server import LOGICAL, Server, binaries


def source_at(dsn: str, password: str | None = None) -> Source:
    return Source.model_validate({"dsn": dsn, "password": password, "publications": ["p"], "slot": "s"}, strict=False)


def assert_logs_in(source: Source) -> None:
    """By both kinds of connection."""
    with connect(source, "test") as connection:
        assert connection.execute("SELECT current_user").fetchone() == ("app",)
    with connect(source, "test", replication=True) as connection:
        assert identify_system(connection).database == "postgres"


def test_the_password_can_be_in_the_connection_string(scram_server: Server) -> None:
    quoted = PASSWORD.replace("\\", "\\\\").replace("'", "\\'")
    assert_logs_in(source_at(f"host=127.0.0.1 port={scram_server.port} dbname=postgres user=app password='{quoted}'"))


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        ("host=127.0.0.1 port=1", 'connection to server at "127.0.0.1", port 1 failed: Connection refused'),
        ("host=/nowhere port=1", 'on socket "/nowhere/.s.PGSQL.1" failed: No such file or directory'),
    ],
)
def test_a_refused_connection_is_one_short_line(where: str, wrong: str) -> None:
    with pytest.raises(SourceUnavailable) as refused:
        connect(source_at(f"{where} dbname=postgres user=app"), "test")
    assert refused.value.wrong.endswith(wrong)
    assert refused.value.wrong.startswith("connection to server ")


def test_the_password_can_be_in_walmeres_own_variable(scram_server: Server, tmp_path: Path) -> None:
    file = tmp_path / "walmere.toml"
    file.write_text(
        f'[source]\ndsn = "{scram_server.dsn(user="app")}"\npublications = ["p"]\nslot = "s"\n'
        '[subscription]\nname = "s"\ndirectory = "s"\n'
    )
    assert_logs_in(load(file, {"WALMERE_SOURCE__PASSWORD": PASSWORD}).source)


def test_the_password_can_be_in_pgpassword(scram_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert_logs_in(source_at(scram_server.dsn(user="app")))


def test_the_password_can_be_in_a_password_file(
    scram_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pgpass"
    escaped = PASSWORD.replace("\\", "\\\\").replace(":", "\\:")
    file.write_text(f"127.0.0.1:{scram_server.port}:*:app:{escaped}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    assert_logs_in(source_at(scram_server.dsn(user="app")))
    elsewhere = self_contained(source_at(scram_server.dsn(user="app")))
    file.unlink()
    assert_logs_in(elsewhere)


def test_everything_can_be_in_a_service_file(
    scram_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "services"
    file.write_text(
        f"[shop]\nhost=127.0.0.1\nport={scram_server.port}\ndbname=postgres\nuser=app\npassword={PASSWORD}\n"
    )
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    assert_logs_in(source_at("service=shop"))
    elsewhere = self_contained(source_at("service=shop"))
    file.unlink()
    assert_logs_in(elsewhere)
    assert PASSWORD not in repr(elsewhere)


def test_a_task_on_another_machine_has_what_libpq_takes_from_this_one(
    scram_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {"PGPASSWORD": PASSWORD, "PGUSER": "app", "PGPORT": str(scram_server.port), "PGSSLMODE": "disable"}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    elsewhere = self_contained(source_at("host=127.0.0.1 dbname=postgres connect_timeout=7"))
    for name in ours:
        monkeypatch.delenv(name)
    parameters = parameters_of(elsewhere)
    assert (parameters["sslmode"], parameters["connect_timeout"]) == ("disable", "7")
    assert_logs_in(elsewhere)
    psycopg2.connect(conninfo_of(elsewhere, "test")).close()  # it may have another libpq, with fewer parameters


@pytest.mark.parametrize("replication", [False, True])
def test_a_wrong_password_is_refused_and_not_shown(scram_server: Server, replication: bool) -> None:
    with pytest.raises(AccessRefused) as caught:
        connect(source_at(scram_server.dsn(user="app"), "wr0ng-w0rd"), "test", replication=replication)
    assert "wr0ng-w0rd" not in str(caught.value) + repr(caught.value)
    assert "WALMERE_SOURCE__PASSWORD" in caught.value.hint


@pytest.mark.parametrize(
    ("user", "database", "kind", "hint"),
    [
        ("app", "postgres", AccessRefused, "WALMERE_SOURCE__PASSWORD"),  # none given
        ("stranger", "postgres", AccessRefused, 'host "postgres" "stranger" 127.0.0.1/32 scram-sha-256'),
        ("missing", "postgres", AccessRefused, 'CREATE ROLE "missing" LOGIN REPLICATION;'),
        ("postgres", "no_such", SourceError, 'CREATE DATABASE "no_such";'),
    ],
)
def test_a_login_that_cannot_succeed_is_not_tried_again(
    scram_server: Server, user: str, database: str, kind: type[SourceError], hint: str
) -> None:
    with pytest.raises(kind) as caught:
        connect(source_at(scram_server.dsn(database, user)), "test")
    assert not caught.value.transient
    assert hint in caught.value.hint


def test_a_role_that_may_not_log_in_or_connect_is_told_what_it_needs(scram_server: Server) -> None:
    source = source_at(scram_server.dsn("closed", "mute"))
    with psycopg.connect(scram_server.dsn(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE closed")
        admin.execute("REVOKE CONNECT ON DATABASE closed FROM PUBLIC")
        admin.execute("CREATE ROLE mute")
        with pytest.raises(AccessRefused) as caught:
            connect(source, "test")
        assert caught.value.hint == 'ALTER ROLE "mute" LOGIN;'
        admin.execute("ALTER ROLE mute LOGIN")
        with pytest.raises(AccessRefused) as caught:
            connect(source, "test")
        assert 'GRANT CONNECT ON DATABASE "closed"' in caught.value.hint
        admin.execute("DROP ROLE mute")
        admin.execute("DROP DATABASE closed")


def test_a_server_that_is_not_there_is_a_passing_trouble() -> None:
    with pytest.raises(SourceUnavailable):
        connect(source_at("host=127.0.0.1 port=1 dbname=x"), "test")
    with pytest.raises(SourceUnavailable):
        connect(source_at("host=no-such-host.invalid dbname=x"), "test")


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server of version 15 with a certificate for db.example, and that certificate."""
    if 15 not in binaries():
        pytest.skip("no PostgreSQL 15, the one with TLS, on this machine")
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    server = Server(binaries()[15], {**LOGICAL, "ssl": "on"})
    certificate, key = server.data / "server.crt", server.data / "server.key"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=db.example"
        f" -addext subjectAltName=DNS:db.example -keyout {key} -out {certificate}",
        shell=True,
        check=True,
        capture_output=True,
    )
    owner = server.data.stat()
    for file in (certificate, key):
        os.chown(file, owner.st_uid, owner.st_gid)
        file.chmod(0o600)
    copy = tmp_path_factory.mktemp("tls") / "root.crt"
    copy.write_bytes(certificate.read_bytes())
    server.start()
    yield server, copy
    server.remove()


@pytest.mark.parametrize("replication", [False, True])
def test_verify_full_accepts_the_name_in_the_certificate_and_no_other(
    tls_server: tuple[Server, Path], replication: bool
) -> None:
    server, certificate = tls_server
    dsn = f"hostaddr=127.0.0.1 port={server.port} user=postgres sslmode=verify-full sslrootcert={certificate}"
    with connect(source_at(f"host=db.example {dsn}"), "test", replication=replication) as connection:
        secure = connection.execute("SELECT ssl FROM pg_catalog.pg_stat_ssl WHERE pid = pg_catalog.pg_backend_pid()")
        assert secure.fetchone() == (True,)
    with pytest.raises(AccessRefused, match=r"does not match host name") as caught:
        connect(source_at(f"host=other.example {dsn}"), "test", replication=replication)
    assert "sslrootcert" in caught.value.hint


def test_a_certificate_that_nobody_vouches_for_is_refused(tls_server: tuple[Server, Path]) -> None:
    server, _ = tls_server
    dsn = f"host=db.example hostaddr=127.0.0.1 port={server.port} user=postgres sslmode=verify-full"
    with pytest.raises(AccessRefused, match="certificate"):
        connect(source_at(f"{dsn} sslrootcert=/nonexistent/root.crt"), "test")
    with pytest.raises(AccessRefused, match="certificate verify failed"):
        connect(source_at(f"{dsn} sslrootcert=system"), "test")


def test_a_server_without_tls_is_refused_where_tls_is_required(server18: Server) -> None:
    with pytest.raises(AccessRefused, match="does not support SSL"):
        connect(source_at(server18.dsn(sslmode="require")), "test")


@pytest.mark.parametrize("replication", [False, True])
def test_session_settings_hold_whatever_the_role_has_set(database: Database, role: str, replication: bool) -> None:
    database.execute(
        *(
            f'ALTER ROLE "{role}" SET {setting}'
            for setting in (
                "DateStyle = 'SQL, DMY'",
                "IntervalStyle = 'iso_8601'",
                "TimeZone = 'America/New_York'",
                "extra_float_digits = -15",
                "bytea_output = 'escape'",
                "search_path = 'public, pg_temp'",
                "statement_timeout = '1s'",
                "client_encoding = 'LATIN1'",
                "quote_all_identifiers = on",
                *(["transaction_timeout = '1s'"] if database.connection.info.server_version >= 170_000 else []),
            )
        )
    )
    source = source_of(database, user=role)
    with connect(source, "test", replication=replication) as connection:
        for name, value in SESSION.items():
            row = connection.execute(f"SELECT current_setting('{name}', true)").fetchone()
            assert row is not None
            if row[0] is None:  # PostgreSQL 17 brought it
                assert name == "transaction_timeout"
                continue
            assert row[0].partition(",")[0].strip('"') == value
        # in a form that needs no parameters, which a replication connection does not have
        row = connection.execute(
            "SELECT '2024-02-03 04:05:06+00'::timestamptz::text, '1 day 2 hours'::interval::text,"
            " (0.1::float8 + 0.2::float8)::text, '\\x00ff'::bytea::text, 'é'::text"
        ).fetchone()
        assert row == ("2024-02-03 04:05:06+00", "1 day 02:00:00", "0.30000000000000004", "\\x00ff", "é")


def test_a_string_that_asks_for_replication_does_not_decide_the_kind_of_connection(database: Database) -> None:
    with connect(source_of(database, dsn=f"{database.dsn}?replication=true"), "test") as connection:
        assert connection.execute("SELECT %s::int", [1]).fetchone() == (1,)


def test_row_security_makes_reading_fail_rather_than_partial(database: Database, role: str) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        f'GRANT SELECT ON t TO "{role}"',
    )
    with (
        connect(source_of(database, user=role), "test") as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"),
    ):
        connection.execute("SELECT * FROM public.t")


def test_a_connection_that_cannot_be_set_up_is_closed(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SESSION, "DateStyle", "no such style")
    with pytest.raises(SourceError, match="DateStyle"):
        connect(source_of(database), "left_behind")
    left = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'left_behind')"
    eventually(lambda: not database.value(left))
