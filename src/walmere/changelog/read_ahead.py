"""Blocks of the log, one after the other. If they are in a store, the next ones are fetched at the same time.

A request to a store takes milliseconds, however small its block is, and a backlog may have thousands of small blocks.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pyarrow as pa

from walmere.changelog.segment import read_block
from walmere.changelog.segment_entry import Segment
from walmere.changelog.store.log_store import LogStore

_READERS: Final = 8
_MAX_BYTES: Final = 32 << 20
"""Bytes of blocks that are fetched ahead, at most; or one block."""


def read_blocks(directory: Path, segments: Iterable[Segment], store: LogStore | None) -> Iterator[pa.RecordBatch]:
    """The first block of each segment, in order. `store`: see `read_block`."""
    ahead: deque[tuple[Future[pa.RecordBatch], int]] = deque()
    pool: ThreadPoolExecutor | None = None
    try:
        for segment in segments:
            length = segment.blocks[0].length
            while ahead and sum(size for _, size in ahead) + length > _MAX_BYTES:
                yield ahead.popleft()[0].result()
            if store is not None and not os.path.exists(directory / segment.file):  # noqa: PTH110  or cannot be read
                pool = pool or ThreadPoolExecutor(_READERS)
                ahead.append((pool.submit(read_block, directory, segment, 0, store), length))
                continue
            while ahead:
                yield ahead.popleft()[0].result()
            yield read_block(directory, segment, 0, store)
        while ahead:
            yield ahead.popleft()[0].result()
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
