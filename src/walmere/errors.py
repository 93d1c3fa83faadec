"""One tree of errors. Each error says what was being done, what went wrong, and what the user can do.

    WalmereError
    ├── ConfigError               walmere.toml, WALMERE_… or an argument is not usable
    ├── ProtocolError             a message does not follow the protocol (has the offset)
    ├── TypeMismatch
    │   ├── CastError             a text is not a value of its type
    │   └── UnknownType           a type that is not in the catalog that was read
    ├── ChangeLogError
    │   ├── ChangeLogVersion      written by another version of the format
    │   ├── ChangeLogDamaged      a file is torn, missing or fails its checksum
    │   │   └── StateDamaged      a file of the subscription's state cannot be read
    │   ├── ChangesRemoved        the changes to be read were removed from the log
    │   ├── ChangeLogInUse        another process writes this log
    │   ├── TakenOver             a process on another machine has taken over
    │   └── ChangeLogMismatch     the log and the source do not belong together
    ├── SinkError
    │   ├── SinkConflict          other writers kept committing at the same time              (transient)
    │   ├── SinkFull              the target's disk is full
    │   ├── SinkUnavailable       no connection to the target, or it was lost                (transient)
    │   ├── SinkRefused           the role may not do this at the target, or may not log in
    │   ├── Conflict              a row violates a constraint of the target
    │   └── SinkMismatch          the table at the target is not the expected one
    │       ├── OwnedByAnother    the table belongs to another subscription
    │       └── ColumnMissing     a table of a database lacks a column: somebody has to add it
    ├── StoreError                an error of an object store
    │   ├── StoreUnavailable      it does not answer, or has an error of its own            (transient)
    │   ├── StoreRefused          no credentials, no right, or no such bucket
    │   └── StoreUnsuitable       it ignores the condition of a put
    ├── SparkError
    │   ├── SparkUnavailable      the master does not answer
    │   ├── ExecutorUnsuitable    an executor lacks Walmere, or has another version of it or of Python
    │   └── SparkEnded            the JVM has ended
    ├── LakeError                 a lake does not have what was asked for
    │   ├── PointGone             the point is older than what is kept
    │   └── NotApplied            the point is newer than what is applied                  (transient)
    ├── NotCompared               there is no point at which source and target can be compared
    ├── NotMirrored               a table is set aside: the target cannot hold it, or its rows have no identity
    ├── InvalidTransition         a wrong use of a table's state machine: a bug in Walmere
    └── SourceError
        ├── SourceUnavailable     no connection, or it was lost                            (transient)
        ├── AccessRefused         the role may not do this, or may not log in
        ├── NotConfigured         a setting of the server prevents logical replication
        ├── WrongSystem           another PostgreSQL system answers at this address
        ├── TableLocked           another session holds a lock on a table to be read       (transient)
        ├── PublicationMissing
        ├── ColumnListsDiffer     one table has different lists: it cannot be decoded
        ├── SlotMissing
        ├── SlotInUse             another walsender streams from the slot                  (transient)
        ├── SlotLost              invalidated: the WAL that it needed is gone
        └── SlotUnsuitable        another plugin, another database, not logical

A *transient* error may go away without action, so the receiver retries; any other error ends it. Errors are passed
between processes (Spark executors, the receiver), so all of them pickle.
"""

from __future__ import annotations

from typing import Any, ClassVar


class WalmereError(Exception):
    """What was being done, what went wrong, and what to do."""

    transient: ClassVar[bool] = False

    def __init__(self, doing: str, wrong: str, hint: str = "") -> None:
        super().__init__(doing, wrong, hint)
        self.doing = doing
        self.wrong = wrong
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.doing}: {self.wrong}" + (f"\n  hint: {self.hint}" if self.hint else "")

    def with_doing(self, doing: str) -> WalmereError:
        """The same error, with another text for what was being done."""
        return type(self)(doing, *self.args[1:])

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for another process; `from_dict` is the inverse."""
        return {"error": type(self).__name__, "arguments": list(self.args)}


def from_dict(stored: dict[str, Any]) -> WalmereError:
    """The inverse of `to_dict`; an unknown class becomes WalmereError. Raises KeyError or TypeError otherwise."""
    kind = globals().get(stored["error"])
    known = isinstance(kind, type) and issubclass(kind, WalmereError)
    error: WalmereError = (kind if known else WalmereError)(*stored["arguments"])  # type: ignore[misc]
    return error


class ConfigError(WalmereError):
    """The configuration or an argument is not usable; nothing was started."""


class ProtocolError(WalmereError):
    """A message is truncated or malformed at byte `offset`, counted from 0."""

    def __init__(self, doing: str, wrong: str, hint: str = "", offset: int = 0) -> None:
        super().__init__(doing, wrong, hint)
        self.args = (doing, wrong, hint, offset)
        self.offset = offset

    def __str__(self) -> str:
        return f"{self.doing}: {self.wrong} at offset {self.offset}" + (f"\n  hint: {self.hint}" if self.hint else "")


class TypeMismatch(WalmereError):
    """An error about the types of columns."""


class CastError(TypeMismatch):
    """A text is not PostgreSQL's output for a value of this type. The error never shows the text."""


class UnknownType(TypeMismatch):
    """A column has a type that is neither built in nor in the catalog that was read."""


class ChangeLogError(WalmereError):
    """An error about the change log on disk."""


class ChangeLogVersion(ChangeLogError):
    """The log has a format version that this version of Walmere does not support."""


class ChangeLogDamaged(ChangeLogError):
    """A file of the log is torn, missing, or fails its checksum."""


class StateDamaged(ChangeLogDamaged):
    """A file of the subscription's state, such as `tables.json`, cannot be read."""


class ChangesRemoved(ChangeLogError):
    """The changes to be read were removed from the log, because no sink or reader needed them."""


class ChangeLogInUse(ChangeLogError):
    """Another process is writing this log."""


class TakenOver(ChangeLogError):
    """Another process, mostly on another machine, has taken over the log or the state in the store."""


class ChangeLogMismatch(ChangeLogError):
    """The log and the source do not belong together, or there is a gap between them."""


class SinkError(WalmereError):
    """An error about the target."""


class SinkConflict(SinkError):
    """Other writers committed to the table at the same time, on every retry."""

    transient = True


class SinkMismatch(SinkError):
    """The table at the target is not the expected one, or does not have the expected rows."""


class OwnedByAnother(SinkMismatch):
    """A table of the target, or the directory of the subscription's points there, belongs to another subscription."""


class ColumnMissing(SinkMismatch):
    """A table of a database lacks published columns. It waits until they are added."""


class SinkFull(SinkError):
    """The target's disk is full. Not transient: a person must free space. The changes wait in the log meanwhile."""


class SinkUnavailable(SinkError):
    """There is no connection to the target, or it was lost."""

    transient = True


class SinkRefused(SinkError):
    """The role may not do this at the target, or may not log in there."""


class Conflict(SinkError):
    """A change cannot be applied: its row violates a constraint of the target. `found` describes it, as JSON."""

    def __init__(self, doing: str, wrong: str, hint: str = "", found: str = "{}") -> None:
        super().__init__(doing, wrong, hint)
        self.args = (doing, wrong, hint, found)
        self.found = found


class StoreError(WalmereError):
    """An error about an object store."""


class StoreUnavailable(StoreError):
    """The store does not answer, or answers with an error of its own."""

    transient = True


class StoreRefused(StoreError):
    """There are no credentials, they do not allow this, or there is no such bucket."""


class StoreUnsuitable(StoreError):
    """The store ignores the condition of a put, so two writers could overwrite each other."""


class SparkError(WalmereError):
    """An error about Spark."""


class SparkUnavailable(SparkError):
    """Spark's master does not answer."""


class ExecutorUnsuitable(SparkError):
    """The Python of an executor cannot run tasks: it lacks Walmere, or has other versions than the driver."""


class SparkEnded(SparkError):
    """Spark's JVM has ended."""


class LakeError(WalmereError):
    """A lake has no such subscription, table or point."""


class PointGone(LakeError):
    """The LSN or time is older than the oldest point that can still be read."""


class NotApplied(LakeError):
    """The LSN or time is newer than what has been applied."""

    transient = True


class NotMirrored(WalmereError):
    """A table cannot be mirrored: the target cannot hold it, or its rows have no identity. Other tables go on."""


class NotCompared(WalmereError):
    """Source and target cannot be compared now. This does not mean that they differ."""


class InvalidTransition(WalmereError):
    """A wrong use of a state machine: a bug in Walmere, not something that a user can fix."""


class SourceError(WalmereError):
    """An error about the source server."""


class SourceUnavailable(SourceError):
    """There is no connection to the source, or it was lost."""

    transient = True


class AccessRefused(SourceError):
    """The role may not log in, or may not do what was asked."""


class NotConfigured(SourceError):
    """A setting of the server prevents what is needed."""


class WrongSystem(SourceError):
    """The server is another PostgreSQL system than the one this subscription started with."""


class TableLocked(SourceError):
    """Another session held a lock on a table until the lock timeout."""

    transient = True


class PublicationMissing(SourceError):
    """A publication named in the configuration does not exist on the source."""


class ColumnListsDiffer(SourceError):
    """Publications have different column lists for one table, so PostgreSQL cannot decode its changes."""


class SlotMissing(SourceError):
    """The replication slot does not exist any more."""


class SlotInUse(SourceError):
    """Another walsender is streaming from the slot. The slot prevents that two receivers run at the same time."""

    transient = True


class SlotLost(SourceError):
    """The slot was invalidated; the server has removed WAL that it needed."""


class SlotUnsuitable(SourceError):
    """A slot of that name exists, but this subscription cannot use it."""
