"""Changes of a table, for a database that applies them one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from walmere.apply.decode import TextChanges
from walmere.apply.fold import Changes
from walmere.names import Identity
from walmere.sinks.postgres.relation import TargetRelation
from walmere.sinks.postgres.rows.changes import RowChanges, RowPiece
from walmere.sinks.row_index import one_array


class Pieces(Protocol):
    """Changes as text, in pieces."""

    @property
    def names(self) -> list[str]: ...

    def pieces(self) -> Iterator[TextChanges]: ...


def row_changes(relation: TargetRelation, identity: Identity, text: Pieces) -> RowChanges:
    """The changes, each with the values by which its row is found."""
    old_names = list(identity.key) if identity.keyed else text.names
    pieces = (_piece(each, old_names) for each in text.pieces())
    return RowChanges(relation, identity, text.names, old_names, pieces)


def _piece(text: TextChanges, old_names: Sequence[str]) -> RowPiece:
    changes = text.changes
    old = _old(changes, old_names)
    return RowPiece(changes.kind, changes.new, changes.unchanged, old, text.commit_lsn, text.sequence)


def _old(changes: Changes, names: Sequence[str]) -> pa.Table:
    """What a row is found by: the old tuple, or else the key in the new one."""
    if changes.old is None:
        return changes.new.select(names)
    has_old = pa.array(changes.old_kind != 0)
    return pa.table(
        {name: pc.if_else(has_old, one_array(changes.old[name]), one_array(changes.new[name])) for name in names}
    )
