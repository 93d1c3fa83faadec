"""How large a table of the target is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableSize:
    """The files of a table's newest version."""

    files: int
    bytes: int
    deleted: int  # rows that are still in files
