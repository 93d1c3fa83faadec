"""Group neighbouring items up to a size: small files to merge, files or blocks for one task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def bins(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Groups of items that together have at most the size `most`; a larger item is a group by itself."""
    group: list[Item] = []
    size = 0
    for item in items:
        if group and size + size_of(item) > most:
            yield group
            group, size = [], 0
        group.append(item)
        size += size_of(item)
    if group:
        yield group
