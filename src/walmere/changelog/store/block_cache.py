"""Blocks of the log on the disk of an executor: those that more than one task there may read.

Tasks that divide a batch by key all read all of its blocks, and a batch with several definitions of a table is read
twice. The first process that needs such a block fetches it, and the others of the executor wait for it. Other blocks
are not kept: one task reads them once, and writing them would be wasted.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from walmere.local_cache import shared_cache

MAX_BYTES: Final = 256 << 20
"""Delete the oldest blocks if all together are larger."""
_written = itertools.count()


def read(name: str, checksum: int, fetch: Callable[[], bytes]) -> bytes:
    """A block, from the disk if it is there and its checksum is right. `name` says which object and byte it is at."""
    shared = shared_cache()
    if shared is None:
        return fetch()
    directory = shared / "blocks"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / name).open("a+b", buffering=0)
    except OSError:  # the disk is full, or cannot be written
        return fetch()
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        data = file.read()
        if data and zlib.crc32(data) == checksum:
            return data
        data = fetch()
        with contextlib.suppress(OSError):
            file.truncate(0)
            file.write(data)
            _trim(directory)
        return data


def _trim(directory: Path) -> None:
    """Delete the oldest blocks, if there are too many. Whoever waits for one of them fetches it."""
    if next(_written) % 8:
        return
    with os.scandir(directory) as entries:
        found = sorted((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path) for entry in entries)
    total = sum(size for _, size, _ in found)
    for _, size, path in found:
        if total <= MAX_BYTES:
            return
        Path(path).unlink(missing_ok=True)
        total -= size
