"""pgvector's `vector` and `halfvec`, written `[1,2.5,-3]`, as lists of float32, which holds both exactly.

(`sparsevec` has only some of its elements, so it is not a list: it keeps its text.)
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from walmere.types.array import split
from walmere.types.base import Cast, Codec, as_mask
from walmere.types.flat import flat, nested
from walmere.types.number import Float

_OPEN, _CLOSE, _COMMA = b"[],"


@dataclass(frozen=True)
class Vector(Codec):
    """A vector as a list of floats."""

    def _cast(self, text: pa.Array) -> Cast:
        valid = as_mask(text.is_valid())
        found = split(flat(text.drop_null() if text.null_count else text), _OPEN, _CLOSE, _COMMA)
        if found is None or found.elements.null_count:
            raise self.refused("a value is not a list of numbers in brackets")
        elements = Float(self.name, pa.float32()).cast(found.elements)
        counts = valid.astype("int64")
        counts[valid] = found.counts
        return Cast(nested(self.arrow, counts, valid, elements.values))
