"""Decode: from references to blocks of the log to typed changes.

The stream is cast with the same codecs as the copy, column by column. The only Python loop is over blocks.

A batch may have changes of several definitions of the table. It is divided into **spans**: a span ends before the first
transaction that has another definition. Columns and replica identity are the same within a span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from walmere.apply.fold import INSERT, KEY, OLD, TRUNCATE, Changes
from walmere.apply.parts import Part, can_be_divided, filtered
from walmere.apply.rejects import Rejects, rejected_key
from walmere.apply.soft_deletes import soften, with_commit_time
from walmere.changelog.plan import BlockRef, Blocks, messages
from walmere.definition import Shape
from walmere.errors import NotMirrored
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import Identity, TableName
from walmere.pgoutput.columns import Rows, decode_rows
from walmere.pgoutput.decode import decode as decode_message
from walmere.pgoutput.messages import Relation, ReplicaIdentity, Truncate
from walmere.shaping.columns import TargetColumns
from walmere.types.base import Codec
from walmere.types.text import Text

_AS_SENT: Final = Text("text", pa.binary())
"""Keeps PostgreSQL's text."""


@dataclass(frozen=True, slots=True)
class Span:
    """Changes of one definition."""

    shape: Shape
    identity: Identity
    versions: frozenset[tuple[int, int]]
    start: Lsn  # everything that committed before it is in the table
    end: Lsn | None = None  # commit LSN of the first transaction with another definition; None: the batch has none
    of_leaves: bool = False  # the identity is that of the leaf partitions, not the root's in the stream

    @property
    def empty(self) -> bool:
        """Whether one transaction has several definitions: it cannot be applied in parts."""
        return self.end is not None and self.end <= self.start


@dataclass(frozen=True, slots=True)
class Decoded:
    """The changes of a span, and their rejects."""

    changes: Changes
    rejects: pa.RecordBatch
    whole: bool = True  # these are all changes, not a part of them


@dataclass(frozen=True, slots=True)
class Truncation:
    """A TRUNCATE, at its place in the order of changes."""

    commit_lsn: int
    sequence: int
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class TextChanges:
    """The changes of a span in order, their values as PostgreSQL's text. `changes` has no TRUNCATE."""

    changes: Changes
    commit_lsn: NDArray[np.uint64]
    sequence: NDArray[np.uint64]
    truncations: tuple[Truncation, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self.changes.new.column_names)

    def pieces(self) -> Iterator[TextChanges]:
        """The changes in pieces: this is one."""
        yield self

    def after_truncation(self) -> TextChanges:
        """The changes after the last TRUNCATE, or all."""
        return self.after(self.truncations[-1]) if self.truncations else self

    def after(self, truncation: Truncation) -> TextChanges:
        """The changes after a TRUNCATE."""
        later = np.flatnonzero(self._later(truncation))
        return TextChanges(self.changes.take(later), self.commit_lsn[later], self.sequence[later])

    def rows_without_columns(self) -> int | None:
        """How many rows a table without columns gets; None if it has columns.

        Such a table of Arrow has no rows, so they cannot be in `changes`.
        """
        if self.changes.new.num_columns:
            return None
        return int((self.changes.kind == INSERT).sum())

    def _later(self, last: Truncation) -> NDArray[np.bool_]:
        """Which changes are after a TRUNCATE."""
        later: NDArray[np.bool_] = self.commit_lsn > last.commit_lsn
        later |= (self.commit_lsn == last.commit_lsn) & (self.sequence > last.sequence)
        return later


class _Columns(NamedTuple):
    """The columns of the target."""

    schema: pa.Schema
    codecs: Sequence[Codec]
    key: tuple[str, ...]


def shape_of(relation: Relation, target: Shape | None = None) -> Shape:
    """The shape of a relation. With `target`, the relation is a part of that table."""
    columns = tuple((column.name, column.type_oid, column.type_modifier) for column in relation.columns)
    if target is None:
        return Shape(TableName(relation.namespace, relation.name), columns)
    shape = Shape(target.table, columns)
    return target if target.same(shape) else shape


def _identity(relation: Relation, target: Shape | None) -> Identity:
    key = _key(relation)
    if target is not None:  # in the order of the target
        key = tuple(name for name, *_ in target.columns if name in key)
    return Identity(relation.replica_identity.value, key)


def next_span(
    blocks: Blocks, target: Shape, applied: Lsn | None, identity_of_leaves: Identity | None = None
) -> Span | None:
    """The first span that is not yet applied to the table; None if there is none.

    `identity_of_leaves`: of a partitioned table, what identifies its rows. See `publisher.identity`.
    """
    if (only := only_span(blocks, target, applied, identity_of_leaves)) is not None:
        return only
    definitions = _definitions(blocks, target, identity_of_leaves)
    begins: dict[tuple[int, int], tuple[Lsn, int]] = {}  # commit LSN and sequence of the first change of each
    for ref, batch in messages(blocks.directory, blocks.refs, applied, store=blocks.store):
        commits, places = batch.column("commit_lsn").to_numpy(), batch.column("sequence").to_numpy()
        first = np.lexsort((places, commits))[0]
        found = (Lsn(commits[first]), int(places[first]))
        number = (ref.block.relation, ref.version)
        begins[number] = min(begins.get(number, found), found)
    if not begins:
        return None
    oldest = min(begins, key=lambda number: begins[number])
    same = frozenset(number for number in begins if definitions[number] == definitions[oldest])
    others = [commit for number, (commit, _) in begins.items() if number not in same]
    shape, identity, _ = definitions[oldest]
    start = max(blocks.refs[0].position, applied or INVALID_LSN, begins[oldest][0])
    return Span(shape, identity, same, start, min(others, default=None), identity_of_leaves is not None)


def only_span(
    blocks: Blocks, target: Shape, applied: Lsn | None, identity_of_leaves: Identity | None = None
) -> Span | None:
    """The span of all changes, if they have one definition. No changes are read."""
    definitions = set(_definitions(blocks, target, identity_of_leaves).values())
    if len(definitions) > 1:
        return None
    [(shape, identity, _)] = definitions
    start = max(blocks.refs[0].position, applied or INVALID_LSN)
    return Span(shape, identity, frozenset(blocks.versions), start, of_leaves=identity_of_leaves is not None)


def _definitions(
    blocks: Blocks, target: Shape, identity_of_leaves: Identity | None
) -> dict[tuple[int, int], tuple[Shape, Identity, tuple[int, int] | None]]:
    """By version of a relation, what changes with it have in common."""
    return {
        number: (
            shape_of(each.relation, target if blocks.parts else None),
            identity_of_leaves or _identity(each.relation, target if blocks.parts else None),
            None if blocks.parts else number,  # a table's own versions always differ in something
        )
        for number, each in blocks.versions.items()
    }


def decode(
    blocks: Blocks, span: Span, columns: TargetColumns, applied: Lsn | None = None, part: Part | None = None
) -> Decoded | None:
    """Read and cast the changes of a span that are not yet applied; None if there are none.

    `columns`: of the target. `part`: only changes of the keys of this part. If the batch cannot be divided, the first
    part has all of it.
    """
    _require_key(columns, span.identity)
    schema = columns.schema
    into = _Columns(columns.mirrored, columns.codecs, span.identity.key)
    wanted = [ref for ref in blocks.refs if (ref.block.relation, ref.version) in span.versions]
    found = list(messages(blocks.directory, wanted, applied, span.end, blocks.store))
    if not found:
        return None
    truncated_at = _last_truncate([batch for _, batch in found], max(blocks.parts, 1))
    rejects = Rejects(span.identity.key)
    raw: list[tuple[pa.RecordBatch, Rows]] = []
    for ref, batch in found:
        rows = batch
        if truncated_at is not None:  # nothing before it matters
            rows = batch.filter(pa.array(_is_after(batch, truncated_at)))
        if rows.num_rows:
            rows = with_commit_time(ref, rows) if columns.soft_deletes else rows
            relation = blocks.versions[ref.block.relation, ref.version].relation
            raw.append((rows, decode_rows(rows.column("message"), relation, streamed=ref.segment.streamed)))
    whole = True
    if part is not None:
        whole = truncated_at is not None or not span.identity.keyed
        whole = whole or not all(can_be_divided(rows, span.identity.key) for _, rows in raw)
        if whole and part.number:
            return None
        raw = raw if whole else [_taken(batch, rows, part, span.identity.key) for batch, rows in raw]
    pieces: list[Changes] = []
    order: list[pa.RecordBatch] = []
    for batch, rows in raw:
        changes = soften(_cast(batch, rows, into, rejects), columns.soft_deletes, span.identity.key, batch)
        pieces.append(_mark_as_leaves(changes, span.identity) if span.of_leaves else changes)
        order.append(batch)
    joined = _join(pieces, schema) if pieces else _truncate(schema)
    if len({ref.block.relation for ref, _ in found}) > 1 and pieces:
        joined = joined.take(np.lexsort((_column(order, "sequence"), _column(order, "commit_lsn"))))
    if truncated_at is not None and pieces:
        joined = _join([_truncate(schema), joined], schema)
    return Decoded(joined, rejects.rows(), whole)


def _require_key(columns: TargetColumns, identity: Identity) -> None:
    """Raise NotMirrored if the target cannot identify the rows of changes. The copy has checked the key of its time."""
    doing = "applying changes to the target"
    if (column := columns.unsuitable_key(identity.key)) is not None:
        raise NotMirrored(
            doing,
            f"column {column} is dropped or masked, and is now part of the replica identity",
            "change the column's section [[table]], or choose another REPLICA IDENTITY",
        )
    if columns.soft_deletes is not None and not identity.keyed:
        raise NotMirrored(
            doing,
            "soft_deletes needs a key, and the table has none any more",
            "give the table a primary key, or remove soft_deletes from the section [[table]]",
        )


def decode_text(
    blocks: Blocks, span: Span, applied: Lsn | None, skip: Lsn | None = None, refs: Sequence[BlockRef] | None = None
) -> TextChanges | None:
    """Read the changes of a span that are not yet applied, without casting them; None if there are none.

    `skip`: without the transaction that has this commit LSN. `refs`: only these blocks. Then a TRUNCATE is not checked:
    see `require_whole_truncates`.
    """
    names = [name for name, *_ in span.shape.columns]
    into = _Columns(pa.schema([(name, pa.binary()) for name in names]), [_AS_SENT] * len(names), span.identity.key)
    found = list(_messages(blocks, span, applied, skip, blocks.refs if refs is None else refs))
    if not found:
        return None
    if refs is None:
        _last_truncate([batch for _, batch in found], max(blocks.parts, 1))
    truncations: set[Truncation] = set()
    pieces, order = [], []
    for ref, batch in found:
        rows, truncates = _without_truncates(batch)
        for row in truncates.select(["commit_lsn", "sequence", "message"]).to_pylist():
            message = decode_message(row["message"], streamed=ref.segment.streamed)
            assert isinstance(message, Truncate)
            at = row["commit_lsn"], row["sequence"]
            truncations.add(Truncation(*at, message.cascade, message.restart_identity))
        if not rows.num_rows:
            continue
        relation = blocks.versions[ref.block.relation, ref.version].relation
        decoded = decode_rows(rows.column("message"), relation, streamed=ref.segment.streamed)
        changes = _cast(rows, decoded, into, Rejects(()))
        pieces.append(_mark_as_leaves(changes, span.identity) if span.of_leaves else changes)
        order.append(rows)
    joined = _join(pieces, into.schema) if pieces else _truncate(into.schema).take(np.zeros(0, np.int64))
    commits = _column(order, "commit_lsn") if order else np.zeros(0, np.uint64)
    sequences = _column(order, "sequence") if order else np.zeros(0, np.uint64)
    if len({ref.block.relation for ref, _ in found}) > 1:
        place = np.lexsort((sequences, commits))
        joined, commits, sequences = joined.take(place), commits[place], sequences[place]
    ordered = sorted(truncations, key=lambda each: (each.commit_lsn, each.sequence))
    return TextChanges(joined, commits, sequences, tuple(ordered))


def _messages(
    blocks: Blocks, span: Span, applied: Lsn | None, skip: Lsn | None, refs: Sequence[BlockRef]
) -> Iterator[tuple[BlockRef, pa.RecordBatch]]:
    """The messages of a span that are not yet applied, without the transaction `skip`."""
    wanted = [ref for ref in refs if (ref.block.relation, ref.version) in span.versions]
    for ref, batch in messages(blocks.directory, wanted, applied, span.end, blocks.store):
        kept = batch if skip is None else batch.filter(pc.not_equal(batch.column("commit_lsn"), int(skip)))
        if kept.num_rows:
            yield ref, kept


def require_whole_truncates(blocks: Blocks, span: Span, applied: Lsn | None, skip: Lsn | None) -> None:
    """Raise NotMirrored if a TRUNCATE empties some partitions of a gathered table only."""
    if blocks.parts > 1:
        found = _messages(blocks, span, applied, skip, blocks.refs)
        _last_truncate((batch for _, batch in found), blocks.parts)


def _column(batches: Sequence[pa.RecordBatch], name: str) -> NDArray[np.uint64]:
    return np.concatenate([batch.column(name).to_numpy() for batch in batches])


def _is_after(batch: pa.RecordBatch, point: tuple[int, int]) -> NDArray[np.bool_]:
    commit, sequence = batch.column("commit_lsn").to_numpy(), batch.column("sequence").to_numpy()
    later: NDArray[np.bool_] = (commit > point[0]) | ((commit == point[0]) & (sequence > point[1]))
    return later


def _without_truncates(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """The messages that change rows, and those that truncate."""
    is_truncate = pc.equal(batch.column("kind"), "T")
    if not is_truncate.true_count:  # a filter would copy them
        return batch, batch.slice(0, 0)
    return batch.filter(pc.invert(is_truncate)), batch.filter(is_truncate)


def _last_truncate(batches: Iterable[pa.RecordBatch], parts: int) -> tuple[int, int] | None:
    """Commit LSN and sequence of the last TRUNCATE; None if there is none. It is in the log once per relation."""
    truncates = [truncated for batch in batches if len(truncated := _without_truncates(batch)[1])]
    if not truncates:
        return None
    points, counts = np.unique(
        np.stack([_column(truncates, "commit_lsn"), _column(truncates, "sequence")], axis=1), axis=0, return_counts=True
    )
    if (counts < parts).any():
        raise NotMirrored(
            "applying a TRUNCATE to a gathered table",
            "it empties some of the partitions only, and the target does not have the partition of each row",
            "no action needed: the table is being copied again",
        )
    return int(points[-1][0]), int(points[-1][1])


def _key(relation: Relation) -> tuple[str, ...]:
    """The columns of the key. With REPLICA IDENTITY FULL all columns are marked as key, but there is none."""
    if relation.replica_identity in (ReplicaIdentity.FULL, ReplicaIdentity.NOTHING):
        return ()
    return tuple(column.name for column in relation.columns if column.is_key)


def _taken(batch: pa.RecordBatch, rows: Rows, part: Part, key: tuple[str, ...]) -> tuple[pa.RecordBatch, Rows]:
    """The changes of a block that belong to a part."""
    mask = part.has(rows, key)
    return batch.filter(pa.array(mask)), filtered(rows, mask)


def _cast(batch: pa.RecordBatch, rows: Rows, into: _Columns, rejects: Rejects) -> Changes:
    """The changes of a block, with the columns of the target: a partition may have them in another order."""
    lsn = batch.column("lsn").to_numpy()
    own = {column.name: place for place, column in enumerate(rows.relation.columns)}
    places = [own[name] for name in into.schema.names]
    new = pa.table([rows.new[place].text for place in places], names=into.schema.names)
    old = None
    if rows.old_kind.any():
        text = pa.table([rows.old[place].text for place in places], names=into.schema.names)
        old = pa.table(_cast_old(text, into.codecs, into.key), schema=into.schema)
    return Changes(
        rows.kind,
        pa.table(rejects.cast(new, into.codecs, lsn), schema=into.schema),
        tuple(rows.new[place].unchanged for place in places),
        rows.old_kind,
        old,
    )


def _mark_as_leaves(changes: Changes, identity: Identity) -> Changes:
    """Mark old tuples as what the leaves log: whole rows if all leaves are FULL, otherwise at least the key."""
    kind = np.where(changes.old_kind != 0, OLD if identity.multiset else KEY, 0).astype(np.uint8)
    return replace(changes, old_kind=kind)


def _cast_old(text: pa.Table, codecs: Sequence[Codec], key: tuple[str, ...]) -> list[pa.Array]:
    """Cast old tuples. A value that the target cannot hold is NULL, as in the target; but a key must be exact."""
    casts = [each.cast(column) for each, column in zip(codecs, text.columns, strict=True)]
    for name, cast in zip(text.column_names, casts, strict=True):
        if name in key and cast.rejected is not None and cast.rejected.any():
            raise rejected_key(name)
    return [cast.values for cast in casts]


def _truncate(schema: pa.Schema) -> Changes:
    nothing = np.zeros(1, np.uint8)
    row = pa.table([pa.nulls(1, field.type) for field in schema], schema=schema)
    return Changes(np.array([TRUNCATE], np.uint8), row, (None,) * len(schema), nothing, None)


def _join(pieces: Sequence[Changes], schema: pa.Schema) -> Changes:
    if len(pieces) == 1:
        return pieces[0]
    olds = any(piece.old is not None for piece in pieces)
    blank = [pa.table([pa.nulls(len(p), f.type) for f in schema], schema=schema) for p in pieces] if olds else []
    return Changes(
        np.concatenate([piece.kind for piece in pieces]),
        pa.concat_tables([piece.new for piece in pieces]),
        tuple(_join_masks([piece.unchanged[column] for piece in pieces], pieces) for column in range(len(schema))),
        np.concatenate([piece.old_kind for piece in pieces]),
        pa.concat_tables([b if p.old is None else p.old for p, b in zip(pieces, blank, strict=True)]) if olds else None,
    )


def _join_masks(masks: Sequence[NDArray[np.bool_] | None], pieces: Sequence[Changes]) -> NDArray[np.bool_] | None:
    if all(mask is None for mask in masks):
        return None
    return np.concatenate(
        [np.zeros(len(p), np.bool_) if mask is None else mask for mask, p in zip(masks, pieces, strict=True)]
    )
