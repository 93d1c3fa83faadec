"""Which tables of the source are mirrored, and under which names: the part of the sections [[table]] about tables.

`rules` has the part about columns, which needs Arrow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from walmere.errors import ConfigError
from walmere.names import TableName
from walmere.table_sections import TableSection

_CHOOSING: Final = "choosing tables by the sections [[table]]"


class Published(Protocol):
    """A table of the publications."""

    @property
    def schema(self) -> str: ...
    @property
    def name(self) -> str: ...


AnyTable = TypeVar("AnyTable", bound=Published)


@dataclass(frozen=True, slots=True)
class TableChoice:
    """The sections of one subscription."""

    sections: tuple[TableSection, ...] = ()

    def includes(self, source: TableName) -> bool:
        """Whether a table is mirrored."""
        found = [each.include for each in self._matching(source) if each.include is not None]
        return found[-1] if found else True

    def target(self, source: TableName) -> TableName:
        """The name of a table in the target."""
        namespace, name = source
        for each in self._matching(source):
            namespace, name = each.namespace or namespace, each.name or name
        return TableName(namespace, name)

    def choose(self, published: Iterable[AnyTable]) -> dict[TableName, AnyTable]:
        """The tables that are mirrored, by their name in the target. Raises ConfigError if two have the same name."""
        found: dict[TableName, AnyTable] = {}
        for each in published:
            source = TableName(each.schema, each.name)
            if not self.includes(source):
                continue
            target = self.target(source)
            if (other := found.get(target)) is not None:
                wrong = f"{TableName(other.schema, other.name)} and {source} would both be {target} in the target"
                raise ConfigError(_CHOOSING, wrong, "give each its own name or namespace")
            found[target] = each
        return found

    def unmatched(self, published: Iterable[Published]) -> list[TableSection]:
        """Sections that match no table."""
        names = [TableName(each.schema, each.name) for each in published]
        return [section for section in self.sections if not any(map(section.matches, names))]

    def _matching(self, source: TableName) -> list[TableSection]:
        return [each for each in self.sections if each.matches(source)]
