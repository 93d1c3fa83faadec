"""Prints which parts of the package import which, as Mermaid, for ARCHITECTURE.md: `python scripts/import_graph.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "walmere"
GROUND = frozenset(
    {
        *("lsn", "errors", "names", "owner", "paths", "bins", "definition", "object_store", "storage", "local_cache"),
        *("config", "directory", "table_sections", "units", "variant_type", "version"),
    }
)
"""Drawn as one box: nearly everything imports them."""
FRONT = frozenset({"__init__", "__main__", "api", "running"})
"""Not drawn: they put the parts together."""


def imports(path: str, source: str) -> Iterator[str]:
    """The modules that a file of the package imports, relative imports made absolute; `from x import y` is x.y."""
    package = ["walmere", *path.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                yield from (".".join([*base, *([module] if module else []), name.name]) for name in names)


def part_of(path: str) -> str:
    """The part of the package that a file is in: what stands directly below `walmere`."""
    return path.partition("/")[0].removesuffix(".py")


def edges() -> set[tuple[str, str]]:
    """Which part imports which."""
    found = set()
    parts = {part_of(file.relative_to(ROOT).as_posix()) for file in ROOT.rglob("*.py")}
    for file in ROOT.rglob("*.py"):
        path = file.relative_to(ROOT).as_posix()
        for module in imports(path, file.read_text()):
            top, *rest = module.split(".")
            if top == "walmere" and rest and rest[0] in parts and rest[0] != part_of(path):
                found.add((part_of(path), rest[0]))
    return found


def reduced(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Without the edges that follow from others."""
    below: dict[str, set[str]] = {}
    for part, other in found:
        below.setdefault(part, set()).add(other)

    def reaches(part: str, other: str) -> bool:
        return any(each == other or reaches(each, other) for each in below.get(part, ()))

    return {
        (part, other)
        for part, other in found
        if not any(each != other and reaches(each, other) for each in below[part])
    }


def mermaid() -> str:
    """The picture."""
    names = dict.fromkeys(GROUND, "ground") | dict.fromkeys(FRONT, "")
    drawn = {(names.get(part, part), names.get(other, other)) for part, other in edges()}
    drawn = {(part, other) for part, other in drawn if part and other and part != other}
    lines = [f"    {part} --> {other}" for part, other in sorted(reduced(drawn))]
    ground = ", ".join(sorted(GROUND))
    return "\n".join(["graph TD", f'    ground["{ground}"]', *lines])


if __name__ == "__main__":
    print(mermaid())
