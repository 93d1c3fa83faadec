"""A codec: the Arrow type of a column, and the cast of its text.

A codec is created once per column (`codec.codec`), by the driver, and pickled to the tasks. Arrow's parsers do nearly
all of the work, on a whole array at once. They stop at the first value that they do not accept. So the usual cast is:
try; if that fails, find the unusual values with array operations, and try again without them. A block without unusual
values needs only the first try.

Arrow's error messages show the value. They are never passed on, because values must not be logged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from walmere.errors import CastError

Mask: TypeAlias = NDArray[np.bool_]

_BINARY: Final = {
    pa.binary(): pa.binary(),
    pa.string(): pa.binary(),
    pa.large_binary(): pa.large_binary(),
    pa.large_string(): pa.large_binary(),
}
_STRING: Final = {pa.binary(): pa.string(), pa.large_binary(): pa.large_string()}


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """A column after the cast, with the length and order of the text."""

    values: pa.Array  # null where the text is null, and where it was rejected
    rejected: Mask | None = None  # where the Arrow type cannot hold the value; None: nowhere


@dataclass(frozen=True)
class Codec(ABC):
    """How the text of one column becomes Arrow."""

    hides: ClassVar[bool] = False
    """Whether the text must not be shown, nor stored in rejects."""

    name: str  # of the type, for error messages
    arrow: pa.DataType

    def cast(self, text: pa.Array | pa.ChunkedArray) -> Cast:
        """Cast an array of text (binary, string or their large forms; null is SQL NULL).

        Raises CastError if a text is not PostgreSQL's output for a value of this type.
        """
        if isinstance(text, pa.ChunkedArray):
            return self._joined([self.cast(chunk) for chunk in text.chunks])
        binary = _BINARY.get(text.type)
        if binary is None:
            raise TypeError(f"text must be an array of binary or string, not of {text.type}")
        if text.null_count == len(text):
            return Cast(pa.nulls(len(text), self.arrow))
        return self._cast(text if text.type == binary else text.view(binary))

    @abstractmethod
    def _cast(self, text: pa.Array) -> Cast:
        """Cast an array of binary or large_binary. At least one value is not null."""

    def _joined(self, casts: list[Cast]) -> Cast:
        if len(casts) == 1:
            return casts[0]
        if not casts:
            return Cast(pa.nulls(0, self.arrow))
        values = pa.concat_arrays([cast.values for cast in casts])
        if all(cast.rejected is None for cast in casts):
            return Cast(values)
        masks = [np.zeros(len(c.values), np.bool_) if c.rejected is None else c.rejected for c in casts]
        return Cast(values, np.concatenate(masks))

    def refused(self, found: str, hint: str = "") -> CastError:
        """The error for a text that is not a value of this type."""
        return CastError(f"casting text to {self.name}", found, hint or "the source or the change log is damaged")

    def malformed(self, text: pa.Array, attempt: Callable[[pa.Array], Any]) -> CastError:
        """The error for an array for which `attempt` returns None. Searches for the first value that causes it."""
        low, high = 0, len(text)
        while high - low > 1:
            middle = (low + high) // 2
            if attempt(text.slice(low, middle - low)) is None:
                high = middle
            else:
                low = middle
        return self.refused(f"value {low} of {len(text)}, of {len(text[low].as_py() or b'')} bytes, is not valid")


def parsed(text: pa.Array, to: pa.DataType) -> pa.Array | None:
    """Parse the text with Arrow; None if Arrow does not accept one of the values."""
    try:
        return as_string(text).cast(to)
    except pa.ArrowInvalid:
        return None


def as_string(text: pa.Array) -> pa.Array:
    """View binary as string without a check, for functions that do not accept binary."""
    return text.view(_STRING[text.type])


def matching(text: pa.Array, regex: str) -> Mask:
    """Where the text matches a regular expression of RE2. Null does not match."""
    return as_mask(pc.match_substring_regex(text, regex))


def one_of(text: pa.Array, values: tuple[bytes, ...]) -> pa.Array:
    """Where the text is one of these. (Not given as an Arrow array: creating one at import would import Pandas.)"""
    return pc.is_in(text, pa.array(values, text.type))


def as_mask(where: pa.Array) -> Mask:
    """Convert a boolean array to a NumPy mask; null is false."""
    mask: Mask = where.fill_null(False).to_numpy(zero_copy_only=False)
    return mask


def without(array: pa.Array, where: Mask) -> pa.Array:
    """Replace the values there by null."""
    return pc.if_else(pa.array(where), pa.scalar(None, array.type), array)


def rejecting(values: pa.Array, where: Mask) -> Cast:
    """A cast with the values there rejected; `where` may be all false."""
    return Cast(without(values, where), where) if where.any() else Cast(values)
