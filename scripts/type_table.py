"""Writes docs/reference/types.md from the code: `make reference`. A test checks that it is up to date."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from walmere.sinks.delta.log.schema import column_types, delta_schema
from walmere.table_sections import CHOICES
from walmere.types.base import Codec
from walmere.types.builtin import BUILT_IN
from walmere.types.codec import EXTENSION_CODECS, codec
from walmere.types.date import Date, Timestamp, TimestampTz
from walmere.types.number import Integer
from walmere.types.numeric import Numeric, typmod_of
from walmere.types.pgtype import PgType, TypType

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "types.md"
NAMES = {"bool": "boolean", "bpchar": "char(n)", "varchar": "varchar(n)", "char": '"char"'}
"""SQL's names, where they differ from pg_type's."""
_DAYS = "`infinity`, years BC, years after 9999"
_NUMERIC = 1700
_EXAMPLES = 100_000

HEAD = """# Types

<!-- written by scripts/type_table.py: do not edit -->

Every type of PostgreSQL, and its type in the lake. A type that has no exact type there is text, as PostgreSQL writes it
(`DateStyle = ISO`, `IntervalStyle = postgres`, `TimeZone = UTC`, `bytea_output = hex`).

What a type of the lake cannot hold is NULL there, and the text is in the table's rejects:
`<path>/_rejects.<schema>/<table>`, with LSN, key and column. If it is part of the key, the table is refused.

`[types]` and the sections `[[table]]` [choose](configuration.md#types) other types. Any column can be `string`. `json`
and `jsonb` as `variant` are a struct of two binary fields in Arrow; the guide says
[what VARIANT cannot hold](../guides/choose-and-shape-tables.md#json-as-variant).

## Built-in types

| PostgreSQL | Delta | Arrow | not held | can also be |
|---|---|---|---|---|
"""


def delta_name(arrow: pa.DataType) -> str:
    """Delta's name of a type, as Spark writes it."""
    [(_, text)] = column_types(delta_schema(pa.schema([("c", arrow)])))
    return _shown(json.loads(text))


def _shown(found: object) -> str:
    if isinstance(found, dict):
        match found["type"]:
            case "array":
                return f"array<{_shown(found['elementType'])}>"
            case "map":
                return f"map<{_shown(found['keyType'])}, {_shown(found['valueType'])}>"
    return {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}.get(str(found), str(found))


def not_held(its: Codec) -> str:
    """The values that a codec rejects."""
    if isinstance(its, Date | Timestamp | TimestampTz):
        return _DAYS
    if isinstance(its, Numeric):
        return "`NaN`, `Infinity`"
    if isinstance(its, Integer) and its.name == "xid8":
        return "from 2^63"
    return ""


def _row(name: str, its: Codec, also: str = "") -> str:
    return f"| `{name}` | `{delta_name(its.arrow)}` | `{its.arrow}` | {not_held(its)} | {also} |"


def _also(name: str) -> str:
    return ", ".join(f"`{each}`" for each in CHOICES.get(name, ())[1:])


def built_in() -> list[str]:
    """A row for each built-in type that is not an array."""
    rows = []
    named = {NAMES.get(each.name, each.name): each for each in BUILT_IN.values() if not each.elem}
    for name, found in sorted(named.items(), key=lambda each: each[0].strip('"')):
        oid = found.oid
        rows.append(_row(name, codec(oid, -1, {}), _also(found.name)))
        if oid == _NUMERIC:
            rows.append(_row("numeric(p,s)`, p ≤ 38: `numeric(12,2)", codec(oid, typmod_of(12, 2), {})))
    return rows


def others() -> list[str]:
    """A row for each kind of type that is created."""
    oid = _EXAMPLES
    kinds = {
        "an enum": PgType(oid, "public", "mood", TypType.ENUM),
        "a composite type": PgType(oid, "public", "pair", TypType.COMPOSITE),
        "a range or multirange": PgType(oid, "public", "span", TypType.RANGE),
        "a type of an extension that is not listed": PgType(oid, "public", "geometry", extension="postgis"),
    }
    rows = [f"| {text} | `{delta_name(codec(oid, -1, {oid: each}).arrow)}` | |" for text, each in kinds.items()]
    rows += ["| a domain | that of its base type | |"]
    array = codec(1007, -1, {}).arrow
    rows += [
        f"| an array, such as `int4[]` | `{delta_name(array)}`, a list of the element's type"
        " | several dimensions, a lower bound other than 1, an element that cannot be held |"
    ]
    for extension, name in sorted(EXTENSION_CODECS):
        its = codec(oid, -1, {oid: PgType(oid, "public", name, extension=extension)})
        rows.append(f"| `{name}` (extension {extension}) | `{delta_name(its.arrow)}` | {not_held(its)} |")
    return rows


def page() -> str:
    """The whole page."""
    parts = [HEAD + "\n".join(built_in())]
    parts.append("## Other types\n\n| PostgreSQL | Delta | not held |\n|---|---|---|\n" + "\n".join(others()))
    parts.append("Text in the database that is not UTF-8 cannot be held by a string, either: it is in the rejects.\n")
    return "\n\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
