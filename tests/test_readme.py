"""What README and docs show can be pasted: configurations load, commands and options exist, links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from walmere import config as configuration
from walmere.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
WITH_TARGET = ("README.md", "docs/guides/mirror-a-publication.md")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> Iterator[str]:
    """Of shell blocks, and of inline code."""
    for block in blocks(page, "sh"):
        yield from re.findall(r"(?:^|/)walmere .+$", block, re.MULTILINE)
    yield from re.findall(r"`(walmere [^`]+)`", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S))


@pytest.mark.parametrize("name", [name for name in NAMES if blocks(ROOT / name, "toml")])
def test_a_configuration_that_is_shown_is_complete(name: str, tmp_path: Path) -> None:
    for block in blocks(ROOT / name, "toml"):
        if "[source]" in block:
            file = tmp_path / "walmere.toml"
            file.write_text(block)
            assert (configuration.load(file, {}).target is not None) or name not in WITH_TARGET


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_options_exist(name: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for text in commands(ROOT / name):
        command = text.partition("walmere ")[2].replace("\\|", " ")
        word = re.match(r"[a-z]+\b(?!\.)", command)
        assert word is None or word[0] in group.commands, text
        if word is not None:
            known = {option for each in group.commands[word[0]].params for option in (*each.opts, *each.secondary_opts)}
            assert {*re.findall(r"(?<=[\s\[])--?[a-z][a-z-]*", command)} <= known | {"--help"}, text


@pytest.mark.parametrize("name", NAMES)
def test_shell_commands_can_be_pasted(name: str) -> None:
    for block in blocks(ROOT / name, "sh"):
        assert "…" not in block
        assert not re.search(r"^\$ ", block, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target
