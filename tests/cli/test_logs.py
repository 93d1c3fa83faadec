"""Structured logs: one line of JSON for each event, without values of rows."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Database
from processes import walmere, write_config
from walmere.cli.logs import JsonLines, ProgressLog


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    formatter = JsonLines(subscription="shop")
    found = [formatter.format(record) for record in caplog.records]
    caplog.clear()
    assert not any("\n" in line for line in found)
    return [json.loads(line) for line in found]


def report(**changed: Any) -> dict[str, Any]:
    table = {"name": "public.t", "phase": "i", "rows_copied": 0, "error": None, "rejects": 0, "changes": 0} | changed
    return {"applied_lsn": changed.get("applied_lsn"), "tables": [table]}


def test_a_report_of_progress_becomes_events(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = ProgressLog()
    log(report())
    assert [each["event"] for each in lines(caplog)] == ["started", "table_phase"]
    log(report(phase="f", rows_copied=10))
    [copied] = lines(caplog)
    assert (copied["event"], copied["table"], copied["phase"], copied["rows_copied"]) == (
        "table_phase",
        "public.t",
        "f",
        10,
    )
    log(report(phase="f", rows_copied=10, changes=3, applied_lsn="0/10"))
    [applied] = lines(caplog)
    assert (applied["event"], applied["lsn"], applied["tables"]) == ("applied", "0/10", {"public.t": 3})
    log(report(phase="f", rows_copied=10, changes=3, applied_lsn="0/10", error="no key\n  hint: add one", rejects=2))
    error, rejects = lines(caplog)
    assert (error["event"], error["level"], error["wrong"]) == ("table_error", "warning", "no key")
    assert (rejects["event"], rejects["rejects"], rejects["subscription"]) == ("rejects", 2, "shop")
    log(report(phase="f", rows_copied=10, changes=3, applied_lsn="0/10", error="no key\n  hint: add one", rejects=2))
    assert lines(caplog) == [], "nothing has changed"


def test_a_traceback_is_never_in_a_line() -> None:
    try:
        raise ValueError("the value of a row")
    except ValueError:
        record = logging.LogRecord("walmere.x", logging.ERROR, "x.py", 1, "it\nfailed", (), sys.exc_info())
    line = json.loads(JsonLines().format(record))
    assert line["exception"] == "ValueError"
    assert line["message"] == "it failed"
    assert "value of a row" not in json.dumps(line)


def test_receive_logs_json_and_nothing_else(database18: Database, tmp_path: Path) -> None:
    config = database18.config(tmp_path / "state")
    file = write_config(config, tmp_path / "walmere.toml")
    failed = walmere("receive", "-c", file, "--once", "--log-format", "json")
    assert failed.returncode == 1
    *_, error = map(json.loads, failed.stderr.splitlines())
    assert (error["event"], error["error"], error["subscription"]) == ("failed", "PublicationMissing", "test")
    assert error["hint"]

    database18.execute("CREATE TABLE t (secret text)", "CREATE PUBLICATION pub FOR TABLE t")
    database18.execute("INSERT INTO t VALUES ('only the source may know this')")
    done = walmere("receive", "-c", file, "--once", "--log-format", "json")
    assert done.returncode == 0
    *_, ended = map(json.loads, done.stderr.splitlines())
    assert (ended["event"], ended["level"], ended["time"][-6:]) == ("ended", "info", "+00:00")
    assert "only the source" not in done.stderr
