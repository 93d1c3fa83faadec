"""The sections `[[table]]` and `[types]` of `walmere.toml`: which tables are mirrored, and how they look in the target.

A section applies to all tables that its pattern matches. If several sections match a table, later ones have precedence,
key by key and column by column. `walmere.shaping` applies them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from walmere.errors import ConfigError
from walmere.names import TableName

HASH, NULL, REDACT = "hash", "null", "redact"
_DROP: Final = "drop"
_FUNCTION: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z")
_PATTERN: Final = re.compile(r'("(?:[^"]|"")+"|[^".]+)\.("(?:[^"]|"")+"|[^".]+)\Z')
_CONFIG: Final = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, defer_build=True)
_DECIMAL: Final = re.compile(r"decimal\((\d{1,2}), ?(\d{1,2})\)\Z")
_MAX_DIGITS: Final = 38
PLAIN_TYPES: Final = frozenset(
    {"string", "binary", "boolean", "smallint", "int", "bigint", "float", "double", "date", "timestamp"}
    | {"timestamp_ntz", "struct", "variant"}
)
"""Spark's names of types, except decimal(p,s)."""
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "numeric": ("string", "decimal(p,s)"),
    "uuid": ("string", "binary"),
    "interval": ("string", "struct"),
    "json": ("string", "variant"),
    "jsonb": ("string", "variant"),
}
"""By type of PostgreSQL, the types that `[types]` can choose. The first is the default."""


def decimal_of(text: str) -> tuple[int, int] | None:
    """Precision and scale of decimal(p,s); None for other types."""
    found = _DECIMAL.match(text)
    return None if found is None else (int(found[1]), int(found[2]))


def _lake_type(text: str) -> str:
    digits = decimal_of(text)
    if digits is not None:
        precision, scale = digits
        if not (0 < precision <= _MAX_DIGITS and scale <= precision):
            raise ValueError("a decimal has 1 to 38 digits, and its scale is at most its precision")
        return f"decimal({precision},{scale})"
    if text not in PLAIN_TYPES:
        raise ValueError(f"{text} is not a type of the target: it is decimal(p,s) or {', '.join(sorted(PLAIN_TYPES))}")
    return text


def _identifier(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("must not be empty, and must not contain a zero byte")
    return text


def _array(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


LakeType: TypeAlias = Annotated[str, AfterValidator(_lake_type)]
Name: TypeAlias = Annotated[str, AfterValidator(_identifier)]


HASH_KEY: Final = "WALMERE_HASH_KEY"
"""The environment variable that has the key of `mask = "hash"`."""
KEY_HINT: Final = f"export {HASH_KEY}=$(openssl rand -hex 32), and keep it: with another key, tables are copied again"
_SHORTEST_KEY: Final = 16


class ColumnSection(BaseModel):
    """What is done with a column. As text: `"drop"`, or a mask."""

    model_config = _CONFIG

    drop: bool = False
    """Leave the column out. The copy does not read it from the source."""
    mask: str | None = None
    """`"hash"`: HMAC-SHA256 of PostgreSQL's text, as 64 hexadecimal digits. `"redact"`: `***`. `"null"`: NULL.
    `"module:function"`: [a function](../guides/choose-and-shape-tables.md#functions) over Arrow arrays. NULL stays
    NULL."""
    type: LakeType | None = None
    """The type in the target, by Spark's name. Of a function, the type of its result. Otherwise one that is exact:
    `string` for any type, `decimal(p,s)` for `numeric` and integers, `int` and `bigint` for smaller integers, `binary`
    for `uuid`, `struct` for `interval`, `variant` for `json` and `jsonb`. Values that do not fit go to the rejects."""

    @field_validator("mask")
    @classmethod
    def _known_mask(cls, value: str | None) -> str | None:
        if value is not None and value not in (HASH, NULL, REDACT) and not _FUNCTION.match(value):
            raise ValueError('must be "hash", "null", "redact" or a function: "module:function"')
        return value

    @model_validator(mode="after")
    def _one_of(self) -> ColumnSection:
        if self.drop and (self.mask is not None or self.type is not None):
            raise ValueError("a column that is dropped has neither mask nor type")
        if self.mask in (HASH, REDACT) and self.type not in (None, "string"):
            raise ValueError(f"{self.mask} makes text: the type cannot be {self.type}")
        return self


def _column(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return {"drop": True} if value == _DROP else {"mask": value}


class TableSection(BaseModel):
    """One `[[table]]`."""

    model_config = _CONFIG

    match: str
    """`"schema.table"`, names at the source. Both may be patterns with `*`, `?` and `[abc]`, as in a shell; upper and
    lower case differ. A part in double quotes is a name as it is: `'"my.schema"."a*b"'`."""
    include: bool | None = None
    """`false`: the tables are not mirrored. Their changes are received, because the publication has them, and
    skipped."""
    namespace: Name | None = None
    """The schema in the target; by default that of the source."""
    name: Name | None = None
    """The name in the target; by default that of the source."""
    columns: Mapping[Name, Annotated[ColumnSection, BeforeValidator(_column)]] = Field(default_factory=dict)
    """What is done with columns, by name at the source: see below."""
    soft_deletes: Name | None = None
    """The name of a column, such as `"deleted_at"`. Rows that are deleted at the source
    [stay in the target](../guides/choose-and-shape-tables.md#keep-deleted-rows), with the time of the delete there. The
    table needs a key."""
    cluster_by: Annotated[tuple[Name, ...], BeforeValidator(_array)] | None = None
    """Columns of the target, such as `["country", "at"]`. The rows of a copy are
    [sorted](../guides/choose-and-shape-tables.md#sort-the-rows-of-a-copy) by them."""

    @field_validator("match")
    @classmethod
    def _pattern(cls, value: str) -> str:
        if not _PATTERN.match(value):
            raise ValueError('must be "schema.table", such as "public.orders", "public.audit_*" or "*.*"')
        return value

    @field_validator("namespace")
    @classmethod
    def _not_reserved(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("_rejects."):
            raise ValueError("names that begin with _rejects. are for rejects")
        return value

    @property
    def exact(self) -> bool:
        """Whether it names one table."""
        return all(part.startswith('"') or not set(part) & set("*?[") for part in self._parts())

    @property
    def shapes(self) -> bool:
        """Whether it does more than to include or exclude tables."""
        return any((self.namespace, self.name, self.columns, self.soft_deletes, self.cluster_by))

    def matches(self, table: TableName) -> bool:
        """Whether it applies to a table of the source."""
        return all(_part_matches(pattern, part) for pattern, part in zip(self._parts(), table, strict=True))

    def _parts(self) -> tuple[str, ...]:
        found = _PATTERN.match(self.match)
        assert found is not None
        return found.groups()


def refused_in_a_database(sections: Sequence[TableSection], types: Mapping[str, str], doing: str) -> None:
    """Raise ConfigError for what a target that is a database does not support."""
    wrong = ["[types]: in a database, columns have the types of the source"] if types else []
    wrong += [
        f"[[table]] {number} ({each.match}): in a database, tables have the names and columns of the source;"
        " only include is supported there"
        for number, each in enumerate(sections, 1)
        if each.shapes
    ]
    if wrong:
        raise ConfigError(doing, "; ".join(wrong), "remove it, or create a view in the target")


def _part_matches(pattern: str, name: str) -> bool:
    if pattern.startswith('"'):
        return pattern[1:-1].replace('""', '"') == name
    return fnmatchcase(name, pattern)


def _choices(value: Mapping[str, str]) -> Mapping[str, str]:
    return {postgres: _choice(postgres, chosen) for postgres, chosen in value.items()}


def _choice(postgres: str, chosen: str) -> str:
    if postgres not in CHOICES:
        raise ValueError(f"there is no choice for {postgres}; there is one for {', '.join(sorted(CHOICES))}")
    chosen = _lake_type(chosen)
    allowed = CHOICES[postgres]
    if chosen not in allowed and not (decimal_of(chosen) and "decimal(p,s)" in allowed):
        raise ValueError(f"{postgres} cannot be {chosen}; it can be {' or '.join(allowed)}")
    return chosen


Types: TypeAlias = Annotated[Mapping[str, str], AfterValidator(_choices)]
"""The section `[types]`."""


def checked_key(environment: Mapping[str, str], doing: str) -> SecretStr | None:
    """The key of hashes; None: there is none. Raises ConfigError."""
    key = environment.get(HASH_KEY, "")
    if key and len(key) < _SHORTEST_KEY:
        raise ConfigError(doing, f"{HASH_KEY} has fewer than {_SHORTEST_KEY} characters", KEY_HINT)
    return SecretStr(key) if key else None
