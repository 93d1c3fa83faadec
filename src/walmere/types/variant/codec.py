"""json and jsonb as VARIANT: Spark's binary encoding, which Delta stores as two binary fields, `metadata` and `value`.

No library makes it from JSON without loss: they make a double of every number with a point. So it is made here, for a
block of documents at once, with array operations. `encoding` has the bytes.

VARIANT holds the value of a document, not its text: white space and the order of keys are lost. jsonb does not have
these, either. What it cannot hold is rejected:

    a number of more than 38 digits, or with more than 38 digits after the point
    two equal keys in one object, and half a pair of surrogates: only json has these
    nested more than 1,000 levels deep, which Spark does not parse, either
    more than 16 MB of text: to encode it may take 150 times as much memory (if it is all small numbers)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walmere.types.base import Cast, Codec, as_mask
from walmere.types.flat import LARGE, flat
from walmere.types.text import Text
from walmere.types.variant.encoding import encoded
from walmere.types.variant.tokens import NotJson, Unsuitable
from walmere.variant_type import VARIANT

MAX_BYTES: Final = 16 << 20
_BLOCK_BYTES: Final = 1 << 18
"""Text that is encoded at a time, or one document. Larger blocks take longer, because they do not fit into caches."""


@dataclass(frozen=True)
class Variant(Codec):
    """json or jsonb as VARIANT."""

    def _cast(self, text: pa.Array) -> Cast:
        cast = Text(self.name, pa.string()).cast(text)  # what is not UTF-8 is rejected
        rejected = np.zeros(len(text), np.bool_) if cast.rejected is None else cast.rejected
        rejected |= as_mask(pc.greater(pc.binary_length(text), MAX_BYTES))
        null = as_mask(text.is_null())
        metadata, values = [], []
        for first, block in _blocks(pc.if_else(pa.array(null | rejected), pa.scalar(b"null", text.type), text)):
            one, other = self._encoded(block, rejected[first : first + len(block)])
            metadata.append(one)
            values.append(other)
        if sum(len(flat(each).data) for each in values) >= LARGE:
            raise self.refused("one array has more than 2 GiB of values", "cast fewer rows at a time")
        children = [pa.concat_arrays(metadata), pa.concat_arrays(values)]
        made = pa.StructArray.from_arrays(children, fields=list(VARIANT), mask=pa.array(null | rejected))
        return Cast(made, rejected) if rejected.any() else Cast(made)

    def _encoded(self, text: pa.Array, rejected: np.ndarray) -> tuple[pa.Array, pa.Array]:
        """Metadata and values. Adds to `rejected`; there, the value is JSON's null."""
        while True:
            try:
                return encoded(flat(text))
            except Unsuitable as found:
                rejected[found.documents] = True
                text = pc.if_else(pa.array(rejected), pa.scalar(b"null", text.type), text)
            except NotJson:
                raise self.refused(f"one of {len(text)} values is not JSON") from None


def _blocks(text: pa.Array) -> Iterator[tuple[int, pa.Array]]:
    """The same documents, some at a time, and the number of the first."""
    ends = flat(text).ends
    first = 0
    while first < len(text):
        begins = int(ends[first - 1]) if first else 0
        following = max(int(np.searchsorted(ends, begins + _BLOCK_BYTES)), first + 1)
        yield first, text.slice(first, following - first)
        first = following
