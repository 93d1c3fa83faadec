"""date, timestamp and timestamptz in the years 1 to 9999, which all SQL engines support; other values are rejected.

PostgreSQL also has infinity, years BC and years after 9999. It writes them so (DateStyle = ISO):

    infinity    -infinity    0044-03-15 BC    10000-01-01    0044-03-15 12:00:00+00 BC

A timestamptz is written in the time zone of the session. Ours have UTC, so the offset is `+00`. Any other offset is
read too, also one with seconds, as zones had before standard time. The year in UTC decides, because an offset can move
a value to another year.
"""

from __future__ import annotations

import re
from calendar import monthrange
from dataclasses import dataclass
from datetime import date
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walmere.types.base import Cast, Codec, Mask, as_mask, matching, one_of, parsed, without
from walmere.types.flat import flat

_DAY_US: Final = 86_400_000_000
_FIRST_DAY: Final = (date.min - date(1970, 1, 1)).days
_LAST_DAY: Final = (date.max - date(1970, 1, 1)).days
_FIRST_US: Final = _FIRST_DAY * _DAY_US
_LAST_US: Final = _LAST_DAY * _DAY_US + _DAY_US - 1

_TIME: Final = r" \d\d:\d\d:\d\d(?:\.\d{1,6})?"
_INFINITY: Final = (b"infinity", b"-infinity")
_OUTSIDE: Final = r"^(?:\d{{5,}}-\d\d-\d\d{time}(?: BC)?|\d{{4}}-\d\d-\d\d{time} BC)$"


def _has_letters(text: pa.Array) -> bool:
    data = flat(text).data
    return bool(len(data)) and bool(data.max() > ord(":"))


@dataclass(frozen=True)
class Date(Codec):
    """date."""

    outside = _OUTSIDE.format(time="")
    first, last = _FIRST_DAY, _LAST_DAY

    def _cast(self, text: pa.Array) -> Cast:
        # Arrow is slow for values that it refuses, and some columns have infinity in half of their rows
        rejected = np.zeros(len(text), np.bool_)
        if _has_letters(text):
            rejected = as_mask(one_of(text, _INFINITY))
            text = without(text, rejected)
        values = None if _has_letters(text) else parsed(text, self.arrow)
        if values is None:
            rejected |= matching(text, self.outside)
            text = without(text, rejected)
            values = parsed(text, self.arrow)
        if values is None:
            return self._unusual(text, rejected)
        return self._inside(values, rejected)

    def _unusual(self, text: pa.Array, rejected: Mask) -> Cast:  # noqa: ARG002
        """Handle values that Arrow refuses for another reason than the range."""
        raise self.malformed(text, lambda part: parsed(part, self.arrow))

    def _inside(self, values: pa.Array, rejected: Mask) -> Cast:
        """Reject values that Arrow parsed but that are outside the range."""
        number = values.view(pa.int32() if self.arrow == pa.date32() else pa.int64())
        edges = pc.min_max(number).as_py()
        if edges["min"] is not None and not (self.first <= edges["min"] and edges["max"] <= self.last):
            outside = as_mask(pc.or_(pc.less(number, self.first), pc.greater(number, self.last)))
            values = without(values, outside)
            rejected = rejected | outside
        return Cast(values, rejected) if rejected.any() else Cast(values)


@dataclass(frozen=True)
class Timestamp(Date):
    """timestamp without time zone."""

    outside = _OUTSIDE.format(time=_TIME)
    first, last = _FIRST_US, _LAST_US


@dataclass(frozen=True)
class TimestampTz(Timestamp):
    """timestamp with time zone."""

    outside = _OUTSIDE.format(time=_TIME + r"\+00")

    def _unusual(self, text: pa.Array, rejected: Mask) -> Cast:
        """Offsets with seconds, or at the limits of the range. One by one: only sessions in other zones have them."""
        odd = ~matching(text, rf"^\d{{4}}-\d\d-\d\d{_TIME}[+-]\d\d(?::?\d\d)?$") & as_mask(text.is_valid())
        values = parsed(without(text, odd), self.arrow)
        if values is None:
            raise self.malformed(without(text, odd), lambda part: parsed(part, self.arrow))
        micros = np.zeros(len(text), np.int64)
        for index in np.flatnonzero(odd):
            in_utc = _utc_us(text[int(index)].as_py().decode("ascii", "replace"))
            if in_utc is None:
                raise self.refused(f"value {index} of {len(text)} is not valid")
            outside = not self.first <= in_utc <= self.last
            micros[index] = 0 if outside else in_utc
            rejected[index] = outside
        held = pa.array(micros, mask=rejected).cast(self.arrow)
        values = pc.if_else(pa.array(odd), held, values)
        return self._inside(values, rejected)


_WITH_ZONE: Final = re.compile(
    r"(\d{4,7})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?([+-])(\d\d)(?::(\d\d)(?::(\d\d))?)?( BC)?", re.ASCII
)


def _utc_us(text: str) -> int | None:
    """Microseconds since 1970 in UTC, of any year; None if it is not a timestamptz."""
    match = _WITH_ZONE.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    micros = int((match[7] or "").ljust(6, "0"))
    offset = int(match[9]) * 3600 + int(match[10] or 0) * 60 + int(match[11] or 0)
    if match[12]:
        year = 1 - year
    cycles, of_cycle = divmod(year, 400)  # the calendar repeats after 400 years, which have 146,097 days
    of_cycle += 400
    if not (1 <= month <= 12 and 1 <= day <= monthrange(of_cycle, month)[1] and hour < 24 and max(minute, second) < 60):
        return None
    days = (date(of_cycle, month, day) - date(1970, 1, 1)).days + (cycles - 1) * 146_097
    local = ((days * 24 + hour) * 60 + minute) * 60 + second
    return (local - (-offset if match[8] == "-" else offset)) * 1_000_000 + micros
