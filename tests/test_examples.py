"""The examples run from top to bottom, and print what they show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from notebook import outputs

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.long
def test_a_notebook_prints_what_it_shows(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = ["".join(text for each in cell["outputs"] for text in each["text"]) for cell in cells]
    assert outputs(["".join(cell["source"]) for cell in cells]) == shown
