"""Types that are stored as text: strings, and types for which a lake has no exact type.

A string must be UTF-8, which is the client encoding of all sessions. Other bytes, from a damaged database or one that
was filled without checks, are rejected: the lake has null, and the rejects table the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walmere.types.base import Cast, Codec, as_mask, as_string, without
from walmere.types.flat import LARGE, flat


@dataclass(frozen=True)
class Text(Codec):
    """Text, unchanged."""

    def _cast(self, text: pa.Array) -> Cast:
        if text.type == pa.large_binary() and len(flat(text).data) >= LARGE:
            raise self.refused("one array has more than 2 GiB of text", "cast fewer rows at a time")
        try:
            return Cast(text.cast(self.arrow))
        except pa.ArrowInvalid:
            rejected = np.zeros(len(text), np.bool_)
        for index in np.flatnonzero(~as_mask(pc.string_is_ascii(as_string(text)))):
            value = text[int(index)].as_py()
            try:
                (value or b"").decode()
            except UnicodeDecodeError:
                rejected[index] = True
        return Cast(without(text, rejected).cast(self.arrow), rejected)


def readable(text: pa.Array) -> pa.Array:
    """Rejected text as strings. Bytes that are not UTF-8 are shown as backslash escapes."""
    try:
        return text.cast(pa.string())
    except pa.ArrowInvalid:
        values = text.to_pylist()
        return pa.array([each and each.decode(errors="backslashreplace") for each in values], pa.string())
