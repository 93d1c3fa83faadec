r"""The text of a column as JSON text, for rows that are represented as one JSON object.

    integers, floats, numeric    a number as PostgreSQL writes it, digit for digit; NaN and the infinities as strings
    bool                         true, false
    json, jsonb                  the value itself, as it is
    arrays of one dimension      an array of what their elements are
    vector, halfvec              an array of numbers
    hstore                       an object of strings
    anything else                PostgreSQL's own text as a string: '2026-01-31', '\x00ff', '[1,5)'

NULL is null. Whole columns are converted at a time, with one array operation for each kind of character to escape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walmere.types.array import Array
from walmere.types.base import Cast, Codec, as_mask, one_of, without
from walmere.types.boolean import Boolean
from walmere.types.flat import BACKSLASH, QUOTE, flat
from walmere.types.hstore import Hstore
from walmere.types.number import Float, Integer
from walmere.types.numeric import Numeric
from walmere.types.text import Text
from walmere.types.vector import Vector

_CONTROL: Final = 0x20
_SHORT: Final = {8: r"\b", 9: r"\t", 10: r"\n", 12: r"\f", 13: r"\r"}
_NO_NUMBERS: Final = (b"NaN", b"Infinity", b"-Infinity")


def json_text(codec: Codec, text: pa.Array) -> Cast:
    """The column as an array of JSON texts. A value that is not UTF-8 is rejected: it becomes `null`."""
    cast = Text(codec.name, pa.string()).cast(text)
    return Cast(_json(codec, cast.values).fill_null("null"), cast.rejected)


def joined(*parts: pa.Array | str) -> pa.Array:
    """Concatenate the parts of each row; null if one of them is null."""
    return pc.binary_join_element_wise(*parts, "")


def quoted(text: pa.Array) -> pa.Array:
    """Convert to JSON strings; null stays null."""
    data = flat(text.view(pa.binary())).data
    if (data == BACKSLASH).any():
        text = pc.replace_substring(text, "\\", "\\\\")
    if (data == QUOTE).any():
        text = pc.replace_substring(text, '"', '\\"')
    for control in np.unique(data[data < _CONTROL]):
        text = pc.replace_substring(text, chr(control), _SHORT.get(int(control), f"\\u{control:04x}"))
    return joined('"', text, '"')


def _json(codec: Codec, text: pa.Array) -> pa.Array:
    match codec:
        case Boolean():
            return pc.if_else(pc.equal(text, "t"), "true", "false")
        case Integer() | Vector() | Text(name="json" | "jsonb"):
            return text
        case Float() | Numeric() | Text(name="numeric"):
            odd = one_of(text, _NO_NUMBERS)
            return pc.if_else(odd, quoted(text), text) if pc.any(odd).as_py() else text
        case Array():
            return _array(codec, text)
        case Hstore():
            return _object(codec, text)
    return quoted(text)


def _array(codec: Codec, text: pa.Array) -> pa.Array:
    """An array of several dimensions, or with a lower bound other than 1, becomes a string of PostgreSQL's text."""
    assert isinstance(codec, Array)
    plain = replace(codec, arrow=pa.list_(pa.string()), element=Text(codec.element.name, pa.string()))
    cast = plain.cast(text)
    lists = cast.values
    elements = _json(codec.element, lists.values).fill_null("null")
    inside = pc.binary_join(pa.ListArray.from_arrays(lists.offsets, elements), ",")
    made = without(joined("[", inside, "]"), as_mask(lists.is_null()))
    return made if cast.rejected is None else pc.if_else(pa.array(cast.rejected), quoted(text), made)


def _object(codec: Codec, text: pa.Array) -> pa.Array:
    maps = codec.cast(text).values
    pairs = joined(quoted(maps.keys), ":", quoted(maps.items).fill_null("null"))
    inside = pc.binary_join(pa.ListArray.from_arrays(maps.offsets, pairs), ",")
    return without(joined("{", inside, "}"), as_mask(maps.is_null()))
