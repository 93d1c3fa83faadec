"""Names in the log of a Delta table: of its files, and of Walmere's own keys."""

from __future__ import annotations

import re
from typing import Final

LOG: Final = "_delta_log"
COMMIT: Final = re.compile(r"(\d{20})\.json\Z")
NUMBERED: Final = re.compile(r"(\d{20})\.(?:json|checkpoint\.parquet)\Z")
"""A commit, or a checkpoint in one part."""
MARK: Final = "walmere."
"""The prefix of Walmere's keys in `commitInfo`."""


def log_file(version: int) -> str:
    """The path of a commit, relative to its table."""
    return f"{LOG}/{version:020d}.json"
