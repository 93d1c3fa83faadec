"""The program of the guide to format `pgoutput`, run as a reader runs it: `.venv/bin/python revenue.py`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Database
from processes import eventually

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "stream.md"


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [text for its, text in found if its == language]


@pytest.mark.long
def test_it_runs_without_an_active_virtual_environment(database18: Database, tmp_path: Path) -> None:
    [program], [source, later], [shown] = blocks("python"), blocks("sql"), blocks("text")
    for given, here in (
        ("postgresql://repl@db.example:5432/shop", database18.dsn),
        ("/var/lib/revenue/checkpoint", str(tmp_path / "checkpoint")),
    ):
        assert given in program
        program = program.replace(given, here)
    path = tmp_path / "revenue.py"
    path.write_text(program)
    others = [each for each in os.environ["PATH"].split(os.pathsep) if Path(each) != Path(sys.executable).parent]
    env = {**os.environ, "PATH": os.pathsep.join(others), "XDG_STATE_HOME": str(tmp_path / "state")}
    for name in ("VIRTUAL_ENV", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        env.pop(name, None)
    found = subprocess.run(["python3", "-c", "import walmere"], env=env, capture_output=True, check=False)
    assert found.returncode, "otherwise this shows nothing: Spark would find Walmere by itself"
    database18.execute("CREATE TABLE orders (id bigint PRIMARY KEY, status text, amount numeric(10,2))")
    database18.execute(*[line for line in source.splitlines() if "wal_level" not in line])
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen([sys.executable, path], stdout=file, stderr=file, env=env, start_new_session=True)

    try:
        slot = "SELECT 1 FROM pg_replication_slots WHERE slot_name = 'revenue' AND confirmed_flush_lsn IS NOT NULL"
        eventually(lambda: database18.rows(slot) or process.poll() is not None, 90, output.read_text)
        database18.execute(*later.strip().splitlines())
        lines = shown.strip().splitlines()
        eventually(
            lambda: all(line in output.read_text() for line in lines) or process.poll() is not None,
            90,
            output.read_text,
        )
        assert process.poll() is None, output.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
