"""What a start costs, in processes and imports. Seconds are measured by `python -m bench.start_up`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Database
from mirror import Mirror

# every Python process that has this directory on its path notes its command, and its imports when it ends
CUSTOMIZE = """
import atexit, json, os, sys

def note(kind, what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps([kind, os.getpid(), what]) + "\\n")

note("command", sys.orig_argv)
atexit.register(lambda: note("modules", sorted({name.partition(".")[0] for name in sys.modules})))
"""
HEAVY = {"pyspark", "pyarrow", "numpy", "pandas", "deltalake", "duckdb", "psycopg", "psycopg2", "obstore", "matplotlib"}


class Noted:
    """The Python processes that a command has started, itself included."""

    def __init__(self, directory: Path) -> None:
        (directory / "site").mkdir()
        (directory / "site" / "sitecustomize.py").write_text(CUSTOMIZE)
        self._file = directory / "notes"
        self._path = directory / "site"

    def run(self, *arguments: str | Path, **variables: str) -> None:
        self._file.unlink(missing_ok=True)
        env = {**os.environ, **variables, "PYTHONPATH": str(self._path), "NOTES": str(self._file)}
        command = [sys.executable, "-m", "walmere", *arguments]
        done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def _notes(self, kind: str) -> dict[int, list[str]]:
        lines = [json.loads(line) for line in self._file.read_text().splitlines()]
        return {pid: what for each, pid, what in lines if each == kind}

    def commands(self) -> list[str]:
        """What each process runs: a command of Walmere, or a module."""
        found = [" ".join(command[1:]) for command in self._notes("command").values()]
        modules = (re.search(r"-m (walmere \w+|\S+)", command) for command in found)
        return [match[1] if match else command for match, command in zip(modules, found, strict=True)]

    def heavy(self) -> dict[str, set[str]]:
        """The heavy packages that each of these processes had imported at its end."""
        modules = self._notes("modules")
        pids = self._notes("command")
        return {name: HEAVY & set(modules.get(pid, ())) for pid, name in zip(pids, self.commands(), strict=True)}


def test_a_run_with_nothing_to_do_starts_the_receiver_and_no_spark(database18: Database, tmp_path: Path) -> None:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database18, tmp_path)
    mirror.run_once()
    database18.execute("CREATE TABLE not_published ()")  # the run ends when the receiver has passed its WAL
    noted = Noted(tmp_path)
    noted.run("run", "-c", mirror.file, "--once", SPARK_HOME=str(tmp_path / "nowhere"))  # it cannot start Spark
    assert noted.commands() == ["walmere run", "walmere receive"]
    heavy = noted.heavy()
    assert heavy["walmere receive"] <= {"pyarrow", "numpy", "psycopg"}
    assert not heavy["walmere run"] & {"pandas", "duckdb", "matplotlib"}


@pytest.mark.long
def test_the_first_batch_starts_three_python_processes(database18: Database, tmp_path: Path) -> None:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    mirror = Mirror(database18, tmp_path)
    mirror.run_once()
    database18.execute("INSERT INTO t VALUES (1)")
    noted = Noted(tmp_path)
    noted.run("run", "-c", mirror.file, "--once")
    assert mirror.rows("t") == {(1,): 1}
    # Spark's daemon forks the workers of tasks
    assert sorted(noted.commands()) == ["walmere receive", "walmere run", "walmere.spark.daemon"]
