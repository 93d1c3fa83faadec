"""interval as its three parts, if that is chosen. Otherwise an interval is text.

PostgreSQL stores months, days and microseconds apart: a month has no fixed number of days, and a day not always 24
hours. So a struct of the three is exact. The text is in `IntervalStyle = postgres`, which our sessions set:
`1 year 2 mons -3 days +04:05:06.7`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from walmere.types.base import Cast, Codec, Mask, as_mask, one_of, without

INTERVAL: Final = pa.struct([("months", pa.int32()), ("days", pa.int32()), ("microseconds", pa.int64())])
_INFINITE: Final = (b"infinity", b"-infinity")
_TEXT: Final = (
    r"^(?:(?P<years>-?[0-9]+) years? ?)?(?:\+?(?P<mons>-?[0-9]+) mons? ?)?(?:\+?(?P<days>-?[0-9]+) days? ?)?"
    r"(?:(?P<sign>[-+]?)(?P<hours>[0-9]+):(?P<minutes>[0-9]{2}):(?P<seconds>[0-9]{2})(?:\.(?P<fraction>[0-9]{1,6}))?)?$"
)


@dataclass(frozen=True)
class IntervalParts(Codec):
    """interval as a struct of months, days and microseconds."""

    def _cast(self, text: pa.Array) -> Cast:
        infinite = as_mask(one_of(text, _INFINITE))
        text = without(text, infinite)
        null = as_mask(text.is_null())
        found = pc.extract_regex(text, _TEXT)
        if (as_mask(found.is_null()) & ~null).any() or (as_mask(pc.equal(pc.binary_length(text), 0)) & ~null).any():
            raise self.refused("a value is not an interval", "the session must have IntervalStyle = postgres")
        parts = {field.name: found.field(place) for place, field in enumerate(found.type)}
        months = 12 * _numbers(parts["years"]) + _numbers(parts["mons"])
        seconds = 3600 * _numbers(parts["hours"]) + 60 * _numbers(parts["minutes"]) + _numbers(parts["seconds"])
        fraction = pc.ascii_rpad(parts["fraction"].cast(pa.string()).fill_null(""), 6, "0")
        total = 1_000_000 * seconds + _numbers(fraction)
        negative = as_mask(pc.equal(parts["sign"].cast(pa.string()), "-"))
        columns = [months, _numbers(parts["days"]), np.where(negative, -total, total)]
        arrays = [pa.array(each).cast(field.type) for each, field in zip(columns, INTERVAL, strict=True)]
        values = pa.StructArray.from_arrays(arrays, fields=list(INTERVAL), mask=pa.array(null))
        return Cast(values, infinite) if infinite.any() else Cast(values)


def _numbers(text: pa.Array) -> NDArray[np.int64]:
    """Numbers; 0 where there is none."""
    plain = text.cast(pa.string()).fill_null("")
    missing: Mask = as_mask(pc.equal(plain, ""))
    numbers: NDArray[np.int64] = pc.if_else(pa.array(missing), "0", plain).cast(pa.int64()).to_numpy()
    return numbers
