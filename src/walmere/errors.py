"""One tree of errors. Each says what was being done, what went wrong, and what the user can do about it.

    WalmereError
    ├── ConfigError               walmere.toml, WALMERE_… or an argument is not usable
    ├── ProtocolError             the bytes are not what the protocol says (carries the offset)
    ├── TypeMismatch
    │   ├── CastError             a text is not one of its type
    │   └── UnknownType           a type that nobody has asked the catalog about
    ├── ChangeLogError
    │   ├── ChangeLogVersion      written by another version of the format
    │   ├── ChangeLogDamaged      a file is torn, missing or fails its checksum
    │   │   └── StateDamaged      a file of the subscription's state cannot be read
    │   ├── ChangesRemoved        what is to be read is not in it any more
    │   ├── ChangeLogInUse        another process writes this log
    │   └── ChangeLogMismatch     the log and the source do not belong together
    ├── SinkError
    │   ├── SinkConflict          others committed at the same time, again and again          (transient)
    │   ├── SinkFull              the target's disk is full
    │   └── SinkMismatch          what is at the target is not the table it should be
    │       └── OwnedByAnother    it belongs to another subscription
    ├── SparkError
    │   ├── SparkUnavailable      the master does not answer
    │   └── SparkEnded            the JVM has ended
    ├── LakeError                 a lake has not what was asked for
    │   ├── PointGone             it is older than what is kept
    │   └── NotApplied            it is newer than what is applied yet                     (transient)
    ├── NotCompared               there is no point at which source and target can be compared
    ├── NotMirrored               a table is set aside: it has what no target could hold, or cannot be told apart
    ├── InvalidTransition         a table's state machine was used wrongly: a bug of ours
    └── SourceError
        ├── SourceUnavailable     no connection, or it was cut                             (transient)
        ├── AccessRefused         the role may not do this, or may not log in
        ├── NotConfigured         a setting of the server forbids logical replication
        ├── WrongSystem           another PostgreSQL system answers at this address
        ├── TableLocked           somebody holds a lock on a table that is to be read         (transient)
        ├── PublicationMissing
        ├── ColumnListsDiffer     of one table, in several publications: it cannot be decoded
        ├── SlotMissing
        ├── SlotInUse             another walsender streams from the slot                  (transient)
        ├── SlotLost              invalidated: the WAL it needed is gone
        └── SlotUnsuitable        another plugin, another database, not logical

A *transient* error may pass by itself, so the receiver tries again; any other ends it. Errors cross process borders
(Spark's executors, the receiver's own process), so all of them pickle.
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

    def to_dict(self) -> dict[str, Any]:
        """For a file that another process reads: see `from_dict`."""
        return {"error": type(self).__name__, "arguments": list(self.args)}


def from_dict(stored: dict[str, Any]) -> WalmereError:
    """The error that `to_dict` was asked of; of its nearest known class. Raises KeyError or TypeError if it is none."""
    kind = globals().get(stored["error"])
    known = isinstance(kind, type) and issubclass(kind, WalmereError)
    error: WalmereError = (kind if known else WalmereError)(*stored["arguments"])  # type: ignore[misc]
    return error


class ConfigError(WalmereError):
    """The configuration or an argument is not usable; nothing was started."""


class ProtocolError(WalmereError):
    """A message is truncated or malformed. `offset` is where in the bytes given, counted from 0."""

    def __init__(self, doing: str, wrong: str, hint: str = "", offset: int = 0) -> None:
        super().__init__(doing, wrong, hint)
        self.args = (doing, wrong, hint, offset)
        self.offset = offset

    def __str__(self) -> str:
        return f"{self.doing}: {self.wrong} at offset {self.offset}" + (f"\n  hint: {self.hint}" if self.hint else "")


class TypeMismatch(WalmereError):
    """Something about the types of columns."""


class CastError(TypeMismatch):
    """A text is not one that PostgreSQL gives for a value of this type. Never shows the text."""


class UnknownType(TypeMismatch):
    """A column is of a type that is neither built in nor among those the catalog was asked for."""


class ChangeLogError(WalmereError):
    """Something about the change log on disk."""


class ChangeLogVersion(ChangeLogError):
    """The log was written in a version of the format that this Walmere does not know."""


class ChangeLogDamaged(ChangeLogError):
    """A file of the log is torn, missing, or fails its checksum."""


class StateDamaged(ChangeLogDamaged):
    """A file of the subscription's state, such as `tables.json`, cannot be read."""


class ChangesRemoved(ChangeLogError):
    """What is to be read is not in the log any more: it was kept for nobody."""


class ChangeLogInUse(ChangeLogError):
    """Another process is writing this log."""


class ChangeLogMismatch(ChangeLogError):
    """The log and the source do not belong together, or there is a gap between them."""


class SinkError(WalmereError):
    """Something about the target."""


class SinkConflict(SinkError):
    """Others committed to the table at the same time, again and again."""

    transient = True


class SinkMismatch(SinkError):
    """What is at the target is not the table it should be, or does not hold the rows it should."""


class OwnedByAnother(SinkMismatch):
    """A table of the target, or the place of the subscription's points there, belongs to another subscription."""


class SinkFull(SinkError):
    """The target's disk is full. Not transient: it needs somebody to make room; but changes wait in the log for it."""


class SparkError(WalmereError):
    """Something about Spark."""


class SparkUnavailable(SparkError):
    """Spark's master does not answer."""


class SparkEnded(SparkError):
    """Spark's JVM has ended, and nothing can be done without it."""


class LakeError(WalmereError):
    """A lake has no such subscription, table or point, or cannot be read as asked."""


class PointGone(LakeError):
    """The LSN or time is older than the oldest point that can still be read."""


class NotApplied(LakeError):
    """The LSN or time is newer than what has been applied."""

    transient = True


class NotMirrored(WalmereError):
    """A table has something that its target could not hold, or that nobody could find again. The others go on."""


class NotCompared(WalmereError):
    """Source and target cannot be compared now. That is not to say that they differ."""


class InvalidTransition(WalmereError):
    """A state machine was used wrongly: a bug, not something a user can mend."""


class SourceError(WalmereError):
    """Something about the source server."""


class SourceUnavailable(SourceError):
    """There is no connection to the source, or it was cut."""

    transient = True


class AccessRefused(SourceError):
    """The role may not log in, or may not do what was asked."""


class NotConfigured(SourceError):
    """A setting of the server forbids what is needed."""


class WrongSystem(SourceError):
    """Another PostgreSQL system answers than the one this subscription began with."""


class TableLocked(SourceError):
    """Somebody holds a lock on a table, for longer than we wait."""

    transient = True


class PublicationMissing(SourceError):
    """A publication named in the configuration does not exist on the source."""


class ColumnListsDiffer(SourceError):
    """Publications have different column lists for one table, and PostgreSQL does not decode its changes then."""


class SlotMissing(SourceError):
    """The replication slot does not exist any more."""


class SlotInUse(SourceError):
    """Another walsender is streaming from the slot: the slot is the fence between two receivers."""

    transient = True


class SlotLost(SourceError):
    """The slot was invalidated; the server has removed WAL that it needed."""


class SlotUnsuitable(SourceError):
    """A slot of that name exists, but it is not one this subscription can use."""
