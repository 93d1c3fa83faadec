"""Runs the code cells of a notebook, in a process of their own, and says what each has printed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

_SCRIPT = """
import contextlib, io, json, sys
cells = json.load(sys.stdin)
names, said = {"__name__": "__main__"}, []
for cell in cells:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(cell, names)
    said.append(output.getvalue())
print(json.dumps(said))
"""


def outputs(cells: Sequence[str]) -> list[str]:
    """What the cells print, one after the other in one namespace."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found
