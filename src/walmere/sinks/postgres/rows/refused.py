"""A change that the target refuses, and the error for it: what is refused, why, and what to do."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Final

from walmere.errors import Conflict
from walmere.lsn import Lsn
from walmere.sinks.postgres.connect import ROW_REFUSED

_WITHOUT_OTHER_ROWS: Final = ("23502", "23514")
"""SQLSTATEs of NOT NULL and CHECK."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A change that the target has refused. It has no values but those of the key."""

    conflict: str
    relation: str
    key: str | None  # as JSON
    constraint: str | None
    message: str  # of the server
    sqlstate: str
    commit_lsn: int

    @classmethod
    def from_json(cls, text: str) -> Refused:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """For the error that crosses processes."""
        return json.dumps(asdict(self))


def conflict_of(refused: Refused, *, skippable: bool = True) -> Conflict:
    """The error for a change that was refused. `skippable`: `on_conflict` decides about it."""
    lsn = Lsn(refused.commit_lsn)
    row = "a row without a key" if refused.key is None else f"the row with the key {refused.key}"
    what, remedy, choice = f"{row} is refused", "alter the target so that it takes the row", ""
    if refused.conflict == "truncate_failed":
        what, remedy = "a TRUNCATE is refused", "alter the target so that its tables can be truncated"
    elif not re.match(ROW_REFUSED, refused.sqlstate):
        remedy = "correct the trigger, rule or function of the target that fails"
    elif skippable:
        choice = '; or set target.on_conflict = "skip"'
    if not refused.conflict.endswith("_failed"):
        what = f"{row} violates {refused.constraint or 'a constraint'}"
        if refused.sqlstate in _WITHOUT_OTHER_ROWS:
            remedy = "alter the constraint of the target"
        else:
            remedy = "change the row of the target that is in the way"
            choice = '; or set target.on_conflict = "skip" or "overwrite"'
    return Conflict(
        "applying changes to the target",
        f"{refused.conflict} in {refused.relation}: {what} ({refused.message});"
        f" its transaction has the commit LSN {lsn}",
        f"{remedy}; or skip the whole transaction: `walmere skip -c … {lsn}`{choice}",
        refused.to_json(),
    )
