"""How far tables are behind the change log: for each, the oldest commit that is in the log and not in the table.

A commit counts for a table if it changed that table and is after the table's position. The manifest says which records
have such changes. Only the first of them is opened, if it has more than one transaction: it may span minutes, and the
commit is somewhere in it. Heartbeats, positions and changes of tables that are not mirrored do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walmere.changelog.records import Transaction, Transactions
from walmere.changelog.search import ManifestSearch
from walmere.lsn import Lsn
from walmere.subscription.state import TableState

MESSAGE_BLOCKS: Final = 200
"""Open at most this many blocks to find a logical message. After that, the lag of their table is unknown."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A table lacks changes that are in the log."""

    commit_time: int | None  # of the oldest of them, in microseconds of Unix time; None: unknown


def oldest_missing(changelog: Path, log: ManifestSearch, tables: Iterable[TableState]) -> dict[str, Missing]:
    """The tables that are behind the log, by name. Tables without a position are not included."""
    pending = {each.name: (each, position) for each in tables if (position := each.position) is not None}
    relations = {relation for each, _ in pending.values() for relation in each.relations}
    found: dict[str, Missing] = {}
    message_blocks = 0
    for record in log.records_after(min((lsn for _, lsn in pending.values()), default=log.end_lsn), relations):
        present = {block.relation for segment in record.segments for block in segment.blocks}
        for name, (each, position) in list(pending.items()):
            wanted = present.intersection(each.relations)
            if not wanted or record.commit_lsn < position:
                continue
            message_blocks += 0 in wanted
            commit_time = _first_commit(changelog, record, wanted, position)
            if commit_time is not None or message_blocks > MESSAGE_BLOCKS:
                found[name] = Missing(commit_time)
                del pending[name]
                relations.difference_update(each.relations)
    return found


def _first_commit(
    changelog: Path, record: Transactions | Transaction, relations: set[int], position: Lsn
) -> int | None:
    """The time of the first commit after a position that changed one of the relations; None: there is none."""
    if isinstance(record, Transactions) and record.count == 1 and 0 not in relations:
        return record.commit_time
    # to open blocks needs Arrow, which takes longer to import than all the rest of `walmere status`
    from walmere.changelog.first_commit import first_commit  # noqa: PLC0415

    return first_commit(changelog, record, relations, position)
