"""A type: the part of its row in `pg_type` that decides how its text is read.

An OID below 10000 is the same in every server, so those types are listed in `builtin`. All others (enums, domains,
composites, extension types, and their arrays) get their OID when they are created. They are read once from the source
(`publisher.catalog.types_of`) and passed to the tasks as a mapping.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TypType(StrEnum):
    """`pg_type.typtype`."""

    BASE = "b"
    COMPOSITE = "c"
    DOMAIN = "d"
    ENUM = "e"
    MULTIRANGE = "m"
    PSEUDO = "p"
    RANGE = "r"


@dataclass(frozen=True, slots=True)
class PgType:
    """A row of `pg_type`."""

    oid: int
    namespace: str
    name: str
    typtype: TypType = TypType.BASE
    basetype: int = 0  # of a domain; may be another domain
    base_typmod: int = -1  # of a domain: the type modifier of its base type
    elem: int = 0  # of an array type: the type of its elements. 0 for types with subscripts only (name, point)
    delimiter: str = ","  # between the elements of an array of this type; box has another
    extension: str | None = None  # that the type belongs to

    def __str__(self) -> str:
        return self.name if self.namespace == "pg_catalog" else f"{self.namespace}.{self.name}"
