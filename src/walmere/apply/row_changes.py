"""Changes of a table, for a database that applies them one by one."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from walmere.apply.decode import TextChanges
from walmere.apply.fold import Changes
from walmere.names import Identity
from walmere.sinks.postgres.relation import TargetRelation
from walmere.sinks.postgres.rows.changes import RowChanges
from walmere.sinks.row_index import one_array


def row_changes(relation: TargetRelation, identity: Identity, text: TextChanges) -> RowChanges:
    """The changes, each with the values by which its row is found."""
    changes = text.changes
    return RowChanges(
        relation,
        identity,
        changes.kind,
        changes.new,
        changes.unchanged,
        _old(changes, identity),
        text.commit_lsn,
        text.sequence,
    )


def _old(changes: Changes, identity: Identity) -> pa.Table:
    """What a row is found by: the old tuple, or else the key in the new one."""
    names = list(identity.key) if identity.keyed else changes.new.column_names
    if changes.old is None:
        return changes.new.select(names)
    has_old = pa.array(changes.old_kind != 0)
    return pa.table(
        {name: pc.if_else(has_old, one_array(changes.old[name]), one_array(changes.new[name])) for name in names}
    )
