"""Connection strings by their form alone; nothing here connects anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from walmere.config import Source
from walmere.errors import ConfigError
from walmere.libpq import check_dsn, conninfo_of, describe, dsn_without_secrets

SECRET = "s3cr3t"


def source_of(dsn: str, password: str | None = None) -> Source:
    return Source.model_validate({"dsn": dsn, "password": password, "publications": ["p"], "slot": "s"}, strict=False)


@pytest.mark.parametrize(
    "dsn",
    [
        f"mysql://u:{SECRET}@h/db",
        f"jdbc:postgresql://h/db?user=u&password={SECRET}",
        f"u:{SECRET}@h/db",
        f" postgresql://u:{SECRET}@h/db",
        f"host=h password=two {SECRET}",
        f"host=h password='{SECRET}",
        f"host=h pasword={SECRET}",
        f"dbname=postgresql://u:{SECRET}@h/db",
        f"dbname='host=h password={SECRET}'",
        f"postgresql://u:%zz{SECRET}@h/db",
        f"postgresql://u:{SECRET}@[::1/db",
        f"postgresql://u:{SECRET}@h/db?sslmode",
        f"postgresql://u:{SECRET}@h/db?unknown=1",
        f"postgresql://u:{SECRET}@h:port/db",
        f"postgresql://u:a@{SECRET}@h/db",
        f"postgresql://u:a?b@{SECRET}@h/db",
        f"postgresql://u:{SECRET}/x@h/db",
        f"postgresql://u:12/{SECRET}@h/db",
        f"postgresql://u:a@b/{SECRET}@h/db",
        f"postgresql://u:{SECRET}@h:70000/db",
        f"postgresql://u:{SECRET}@h:0/db",
        f"host=a,b port=1,2,3 password={SECRET}",
        f"host=a,b port=1,x password={SECRET}",
        f"host=h sslmode=sometimes password={SECRET}",
        f"host=h sslmode=require sslrootcert=system password={SECRET}",
        f"host=h channel_binding=maybe password={SECRET}",
        f"host=h gssencmode=maybe password={SECRET}",
        f"host=h target_session_attrs=best password={SECRET}",
        f"host=h connect_timeout=soon password={SECRET}",
        f"host=h keepalives_idle=long password={SECRET}",
        f"service=no_such_service password={SECRET}",
    ],
)
def test_what_libpq_refuses_by_its_form_is_refused_without_being_shown(dsn: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_dsn(source_of(dsn))
    assert SECRET not in str(caught.value) + repr(caught.value)


def test_the_parameter_that_is_wrong_is_named() -> None:
    with pytest.raises(ConfigError, match=r"of: port\n"):
        check_dsn(source_of("postgresql://u@h:port/db"))
    with pytest.raises(ConfigError, match=r"of: connect_timeout, sslmode\n"):
        check_dsn(source_of("host=h sslmode=sometimes connect_timeout=soon"))


@pytest.mark.parametrize(
    "dsn",
    [
        "",
        "dbname=shop",
        "postgresql://",
        "postgresql://u@h",
        "postgres://u:p%40ss%2Fw%3Ard@h:5432/db?sslmode=verify-full&connect_timeout=3",
        "postgresql://u:quer?y@h/db",
        "postgresql://u@a:1,b:2,[::1]:3/db?target_session_attrs=read-write",
        "postgresql:///db?host=/var/run/postgresql",
        "host=a,b port=5432 dbname=d",
        "host=a,b hostaddr=10.0.0.1,10.0.0.2 port=1,2",
        "host=h gssencmode=require keepalives=1 tcp_user_timeout=1000 port=' 5432 '",
        "host=h user=me@company dbname=d@b",
    ],
)
def test_what_libpq_accepts_is_accepted(dsn: str) -> None:
    check_dsn(source_of(dsn))


def test_a_service_of_the_service_file_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "services"
    file.write_text("[shop]\nhost=a,b\nport=1,2\n")
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    check_dsn(source_of("service=shop"))


def test_a_password_file_that_others_can_read_is_not_warned_about_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pgpass"
    file.write_text("*:*:*:*:x\n")
    file.chmod(0o644)
    monkeypatch.setenv("PGPASSFILE", str(file))
    check_dsn(source_of("host=h"))
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("dsn", "address"),
    [
        (f"postgresql://u:{SECRET}@h:5433/db", "h:5433/db"),
        (f"host=h user=u password={SECRET}", "h/u"),
        (f"hostaddr=10.0.0.1 dbname=db password={SECRET}", "10.0.0.1/db"),
        (f"service=shop password={SECRET}", "service shop"),
        ("dbname=db", "the local socket/db"),
    ],
)
def test_an_address_for_people_has_no_password(dsn: str, address: str) -> None:
    assert describe(source_of(dsn, SECRET)) == address


def test_a_string_for_pasting_has_no_secret_and_nothing_else_is_lost() -> None:
    source = source_of(f"postgresql://u:{SECRET}@h/d%20b?sslpassword={SECRET}&replication=true", SECRET)
    assert dsn_without_secrets(source, replication="database") == "user=u dbname='d b' host=h replication=database"


def test_timeouts_of_tcp_follow_the_timeout_of_the_source_unless_the_dsn_has_its_own() -> None:
    source = source_of("host=h tcp_user_timeout=5").model_copy(update={"timeout": 6.0})
    had = conninfo_to_dict(conninfo_of(source, "test"))
    names = ("connect_timeout", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout")
    assert [str(had[name]) for name in names] == ["6", "3", "1", "3", "5"]
    assert conninfo_to_dict(conninfo_of(source_of("host=h"), "test"))["tcp_user_timeout"] == "60000"
