"""Reading the small files of a subscription's state. What cannot be read is one error that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from walmere.errors import StateDamaged

Content = TypeVar("Content")


def read_json(path: Path, parse: Callable[[Any], Content], way_out: str) -> Content:
    """What `parse` makes of the JSON in a file. Raises StateDamaged, with the way out, if that cannot be done."""
    data = path.read_bytes()
    doing = f"reading {path}"
    if not data.strip(b"\0 \t\r\n"):
        raise StateDamaged(doing, "it is empty", way_out)
    try:
        content = json.loads(data)
    except UnicodeDecodeError:
        raise StateDamaged(doing, "it is not UTF-8 text", way_out) from None
    except (ValueError, RecursionError):
        raise StateDamaged(doing, "it is not JSON", way_out) from None
    try:
        return parse(content)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise StateDamaged(doing, "it does not have the content that it should have", way_out) from None
