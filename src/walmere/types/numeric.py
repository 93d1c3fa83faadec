"""numeric: exact as decimal if the column has a precision, otherwise exact as text.

`numeric(p, s)` with p ≤ 38 is decimal(p, s). Since PostgreSQL 15, the scale may be negative or larger than p. A lake
has neither, so the decimal is just wide enough: numeric(5, -2) has hundreds up to 9999900, which are seven digits, so
it is decimal(7, 0); numeric(3, 5) goes up to 0.00999, so it is decimal(5, 5). If that needs more than 38 digits, or
there is no type modifier, the text is kept. A decimal rejects NaN, the infinities, and values with too many digits. The
last can happen only if a caller requests another decimal than that of the column.

Arrow's parser is not safe with more than 38 digits: on overflow it returns a wrong number without an error (observed
with 39 digits for decimal(38, 0), and with 30 for decimal(38, 10)). So the digits are counted first, and Arrow parses
only values that certainly fit. Python's decimal handles the few others.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walmere.types.base import Cast, Codec, Mask, as_mask, matching, one_of, parsed, without
from walmere.types.flat import flat
from walmere.types.number import plain
from walmere.types.text import Text

DIGITS: Final = 38
_HEADER: Final = 4
"""VARHDRSZ, which PostgreSQL adds to type modifiers."""

_NOT_FINITE: Final = (b"NaN", b"Infinity", b"-Infinity")
_NUMBER: Final = r"^-?[0-9]+(?:\.[0-9]+)?$"
_EXACT: Final = Context(prec=DIGITS, traps=[Inexact, InvalidOperation])


def precision_and_scale(typmod: int) -> tuple[int, int] | None:
    """Precision and scale from a type modifier; None without a modifier."""
    if typmod < _HEADER:
        return None
    precision = (typmod - _HEADER) >> 16 & 0xFFFF
    scale = (((typmod - _HEADER) & 0x7FF) ^ 0x400) - 0x400  # eleven bits, signed
    return precision, scale


def typmod_of(precision: int, scale: int) -> int:
    """The type modifier of numeric(precision, scale)."""
    return (precision << 16 | scale & 0x7FF) + _HEADER


def numeric(name: str, typmod: int) -> Codec:
    """The codec of a numeric column."""
    declared = precision_and_scale(typmod)
    if declared is not None:
        precision, scale = declared
        digits = max(precision, precision - scale, scale)
        if digits <= DIGITS:
            return Numeric(f"{name}({precision},{scale})", pa.decimal128(digits, max(scale, 0)))
    return Text(name, pa.string())


@dataclass(frozen=True)
class Numeric(Codec):
    """numeric(p, s) as a decimal."""

    def _cast(self, text: pa.Array) -> Cast:
        rejected = np.zeros(len(text), np.bool_)
        if not plain(text):
            rejected = as_mask(one_of(text, _NOT_FINITE))
            text = without(text, rejected)
            if not plain(text):
                raise self.malformed(text, self._numbers)
        values = parsed(text, self.arrow) if self._surely_fit(text) else None
        if values is None:
            odd = as_mask(text.is_valid()) & ~self._fits(text)
            values = parsed(without(text, odd), self.arrow)
            if values is None:
                raise self.malformed(text, self._numbers)
            if odd.any():
                values, too_many = self._decided(text, odd, values)
                rejected |= too_many
        return Cast(values, rejected) if rejected.any() else Cast(values)

    def _surely_fit(self, text: pa.Array) -> bool:
        """Whether every value is so short that it has at most 38 digits after scaling."""
        _, starts, ends = flat(text)
        return int((ends - starts).max()) + int(self.arrow.scale) <= DIGITS

    def _fits(self, text: pa.Array) -> Mask:
        """Where a value has no more digits than the decimal, before and after the point."""
        data, starts, ends = flat(text)
        point: np.ndarray = pc.find_substring(text, ".").fill_null(-1).to_numpy().astype(np.int64)
        after = np.where(point < 0, 0, ends - starts - point - 1)
        data = np.append(data, np.zeros(2, np.uint8))  # room to look at the first two bytes of an empty value
        negative = data[starts] == ord("-")
        before = np.where(point < 0, ends - starts, point) - negative
        zero = (before == 1) & (data[starts + negative] == ord("0"))
        fits: Mask = ((before <= self.arrow.precision - self.arrow.scale) | zero) & (after <= self.arrow.scale)
        return fits

    def _numbers(self, text: pa.Array) -> pa.Array | None:
        return text if (matching(text, _NUMBER) | as_mask(text.is_null())).all() else None

    def _decided(self, text: pa.Array, odd: Mask, values: pa.Array) -> tuple[pa.Array, Mask]:
        """Fill in the odd values that fit into the decimal. Returns the values, and where one does not fit."""
        rows = np.flatnonzero(odd)
        found = text.take(pa.array(rows))
        if self._numbers(found) is None:
            raise self.malformed(text, self._numbers)
        decided = [self._held(value) for value in found.to_pylist()]
        place = np.zeros(len(text), np.int64)
        place[rows] = np.arange(len(rows))
        held = pa.array(decided, self.arrow).take(pa.array(place))
        too_many = np.zeros(len(text), np.bool_)
        too_many[rows] = [value is None for value in decided]
        return pc.if_else(pa.array(odd), held, values), too_many

    def _held(self, text: bytes) -> Decimal | None:
        value = Decimal(text.decode())
        try:
            scaled = value.quantize(Decimal(1).scaleb(-self.arrow.scale), context=_EXACT)
        except (Inexact, InvalidOperation):
            return None
        return scaled if len(scaled.as_tuple().digits) <= self.arrow.precision else None
