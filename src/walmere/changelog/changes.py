"""The changes of a transaction as Python objects, with typed values.

A reader hands out the messages of a transaction some at a time (`Messages`). Those of one definition are decoded
together, column by column, with the codecs of copies and batches; Python only builds the rows. This happens when a
value of one of them is first read. A caller that only counts changes, or reads the raw messages, needs no types.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from walmere.changelog.decoded import DecodedRows, Rejected
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.pgoutput import messages as m
from walmere.pgoutput.columns import DELETE, KEY, OLD
from walmere.pgoutput.decode import decode
from walmere.pgoutput.relation import RelMap
from walmere.types import PgType
from walmere.types.base import Mask
from walmere.types.codec import codec

KINDS: Final[Mapping[str, Literal["insert", "update", "delete", "truncate", "message"]]] = {
    "I": "insert",
    "U": "update",
    "D": "delete",
    "T": "truncate",
    "M": "message",
}
"""The messages that change something, by their letter."""

Row: TypeAlias = dict[str, Any]
"""Values by column."""
TypesOf: TypeAlias = Callable[[Iterable[int]], Mapping[int, PgType]]
"""Looks up types by OID. It may return more than was asked for, and less: built-in types, or types that are gone."""


@dataclass(frozen=True, slots=True, repr=False)
class Change:
    """A change of one row, a TRUNCATE, or a logical message.

    `new`, `key` and `old` have Python values: int, float, bool, str, bytes, Decimal, date, datetime, list, dict.
    A value that its type cannot hold (infinity, a date BC) is None there, and its text is in `rejects`.
    """

    kind: Literal["insert", "update", "delete", "truncate", "message"]
    lsn: Lsn
    sequence: int  # of the message in the log
    relations: tuple[m.Relation, ...]  # of a TRUNCATE there can be several, of a logical message there is none
    raw: bytes  # as pgoutput sent it
    streamed: bool  # `raw` has an xid after its kind
    _rows: _RowBlock | None = field(compare=False)
    _place: int = field(compare=False)

    def __repr__(self) -> str:
        """Without values: they must not be logged."""
        return f"<walmere.Change {self.kind} {', '.join(self.tables)} at {self.lsn}>"

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables, as schema.table."""
        return tuple(str(TableName(each.namespace or "pg_catalog", each.name)) for each in self.relations)

    @property
    def table(self) -> str | None:
        """The table, as schema.table. None if there is not exactly one."""
        return self.tables[0] if len(self.relations) == 1 else None

    @property
    def new(self) -> Row | None:
        """The new row. Values in `unchanged` are missing. None for a delete."""
        return None if self._rows is None else self._rows.values.new[self._place]

    @property
    def key(self) -> Row | None:
        """The old key, if it was sent: of a delete, and of an update that changes it."""
        return None if self._rows is None else self._rows.values.key[self._place]

    @property
    def old(self) -> Row | None:
        """The old row, if it was sent: with REPLICA IDENTITY FULL, of every update and delete."""
        return None if self._rows is None else self._rows.values.old[self._place]

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Columns whose values are not known: they are TOASTed and unchanged, so PostgreSQL did not send them."""
        return () if self._rows is None else self._rows.values.unchanged.get(self._place, ())

    @property
    def rejects(self) -> Mapping[str, str]:
        """The text of values that their type cannot hold, by column; those of the old row or key, by `old.…`."""
        return {} if self._rows is None else self._rows.values.rejects[self._place] or {}

    @property
    def message(self) -> m.Insert | m.Update | m.Delete | m.Truncate | m.LogicalMessage:
        """The message itself, with values as PostgreSQL's text."""
        message = decode(self.raw, streamed=self.streamed)
        assert isinstance(message, m.Insert | m.Update | m.Delete | m.Truncate | m.LogicalMessage)
        return message


@dataclass(frozen=True, slots=True)
class Messages:
    """Consecutive messages of a transaction that change something."""

    rows: pa.RecordBatch  # the columns of a segment, and `version`, that of the definition
    streamed: bool
    relations: RelMap
    types: TypesOf

    def changes(self) -> Iterator[Change]:
        """One after the other."""
        blocks, places = self._blocks()
        columns = (self.rows.column(name).to_pylist() for name in ("kind", "lsn", "sequence", "message"))
        for at, (letter, lsn, sequence, raw) in enumerate(zip(*columns, strict=True)):
            block = blocks[at]
            relations = (block.relation,) if block is not None else self._relations(raw)
            yield Change(KINDS[letter], Lsn(lsn), sequence, relations, raw, self.streamed, block, places[at])

    def _blocks(self) -> tuple[list[_RowBlock | None], list[int]]:
        """For each message its block, and its place there. Messages that are about no row have none."""
        oids, versions = (self.rows.column(name).to_numpy() for name in ("relation", "version"))
        is_row = np.isin(self.rows.column("kind").to_numpy(zero_copy_only=False), ["I", "U", "D"])
        code = oids.astype(np.uint64) << np.uint64(32) | versions
        blocks: list[_RowBlock | None] = [None] * len(code)
        places = np.zeros(len(code), np.int64)
        for each in np.unique(code[is_row]):
            where = np.flatnonzero(is_row & (code == each))
            relation = self.relations.get(int(each) >> 32, int(each) & 0xFFFFFFFF).relation
            block = _RowBlock(self.rows.take(pa.array(where)), relation, self.streamed, self.types)
            places[where] = np.arange(len(where))
            for place in where:
                blocks[place] = block
        return blocks, places.tolist()

    def _relations(self, raw: bytes) -> tuple[m.Relation, ...]:
        message = decode(raw, streamed=self.streamed)
        oids = message.relations if isinstance(message, m.Truncate) else ()
        return tuple(self.relations.current(oid).relation for oid in oids)


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of a block, one item per message."""

    new: Sequence[Row | None]
    key: Sequence[Row | None]
    old: Sequence[Row | None]
    unchanged: Mapping[int, tuple[str, ...]]  # by place; few messages have any
    rejects: Sequence[Row | None]


class _RowBlock:
    """The row messages of one definition, decoded when first asked."""

    def __init__(self, messages: pa.RecordBatch, relation: m.Relation, streamed: bool, types: TypesOf) -> None:
        self.relation = relation
        self._messages = messages
        self._streamed = streamed
        self._types = types

    @cached_property
    def values(self) -> _Values:
        columns = self.relation.columns
        names = [each.name for each in columns]
        types = self._types([each.type_oid for each in columns])
        codecs = [codec(each.type_oid, each.type_modifier, types) for each in columns]
        decoded = DecodedRows(self._messages, self.relation, self._streamed)
        rows, rejected = decoded.rows, Rejected(self._messages.num_rows)
        present = [decoded.new(place) for place in range(len(columns))]
        new = [
            rejected.keep(name, each.text, codec.cast(each.text))
            for name, codec, each in zip(names, codecs, present, strict=True)
        ]
        old = [
            rejected.keep(f"old.{name}", each.text, codec.cast(each.text))
            for name, codec, each in zip(names, codecs, rows.old, strict=True)
        ]
        keys = [place for place, each in enumerate(columns) if each.is_key]
        built = _rows(names, new, rows.kind != DELETE)
        return _Values(
            built,
            _rows([names[place] for place in keys], [old[place] for place in keys], rows.old_kind == KEY),
            _rows(names, old, rows.old_kind == OLD),
            _without_unchanged(built, names, [each.unchanged for each in present]),
            rejected.maps().to_pylist(maps_as_pydicts="strict"),
        )


def _rows(names: Sequence[str], columns: Sequence[pa.Array], present: Mask) -> list[Row | None]:
    """Build the rows of these columns; None where there is none."""
    if not present.any():
        return [None] * len(present)
    values = [each.to_pylist(maps_as_pydicts="strict") for each in columns]
    each_row = zip(*values, strict=True) if values else itertools.repeat(())
    return [
        dict(zip(names, row, strict=True)) if there else None for there, row in zip(present, each_row, strict=False)
    ]


def _without_unchanged(
    rows: Sequence[Row | None], names: Sequence[str], unchanged: Sequence[Mask | None]
) -> dict[int, tuple[str, ...]]:
    """Remove the values that are not known. Returns the names of their columns, by row."""
    found: dict[int, tuple[str, ...]] = {}
    for name, mask in zip(names, unchanged, strict=True):
        for place in np.flatnonzero(mask).tolist() if mask is not None else ():
            found[place] = (*found.get(place, ()), name)
            row = rows[place]
            assert row is not None
            del row[name]
    return found
