"""From references to typed changes: what a task does with the blocks of its table before the fold.

The same codecs that cast the copy's text cast the stream's. All by whole columns; the only Python loop is over blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from walmere.errors import WalmereError
from walmere.lsn import Lsn
from walmere.pgoutput.columns import Rows, decode_rows
from walmere.pgoutput.messages import Relation, ReplicaIdentity
from walmere.pgoutput.relation import RelationVersion
from walmere.sinks.base import Identity
from walmere.spark.fold import TRUNCATE, Changes
from walmere.subscription.plan import BlockRef, messages
from walmere.subscription.rejects import Rejects, rejected_key
from walmere.types import PgType
from walmere.types.base import Codec
from walmere.types.codec import codec


@dataclass(frozen=True, slots=True)
class Decoded:
    """The changes of a table in one batch."""

    changes: Changes
    identity: Identity
    rejects: pa.RecordBatch


def decode(
    directory: Path,
    refs: Sequence[BlockRef],
    versions: Mapping[int, RelationVersion],
    types: Mapping[int, PgType],
    applied: Lsn | None = None,
) -> Decoded | None:
    """Read and cast what the references point to and the table does not have; None if none of it counts."""
    pieces: list[Changes] = []
    truncated = False
    relation: Relation | None = None
    rejects = Rejects(())
    for ref, batch in messages(directory, list(refs), applied):
        before, relation = relation, versions[ref.version].relation
        if before is not None and _shape(before) != _shape(relation):
            raise WalmereError(
                f"applying changes to {relation.namespace}.{relation.name}",
                "its columns or its replica identity changed between two changes of one batch",
                "copy the table again",
            )
        truncates = np.flatnonzero(pc.equal(batch.column("kind"), "T").to_numpy(zero_copy_only=False))
        rows = batch
        if truncates.size:  # what came before is gone
            pieces, truncated = [], True
            rows = batch.slice(int(truncates[-1]) + 1)
        if rows.num_rows:
            codecs = [codec(column.type_oid, column.type_modifier, types) for column in relation.columns]
            rejects = rejects if pieces else Rejects(_key(relation))
            pieces.append(_typed(rows, relation, codecs, ref.segment.streamed, rejects))
    if relation is None:
        return None
    codecs = [codec(column.type_oid, column.type_modifier, types) for column in relation.columns]
    schema = pa.schema([(column.name, each.arrow) for column, each in zip(relation.columns, codecs, strict=True)])
    if truncated:
        pieces.insert(0, _truncate(schema))
    identity = Identity(relation.replica_identity.value, _key(relation))
    return Decoded(_joined(pieces, schema), identity, rejects.rows())


def _shape(relation: Relation) -> tuple[object, ...]:
    return relation.replica_identity, relation.columns


def _key(relation: Relation) -> tuple[str, ...]:
    """The key's columns. With REPLICA IDENTITY FULL every column is marked, and there is none."""
    if relation.replica_identity in (ReplicaIdentity.FULL, ReplicaIdentity.NOTHING):
        return ()
    return tuple(column.name for column in relation.columns if column.is_key)


def _typed(
    batch: pa.RecordBatch, relation: Relation, codecs: Sequence[Codec], streamed: bool, rejects: Rejects
) -> Changes:
    rows: Rows = decode_rows(batch.column("message"), relation, streamed=streamed)
    lsn = batch.column("lsn").to_numpy()
    names = [column.name for column in relation.columns]
    schema = pa.schema([(name, each.arrow) for name, each in zip(names, codecs, strict=True)])
    new = pa.table([values.text for values in rows.new], names=names)
    old = pa.table([values.text for values in rows.old], names=names) if rows.old_kind.any() else None
    return Changes(
        rows.kind,
        pa.table(rejects.cast(new, codecs, lsn), schema=schema),
        tuple(values.unchanged for values in rows.new),
        rows.old_kind,
        None if old is None else pa.table(_old(old, codecs, _key(relation)), schema=schema),
    )


def _old(text: pa.Table, codecs: Sequence[Codec], key: tuple[str, ...]) -> list[pa.Array]:
    """Old tuples; what the target cannot hold of them is NULL there, too, but a key must be exact."""
    casts = [each.cast(column) for each, column in zip(codecs, text.columns, strict=True)]
    for name, cast in zip(text.column_names, casts, strict=True):
        if name in key and cast.rejected is not None and cast.rejected.any():
            raise rejected_key(name)
    return [cast.values for cast in casts]


def _truncate(schema: pa.Schema) -> Changes:
    nothing = np.zeros(1, np.uint8)
    row = pa.table([pa.nulls(1, field.type) for field in schema], schema=schema)
    return Changes(np.array([TRUNCATE], np.uint8), row, (None,) * len(schema), nothing, None)


def _joined(pieces: Sequence[Changes], schema: pa.Schema) -> Changes:
    if len(pieces) == 1:
        return pieces[0]
    olds = any(piece.old is not None for piece in pieces)
    blank = [pa.table([pa.nulls(len(p), f.type) for f in schema], schema=schema) for p in pieces] if olds else []
    return Changes(
        np.concatenate([piece.kind for piece in pieces]),
        pa.concat_tables([piece.new for piece in pieces]),
        tuple(_masks([piece.unchanged[column] for piece in pieces], pieces) for column in range(len(schema))),
        np.concatenate([piece.old_kind for piece in pieces]),
        pa.concat_tables([b if p.old is None else p.old for p, b in zip(pieces, blank, strict=True)]) if olds else None,
    )


def _masks(masks: Sequence[NDArray[np.bool_] | None], pieces: Sequence[Changes]) -> NDArray[np.bool_] | None:
    if all(mask is None for mask in masks):
        return None
    return np.concatenate(
        [np.zeros(len(p), np.bool_) if mask is None else mask for mask, p in zip(masks, pieces, strict=True)]
    )
