"""Makes row messages and the relations they are of; the other direction of decode."""

from __future__ import annotations

import struct

from walmere.pgoutput import UNCHANGED, Binary, Column, Relation, ReplicaIdentity, Tuple, Value

OID = 16384


def relation(columns: int, oid: int = OID) -> Relation:
    return Relation(
        oid, "public", "t", ReplicaIdentity.DEFAULT, tuple(Column(0, f"c{i}", 25, -1) for i in range(columns))
    )


def value(v: Value) -> bytes:
    if v is None:
        return b"n"
    if v is UNCHANGED:
        return b"u"
    if isinstance(v, Binary):
        return b"b" + struct.pack("!I", len(v.data)) + v.data
    return b"t" + struct.pack("!I", len(v)) + v


def tuple_(values: Tuple) -> bytes:
    return struct.pack("!H", len(values)) + b"".join(map(value, values))


def row(
    kind: bytes,
    *,
    key: Tuple | None = None,
    old: Tuple | None = None,
    new: Tuple | None = None,
    xid: int | None = None,
    oid: int = OID,
) -> bytes:
    data = kind + (b"" if xid is None else struct.pack("!I", xid)) + struct.pack("!I", oid)
    if key is not None:
        data += b"K" + tuple_(key)
    if old is not None:
        data += b"O" + tuple_(old)
    if new is not None:
        data += b"N" + tuple_(new)
    return data
