"""Types whose text is the value: strings, and all that a lake has no exact counterpart for and that stays as it is.

A string has to be UTF-8, which sessions ask for and servers give. Bytes that are not, from a database that was damaged
or once filled without checks, are rejected: null in the lake, and kept as they are with the rejects.
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
    """The text as it is."""

    def _cast(self, text: pa.Array) -> Cast:
        if text.type == pa.large_binary() and len(flat(text).data) >= LARGE:
            raise self.refused("there are 2 GiB of text in one array", "cast fewer rows at a time")
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
