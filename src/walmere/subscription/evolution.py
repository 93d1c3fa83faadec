"""Which changes of a table's definition its target can take on in place, and which need a new copy. Pure: no I/O here.

The rule follows PostgreSQL's own: **where it did not write the table anew, neither do we copy it anew.** An added
column (with a constant default, old rows get it as their `attmissingval`), a dropped or renamed one, a longer varchar,
a numeric of more digits: all these leave the rows on disk as they are, and from the catalogs we know exactly what the
rows are now. Whenever PostgreSQL rewrites a table, their values may be anything (`ALTER TYPE … USING`, a volatile
default), and the stream does not tell: then only a copy does.

How we know: the filenode is another after a rewrite; an `attnum` is never given to another column, so it tells a rename
from a new column; and a column whose attnum is greater than any that the table had is one that was added since. (One
that was there before, but is published only now, has values that we have never seen: the publication was altered.)

The catalogs speak of now, the stream of its own time. Only if both say the same do the catalogs tell what the stream
has come to; else more has happened meanwhile, and a copy settles it all at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from walmere.definition import Definition, PublishedColumn
from walmere.types import PgType
from walmere.types.codec import codec

_TEXT, _VARCHAR = 25, 1043
_ALIKE: Final = frozenset({_TEXT, _VARCHAR})
"""Types whose values are the same text."""


@dataclass(frozen=True, slots=True)
class Evolution:
    """What the target is to have: its columns, and for each the name it had, or what all rows have in it."""

    schema: pa.Schema
    values: tuple[str | pa.Scalar, ...]


def in_place(
    old: Definition, new: Definition, missing: Mapping[int, str | None], types: Mapping[int, PgType]
) -> Evolution | None:
    """How a target of the old definition becomes one of the new. None: it takes a copy.

    `missing`: by attnum, what rows have in a column that was added after them.
    """
    if new.layout.filenodes != old.layout.filenodes or new.publication_fingerprint != old.publication_fingerprint:
        return None
    before = {column.attnum: column for column in old.columns}
    fields: list[tuple[str, pa.DataType]] = []
    values: list[str | pa.Scalar] = []
    for column in new.columns:
        its = codec(column.type_oid, column.typmod, types)
        fields.append((column.name, its.arrow))
        known = before.get(column.attnum)
        if known is not None:
            if not _same_values(known, column, codec(known.type_oid, known.typmod, types).arrow, its.arrow):
                return None
            values.append(known.name)
        elif column.attnum <= old.natts or new.leaves:
            return None  # each partition has its own missing value
        else:
            text = missing.get(column.attnum)
            cast = its.cast(pa.chunked_array([pa.array([None if text is None else text.encode()], pa.binary())]))
            if cast.rejected is not None and cast.rejected.any():
                return None
            [value] = cast.values
            values.append(value)
    return Evolution(pa.schema(fields), tuple(values))


def _same_values(old: PublishedColumn, new: PublishedColumn, held: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether what the target holds of a column are its values still, at most in a wider decimal."""
    if old.type_oid != new.type_oid and not {old.type_oid, new.type_oid} <= _ALIKE:
        return False
    if held == wanted:
        return True
    decimals = pa.types.is_decimal(held) and pa.types.is_decimal(wanted)
    return bool(decimals and held.scale == wanted.scale and held.precision <= wanted.precision)
