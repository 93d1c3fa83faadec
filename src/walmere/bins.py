"""Neighbours that are worked on together: small files that become one, files of one task, blocks of one task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def bins(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """As many as are no larger together than that; or one that is larger by itself."""
    together: list[Item] = []
    size = 0
    for item in items:
        if together and size + size_of(item) > most:
            yield together
            together, size = [], 0
        together.append(item)
        size += size_of(item)
    if together:
        yield together
