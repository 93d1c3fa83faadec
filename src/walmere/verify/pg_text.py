r"""The values of both sides in a form that can be compared, in DuckDB's SQL: PostgreSQL's text, if possible.

The source sends text, and the target has values of Arrow types. If `walmere.types` made both sides alike, a wrong cast
would be wrong on both sides, and equal. So this module goes the other way: it writes the target's value as PostgreSQL
would write it in a session with our settings (`publisher.connect.SESSION`), and uses nothing of `walmere.types`.

    bool                     t, f
    integers, numeric        the digits, with all digits of the scale
    date                     2026-01-31
    timestamp, timestamptz   2026-01-31 12:00:00.5, and +00 behind it: the session's time zone is UTC
    bytea                    \x00ff
    text and all the rest    as it is
    arrays                   {1,NULL,"a, b"}
    hstore                   "a"=>"b", "c"=>NULL

Floats are the exception. PostgreSQL writes the shortest text that gives the same float again, and other programs write
another text of that length. So here the source's text becomes a float, by DuckDB, and the bits are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

_NEEDS_QUOTES: Final = r'^(?i:null)?$|[ \t\n\r\v\f"\\{{}}{delimiter}]'
"""What is empty, is the word NULL, or has a character that means something in an array."""
_QUOTED: Final = r'"(?:[^"\\]|\\.)*"|NULL'


def source_value(column: str, kind: pa.DataType) -> str:
    """The value of a column of the source, which is text; `kind`: the target's type."""
    if not _has_floats(kind):
        return column
    parsed = _parsed(column, kind)
    return _written(parsed, kind) if _is_nested(kind) else parsed


def target_value(column: str, kind: pa.DataType, delimiters: str = ",") -> str:
    """The value of a column of the target; `delimiters`: of its array type, and of the arrays in it, if any."""
    if _has_floats(kind) and not _is_nested(kind):
        return column
    return _written(column, kind, delimiters)


def hash_terms(value: str, kind: pa.DataType) -> Iterator[str]:
    """What to hash of a value, so that different values have different hashes: DuckDB's hash of floats is not enough.

    To it, 0.0 and -0.0 are the same, and so are an empty list and NULL.
    """
    yield value
    if pa.types.is_floating(kind):
        yield _negative_zero(value)
    elif _has_floats(kind) and not _is_nested(kind):
        yield f"CASE WHEN {value} IS NULL THEN -1 ELSE len({value})::BIGINT END"
        yield f"list_transform({value}, lambda x: {_negative_zero('x')})"


def _negative_zero(value: str) -> str:
    return f"({value} = 0 AND signbit({value}))"


def _has_floats(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind)) or (bool(pa.types.is_list(kind)) and _has_floats(kind.value_type))


def _is_nested(kind: pa.DataType) -> bool:
    """Whether it is a list of lists: an array of vectors, or of a domain over arrays."""
    return bool(pa.types.is_list(kind) and pa.types.is_list(kind.value_type))


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
    if pa.types.is_map(kind):
        pair = f"{_quoted(f'{each}.key')} || '=>' || coalesce({_quoted(f'{each}.value')}, 'NULL')"
        pairs = f"array_to_string(list_transform(map_entries({value}), lambda {each}: {pair}), ', ')"
        return f"CASE WHEN {value} IS NOT NULL THEN {pairs} END"
    raise TypeError(f"no text for {kind}")


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


def _parsed(text: str, kind: pa.DataType, depth: int = 0) -> str:
    """Floats, or lists of them: of `{1,NULL}`, or of a vector, `[1,2]`."""
    if pa.types.is_floating(kind):
        # TRY: the error of CAST would have the value in it
        return f"TRY_CAST({text} AS {'DOUBLE' if pa.types.is_float64(kind) else 'FLOAT'})"
    each, inside = f"x{depth}", f"{text}[2:-2]"
    if not pa.types.is_list(kind.value_type):
        elements, element = f"string_split({inside}, ',')", each
    else:
        elements = f"regexp_extract_all({inside}, '{_QUOTED}')"
        element = rf"regexp_replace(CASE WHEN {each} <> 'NULL' THEN {each}[2:-2] END, '\\(.)', '\1', 'g')"
    parsed = _parsed(element, kind.value_type, depth + 1)
    return f"CASE WHEN length({text}) = 2 THEN [] ELSE list_transform({elements}, lambda {each}: {parsed}) END"
