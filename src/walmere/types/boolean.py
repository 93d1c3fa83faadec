"""bool: `t` or `f`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from walmere.types.base import Cast, Codec, as_mask
from walmere.types.flat import flat

_TRUE, _FALSE = b"tf"


@dataclass(frozen=True)
class Boolean(Codec):
    """A letter as a boolean."""

    def _cast(self, text: pa.Array) -> Cast:
        data, starts, ends = flat(text.drop_null() if text.null_count else text)
        true = data == _TRUE
        if not ((ends - starts == 1).all() and (true | (data == _FALSE)).all()):
            raise self.refused("a value is neither t nor f")
        if not text.null_count:
            return Cast(pa.array(true))
        valid = as_mask(text.is_valid())
        values = np.zeros(len(text), np.bool_)
        values[valid] = true
        return Cast(pa.array(values, mask=~valid))
