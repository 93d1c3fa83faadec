"""The name of a table, and what identifies its rows: `TableName` and `Identity`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

_DEFAULT, _INDEX, _FULL, _NOTHING = "difn"
_NAME: Final = re.compile(r'("(?:[^"]|"")*"|[^".]+)\.("(?:[^"]|"")*"|[^".]+)\Z')


class TableName(NamedTuple):
    """The schema and name of a table of the source, as in its Relation message."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """schema.table, unique for every table: a part with a dot or a quote is quoted as in SQL."""
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
    """What identifies the rows of a table: `pg_class.relreplident`, and the columns of the key if there is one.

    FULL with a key uses that key. FULL without a key makes the table a multiset. Any other mode without a key, and
    NOTHING always, accepts only inserts.
    """

    mode: str  # d, i, f, n
    key: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in (_DEFAULT, _INDEX, _FULL, _NOTHING):
            raise ValueError(f"{self.mode!r} is not a replica identity; it must be d, i, f or n")

    @property
    def keyed(self) -> bool:
        return bool(self.key) and self.mode != _NOTHING

    @property
    def multiset(self) -> bool:
        return not self.key and self.mode == _FULL
