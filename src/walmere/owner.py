"""Whose a table of a lake is. It stands in the table's own metadata, so that no second subscription overwrites it.

The owner is a subscription, by its name, of one database: the cluster's system identifier and the database's OID. A
subscription that was dropped and is begun anew is the same owner.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from walmere.errors import OwnedByAnother

PROPERTY: Final = "walmere.owner"
"""The Delta table property that has it, as JSON."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A subscription of a database."""

    subscription: str
    system_identifier: str
    database_oid: int  # 0: not known; a change log of an earlier version does not have it

    def __str__(self) -> str:
        """For people."""
        return (
            f"subscription {self.subscription} of the database with OID {self.database_oid}"
            f" in system {self.system_identifier}"
        )

    @property
    def known(self) -> bool:
        """Whether it is complete, and can be written down."""
        return self.database_oid != 0

    def same(self, other: Owner) -> bool:
        """Whether both are one, as far as is known."""
        databases = {self.database_oid, other.database_oid}
        return (
            (self.subscription, self.system_identifier) == (other.subscription, other.system_identifier)
            and (len(databases) == 1 or 0 in databases)
        )  # fmt: skip

    def to_json(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Owner:
        """The inverse. What cannot be read is somebody, but not us."""
        try:
            content = json.loads(text)
            return cls(str(content["subscription"]), str(content["system_identifier"]), int(content["database_oid"]))
        except (ValueError, KeyError, TypeError):
            return cls("(unreadable)", "(unreadable)", -1)


def owned_by_another(doing: str, what: str, owner: Owner | str) -> OwnedByAnother:
    """The error of whoever would write to what another subscription owns."""
    return OwnedByAnother(
        doing,
        f"{what} belongs to {owner}",
        "give this subscription another target.path; or, to replace what is there, `walmere run --take-over`",
    )
