"""`walmere log`: for people and for machines, all of it or some, to its end or on and on."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Database
from processes import eventually, running, walmere, write_config
from receiving import logged, receive_all
from walmere.config import Config

ODD = 'it\'s "odd"\n\t\\ é→𝄞 \x1b[31m'


@pytest.fixture
def log(database18: Database, tmp_path: Path) -> Config:
    """A log with every kind of change, and values that are hard to show."""
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int)",
        "ALTER TABLE t ALTER v SET STORAGE EXTERNAL",
        "CREATE SCHEMA other",
        "CREATE TABLE other.t (id int PRIMARY KEY)",
        'CREATE TABLE "Größe ""x""" (a int, b bytea)',
        'ALTER TABLE "Größe ""x""" REPLICA IDENTITY FULL',
        'CREATE PUBLICATION pub FOR TABLE t, other.t, "Größe ""x"""',
    )
    config = database.config(tmp_path / "s")
    receive_all(database, config)
    database.connection.execute("INSERT INTO t VALUES (1, %s, NULL), (2, '', 0), (3, NULL, 3)", [ODD])
    database.execute(
        "INSERT INTO t VALUES (4, repeat('x', 9000), 1)",
        "UPDATE t SET n = 2 WHERE id = 4",
        "UPDATE t SET id = 20 WHERE id = 2",
        "DELETE FROM t WHERE id = 3",
        "INSERT INTO other.t VALUES (7)",
        'INSERT INTO "Größe ""x""" VALUES (1, \'\\x00ff\')',
        'UPDATE "Größe ""x""" SET a = 2',
        "TRUNCATE t, other.t RESTART IDENTITY CASCADE",
        "SELECT pg_logical_emit_message(true, 'in', '\\xff00'::bytea)",
    )
    database.connection.execute("SELECT pg_logical_emit_message(false, 'beside', %s)", [ODD])
    receive_all(database, config)
    return config


@pytest.fixture
def path(log: Config, tmp_path: Path) -> Path:
    return write_config(log, tmp_path / "walmere.toml")


def lines(path: Path, *arguments: str) -> list[dict[str, Any]]:
    result = walmere("log", "-c", path, "--json", "--values", *arguments)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_without_being_asked_no_value_is_shown(path: Path, log: Config) -> None:
    shown = walmere("log", "-c", path)
    assert shown.returncode == 0, shown.stderr
    machines = walmere("log", "-c", path, "--json")
    for text in (shown.stdout, machines.stdout):
        assert not [value for value in ("xxx", "odd", "00ff", "31m") if value in text]
    assert "  UPDATE public.t\n" in shown.stdout
    assert f"  MESSAGE beside  {len(ODD.encode())} bytes\n" in shown.stdout
    changes = [change for line in machines.stdout.splitlines() for change in json.loads(line)["changes"]]
    assert {name for change in changes for name in change} == {
        *("kind", "lsn", "table", "tables", "cascade", "restart_identity", "transactional", "prefix", "bytes")
    }
    assert len(changes) == 13


def test_json_has_one_transaction_a_line_with_all_that_is_known(path: Path, log: Config) -> None:
    transactions = lines(path)
    assert [set(each) for each in transactions] == [{"xid", "commit_lsn", "commit_time", "origin", "changes"}] * 11
    assert [each["commit_lsn"] for each in transactions] == [str(each.commit_lsn) for each in logged(log)]
    changes = [{k: v for k, v in change.items() if k != "lsn"} for each in transactions for change in each["changes"]]
    assert changes == [
        {"kind": "insert", "table": "public.t", "new": {"id": "1", "v": ODD, "n": None}},
        {"kind": "insert", "table": "public.t", "new": {"id": "2", "v": "", "n": "0"}},
        {"kind": "insert", "table": "public.t", "new": {"id": "3", "v": None, "n": "3"}},
        {"kind": "insert", "table": "public.t", "new": {"id": "4", "v": "x" * 9000, "n": "1"}},
        {"kind": "update", "table": "public.t", "new": {"id": "4", "n": "2"}, "unchanged": ["v"]},
        {"kind": "update", "table": "public.t", "key": {"id": "2"}, "new": {"id": "20", "v": "", "n": "0"}},
        {"kind": "delete", "table": "public.t", "key": {"id": "3"}},
        {"kind": "insert", "table": "other.t", "new": {"id": "7"}},
        {"kind": "insert", "table": 'public.Größe "x"', "new": {"a": "1", "b": "\\x00ff"}},
        {
            "kind": "update",
            "table": 'public.Größe "x"',
            "old": {"a": "1", "b": "\\x00ff"},
            "new": {"a": "2", "b": "\\x00ff"},
        },
        {"kind": "truncate", "tables": ["public.t", "other.t"], "cascade": True, "restart_identity": True},
        {"kind": "message", "transactional": True, "prefix": "in", "bytes": 2, "content": "\\xff\x00"},
        {
            "kind": "message",
            "transactional": False,
            "prefix": "beside",
            "bytes": len(ODD.encode()),
            "content": ODD,
        },
    ]
    assert transactions[-1]["xid"] == 0
    assert transactions[0]["commit_time"].endswith("+00:00")


def test_people_see_each_change_on_one_line(path: Path) -> None:
    result = walmere("log", "-c", path, "--values")
    assert result.returncode == 0
    shown = result.stdout.split("\n")
    assert len(shown) == 11 + 13 + 1, "nothing that stands in a value begins a line of its own"
    assert "\x1b" not in result.stdout, "nor does it speak to the terminal"
    for line in (
        "  INSERT public.t  id='2'  v=''  n='0'",
        "  INSERT public.t  id='3'  v=NULL  n='3'",
        "  UPDATE public.t  id='4'  v=(unchanged)  n='2'",
        "  UPDATE public.t  id='2' → id='20'  v=''  n='0'",
        "  DELETE public.t  id='3'",
        "  TRUNCATE public.t, other.t RESTART IDENTITY CASCADE",
    ):
        assert line in shown


def test_a_terminal_that_is_not_utf_8_is_no_reason_to_fail(path: Path) -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    people = walmere("log", "-c", path, "--values", env=ascii_only)
    assert people.returncode == 0, people.stderr
    machines = walmere("log", "-c", path, "--values", "--json", env=ascii_only)
    assert machines.returncode == 0, machines.stderr
    assert [json.loads(line) for line in machines.stdout.splitlines()] == lines(path)


def test_a_table_is_named_with_its_schema_or_without(path: Path) -> None:
    def tables(name: str) -> set[str]:
        found = [change for each in lines(path, "--table", name) for change in each["changes"]]
        return {change["table"] for change in found if "table" in change}

    assert tables("t") == {"public.t", "other.t"}
    assert tables("other.t") == {"other.t"}
    assert tables('Größe "x"') == {'public.Größe "x"'}


def test_from_an_lsn_on(path: Path, log: Config) -> None:
    commits = [str(each.commit_lsn) for each in logged(log)]
    assert [each["commit_lsn"] for each in lines(path, "--from", commits[4])] == commits[4:]
    early = walmere("log", "-c", path, "--from", "0/1")
    assert early.returncode == 1
    assert "earlier changes have been removed" in early.stderr


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_follow_goes_on_as_more_arrives_and_ends_when_told(
    database18: Database, path: Path, log: Config, tmp_path: Path, ending: signal.Signals
) -> None:
    output = tmp_path / "out"
    with running("log", "-c", path, "--json", "--values", "--follow", output=output) as process:
        eventually(lambda: output.read_text().count("\n") == 11, why=output.read_text)
        for number in (100, 101):
            database18.execute(f"INSERT INTO t VALUES ({number})")
            receive_all(database18, log)
            eventually(lambda: output.read_text().count("\n") == number - 88, why=output.read_text)  # noqa: B023
        process.send_signal(ending)
        assert process.wait(10) == 0
    last = json.loads(output.read_text().splitlines()[-1])
    assert last["changes"][0]["new"]["id"] == "101"


def test_a_long_log_ends_when_told_also_without_follow(database18: Database, path: Path, log: Config) -> None:
    database18.execute("INSERT INTO t SELECT generate_series(1000, 60000)")
    receive_all(database18, log)
    process = subprocess.Popen([sys.executable, "-m", "walmere", "log", "-c", path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        process.terminate()
        process.stdout.read()
        assert process.wait(10) == 0


@pytest.mark.parametrize("form", ["", "--json", "--follow"])
def test_nobody_reads_on_and_that_is_fine(database18: Database, path: Path, log: Config, form: str) -> None:
    if form != "--follow":
        database18.execute("INSERT INTO t SELECT generate_series(1000, 20000)")
        receive_all(database18, log)
    script = f"{sys.executable} -m walmere log -c {path} {form} | head -2 >/dev/null; echo ${{PIPESTATUS[0]}}"
    process = subprocess.Popen(
        ["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    numbers = itertools.count(500)
    while form == "--follow" and process.poll() is None:  # it notices with the next thing it says
        database18.execute(f"INSERT INTO t VALUES ({next(numbers)})")
        receive_all(database18, log)
    out, err = process.communicate(timeout=30)
    assert (out, err) == ("0\n", "")


def test_without_a_log_it_says_who_makes_one(database18: Database, tmp_path: Path) -> None:
    path = write_config(database18.config(tmp_path / "s"), tmp_path / "walmere.toml")
    result = walmere("log", "-c", path)
    assert result.returncode == 1
    assert "walmere receive" in result.stderr
    assert not (tmp_path / "s").exists()


def test_a_log_dropped_under_a_follower_ends_it(path: Path, log: Config, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with running("log", "-c", path, "--follow", output=output) as process:
        eventually(lambda: "beside" in output.read_text(), why=output.read_text)
        assert walmere("drop", "-c", path).returncode == 0
        assert process.wait(10) == 1
    assert "there is no change log" in output.read_text()
    assert "Traceback" not in output.read_text()
