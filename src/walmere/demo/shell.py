"""Commands that the demo prints, to be pasted into a shell."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path


def program(name: str) -> str:
    """A program of this Python environment, quoted."""
    return path(Path(sys.executable).parent / name)


def path(file: Path) -> str:
    """A path, relative if that is shorter, quoted."""
    relative = os.path.relpath(file)
    return quoted(file if relative.startswith("..") else relative)


def quoted(text: str | Path) -> str:
    """Quote for a shell; with double quotes if possible, because Python code and SQL have single quotes."""
    plain = shlex.quote(str(text))
    return f'"{text}"' if "'\"'\"'" in plain and not set(str(text)) & set('"$`\\!') else plain
