"""A change that the target refuses, and the error for it: what is refused, why, and what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from walmere.errors import Conflict
from walmere.lsn import Lsn
from walmere.sinks.postgres.errors import (
    ALTER_TARGET,
    CORRECT_TARGET,
    CREATE_PARTITION,
    REMEDIES,
    ROW_REFUSED,
    UNIQUE_VIOLATION,
)


@dataclass(frozen=True, slots=True)
class Refused:
    """A change that the target has refused. It has no values but those of the key."""

    conflict: str
    relation: str  # of `tables` the first one
    key: str | None  # as JSON
    constraint: str | None
    message: str  # of the server
    sqlstate: str
    commit_lsn: int
    in_function: bool = False  # a function of the target has raised the error, such as that of a trigger
    partitioned: bool = False  # the table
    tables: Sequence[str] = ()  # those of a TRUNCATE, or those that defer checks

    @classmethod
    def from_json(cls, text: str) -> Refused:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """For the error that crosses processes."""
        return json.dumps(asdict(self))

    @property
    def lacks_partition(self) -> bool:
        """Whether the target has no partition for the row."""
        return self.sqlstate == "23514" and self.partitioned and not self.constraint and not self.in_function


def conflict_of(refused: Refused, on_conflict: str | None) -> Conflict:
    """The error for a change that was refused. `on_conflict`: as it is set; None if no value of it helps."""
    lsn = Lsn(refused.commit_lsn)
    what = "a row without a key" if refused.key is None else f"the row with the key {refused.key}"
    if refused.conflict == "truncate_failed":
        what = "a TRUNCATE is refused"
    elif refused.conflict == "commit_failed":
        what = "a transaction is refused at its end"
    elif refused.conflict.endswith("_failed") or refused.lacks_partition:
        what += " is refused"
    else:
        what += f" violates {refused.constraint or 'a constraint'}"
    remedy, helps = _remedy(refused)
    others = [] if on_conflict is None else [f'"{each}"' for each in helps if each != on_conflict]
    choice = f"; or set target.on_conflict = {' or '.join(others)}" if others else ""
    return Conflict(
        "applying changes to the target",
        f"{refused.conflict} in {', '.join(refused.tables) or refused.relation}: {what} ({refused.message});"
        f" its transaction has the commit LSN {lsn}",
        f"{remedy}; or skip the whole transaction: `walmere skip -c … {lsn}`{choice}",
        refused.to_json(),
    )


def _remedy(refused: Refused) -> tuple[str, Sequence[str]]:
    """What to do, and which values of `on_conflict` help."""
    is_row_refused = re.match(ROW_REFUSED, refused.sqlstate)
    if refused.in_function and not is_row_refused:
        return "correct the trigger, rule or function of the target that fails", ()
    if refused.conflict == "truncate_failed":
        return "alter the target so that its tables can be truncated", ()
    if not is_row_refused:
        return CORRECT_TARGET, ()
    if refused.conflict == "commit_failed":
        takes_it = "alter the target so that it takes the transaction"
        return takes_it if refused.in_function else REMEDIES.get(refused.sqlstate, takes_it), ()
    if refused.lacks_partition:
        return CREATE_PARTITION, ("skip",)
    if refused.in_function:
        return ALTER_TARGET, ("skip",)
    helps = ("skip", "overwrite") if refused.sqlstate == UNIQUE_VIOLATION else ("skip",)
    return REMEDIES.get(refused.sqlstate, ALTER_TARGET), helps
