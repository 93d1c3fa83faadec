"""Find the first commit that changed a table, in the segments of a record of the change log."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from walmere.changelog.plan import messages, references
from walmere.changelog.records import Transaction, Transactions
from walmere.lsn import Lsn


def first_commit(changelog: Path, record: Transactions | Transaction, relations: set[int], position: Lsn) -> int | None:
    """The time of the first commit after a position that changed one of the relations; None: there is none."""
    oldest: int | None = None
    refs = [ref for ref, _ in references(record, lambda relation: position if relation in relations else None, None)]
    for ref, batch in messages(changelog, refs):
        times = batch.column("commit_time").cast(pa.int64())
        if 0 in relations:  # of this relation, only logical messages become rows
            times = times.filter(pc.equal(batch.column("kind"), "M"))
        first = ref.commit_time if ref.commit_time is not None and len(times) else pc.min(times).as_py()
        if first is not None:
            oldest = first if oldest is None else min(oldest, first)
    return oldest
