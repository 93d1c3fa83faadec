"""The examples run from top to bottom, and print what they show."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conftest import Database
from notebook import outputs

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.long
def test_a_notebook_prints_what_it_shows(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = ["".join(text for each in cell["outputs"] for text in each["text"]) for cell in cells]
    assert outputs(["".join(cell["source"]) for cell in cells]) == shown


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
@pytest.mark.long
def test_a_program_prints_what_it_says(path: Path, tmp_path: Path) -> None:
    said = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("It prints\n\n")[2]
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, cwd=tmp_path, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == textwrap.dedent(said).rstrip() + "\n"


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert not [
        path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb") and path.name not in listed
    ]


@pytest.mark.long
def test_personal_data_is_masked(database18: Database, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "mask_personal_data", tmp_path, dirs_exist_ok=True)
    database18.execute((tmp_path / "shop.sql").read_text())
    file = tmp_path / "walmere.toml"
    text = file.read_text().replace('"walmere_masked"', f'"{database18.slot}"')
    file.write_text(re.sub(r"dsn = .*", lambda _: f"dsn = {json.dumps(database18.dsn)}", text))
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "WALMERE_HASH_KEY": "a key that the test has"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-m", "walmere", "check", "-c", "walmere.toml")
    run("-m", "walmere", "run", "-c", "walmere.toml", "--once")
    run("-m", "walmere", "verify", "-c", "walmere.toml")
    shown = run("show.py")
    for text in ("engines.example", "1815", "52300.00", "111.50"):
        assert text in shown
    assert "ada@" not in shown
    assert not (tmp_path / "lake" / "public" / "sessions").exists()
