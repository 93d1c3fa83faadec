"""What the package promises to those who import it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import walmere.pgoutput


def test_all_names_are_there_sorted_and_nothing_else_is_public() -> None:
    names = walmere.pgoutput.__all__
    assert len(set(names)) == len(names)
    modules = {"decode", "messages", "relation", "replication", "columns", "scan"}
    public = {name for name in vars(walmere.pgoutput) if not name.startswith("_")}
    assert set(names) <= public
    assert public - set(names) <= modules


@pytest.mark.parametrize("module", ["", ".decode", ".messages", ".relation", ".replication"])
def test_only_columns_needs_arrow_and_nothing_here_needs_a_server_or_spark(module: str) -> None:
    code = (
        f"import sys, walmere.pgoutput{module}; "
        "print([m for m in ('pyarrow', 'numpy', 'psycopg', 'psycopg2', 'pyspark') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
