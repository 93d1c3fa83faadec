"""Keeps the layout true: who may import whom. See ARCHITECTURE.md."""

from __future__ import annotations

import subprocess
import sys

import pytest
from scripts.import_graph import ROOT, edges, imports, mermaid, part_of

GROUND = {"lsn", "errors", "names", "owner", "paths", "bins", "version", "local_cache", "units", "variant_type"}
WIRE = GROUND | {"pgoutput", "types"}
LOG = WIRE | {"object_store", "storage", "changelog"}
TARGET = GROUND | {"object_store", "storage", "directory", "ledger", "libpq"}
APPLY = LOG | TARGET | {"definition", "sinks"}
SUBSCRIBER = APPLY | {"config", "publisher", "apply", "shaping"}
ALL = SUBSCRIBER | {"subscription", "spark", "source", "reads", "verify", "__init__"}

MAY_IMPORT: dict[str, set[str]] = {
    **{each: set() for each in ("lsn", "errors", "paths", "bins", "version", "local_cache", "units", "variant_type")},
    "testing": GROUND,
    "names": GROUND,
    "owner": GROUND,
    "object_store": GROUND,
    "storage": GROUND,
    "directory": GROUND | {"object_store", "storage"},
    "definition": GROUND,
    "table_sections": GROUND,
    "config": GROUND | {"object_store", "table_sections"},
    "libpq": GROUND,
    "types": GROUND,
    "shaping": GROUND | {"config", "definition", "table_sections", "types"},
    "pgoutput": GROUND | {"types"},
    "publisher": WIRE | {"config", "definition", "libpq"},
    "changelog": LOG,
    "ledger": TARGET,
    "sinks": TARGET,
    "apply": APPLY | {"shaping"},
    "subscription": SUBSCRIBER,
    "spark": APPLY | {"apply", "subscription"},
    "source": LOG | {"config", "publisher", "definition", "subscription", "spark"},
    "reads": TARGET | {"config", "sinks", "spark"},
    "verify": (ALL | {"running"}) - {"__init__", "source"},
    "metrics": GROUND,
    "serving": GROUND,
    "dashboard": (ALL | {"metrics", "serving"}) - {"config"},
    "demo": ALL | {"testing"},
    "running": ALL - {"verify"},
    "api": ALL | {"running"},
    "cli": ALL | {"api", "dashboard", "demo", "metrics", "serving"},
    "__main__": {"cli"},
    "__init__": (ALL | {"api"}) - {"__init__"},
}
"""By what stands directly below `walmere`. ARCHITECTURE.md has it as a picture."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "pyspark": ("spark/", "source/", "sinks/lakehouse.py", "running.py", "api.py"),  # the last two: its types only
    "duckdb": ("reads/", "verify/", "shaping/keyed_hash.py"),
    "obstore": ("object_store/",),
    "psycopg": ("publisher/", "sinks/postgres/", "libpq.py"),
    "psycopg2": ("publisher/",),
}
SINKS_OWN = {"numpy", "pyarrow", "deltalake", "pyroaring", "pyspark", "psycopg"}
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


def faults(path: str, source: str) -> list[str]:
    """What a file, by its path below the package, imports and may not."""
    part = part_of(path)
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


def test_no_part_imports_itself_by_way_of_others() -> None:
    below: dict[str, set[str]] = {}
    for part, other in edges():
        below.setdefault(part, set()).add(other)
    parts = sorted(below)
    while parts:
        leaves = [part for part in parts if not (below[part] - {part}) & set(parts)]
        assert leaves, f"these import each other: {parts}"
        parts = [part for part in parts if part not in leaves]


@pytest.mark.parametrize(
    "module",
    [
        *("walmere.apply.worker", "walmere.spark.apply_task"),
        *(
            "walmere.source.format",
            "walmere.source.columns",
            "walmere.source.log",
            "walmere.source.query",
            *("walmere.source.change_rows", "walmere.sinks.delta.sink", "walmere.spark.failures", "pyspark_pgoutput"),
        ),
    ],
)
def test_what_a_task_imports_needs_neither_the_source_nor_its_drivers(module: str) -> None:
    """A task that applies changes, and one of format pgoutput, reads the log. A copy is another matter."""
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert module in loaded
    forbidden = ("psycopg", "psycopg2", "walmere.publisher", "walmere.config")
    assert not [
        each for each in loaded if each in forbidden or each.startswith(tuple(f"{name}." for name in forbidden))
    ]
    if module.startswith("walmere.apply"):
        assert "pyspark" not in loaded


@pytest.mark.parametrize("module", ["source_text", "json_text", "pg_text", "fingerprint", "rows"])
def test_what_verify_compares_with_uses_no_codec(module: str) -> None:
    """Otherwise a wrong cast would be wrong on both sides, and equal."""
    code = f"import sys, walmere.verify.{module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert f"walmere.verify.{module}" in loaded
    assert not [each for each in loaded if each.startswith("walmere.types")]


def test_the_picture_in_the_architecture_is_up_to_date() -> None:
    text = (ROOT.parents[1] / "ARCHITECTURE.md").read_text()
    assert f"```mermaid\n{mermaid()}\n```" in text, "put in what `python scripts/import_graph.py` prints"


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
        ("sinks/delta/sink.py", "from walmere.changelog.reader import Reader"),
        ("sinks/delta/sink.py", "from pyspark.sql import SparkSession"),
        ("sinks/delta/sink.py", "import polars"),
        ("subscription/receiver.py", "import psycopg2.extras"),
        ("subscription/receiver.py", "from walmere.cli import main"),
        ("subscription/receiver.py", "from walmere import cli"),
        ("reads/lake.py", "from walmere.subscription.tables import Tables"),
        ("reads/lake.py", "from pyspark.sql import DataFrame"),
        ("apply/worker.py", "from pyspark.sql import SparkSession"),
        ("apply/worker.py", "from walmere.subscription.tables import Tables"),
        ("changelog/plan.py", "from walmere.subscription import state"),
        ("ledger/file.py", "from walmere.sinks.base import Sink"),
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
        ("sinks/postgres/sink.py", "import psycopg"),
        ("spark/apply.py", "from walmere.subscription import state\nfrom walmere.sinks.base import Sink"),
        (
            "reads/lake.py",
            "from walmere.spark.dataframe import DataFrame\nfrom walmere.sinks.delta.sink import DeltaSink",
        ),
        ("cli/main.py", "from walmere import __version__\nfrom walmere.demo import server"),
    ],
)
def test_an_allowed_import_passes(path: str, source: str) -> None:
    assert not faults(path, source)
