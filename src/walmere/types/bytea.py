r"""bytea: `\x` and two hexadecimal digits for each byte (bytea_output = hex, which our sessions set).

All values are decoded by one call, over the bytes as they are stored. For that, the two bytes of each `\x` are replaced
by digits, which give one more byte before each value; it is skipped.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from walmere.types.base import Cast, Codec, as_mask
from walmere.types.flat import LARGE, binary_of, flat

_BACKSLASH, _X = b"\\x"


@dataclass(frozen=True)
class Bytea(Codec):
    """bytea as binary."""

    def _cast(self, text: pa.Array) -> Cast:
        dense = text.drop_null() if text.null_count else text
        data, starts, ends = flat(dense)
        lengths = ends - starts
        if (lengths < 2).any() or (lengths % 2).any() or not (data[starts] == _BACKSLASH).all():
            raise self._not_hex()
        if not (data[starts + 1] == _X).all():
            raise self._not_hex()
        digits = data.copy()
        digits[starts] = digits[starts + 1] = ord("0")
        try:
            decoded = np.frombuffer(binascii.unhexlify(digits.data), np.uint8)
        except binascii.Error:
            raise self._not_hex() from None
        if len(decoded) >= LARGE:
            raise self.refused("one array has more than 2 GiB", "cast fewer rows at a time")
        values = binary_of(decoded, starts // 2 + 1, ends // 2)
        if text.null_count:
            valid = as_mask(text.is_valid())
            values = values.take(pa.array(np.cumsum(valid) - 1, mask=~valid))
        return Cast(values)

    def _not_hex(self) -> Exception:
        return self.refused("a value is not in hex format", "the session must have bytea_output = hex")
