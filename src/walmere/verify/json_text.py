r"""The JSON of the source in the form that DuckDB writes of a VARIANT, to compare the two as text.

    {"a":[1.50,null],"b":"\n"}     no white space, keys in the order of their bytes, numbers as jsonb writes them

So numbers are compared with all their digits: 1.5 and 1.50 differ, and 1.5e1, which only json has, is 15. Python's own
parser reads the text, and nothing of `walmere.types` is used. Its cost is some microseconds for each document.

What VARIANT cannot hold is NULL in the target: numbers of more than 38 digits, or with more than 38 digits after the
point; objects with two equal keys; half a pair of surrogates; nested more than 1,000 levels deep; more than 16 MB.
"""

from __future__ import annotations

import json
import re
import sys
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import pyarrow as pa

_MAX_DIGITS: Final = 38
_MAX_DEPTH: Final = 1_000
_MAX_BYTES: Final = 16 << 20
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_SPECIAL: Final = re.compile(r'["\\\x00-\x1f]')
_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class _NotHeld(Exception):
    """VARIANT cannot hold the document."""


class _Number(str):
    """The digits of a number."""

    __slots__ = ()


def read(text: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    """The documents in that form, and where VARIANT cannot hold them; None: nowhere."""
    found = [None if each is None else compared(each) for each in text.to_pylist()]
    made = pa.array(found, pa.large_string())
    if made.null_count == text.null_count:
        return made, None
    return made, pa.array([one is None and each.is_valid for one, each in zip(found, text, strict=True)])


def compared(text: bytes) -> str | None:
    """One document; None if VARIANT cannot hold it."""
    if len(text) > _MAX_BYTES:
        return None
    depth = _depth(text)
    if depth > _MAX_DEPTH:
        return None
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 4 * depth)  # of the parser, and of `_written`
    try:
        parsed = json.loads(
            text.decode(), parse_int=_number, parse_float=_number, object_pairs_hook=_object, strict=False
        )
        made = _written(parsed)
        made.encode()
    except (_NotHeld, UnicodeError):
        return None
    finally:
        sys.setrecursionlimit(limit)
    return made


def _depth(text: bytes) -> int:
    """How many levels are nested; 0 if they are few."""
    if text.count(b"[") + text.count(b"{") < 100:
        return 0
    depth = deepest = 0
    for character in re.findall(r"[][{}]", _STRING.sub("", text.decode(errors="replace"))):
        depth += 1 if character in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _number(text: str) -> _Number:
    """As jsonb writes it."""
    if "e" in text or "E" in text:
        text = _without_exponent(text)
    whole, _, fraction = text.lstrip("-").partition(".")
    if len((whole + fraction).lstrip("0")) > _MAX_DIGITS or len(fraction) > _MAX_DIGITS:
        raise _NotHeld
    return _Number(text if text[0] != "-" or text.strip("-0.") else text[1:])  # there is no -0


def _without_exponent(text: str) -> str:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise _NotHeld from None
    exponent = int(number.as_tuple().exponent)
    if exponent < -_MAX_DIGITS or (number and exponent > _MAX_DIGITS):  # before so many zeros are written
        raise _NotHeld
    return f"{number:f}" if number or exponent < 0 else "0"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _NotHeld
    return made


def _written(value: Any) -> str:
    match value:
        case _Number():
            return str(value)
        case str():
            return _quoted(value)
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case list():
            return "[" + ",".join([_written(each) for each in value]) + "]"
    pairs = sorted((key.encode(), key) for key in value)
    return "{" + ",".join([f"{_quoted(key)}:{_written(value[key])}" for _, key in pairs]) + "}"


def _quoted(text: str) -> str:
    if _SPECIAL.search(text) is None:
        return f'"{text}"'
    return '"' + _SPECIAL.sub(lambda found: _ESCAPES.get(found[0]) or f"\\u{ord(found[0]):04X}", text) + '"'
