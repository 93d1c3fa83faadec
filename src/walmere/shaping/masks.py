"""Codecs that hide values. What they are made from is neither shown nor stored in rejects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import SecretStr

from walmere.errors import ConfigError
from walmere.shaping.functions import call
from walmere.shaping.keyed_hash import keyed_hash
from walmere.types.base import Cast, Codec

REDACTED: Final = "***"


@dataclass(frozen=True)
class Hash(Codec):
    """HMAC-SHA256 of PostgreSQL's text: equal values of all tables have equal hashes, so they can be joined."""

    hides: ClassVar[bool] = True

    key: SecretStr | None  # None: only the type of the column is needed

    def _cast(self, text: pa.Array) -> Cast:
        if self.key is None:
            raise ConfigError("hashing a column", "there is no key", "set WALMERE_HASH_KEY")
        return Cast(keyed_hash(text, self.key.get_secret_value()))


@dataclass(frozen=True)
class Null(Codec):
    """NULL, whatever the value."""

    hides: ClassVar[bool] = True

    def _cast(self, text: pa.Array) -> Cast:
        return Cast(pa.nulls(len(text), self.arrow))


@dataclass(frozen=True)
class Redact(Codec):
    """The same text for every value; NULL stays NULL."""

    hides: ClassVar[bool] = True

    def _cast(self, text: pa.Array) -> Cast:
        return Cast(pc.if_else(text.is_valid(), pa.scalar(REDACTED, self.arrow), pa.scalar(None, self.arrow)))


@dataclass(frozen=True)
class Function(Codec):
    """The result of a function of the user.

    A value that the type of the function's argument cannot hold, such as infinity in a date, becomes NULL.
    """

    hides: ClassVar[bool] = True

    function: str
    argument: Codec

    def _cast(self, text: pa.Array) -> Cast:
        return Cast(call(self.function, self.argument.cast(text).values, self.arrow))
