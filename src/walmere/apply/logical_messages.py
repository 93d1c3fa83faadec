"""Logical messages as a table: one row for each `pg_logical_emit_message` at the source, in commit order.

The change log has them under relation 0. On request they are mirrored too, like a table without a key that only gets
inserts: an outbox that needs no table at the source. Walmere's heartbeats are not mirrored.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walmere.changelog.plan import Blocks, messages
from walmere.lsn import Lsn

# kind, xid (in a stream only), flags, LSN, prefix, length, content; \C is any byte
_PLAIN: Final = r"(?s)^M(?P<flags>\C)\C{8}(?P<prefix>[^\x00]*)\x00\C{4}(?P<content>\C*)$"
_STREAMED: Final = _PLAIN.replace("^M", r"^M\C{4}")


MESSAGES: Final = pa.schema(
    [
        ("lsn", pa.int64()),
        ("commit_lsn", pa.int64()),
        ("commit_time", pa.timestamp("us", "UTC")),
        ("xid", pa.int64()),
        ("transactional", pa.bool_()),
        ("prefix", pa.string()),
        ("content", pa.binary()),
    ]
)
"""The columns of the table of logical messages."""


def read(blocks: Blocks, applied: Lsn | None) -> pa.Table:
    """The logical messages of these blocks that are not yet applied."""
    found: list[pa.Table] = []
    for ref, batch in messages(blocks.directory, blocks.refs, applied, store=blocks.store):
        logical = batch.filter(pc.equal(batch.column("kind"), "M"))
        parts = pc.extract_regex(logical.column("message"), _STREAMED if ref.segment.streamed else _PLAIN)
        flags, prefix, content = (pc.struct_field(parts, index) for index in range(3))
        times = logical.column("commit_time")
        if ref.commit_time is not None:
            times = pa.array(np.full(len(logical), ref.commit_time, np.int64)).cast(times.type)
        found.append(
            pa.table(
                [
                    logical.column("lsn").cast(pa.int64()),
                    logical.column("commit_lsn").cast(pa.int64()),
                    times,
                    logical.column("xid").cast(pa.int64()),
                    pc.equal(flags, b"\x01"),
                    prefix.cast(pa.string()),
                    content,
                ],
                schema=MESSAGES,
            )
        )
    return pa.concat_tables(found) if found else MESSAGES.empty_table()
