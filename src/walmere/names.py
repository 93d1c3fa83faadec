"""What a table is called, and what tells its rows apart: `TableName` and `Identity`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

_DEFAULT, _INDEX, _FULL, _NOTHING = "difn"
_NAME: Final = re.compile(r'("(?:[^"]|"")*"|[^".]+)\.("(?:[^"]|"")*"|[^".]+)\Z')


class TableName(NamedTuple):
    """A table of the source, in the words of its Relation message."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """For people, and yet no two tables have the same: where it could be mistaken, quoted as in SQL."""
        return ".".join('"' + part.replace('"', '""') + '"' if "." in part or '"' in part else part for part in self)

    @classmethod
    def parse(cls, text: str) -> TableName:
        """The inverse of str. Raises ValueError for anything else."""
        match = _NAME.match(text)
        if match is None:
            raise ValueError(f"{text!r} is not schema.table")
        namespace, name = (part[1:-1].replace('""', '"') if part.startswith('"') else part for part in match.groups())
        return cls(namespace, name)


@dataclass(frozen=True, slots=True)
class Identity:
    """How the rows of a table are told apart: `pg_class.relreplident`, and the columns of the key if there is one.

    FULL with a key goes by that key (nobody gives one yet). FULL without one makes the table
    a multiset. Anything else without a key, and NOTHING always, takes inserts only.
    """

    mode: str  # d, i, f, n
    key: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in (_DEFAULT, _INDEX, _FULL, _NOTHING):
            raise ValueError(f"{self.mode!r} is no replica identity; one is d, i, f or n")

    @property
    def keyed(self) -> bool:
        return bool(self.key) and self.mode != _NOTHING

    @property
    def multiset(self) -> bool:
        return not self.key and self.mode == _FULL
