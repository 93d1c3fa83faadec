"""The owner of a table of a lake. It is stored in the table's metadata, so that no other subscription overwrites it.

The owner is a subscription (its name) of one database (the cluster's system identifier and the database's OID). A
subscription that was dropped and created again is the same owner.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from walmere.errors import OwnedByAnother

PROPERTY: Final = "walmere.owner"
"""The Delta table property that has the owner, as JSON."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A subscription of a database."""

    subscription: str
    system_identifier: str
    database_oid: int  # 0: not known, because the change log was written by an earlier version

    def __str__(self) -> str:
        return (
            f"subscription {self.subscription} of the database with OID {self.database_oid}"
            f" in system {self.system_identifier}"
        )

    @property
    def known(self) -> bool:
        """Whether all fields are known, so that it can be stored."""
        return self.database_oid != 0

    def same(self, other: Owner) -> bool:
        """Whether both are the same owner, as far as is known."""
        databases = {self.database_oid, other.database_oid}
        return (
            (self.subscription, self.system_identifier) == (other.subscription, other.system_identifier)
            and (len(databases) == 1 or 0 in databases)
        )  # fmt: skip

    def to_json(self) -> str:
        """The value of the table property."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Owner:
        """The inverse of `to_json`. Text that cannot be read becomes an owner that no subscription equals."""
        try:
            content = json.loads(text)
            return cls(str(content["subscription"]), str(content["system_identifier"]), int(content["database_oid"]))
        except (ValueError, KeyError, TypeError):
            return cls("(unreadable)", "(unreadable)", -1)


def owned_by_another(doing: str, what: str, owner: Owner | str) -> OwnedByAnother:
    """The error for writing to a table that another subscription owns."""
    return OwnedByAnother(
        doing,
        f"{what} belongs to {owner}",
        "set another target.path for this subscription; or, to replace the tables, `walmere run --take-over`",
    )
