"""Fold for a database: the net effect of a batch on each row, followed from its first change to its last.

`fold` asks what happens to a key. That is enough for files, where a row is replaced as a whole. A database updates rows
in place: columns that are not published, and unchanged TOAST values, stay as they are. And an UPDATE of a row that the
target does not have does nothing, as in PostgreSQL's own subscriber. So the changes of a row are followed here, also
from key to key:

    first change           last change   effect
    Insert                 not a Delete  insert
    Insert                 Delete        nothing
    Update of a row that   not a Delete  update the row that had this key before the batch
    the target has         Delete        delete that row

Deletes come first, then updates, then inserts: a key that was freed can be used again. If it was not freed, because
the publication leaves out deletes, both rows are written: the target refuses the second one, as it should.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from walmere.apply.fold import DELETE, INSERT, Changes, KeyedChanges, follow, multiset, require_new_values, take
from walmere.errors import NotMirrored
from walmere.names import Identity
from walmere.sinks.base import Mask, RowNet


def fold_rows(changes: Changes, identity: Identity) -> RowNet:
    """The net effect of changes that have no TRUNCATE. Raises NotMirrored for changes that have no replica identity."""
    schema = changes.new.schema
    key = pa.schema([schema.field(name) for name in identity.key] if identity.keyed else schema)
    if not len(changes) or (changes.kind == INSERT).all():
        nothing = key.empty_table()
        return RowNet(nothing, None, schema.empty_table(), nothing, (None,) * len(schema), changes.new)
    if identity.keyed:
        return _keyed(KeyedChanges(changes, identity, truncate=False))
    require_identity(changes, identity)
    net = multiset(changes, identity, truncate=False)
    updates = schema.empty_table(), key.empty_table()
    return RowNet(net.deletes, net.counts, *updates, (None,) * len(schema), net.appends)


def require_identity(changes: Changes, identity: Identity) -> None:
    """Raise NotMirrored for an UPDATE or DELETE whose row cannot be found, or an INSERT that lacks values."""
    require_new_values(changes)
    if not (identity.keyed or identity.multiset or (changes.kind == INSERT).all()):
        raise NotMirrored(
            "applying changes to the target",
            "there is an UPDATE or DELETE of a table without a replica identity",
            "give the table a primary key, or ALTER TABLE … REPLICA IDENTITY FULL",
        )


def _keyed(keyed: KeyedChanges) -> RowNet:
    kind, parent = keyed.changes.kind, keyed.parents()
    first = follow(np.ones(len(kind), np.bool_), parent)
    in_target = kind[first] != INSERT
    begins = keyed.writes & ((kind == INSERT) | keyed.moved)[keyed.event_change]  # another row gets the key
    last_of_row = np.append((keyed.event_key[1:] != keyed.event_key[:-1]) | begins[1:], True)
    exist = np.sort(keyed.event_change[last_of_row & keyed.writes])
    updated, inserted = exist[in_target[exist]], exist[~in_target[exist]]
    removed = np.flatnonzero((kind == DELETE) & in_target)
    by_old = keyed.old_place >= 0
    place = np.where(by_old, keyed.old_place, keyed.new_place)  # of the key by which a change found its row
    updates, inserts, unchanged = [], [], []
    for column, mask in zip(keyed.tuples.new, keyed.tuples.unchanged, strict=True):
        source = None if mask is None else follow(mask, parent)
        updates.append(take(column, updated if source is None else source[updated]))
        inserts.append(take(column, inserted if source is None else source[inserted]))
        keeps: Mask | None = None if mask is None or source is None else mask[source[updated]]
        unchanged.append(keeps if keeps is not None and keeps.any() else None)
    return RowNet(
        keyed.key_table(place[first[removed]]),
        None,
        pa.Table.from_arrays(updates, schema=keyed.schema),
        keyed.key_table(place[first[updated]]),
        tuple(unchanged),
        pa.Table.from_arrays(inserts, schema=keyed.schema),
    )
