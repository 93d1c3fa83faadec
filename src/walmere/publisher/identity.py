"""What identifies the rows of a partitioned table whose partitions are mirrored as one table.

An UPDATE or DELETE is logged by the leaf partition that holds the row, with the replica identity **of that leaf**.
With `publish_via_partition_root` the stream names only the root: the Relation message has the root's replica identity,
and the old tuple is marked with it, whatever the leaf has logged. A root with REPLICA IDENTITY FULL and leaves at the
default sends "old rows" that have only the key; a root with a primary key and leaves that use another index sends
"keys" in which the key is NULL. So the identity in the stream is not used for such tables. Used instead:

    every leaf is FULL               a key of the root if it has one, otherwise the whole row
    every leaf has the key columns   a key of the root that is part of each leaf's identity; or the identity that all
                                     leaves have in common, if it includes the partition key columns
    no leaf can UPDATE or DELETE     nothing: there are only inserts

The second line needs a key that is unique across all leaves. The unique index of a leaf covers only that leaf; a unique
index of the root covers all leaves, and so does a key that includes the partition key columns. Any other table is
refused: two rows could be confused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from walmere.publisher.connect import Connection

_FULL, _NOTHING, _DEFAULT = "fnd"

HINT: Final = (
    "ALTER TABLE … REPLICA IDENTITY FULL on every partition; or give the partitioned table a primary key, and every"
    " partition REPLICA IDENTITY DEFAULT"
)


@dataclass(frozen=True, slots=True)
class TreeIdentity:
    """The identity of a partitioned table as one table: a letter of `pg_class.relreplident`, and the key columns."""

    mode: str
    key: tuple[str, ...] = ()
    refused: str = ""  # why rows cannot be identified


@dataclass(frozen=True, slots=True)
class LeafIdentity:
    """The identity of one leaf: `relreplident`, and the columns of its replica identity index, if it uses one."""

    name: str
    mode: str
    key: tuple[str, ...] = ()

    @property
    def sends_changes(self) -> bool:
        """Whether the server accepts UPDATE and DELETE on it."""
        return self.mode == _FULL or bool(self.key)


def combine(
    leaves: Iterable[LeafIdentity], root_keys: Sequence[tuple[str, ...]], partition_columns: frozenset[str] | None
) -> TreeIdentity:
    """The identity of the whole table. `root_keys`: keys that are unique across all leaves, the best first.

    `partition_columns`: the partition key columns of all levels; None if the partition key has an expression.
    """
    senders = [leaf for leaf in leaves if leaf.sends_changes]
    keyed = [leaf for leaf in senders if leaf.mode != _FULL]
    if not senders:
        return TreeIdentity(_NOTHING)
    if not keyed:
        return TreeIdentity(_DEFAULT, root_keys[0]) if root_keys else TreeIdentity(_FULL)
    in_common = frozenset.intersection(*(frozenset(leaf.key) for leaf in keyed))
    for key in root_keys:
        if in_common.issuperset(key):
            return TreeIdentity(_DEFAULT, key)
    alike = len(keyed) == len(senders) and all(frozenset(leaf.key) == in_common for leaf in keyed)
    if alike and partition_columns is not None and partition_columns <= in_common:
        return TreeIdentity(_DEFAULT, keyed[0].key)
    shown = "; ".join(sorted({_shown(leaf) for leaf in senders})[:4])
    return TreeIdentity(
        _NOTHING,
        refused=f"the replica identities of its partitions do not identify a row across all partitions ({shown})",
    )


def _shown(leaf: LeafIdentity) -> str:
    return f"{leaf.name}: {'the whole row' if leaf.mode == _FULL else ', '.join(leaf.key)}"


def tree_identities(connection: Connection, leaves: Mapping[int, Sequence[int]]) -> dict[int, TreeIdentity]:
    """The identities of partitioned tables with these leaves, by OID. Locks no table."""
    if not leaves:
        return {}
    known = _relations(connection, sorted({leaf for oids in leaves.values() for leaf in oids}))
    keys = _unique_keys(connection, sorted(leaves))
    columns = _partition_columns(connection, sorted(leaves))
    return {
        root: combine(
            [known[leaf] for leaf in oids if leaf in known], keys.get(root, ()), columns.get(root, frozenset())
        )
        for root, oids in leaves.items()
    }


IS_REPLICA_IDENTITY: Final = (
    "i.indisvalid AND i.indimmediate"
    " AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident END"
)
"""SQL: whether index i is the replica identity of table c. (`pg_get_replica_identity_index` would lock the table.)"""
_COLUMNS: Final = (
    "ARRAY(SELECT attname FROM unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) WITH ORDINALITY AS k (attnum, place)"
    " JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum ORDER BY place)"
)


def _relations(connection: Connection, oids: Sequence[int]) -> dict[int, LeafIdentity]:
    rows = connection.execute(
        f"SELECT c.oid, c.relname, c.relreplident::text, {_COLUMNS} FROM pg_catalog.pg_class c"  # noqa: S608
        f" LEFT JOIN pg_catalog.pg_index i ON i.indrelid = c.oid AND {IS_REPLICA_IDENTITY}"
        " WHERE c.oid = ANY(%s) AND c.relkind = 'r'",
        [list(oids)],
    )
    return {oid: LeafIdentity(name, mode, tuple(key)) for oid, name, mode, key in rows}


def _unique_keys(connection: Connection, oids: Sequence[int]) -> dict[int, list[tuple[str, ...]]]:
    rows = connection.execute(
        f"SELECT i.indrelid, {_COLUMNS} FROM pg_catalog.pg_index i"  # noqa: S608
        " WHERE i.indrelid = ANY(%s) AND i.indisunique AND i.indisvalid AND i.indimmediate"
        " AND i.indpred IS NULL AND i.indexprs IS NULL"
        " AND NOT EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = i.indrelid AND NOT a.attnotnull"
        "  AND a.attnum = ANY((i.indkey::int2[])[0:i.indnkeyatts - 1]))"
        " ORDER BY i.indisreplident DESC, i.indisprimary DESC, i.indexrelid",
        [list(oids)],
    )
    found: dict[int, list[tuple[str, ...]]] = {}
    for oid, key in rows:
        found.setdefault(oid, []).append(tuple(key))
    return found


def _partition_columns(connection: Connection, oids: Sequence[int]) -> dict[int, frozenset[str] | None]:
    rows = connection.execute(
        "WITH RECURSIVE tree (root, relid) AS ("
        " SELECT oid, oid FROM pg_catalog.pg_class WHERE oid = ANY(%s)"
        " UNION ALL SELECT root, inhrelid FROM tree JOIN pg_catalog.pg_inherits ON inhparent = relid)"
        " SELECT root, array_agg(attname) FROM tree JOIN pg_catalog.pg_partitioned_table ON partrelid = relid"
        " CROSS JOIN LATERAL unnest(partattrs::int2[]) AS k (attnum)"
        " LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = relid AND a.attnum = k.attnum AND k.attnum <> 0"
        " GROUP BY root",
        [list(oids)],
    ).fetchall()
    return {root: None if None in names else frozenset(names) for root, names in rows}
