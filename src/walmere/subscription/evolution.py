"""Which changes of a table's definition its target can adopt in place, and which need a new copy. Pure: no I/O here.

The rule: **if PostgreSQL did not rewrite the table, it is not copied again.** An added column (with a constant default,
old rows get it as `attmissingval`), a dropped or renamed column, a longer varchar, a numeric with more digits: all
these leave the rows on disk as they are, and the catalogs say what the rows are now. If PostgreSQL rewrites the table
(`ALTER TYPE … USING`, a volatile default), rows may get any value, and the stream does not have it: only a copy does.

A rewrite changes the filenode. An `attnum` is never reused, so it distinguishes a rename from a new column. A column
whose attnum is greater than all that the table had was added since. (A column that existed before, but is published
only now, has values that were never received: the publication was altered.)

The catalogs describe the present, the stream an earlier time. The catalogs can be used only if both have the same
definition. Otherwise the table was altered again meanwhile, and it is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
from pydantic import SecretStr

from walmere.definition import Definition, PublishedColumn, Shaping
from walmere.names import TableName
from walmere.shaping.columns import DELETED_AT, target_columns
from walmere.types import PgType
from walmere.types.base import Codec

_TEXT, _VARCHAR = 25, 1043
_SAME_TEXT: Final = frozenset({_TEXT, _VARCHAR})
"""Types whose values have the same text."""


@dataclass(frozen=True, slots=True)
class Evolution:
    """The new columns of the target. `values` has for each its old name, or the value that all rows get in it."""

    schema: pa.Schema
    values: tuple[str | pa.Scalar, ...]


def in_place(
    old: Definition,
    new: Definition,
    missing: Mapping[int, str | None],
    types: Mapping[int, PgType],
    hash_key: SecretStr | None = None,
) -> Evolution | None:
    """How a target with the old definition gets the new one. None: it needs a copy.

    `missing`: by attnum, the value of an added column in older rows (`attmissingval`).
    """
    if not _same_shaping(old, new):
        return None
    if new.layout.filenodes != old.layout.filenodes or new.publication_fingerprint != old.publication_fingerprint:
        return None
    before = {column.attnum: column for column in old.columns}
    had, wanted = (_codecs(each, types, hash_key) for each in (old, new))
    fields: list[tuple[str, pa.DataType]] = []
    values: list[str | pa.Scalar] = []
    for column in new.columns:
        codec = wanted.get(column.name)
        if codec is None:
            continue  # it is dropped
        fields.append((column.name, codec.arrow))
        known = before.get(column.attnum)
        if known is not None:
            if not _same_values(known, column, had[known.name].arrow, codec.arrow):
                return None
            values.append(known.name)
        elif column.attnum <= old.natts or new.leaves:
            return None  # each partition has its own missing value
        else:
            text = missing.get(column.attnum)
            cast = codec.cast(pa.chunked_array([pa.array([None if text is None else text.encode()], pa.binary())]))
            if cast.rejected is not None and cast.rejected.any():
                return None
            [value] = cast.values
            values.append(value)
    if new.shaping is not None and (own := new.shaping.soft_deletes) is not None:
        fields.append((own, DELETED_AT))
        values.append(own)
    return Evolution(pa.schema(fields), tuple(values))


def _codecs(definition: Definition, types: Mapping[int, PgType], hash_key: SecretStr | None) -> dict[str, Codec]:
    """The codecs of the columns that the target has."""
    columns = definition.shape(TableName("", "")).columns
    made = target_columns(columns, types, definition.shaping, hash_key)
    return dict(zip(made.names, made.codecs, strict=True))


def _same_shaping(old: Definition, new: Definition) -> bool:
    """Whether columns that both have are dropped, masked or cast in the same way."""
    before, now = old.shaping or Shaping(), new.shaping or Shaping()
    rules = []
    for definition, shaping in ((old, before), (new, now)):
        found = {each.attnum: shaping.column(each.name) for each in definition.columns}
        rules.append({number: replace(rule, name="") if rule else None for number, rule in found.items()})
    both = rules[0].keys() & rules[1].keys()
    keys = {each.key_fingerprint for each in (before, now)} - {None}
    if before.soft_deletes != now.soft_deletes:
        return False
    return len(keys) < 2 and all(rules[0][number] == rules[1][number] for number in both)


def _same_values(old: PublishedColumn, new: PublishedColumn, held: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether the column's values in the target are still valid, at most in a wider decimal."""
    if old.type_oid != new.type_oid and not {old.type_oid, new.type_oid} <= _SAME_TEXT:
        return False
    if held == wanted:
        return True
    decimals = pa.types.is_decimal(held) and pa.types.is_decimal(wanted)
    return bool(decimals and held.scale == wanted.scale and held.precision <= wanted.precision)
