"""The public face of the package: what can be imported from it, and what that brings along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import walmere
from conftest import Database
from mirror import Mirror
from walmere.errors import ConfigError

HEAVY = ("pyspark", "py4j", "pyarrow", "numpy", "psycopg", "psycopg2", "deltalake", "duckdb", "pydantic", "typer")


def import_in_a_new_process(statement: str) -> tuple[float, set[str]]:
    """The seconds of CPU that it took, of several times the least, and the heavy packages that came with it."""
    program = (
        "import json, sys, time; began = time.process_time()\n"
        f"{statement}\n"
        "print(json.dumps([time.process_time() - began, list(sys.modules)]))"
    )
    seconds, modules = min(
        json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
        for _ in range(5)
    )
    return seconds, set(HEAVY) & set(modules)


def test_the_protocol_alone_is_light() -> None:
    seconds, heavy = import_in_a_new_process("from walmere import pgoutput; pgoutput.decode(b'I\\0\\0\\0\\1N\\0\\0')")
    assert not heavy
    assert seconds < 0.2, "neither Spark nor Java, and not even Arrow"


def test_a_subscription_brings_no_spark_until_it_runs() -> None:
    _, heavy = import_in_a_new_process("from walmere import Subscription")
    assert not heavy & {"pyspark", "py4j", "duckdb"}


def test_every_name_can_be_imported() -> None:
    for name in walmere.__all__:
        assert getattr(walmere, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        walmere.nothing  # noqa: B018


def test_a_subscription_does_what_the_commands_do(database_under_test: Database, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        walmere.Subscription(tmp_path / "walmere.toml")
    database_under_test.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t SELECT generate_series(1, 100)",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    mirror = Mirror(database_under_test, tmp_path)
    shop = walmere.Subscription(str(mirror.file))
    assert all(finding.level != "problem" for finding in shop.check())
    reports: list[object] = []
    shop.run(once=True, on_progress=reports.append)
    assert reports
    database_under_test.execute("DELETE FROM t WHERE id > 50")
    position = shop.source_position()
    assert shop.receive(once=True) >= position
    assert not shop.running
    assert [sum(1 for _ in each.changes) for each in shop.transactions(table="t")] == [50]
    assert [table["name"] for table in shop.status()["tables"]] == ["public.t"]
    assert shop.verify().equal
    assert [str(table) for table in shop.resync(["t"])] == ["public.t"]
    mirror.assert_equal("t")
    assert any("dropped slot" in line for line in shop.drop())
    assert not (tmp_path / "subscription").exists()
