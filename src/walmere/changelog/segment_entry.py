"""A segment as the manifest describes it: its file, and the blocks in it. `segment` reads and writes the file.

Who reads only the manifest, such as `walmere status`, needs no Arrow.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

SUFFIX: Final = ".arrow"
TEMPORARY: Final = ".tmp"


@dataclass(frozen=True, slots=True)
class Block:
    """One record batch of a segment, as the manifest describes it."""

    relation: int
    version: int  # of the relation's definition; 0 for relation 0
    rows: int
    first_sequence: int
    last_sequence: int
    offset: int  # of the batch in the file
    length: int
    checksum: int  # CRC-32 of those bytes
    inserts: bool  # only: such blocks can be applied in parallel


class Stored(NamedTuple):
    """Where a segment is in the store: the number of the object, and where the file's bytes begin in it."""

    number: int
    offset: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A complete segment file."""

    file: str
    length: int
    streamed: bool  # its messages carry an xid after their kind
    blocks: tuple[Block, ...]
    stored: Stored | None = None  # None: there is only the local file

    @property
    def rows(self) -> int:
        """The number of messages."""
        return sum(block.rows for block in self.blocks)

    def only(self, block: Block) -> Segment:
        """The same segment with only one of its blocks."""
        return Segment(self.file, self.length, self.streamed, (block,), self.stored)


def segment_bytes_in(directory: Path) -> int:
    """The size of the segments in a directory. There may be hundreds of thousands, so this may take a second."""
    total = 0
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # retention has just removed it
                total += entry.stat().st_size if entry.name.endswith(SUFFIX) else 0
    return total
