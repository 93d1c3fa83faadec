"""Integers and floats. PostgreSQL's shortest-precise output (since 12) makes the text of a float exact.

Arrow's parsers are strict with two exceptions, which are checked here. The integer parser accepts hexadecimal. The
float parser returns infinity or zero for a number that is too large or too small for the type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from walmere.types.base import Cast, Codec, as_mask, one_of, parsed, rejecting
from walmere.types.flat import flat

_MINUS, _NINE = b"-9"
_INT64_MAX: Final = (1 << 63) - 1
_INFINITE: Final = (b"Infinity", b"-Infinity")
_ZERO: Final = (b"0", b"-0")


def plain(text: pa.Array) -> bool:
    """Whether the text has only digits, minus and point. (A slash passes too, but no parser accepts it.)"""
    data = flat(text).data
    if not len(data) or (data.min() >= _MINUS and data.max() <= _NINE):
        return True
    return bool(text.null_count) and plain(text.drop_null())


@dataclass(frozen=True)
class Integer(Codec):
    """int2, int4, int8, and types that are stored as int64. The upper half of xid8 does not fit into int64."""

    def _cast(self, text: pa.Array) -> Cast:
        values = self._parsed(text)
        if values is not None:
            return Cast(values)
        if self.name == "xid8":
            unsigned = parsed(text, pa.uint64()) if plain(text) else None
            if unsigned is not None:
                too_large = as_mask(pc.greater(unsigned, pa.scalar(_INT64_MAX, pa.uint64())))
                return rejecting(unsigned.cast(pa.int64(), safe=False), too_large)
        raise self.malformed(text, self._parsed)

    def _parsed(self, text: pa.Array) -> pa.Array | None:
        return parsed(text, self.arrow) if plain(text) else None


@dataclass(frozen=True)
class Float(Codec):
    """float4 and float8, with NaN and the infinities."""

    def _cast(self, text: pa.Array) -> Cast:
        values = self._parsed(text)
        if values is None:
            raise self.malformed(text, self._parsed)
        return Cast(values)

    def _parsed(self, text: pa.Array) -> pa.Array | None:
        values = parsed(text, self.arrow)
        if values is None:
            return None
        for edge, texts in ((pc.is_inf(values), _INFINITE), (pc.equal(values, pa.scalar(0, self.arrow)), _ZERO)):
            if pc.any(edge).as_py() and not pc.all(one_of(text.filter(edge), texts)).as_py():
                return None
        return values
