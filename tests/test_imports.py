"""Keeps the layout true: who may import whom (docs: the layout; read with `ast`, nothing is imported)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "walmere"

GROUND = {"lsn", "errors"}
WIRE = GROUND | {"pgoutput", "types"}
SUBSCRIBER = WIRE | {"config", "metrics", "publisher", "changelog"}
ALL = SUBSCRIBER | {"subscription", "sinks", "spark", "reads", "verify", "__init__"}

MAY_IMPORT: dict[str, set[str]] = {
    "lsn": set(),
    "errors": set(),
    "metrics": GROUND,
    "config": GROUND,
    "types": GROUND,
    "pgoutput": GROUND | {"types"},
    "changelog": WIRE,
    "publisher": WIRE | {"config"},
    "subscription": SUBSCRIBER | {"sinks"},
    "sinks": GROUND,
    "spark": WIRE | {"metrics", "changelog", "subscription", "sinks"},
    "reads": GROUND | {"config", "sinks", "spark"},
    "verify": ALL - {"verify", "__init__"},
    "dashboard": ALL - {"config"},
    "demo": ALL,
    "running": ALL | {"api"},  # to speak of it; it is imported by that
    "api": ALL | {"running", "reads"},
    "cli": ALL | {"api", "running", "dashboard", "demo"},
    "__main__": {"cli"},
    "__init__": (ALL | {"api", "reads"}) - {"__init__"},
}
"""By what stands directly below `walmere`; many of them are still to come."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "pyspark": ("spark/", "sinks/lakehouse.py", "running.py", "api.py"),  # those two speak of its types only
    "duckdb": ("reads.py", "verify/"),
    "psycopg": ("publisher/", "sinks/postgres.py"),
    "psycopg2": ("publisher/", "sinks/postgres.py"),
}
SINKS_OWN = {"numpy", "pyarrow", "deltalake", "pyspark", "psycopg"}
NO_IO = {
    "asyncio",
    "io",
    "logging",
    "os",
    "pathlib",
    "select",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
}


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


def faults(path: str, source: str) -> list[str]:
    """What a file, by its path below the package, imports and may not."""
    part = path.partition("/")[0].removesuffix(".py")
    if part not in MAY_IMPORT:
        return [f"{path}: say in MAY_IMPORT where {part} stands"]
    found = []
    for module in imports(path, source):
        top, *rest = module.split(".")
        if top == "walmere":
            # what is no module or package is a name of the top package itself
            target = rest[0] if rest and rest[0] in MAY_IMPORT else "__init__"
            allowed = target == part or target in MAY_IMPORT[part]
        else:
            allowed = path.startswith(ONLY_IN.get(top, ("",)))
            allowed &= part != "pgoutput" or top not in NO_IO
            allowed &= part != "sinks" or top in SINKS_OWN | sys.stdlib_module_names
        if not allowed:
            found.append(f"{path} imports {module}")
    return found


def test_every_module_imports_only_what_stands_below_it() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert files
    assert not [fault for file in files for fault in faults(file.relative_to(ROOT).as_posix(), file.read_text())]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("lsn.py", "import walmere.errors"),
        ("pgoutput/decode.py", "from walmere.publisher import connect"),
        ("pgoutput/decode.py", "import os"),
        ("pgoutput/decode.py", "from socket import create_connection"),
        ("types/text.py", "from ..pgoutput import decode"),
        ("changelog/writer.py", "def late():\n    from walmere.subscription.receiver import Receiver"),
        ("changelog/writer.py", "from walmere.config import Config"),
        ("publisher/stream.py", "from walmere.changelog.writer import Writer"),
        ("publisher/stream.py", "from walmere.spark import apply"),
        ("spark/apply.py", "from walmere.publisher.connect import connect"),
        ("spark/apply.py", "import psycopg"),
        ("sinks/delta.py", "from walmere.changelog.reader import Reader"),
        ("sinks/delta.py", "from pyspark.sql import SparkSession"),
        ("sinks/delta.py", "import polars"),
        ("subscription/receiver.py", "import psycopg2.extras"),
        ("subscription/receiver.py", "from walmere.cli import main"),
        ("subscription/receiver.py", "from walmere import cli"),
        ("reads.py", "from walmere.subscription.ledger import Ledger"),
        ("reads.py", "from pyspark.sql import DataFrame"),
        ("somewhere/new.py", ""),
    ],
)
def test_a_forbidden_import_is_seen(path: str, source: str) -> None:
    assert faults(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pgoutput/decode.py", "from walmere.lsn import Lsn\nfrom . import messages\nimport numpy"),
        ("publisher/stream.py", "import psycopg\nfrom walmere.pgoutput.replication import decode_frame"),
        ("subscription/receiver.py", "from walmere.publisher import slot\nfrom walmere.config import Config"),
        ("sinks/lakehouse.py", "from pyspark.sql import SparkSession\nfrom walmere.errors import WalmereError"),
        ("sinks/postgres.py", "import psycopg"),
        ("spark/apply.py", "from walmere.subscription import state\nfrom walmere.sinks.base import Sink"),
        ("reads.py", "from walmere.spark.dataframe import DataFrame\nfrom walmere.sinks.delta import DeltaSink"),
        ("cli/main.py", "from walmere import __version__\nfrom walmere.demo import server"),
    ],
)
def test_an_allowed_import_passes(path: str, source: str) -> None:
    assert not faults(path, source)
