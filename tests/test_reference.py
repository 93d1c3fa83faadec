"""The pages of the reference that follow from the code are up to date, and the tests that are named as proof exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import reference

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["configuration.md", "options.md", "errors.md", "metrics.md", "snippets.md"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    page = reference.REFERENCE / name
    assert page.read_text(encoding="utf-8") == reference.rendered()[page], "run `make reference`"


def test_every_test_that_is_named_as_proof_exists() -> None:
    for page in (ROOT / "docs" / "explanation").glob("*.md"):
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{page.name}: {path}::{name}"
