"""The demo as a newcomer starts it: real PostgreSQL 18, real Spark; smaller and shorter than theirs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from deltalake import DeltaTable

from delta_rows import read_delta
from processes import eventually
from walmere.demo import app
from walmere.demo.compare import TableComparison
from walmere.demo.compare import compare as real_compare
from walmere.demo.shop import KEYS
from walmere.publisher.connect import Connection

pytestmark = pytest.mark.timeout(600)  # a machine with other things to do takes its time to start Spark

SMALL = ("--rows", "5000", "--seconds", "4")
ENDLESS = ("--rows", "5000", "--seconds", "300")


class Demo:
    """A demo as a process, in a process group of its own as a shell would start it, with all that it starts marked."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.temporary = Path(tempfile.mkdtemp())  # not below pytest's own: the server's user has to reach it
        self.temporary.chmod(0o755)
        self.mark = uuid.uuid4().hex
        self.directory = directory
        self.output = directory / "stderr"
        with self.output.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "walmere", "demo", *options, "--json"],
                cwd=directory,
                stdout=subprocess.PIPE,
                stderr=stderr,
                process_group=0,
                env={
                    **os.environ,
                    "TMPDIR": str(self.temporary),
                    "MARK": self.mark,
                    "WALMERE_TARGET__PATH": "/nowhere",
                },
            )

    def said(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str) -> None:
        eventually(lambda: text in self.said() or self.process.poll() is not None, 120, self.said)
        assert self.process.poll() is None, self.said()

    def result(self) -> dict[str, Any]:
        out, _ = self.process.communicate(timeout=200)
        return dict(json.loads(out)) if out else {}

    def left(self) -> list[str]:
        """What still runs of all that it has started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    def remove(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        shutil.rmtree(self.temporary)


@pytest.fixture
def demo(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Demo]:
    demo = Demo(tmp_path, *getattr(request, "param", SMALL))
    yield demo
    demo.remove()


def test_a_short_demo_ends_with_every_table_equal_and_commands_that_work(demo: Demo) -> None:
    result = demo.result()
    assert demo.process.returncode == 0, demo.said()
    assert result["equal"]
    assert [table["name"] for table in result["tables"]] == [f"public.{name}" for name in KEYS]
    assert all(table["equal"] and table["rows"] and table["changes"] for table in result["tables"])
    assert result["copied_rows"] >= 4000
    assert result["changes"] > result["transactions"] > 100
    assert result["transactions_by_kind"]["truncate"] == 1
    assert {"rename_product", "renumber_order", "send_elsewhere", "cancel"} <= result["transactions_by_kind"].keys()
    assert 0 < result["spark_start_seconds"] < result["first_result_seconds"]
    assert "Traceback" not in demo.said()
    assert not list(demo.temporary.glob("walmere-pg-*"))
    eventually(lambda: not demo.left(), 5, lambda: str(demo.left()))
    carts = DeltaTable(demo.directory / result["lake"] / "public" / "carts")
    assert len(read_delta(carts)) == result["tables"][0]["rows"]
    for command in result["next"]:
        tried = subprocess.run(command, shell=True, cwd=demo.directory, capture_output=True, text=True, check=False)
        assert tried.returncode == 0, tried.stderr
        assert tried.stdout
        assert "Traceback" not in tried.stderr


@pytest.mark.long
def test_a_database_as_the_target_is_equal_too_and_can_be_started_again(tmp_path: Path) -> None:
    place = Path(tempfile.mkdtemp())  # not below pytest's own: the server's user has to reach it
    place.chmod(0o755)
    demo = Demo(tmp_path, *SMALL, "--target", "postgres", "--directory", str(place / "demo"))
    try:
        result = demo.result()
        assert demo.process.returncode == 0, demo.said()
        assert result["equal"]
        assert [table["name"] for table in result["tables"]] == [f"public.{name}" for name in KEYS]
        assert all(table["equal"] and table["rows"] and table["changes"] for table in result["tables"])
        assert result["transactions_by_kind"]["truncate"] == 1
        assert not list(demo.temporary.glob("walmere-pg-*"))
        eventually(lambda: not demo.left(), 5, lambda: str(demo.left()))
        *tries, _ = outputs = [_output(command, demo.directory) for command in result["next"]]
        assert "server started" in tries[0]
        assert "placed" in tries[1]
        assert "deliveries" in tries[2]
        assert "0/" in tries[3]
        assert "server stopped" in tries[-1]
        assert all(outputs)
    finally:
        demo.remove()
        shutil.rmtree(place)


def _output(command: str, directory: Path) -> str:
    with tempfile.TemporaryFile("w+") as output:  # not a pipe, which a server that it starts would keep open
        tried = subprocess.run(command, shell=True, cwd=directory, stdout=output, stderr=output, check=False)
        output.seek(0)
        text = output.read()
    assert tried.returncode == 0, text
    return text


@pytest.mark.long
def test_one_wrong_value_in_the_lake_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged(connection: Connection, lake: Path, name: str) -> TableComparison:
        if name == "orders":
            DeltaTable(lake / "public" / "orders").update(predicate="id = 1234", updates={"total": "total + 0.01"})
        return real_compare(connection, lake, name)

    monkeypatch.setattr(app, "compare", damaged)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert app.main(app.DemoOptions(tmp_path / "demo", 5000, 2)) == 1
    out = capsys.readouterr().out
    assert "NOT EQUAL: public.orders" in out
    assert "1 different: (1234)" in out
    assert out.count(" equal") == len(KEYS) - 1


@pytest.mark.parametrize("demo", [ENDLESS], indirect=True, ids=[""])
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "Walmere"),
        (signal.SIGINT, "starting Spark"),
        pytest.param(signal.SIGINT, "applying changes", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "copying", marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_it_can_be_interrupted_at_any_moment_and_leaves_nothing_running(
    demo: Demo, number: signal.Signals, moment: str
) -> None:
    demo.wait_for(moment)
    os.killpg(demo.process.pid, number)  # as a terminal does
    assert demo.result() == {}
    assert demo.process.returncode == 128 + number, demo.said()
    assert "stopped; no process is left running" in demo.said()
    assert "Traceback" not in demo.said()
    eventually(lambda: not demo.left(), 5, lambda: str(demo.left()))
    assert not list(demo.temporary.glob("walmere-pg-*"))


def test_a_place_that_is_not_the_demos_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "thesis").touch()
    command = [sys.executable, "-m", "walmere", "demo", "--directory", str(tmp_path)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "files that are not from a demo" in refused.stderr
    assert "--directory" in refused.stderr
    assert refused.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]
