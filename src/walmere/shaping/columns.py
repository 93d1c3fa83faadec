"""The columns of the target's table, each with the codec that makes it from the source's text. One path for all.

A table without a section has the published columns and their usual codecs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pydantic import SecretStr

from walmere.definition import ShapedColumn, Shaping
from walmere.shaping.masks import Function, Hash, Null, Redact
from walmere.types.base import Codec
from walmere.types.choice import arrow_type, by_type, choose
from walmere.types.codec import codec
from walmere.types.pgtype import PgType

DELETED_AT: Final = pa.timestamp("us", "UTC")
"""The type of the column of soft deletes."""


@dataclass(frozen=True, slots=True)
class TargetColumns:
    """The columns that the target has, in order."""

    names: tuple[str, ...]
    codecs: tuple[Codec, ...]
    soft_deletes: str | None = None  # a column of the target only, after the others

    @property
    def mirrored(self) -> pa.Schema:
        """The columns that are made from the source's."""
        return pa.schema([(name, each.arrow) for name, each in zip(self.names, self.codecs, strict=True)])

    @property
    def schema(self) -> pa.Schema:
        """All columns of the target."""
        if self.soft_deletes is None:
            return self.mirrored
        return self.mirrored.append(pa.field(self.soft_deletes, DELETED_AT))

    def rows(self, values: Sequence[pa.Array], count: int) -> pa.RecordBatch:
        """Rows of the target that are not deleted."""
        own = [] if self.soft_deletes is None else [pa.nulls(count, DELETED_AT)]
        return pa.RecordBatch.from_arrays([*values, *own], schema=self.schema)

    def unsuitable_key(self, key: Iterable[str]) -> str | None:
        """A column of the key that cannot identify rows in the target; None: all can."""
        by_name = dict(zip(self.names, self.codecs, strict=True))
        return next((name for name in key if not _identifies(by_name.get(name))), None)


def _identifies(codec: Codec | None) -> bool:
    """Whether different values are different in the target."""
    return codec is not None and (not codec.hides or isinstance(codec, Hash))


def target_columns(
    columns: Iterable[tuple[str, int, int]],
    types: Mapping[int, PgType],
    shaping: Shaping | None = None,
    hash_key: SecretStr | None = None,
) -> TargetColumns:
    """The columns of the target for those of the source: name, type, type modifier.

    Without `hash_key`, columns that are hashed cannot be cast. Raises ValueError for a type that cannot be chosen.
    """
    names, codecs = [], []
    rules = {} if shaping is None else {each.name: each for each in shaping.columns}
    chosen = {} if shaping is None else dict(shaping.types)
    for name, type_oid, typmod in columns:
        rule = rules.get(name)
        if rule is None or not rule.drop:
            names.append(name)
            usual = by_type(type_oid, typmod, types, chosen) if chosen else None
            usual = usual or codec(type_oid, typmod, types)
            codecs.append(usual if rule is None else _shaped(usual, (type_oid, typmod), types, rule, hash_key))
    return TargetColumns(tuple(names), tuple(codecs), None if shaping is None else shaping.soft_deletes)


def _shaped(
    usual: Codec,
    column: tuple[int, int],
    types: Mapping[int, PgType],
    rule: ShapedColumn,
    hash_key: SecretStr | None,
) -> Codec:
    match rule.mask:
        case None:
            return usual if rule.type is None else choose(*column, types, rule.type)
        case "hash":
            return Hash(f"the hash of {usual.name}", pa.string(), hash_key)
        case "redact":
            return Redact(f"the redacted {usual.name}", pa.string())
        case "null":
            return Null(usual.name, usual.arrow if rule.type is None else arrow_type(rule.type))
        case function:
            result = usual.arrow if rule.type is None else arrow_type(rule.type)
            return Function(f"{usual.name}, masked by {function}", result, function, usual)
