"""Log sequence numbers, printed and parsed as PostgreSQL does (`pg_lsn`).

An LSN is a byte position in the write-ahead log: 64 bits, written as two hexadecimal halves, `16/B374D848`.
It is an `int`: it compares, hashes, subtracts (to a number of bytes) and can be stored in a NumPy array.
"""

from __future__ import annotations

import re
from typing import Final

_TEXT: Final = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})\Z")


class Lsn(int):
    """A position in the write-ahead log."""

    __slots__ = ()

    def __new__(cls, value: int | str = 0) -> Lsn:
        """From a number of bytes, or from text as PostgreSQL prints it. Raises ValueError."""
        if isinstance(value, str):
            return cls.parse(value)
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{value} is not an LSN: an LSN has 64 bits")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Parse the text of a `pg_lsn`. Raises ValueError for anything else."""
        match = _TEXT.match(text)
        if match is None:
            raise ValueError(f"{text!r} is not an LSN; an example is 16/B374D848")
        high, low = match.groups()
        return cls(int(high, 16) << 32 | int(low, 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn('{self}')"


INVALID_LSN: Final = Lsn(0)
"""PostgreSQL's InvalidXLogRecPtr: no position."""
