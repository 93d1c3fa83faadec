"""`walmere help TOPIC`: the pages of docs/, which are part of the package."""

from __future__ import annotations

import re
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from walmere.cli.options import AsJson
from walmere.cli.output import print_json
from walmere.errors import ConfigError


def topics() -> dict[str, Path]:
    """The pages by name: that of their file."""
    inside = Path(__file__).parents[1] / "docs"
    directory = inside if inside.is_dir() else Path(__file__).parents[3] / "docs"  # a clone that is not installed
    return {path.stem: path for path in sorted(directory.rglob("*.md")) if path.stem != "index"}


def title(page: Path) -> str:
    """The first heading."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), page.stem)


def complete_topic(incomplete: str) -> list[str]:
    """For the shell."""
    return [name for name in topics() if name.startswith(incomplete)]


def show_topic(
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", autocompletion=complete_topic)] = None,
    json: AsJson = False,
) -> None:
    """Show a page of the documentation, or list the topics."""
    known = topics()
    if topic is None:
        _list(known, as_json=json)
        return
    page = known.get(topic)
    if page is None:
        near = get_close_matches(topic, known) or [name for name in known if topic in name]
        hint = f"`walmere help {near[0]}`?" if near else "`walmere help` lists the topics"
        raise ConfigError("looking for a page of the documentation", f"there is no topic {topic}", hint)
    text = re.sub(r"^<!--.*?-->\n+", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    if json:
        print_json({"topic": topic, "title": title(page), "text": text})
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        console = Console()
        with console.pager(styles=True):
            console.print(Markdown(text, hyperlinks=False))
    else:
        print(text, end="")


def _list(known: dict[str, Path], *, as_json: bool) -> None:
    if as_json:
        print_json([{"topic": name, "title": title(page)} for name, page in known.items()])
        return
    width = max(map(len, known))
    for name, page in known.items():
        print(f"{name:<{width}}  {title(page)}")
    print("\nwalmere help TOPIC shows one of them, walmere COMMAND -h the options of a command.")
