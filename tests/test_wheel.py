"""The wheel works where nothing else of this project is: built, installed in a new environment, run from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "results", "walmere-demo", "dist", "build")

# pyspark alone is 400 MB to download and to unpack
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A directory whose environment does not stay on the disk for the next three runs of pytest."""
    yield tmp_path
    shutil.rmtree(tmp_path / "venv", ignore_errors=True)


def run(command: list[str | Path], directory: Path) -> str:
    """Run a command outside the source tree and outside the environment of the tests; returns its stdout."""
    hidden = ("PYTHON", "VIRTUAL_ENV", "PYSPARK", "SPARK_", "WALMERE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    ended = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def test_the_wheel_runs_the_demo_in_a_clean_environment(work: Path) -> None:
    source, dist, venv, elsewhere = (work / name for name in ("source", "dist", "venv", "elsewhere"))
    elsewhere.mkdir()
    shutil.copytree(ROOT, source, ignore=NOT_COPIED)
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", dist, source], elsewhere)
    [wheel] = dist.glob("*.whl")

    run([sys.executable, "-m", "venv", venv], elsewhere)
    python, walmere = venv / "bin" / "python", venv / "bin" / "walmere"
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*install, "--constraint", ROOT / "constraints.txt", f"walmere[demo] @ {wheel.as_uri()}"], elsewhere)
    where = run([python, "-c", "import walmere; print(walmere.__file__)"], elsewhere)
    assert Path(where.strip()).is_relative_to(venv)

    metadata = "from importlib.metadata import version; print(version('walmere'))"
    version = run([walmere, "--version"], elsewhere).strip()
    assert version == run([python, "-c", metadata], elsewhere).strip()
    assert wheel.name.startswith(f"walmere-{version}-")

    shown = run([walmere, "demo", "--seconds", "5"], elsewhere)
    assert re.search(r"^Every table equals its source: [\d,]+ rows, 6 tables, every column", shown, re.MULTILINE), shown
    assert "NOT EQUAL" not in shown
    assert (elsewhere / "walmere-demo" / "lake").is_dir()
