r"""The values of both sides in a form that can be compared, in DuckDB's SQL: PostgreSQL's text, if possible.

The source sends text, and the target has values of Arrow types. If `walmere.types` made both sides alike, a wrong cast
would be wrong on both sides, and equal. So this module goes the other way: it writes the target's value as PostgreSQL
would write it in a session with our settings (`walmere.libpq.SESSION`), and uses nothing of `walmere.types`.

    bool                     t, f
    integers, numeric        the digits, with all digits of the scale
    date                     2026-01-31
    timestamp, timestamptz   2026-01-31 12:00:00.5, and +00 behind it: the session's time zone is UTC
    bytea                    \x00ff
    text and all the rest    as it is
    arrays                   {1,NULL,"a, b"}
    hstore                   "a"=>"b", "c"=>NULL
    interval in its parts    1 year 2 mons -3 days +04:05:06.7
    VARIANT                  the JSON that DuckDB makes of it: `json_text` makes the same of the source's text

Floats are the exception. PostgreSQL writes the shortest text that gives the same float again, and other programs write
another text of that length. So here the source's text becomes a float, by DuckDB, and the bits are compared. The type
at the source says which float: if the target has another type, the column is different.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from walmere.variant_type import VARIANT

_NEEDS_QUOTES: Final = r'^(?i:null)?$|[ \t\n\r\v\f"\\{{}}{delimiter}]'
"""What is empty, is the word NULL, or has a character that means something in an array."""
_QUOTED: Final = r'"(?:[^"\\]|\\.)*"|NULL'


@dataclass(frozen=True, slots=True)
class SourceType:
    """What has to be known of a column's type at the source. Its `typname` decides, not the target's type."""

    floats: str | None = None  # of float4, float8, or an array or a vector of them: DuckDB's name of the type
    delimiters: str = ""  # `typdelim` of an array's elements, and of the arrays in it; a vector is an array, too
    decimal: tuple[int, int] | None = None  # of a number for which a decimal was chosen: precision and scale
    uuid_bytes: bool = False  # of a uuid for which binary was chosen
    masked: bool = False  # the source's value was masked as the target's, so it has the target's type
    shaped: bool = False  # the target has another value, or another type, than by default


def source_value(column: str, kind: SourceType) -> str:
    """The value of a column of the source, which is text."""
    if kind.decimal is not None:  # 1.5 is 1.500 in the target; what it cannot hold is NULL by now
        precision, scale = kind.decimal
        number = f"TRY_CAST({column} AS DECIMAL({precision}, {scale}))"
        return _written(number, pa.decimal128(precision, scale))
    if kind.uuid_bytes:
        return rf"('\x' || replace({column}, '-', ''))"
    if kind.floats is None:
        return column
    parsed = _parsed(column, kind.floats, len(kind.delimiters))
    return parsed if len(kind.delimiters) < 2 else _written(parsed, _lists(pa.float64(), len(kind.delimiters)))


def target_value(column: str, kind: pa.DataType, source: SourceType) -> str:
    """The value of a column of the target."""
    floats, depth = _floats(kind)
    return column if floats and depth < 2 else _written(column, kind, source.delimiters)


def source_terms(value: str, kind: SourceType) -> Iterator[str]:
    """What to hash of a value of the source, so that different values have different hashes."""
    return _terms(value, kind.floats is not None, len(kind.delimiters))


def target_terms(value: str, kind: pa.DataType) -> Iterator[str]:
    """The same of a value of the target."""
    return _terms(value, *_floats(kind))


def _terms(value: str, floats: bool, depth: int) -> Iterator[str]:
    """To DuckDB's hash, 0.0 and -0.0 are the same, and so are an empty list and NULL."""
    yield value
    if floats and depth == 0:
        yield _negative_zero(value)
    elif floats and depth == 1:
        yield f"CASE WHEN {value} IS NULL THEN -1 ELSE len({value})::BIGINT END"
        yield f"list_transform({value}, lambda x: {_negative_zero('x')})"


def _negative_zero(value: str) -> str:
    return f"({value} = 0 AND signbit({value}))"


def _floats(kind: pa.DataType) -> tuple[bool, int]:
    """Whether it is made of floats, and how many lists are around them."""
    depth = 0
    while pa.types.is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return bool(pa.types.is_floating(kind)), depth


def _lists(kind: pa.DataType, depth: int) -> pa.DataType:
    return _lists(pa.list_(kind), depth - 1) if depth else kind


def _written(value: str, kind: pa.DataType, delimiters: str = ",", depth: int = 0) -> str:
    """As PostgreSQL writes it. Floats in lists of lists as DuckDB writes them, on both sides."""
    text = f"{value}::VARCHAR"
    if pa.types.is_boolean(kind):
        return f"CASE {value} WHEN true THEN 't' WHEN false THEN 'f' END"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_date32(kind):
        return text
    if pa.types.is_decimal(kind):
        if kind.precision > kind.scale:
            return text
        return f"CASE WHEN {value} < 0 THEN '-0' || ({text})[2:] ELSE '0' || {text} END"  # DuckDB writes .05
    if pa.types.is_timestamp(kind):
        return text if kind.tz is None else f"({text} || '+00')"
    if pa.types.is_binary(kind):
        return rf"('\x' || lower(hex({value})))"
    if pa.types.is_string(kind):
        return value
    each = f"x{depth}"
    if pa.types.is_list(kind):
        delimiter, inner = delimiters[:1] or ",", delimiters[1:]
        element = _written(each, kind.value_type, inner, depth + 1)
        texts = value if element == each else f"list_transform({value}, lambda {each}: {element})"
        element = f"coalesce({_element(each, kind.value_type, delimiter)}, 'NULL')"
        elements = f"list_transform({texts}, lambda {each}: {element})"
        return f"('{{' || array_to_string({elements}, {_literal(delimiter)}) || '}}')"
    if pa.types.is_map(kind) or pa.types.is_struct(kind):
        return _hstore(value, each) if pa.types.is_map(kind) else _struct(value, kind)
    raise TypeError(f"no text for {kind}")


def _struct(value: str, kind: pa.DataType) -> str:
    if kind == VARIANT:
        return f"variant_bytes_to_variant({value}.metadata || {value}.value)::JSON::VARCHAR"
    return _interval(value)


def _hstore(value: str, each: str) -> str:
    pair = f"{_quoted(f'{each}.key')} || '=>' || coalesce({_quoted(f'{each}.value')}, 'NULL')"
    pairs = f"array_to_string(list_transform(map_entries({value}), lambda {each}: {pair}), ', ')"
    return f"CASE WHEN {value} IS NOT NULL THEN {pairs} END"


def _interval(value: str) -> str:
    """months, days and microseconds as PostgreSQL's `EncodeInterval` writes them.

    After a negative part, a positive one has a plus sign.
    """
    months, days, time = (f"{value}.{name}" for name in ("months", "days", "microseconds"))
    years = f"(({months} - {months} % 12) // 12)"
    size = f"abs({time}::HUGEINT)"
    hours = f"({size} // 3600000000)::VARCHAR"
    fraction = f"rtrim('.' || lpad(({size} % 1000000)::VARCHAR, 6, '0'), '0')"
    parts = [
        _counted(years, "year", "false"),
        _counted(f"({months} % 12)", "mon", "false"),  # has the sign of the years
        _counted(days, "day", f"{months} < 0"),
        f"CASE WHEN {time} <> 0 OR ({months} = 0 AND {days} = 0) THEN"
        f" CASE WHEN {time} < 0 THEN '-' WHEN {days} < 0 OR ({days} = 0 AND {months} < 0) THEN '+' ELSE '' END"
        f" || CASE WHEN length({hours}) < 2 THEN '0' ELSE '' END || {hours}"
        f" || ':' || lpad(({size} // 60000000 % 60)::VARCHAR, 2, '0')"
        f" || ':' || lpad(({size} // 1000000 % 60)::VARCHAR, 2, '0') || rtrim({fraction}, '.') END",
    ]
    return f"CASE WHEN {value} IS NOT NULL THEN concat_ws(' ', {', '.join(parts)}) END"


def _counted(number: str, unit: str, after_negative: str) -> str:
    """Such as `-2 mons`; NULL for 0."""
    plus = f"CASE WHEN {after_negative} AND {number} > 0 THEN '+' ELSE '' END"
    units = f"CASE {number} WHEN 1 THEN '{unit}' ELSE '{unit}s' END"
    return f"CASE WHEN {number} <> 0 THEN {plus} || {number} || ' ' || {units} END"


def _element(text: str, kind: pa.DataType, delimiter: str) -> str:
    """With quotes, if it needs them, as PostgreSQL's `array_out` decides it."""
    if pa.types.is_timestamp(kind):
        return f"""('"' || {text} || '"')"""
    if not (pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_nested(kind)):
        return text
    needs_quotes = _literal(_NEEDS_QUOTES.format(delimiter=re.escape(delimiter)))
    return f"CASE WHEN regexp_matches({text}, {needs_quotes}) THEN {_quoted(text)} ELSE {text} END"


def _quoted(text: str) -> str:
    return rf"""('"' || replace(replace({text}, '\', '\\'), '"', '\"') || '"')"""


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _parsed(text: str, floats: str, depth: int, level: int = 0) -> str:
    """Floats, or lists of them: of `{1,NULL}`, or of a vector, `[1,2]`."""
    if not depth:
        return f"TRY_CAST({text} AS {floats})"  # TRY: the error of CAST would show the value
    each, inside = f"x{level}", f"{text}[2:-2]"
    if depth == 1:
        elements, element = f"string_split({inside}, ',')", each
    else:
        elements = f"regexp_extract_all({inside}, '{_QUOTED}')"
        element = rf"regexp_replace(CASE WHEN {each} <> 'NULL' THEN {each}[2:-2] END, '\\(.)', '\1', 'g')"
    parsed = _parsed(element, floats, depth - 1, level + 1)
    return f"CASE WHEN length({text}) = 2 THEN [] ELSE list_transform({elements}, lambda {each}: {parsed}) END"
