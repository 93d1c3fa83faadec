r"""hstore as a map of strings: `"key"=>"value", "other"=>NULL`.

`hstore_out` quotes all keys and all values except NULL; a backslash escapes a quote or a backslash. So without the
escapes, every pair of quotes encloses a key or a value, and a key is followed by `=>`. The checks below account for
every byte outside the quotes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from walmere.types.base import Cast, Codec, Mask, as_mask
from walmere.types.flat import QUOTE, Flat, Places, binary_of, flat, nested, unescape, where_is
from walmere.types.text import Text


class Pairs(NamedTuple):
    """The keys and values of all rows, and their number for each row."""

    keys: pa.Array
    values: pa.Array
    counts: Places


@dataclass(frozen=True)
class Hstore(Codec):
    """hstore as a map."""

    def _cast(self, text: pa.Array) -> Cast:
        values, rejected = self._maps(text, as_mask(text.is_valid()))
        return Cast(values, rejected) if rejected.any() else Cast(values)

    def _maps(self, text: pa.Array, wanted: Mask) -> tuple[pa.Array, Mask]:
        """The wanted values as maps, null elsewhere, and which of them were rejected: those that are not UTF-8."""
        found = pairs(flat(text if wanted.all() else text.filter(pa.array(wanted))))
        if found is None:
            raise self.refused("a value is not in the format of hstore")
        text_of = Text(self.name, pa.string())
        keys, values = text_of.cast(found.keys), text_of.cast(found.values)
        rejected = np.zeros(len(text), np.bool_)
        row_of = np.repeat(np.flatnonzero(wanted), found.counts)
        for part in (keys, values):
            if part.rejected is not None:
                rejected[row_of[part.rejected]] = True
        if rejected.any():
            return self._maps(text, wanted & ~rejected)[0], rejected
        counts = np.zeros(len(text), np.int64)
        counts[wanted] = found.counts
        entries = pa.StructArray.from_arrays(
            [keys.values, values.values], fields=[self.arrow.key_field, self.arrow.item_field]
        )
        return nested(self.arrow, counts, wanted, entries), rejected


def pairs(text: Flat) -> Pairs | None:
    """Split all values at once; None if one is not well-formed."""
    escaped = unescape(text)
    (data, starts, ends), literal = escaped
    quotes = np.flatnonzero(where_is(escaped, QUOTE))
    if not len(quotes) and not len(data):
        nothing = pa.array([], pa.binary())
        return Pairs(nothing, nothing, np.zeros(len(starts), np.int64))
    if not len(quotes) or len(quotes) % 2:
        return None
    opening, closing = quotes[0::2], quotes[1::2]
    padded = np.append(data, np.zeros(16, np.uint8))

    def has(at: Places, expected: bytes) -> Mask:
        found: Mask = (padded[at[:, np.newaxis] + np.arange(len(expected))] == np.frombuffer(expected, np.uint8)).all(1)
        return found

    is_key = has(closing + 1, b"=>")
    is_null = np.zeros(len(is_key), np.bool_)
    is_null[is_key] = has(closing[is_key] + 3, b"NULL")
    has_value = is_key & ~is_null
    # the value comes directly after its key, unless it is NULL, which has no quotes
    follows = np.append(opening[1:], -1) == closing + 3
    comes_after = np.append(False, has_value[:-1])
    if not (follows[has_value].all() and np.array_equal(~is_key, comes_after)) or has_value[-1]:
        return None
    ends_pair = np.flatnonzero(~has_value)
    end = np.where(is_null, closing + 7, closing + 1)[ends_pair]
    key = np.flatnonzero(is_key)
    row = np.searchsorted(starts, opening[key], side="right") - 1
    counts = np.bincount(row, minlength=len(starts)).astype(np.int64)
    last = np.append(row[1:] != row[:-1], True)
    if not np.where(last, end == ends[row], has(end, b", ") & (np.append(opening[key][1:], 0) == end + 2)).all():
        return None
    if not np.array_equal(opening[key][np.append(True, last[:-1])], starts[counts > 0]):
        return None
    if (ends != starts)[counts == 0].any():
        return None
    if literal is not None:
        inside = np.cumsum(where_is(escaped, QUOTE), dtype=np.uint8) & 1
        if (literal & (inside == 0)).any():
            return None
    null = is_null[key]
    value = np.where(null, key, key + 1)
    keys = binary_of(data, opening[key] + 1, closing[key])
    begin = np.where(null, closing[key], opening[value] + 1)
    return Pairs(keys, binary_of(data, begin, np.where(null, closing[key], closing[value]), null), counts)
