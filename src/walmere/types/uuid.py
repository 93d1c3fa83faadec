"""uuid as its 16 bytes, if that is chosen. Otherwise a uuid is text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from walmere.types.base import Cast, Codec, matching
from walmere.types.bytea import Bytea

_UUID: Final = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"


@dataclass(frozen=True)
class UuidBytes(Codec):
    """uuid as binary."""

    def _cast(self, text: pa.Array) -> Cast:
        if not (matching(text, _UUID) | text.is_null().to_numpy(zero_copy_only=False)).all():
            raise self.refused("a value is not a uuid")
        digits = pc.replace_substring(text, "-", "")
        empty = pa.scalar(b"", text.type)
        return Bytea(self.name, self.arrow).cast(
            pc.binary_join_element_wise(pa.scalar(b"\\x", text.type), digits, empty)
        )
