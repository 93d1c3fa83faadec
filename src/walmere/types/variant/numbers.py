"""Numbers of JSON as the numbers that VARIANT has: integers of 64 bits, and decimals of up to 38 digits.

A decimal keeps all digits after the point: 1.50 is 150 with the scale 2. `1.5e1` is what PostgreSQL's jsonb makes of
it, 15. A number is never a double: that would be another number.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from walmere.types.base import Mask, as_mask, as_string, matching
from walmere.types.flat import Bytes, Places, binary_of
from walmere.types.variant.tokens import NotJson

DIGITS: Final = 38
_NUMBER: Final = r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$"
_INT64_DIGITS: Final = 18
"""Every number of so many digits fits into 64 bits."""
_BITS: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """The digits of each number as an integer of 128 bits, and its scale; -1: it is written without a point."""

    low: NDArray[np.uint64]
    high: NDArray[np.int64]
    scale: Places
    unsuitable: Mask  # more digits than a decimal has

    @property
    def is_int64(self) -> Mask:
        """Where the digits fit into 64 bits."""
        found: Mask = self.high == self.low.view(np.int64) >> 63
        return found

    def below(self, digits: int) -> Mask:
        """Where there are at most so many digits, of up to 18."""
        limit, value = 10**digits, self.low.view(np.int64)
        found: Mask = self.is_int64 & (value > -limit) & (value < limit)
        return found


def numbers(data: Bytes, starts: Places, ends: Places) -> Numbers:
    """The numbers at these places. Raises NotJson."""
    count = len(starts)
    text = binary_of(data, starts, ends)
    if not matching(text, _NUMBER).all():
        raise NotJson
    negative = data[starts] == ord("-")
    point: Places = pc.find_substring(text, ".").to_numpy().astype(np.int64)
    scale = np.where(point < 0, -1, ends - starts - point - 1)
    digits = ends - starts - negative - (point >= 0)
    scientific = matching(text, "[eE]")
    low, high = np.zeros(count, np.int64), np.zeros(count, np.int64)
    whole = pc.replace_substring(text, ".", "") if (point >= 0).any() else text

    short = (digits <= _INT64_DIGITS) & ~scientific
    low[short] = as_string(whole.filter(pa.array(short))).cast(pa.int64()).to_numpy()
    high[short] = low[short] >> 63
    unsuitable = np.zeros(count, np.bool_)
    long = np.flatnonzero(~short & ~scientific)
    if len(long):
        low[long], high[long], unsuitable[long] = _long(whole.take(pa.array(long)), negative[long])
    for each in np.flatnonzero(scientific):  # jsonb writes none
        found = _scientific(text[int(each)].as_py().decode())
        unsuitable[each] = found is None
        if found is not None:
            value, scale[each] = found
            low[each] = np.uint64(value & _BITS).view(np.int64)
            high[each] = value >> 64
    unsuitable |= scale > DIGITS
    return Numbers(low.view(np.uint64), high, scale, unsuitable)


def _long(text: pa.Array, negative: Mask) -> tuple[Places, Places, Mask]:
    """Numbers of many digits, which may be zeros. Arrow's parser is right up to 38 digits."""
    plain = pc.ascii_ltrim(as_string(text), "-0")
    unsuitable = as_mask(pc.greater(pc.binary_length(plain), DIGITS))
    zero = pc.or_(pc.equal(plain, ""), pa.array(unsuitable))
    plain = pc.if_else(zero, "0", plain)
    signed = pc.if_else(pa.array(negative), pc.binary_join_element_wise("-", plain, ""), plain)
    words = np.frombuffer(signed.cast(pa.decimal128(DIGITS, 0)).buffers()[1], np.int64)[: 2 * len(text)]
    return words[0::2], words[1::2], unsuitable


def _scientific(text: str) -> tuple[int, int] | None:
    """The digits and the scale of a number with an exponent, as jsonb has it; None: they are too many."""
    try:
        sign, digits, exponent = Decimal(text).as_tuple()
    except InvalidOperation:  # the exponent has more than 18 digits
        return None
    assert isinstance(exponent, int)
    if len(digits) > DIGITS:
        return None
    value = int("".join(map(str, digits)))
    if value and len(str(value)) + max(exponent, 0) > DIGITS:
        return None
    value *= 10 ** max(exponent, 0) if value else 1
    return -value if sign else value, max(-exponent, 0) or -1
