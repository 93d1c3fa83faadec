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
    │   ├── Conflict              a row violates a constraint of the target, or does not fit
    │   └── SinkMismatch          the table at the target is not the expected one
    │       ├── OwnedByAnother    the table belongs to another subscription
    │       └── ColumnMissing     a table of a database lacks a column: somebody has to add it
    ├── StoreError                an error of an object store
    │   ├── StoreUnavailable      it does not answer, or has an error of its own            (transient)
    │   ├── StoreRefused          no credentials, no permission, or no such bucket
    │   └── StoreUnsuitable       it ignores the condition of a put
    ├── SparkError
    │   ├── SparkUnavailable      the master does not answer
    │   ├── ExecutorUnsuitable    an executor lacks Walmere, or has another version of it or of Python
    │   └── SparkEnded            the JVM has ended
    ├── LakeError                 a lake does not have what was asked for
    │   ├── PointGone             the point is older than what is kept
    │   └── NotApplied            the point is newer than what is applied                  (transient)
    ├── NotCompared               there is no point at which source and target can be compared
    ├── Paused                    the subscription is paused, so that this would never end
    ├── NotMirrored               a table is set aside: the target cannot hold it, or its rows have no identity
    │   └── FunctionFailed        a function of [[table]] could not be imported, or has failed
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

docs/reference/errors.md is made of the docstrings of these classes (`make reference`): what an error means, and after
"What to do:" what a user can do.
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
    """The configuration or an argument is not usable; nothing was started.

    What to do: Correct the key, variable or argument that the error names.
    """


class ProtocolError(WalmereError):
    """A message is truncated or malformed at byte `offset`, counted from 0.

    What to do: Report a bug, with the version of the server. A proxy that changes the stream can also be the cause.
    """

    def __init__(self, doing: str, wrong: str, hint: str = "", offset: int = 0) -> None:
        super().__init__(doing, wrong, hint)
        self.args = (doing, wrong, hint, offset)
        self.offset = offset

    def __str__(self) -> str:
        return f"{self.doing}: {self.wrong} at offset {self.offset}" + (f"\n  hint: {self.hint}" if self.hint else "")


class TypeMismatch(WalmereError):
    """An error about the types of columns."""


class CastError(TypeMismatch):
    """A text is not PostgreSQL's output for a value of this type. The error never shows the text.

    What to do: Report a bug, with the type of the column. `walmere resync` copies the table again.
    """


class UnknownType(TypeMismatch):
    """A column has a type that is neither built in nor in the catalog that was read.

    What to do: Run `walmere run` once, which reads the catalog; or give `format("pgoutput")` the option `dsn`.
    """


class ChangeLogError(WalmereError):
    """An error about the change log on disk."""


class ChangeLogVersion(ChangeLogError):
    """The log has a format version that this version of Walmere does not support.

    What to do: Use the version of Walmere that has written the log, or `walmere drop` and start again.
    """


class ChangeLogDamaged(ChangeLogError):
    """A file of the log is torn, missing, or fails its checksum.

    What to do: Restore the file that is named, or `walmere drop` and start again: all tables are copied again.
    """


class StateDamaged(ChangeLogDamaged):
    """A file of the subscription's state, such as `tables.json`, cannot be read.

    What to do: Move the file to another place, as the hint says. Most of these files are made again.
    """


class ChangesRemoved(ChangeLogError):
    """The changes to be read were removed from the log, because no sink or reader needed them.

    What to do: Start the query without its checkpoint, or raise `[subscription] keep_seconds`, or give it a `reader`.
    """


class ChangeLogInUse(ChangeLogError):
    """Another process is writing this log.

    What to do: End the process that the error names, or use another `[subscription] directory`.
    """


class TakenOver(ChangeLogError):
    """Another process, mostly on another machine, has taken over the log or the state in the store.

    What to do: Nothing, if the other process is wanted. Otherwise end that one, and start this one again.
    """


class ChangeLogMismatch(ChangeLogError):
    """The log and the source do not belong together, or there is a gap between them.

    What to do: Correct the DSN or the directory. If the source was restored or has lost transactions: `walmere drop`,
    and start again.
    """


class SinkError(WalmereError):
    """An error about the target."""


class SinkConflict(SinkError):
    """Other writers committed to the table at the same time, on every retry.

    What to do: Nothing: it is tried again. If it stays, find out who else writes to the table.
    """

    transient = True


class SinkMismatch(SinkError):
    """The table at the target is not the expected one, or does not have the expected rows.

    What to do: As the hint says: mostly `walmere resync`, or remove what somebody has put in the table's place.
    """


class OwnedByAnother(SinkMismatch):
    """A table of the target, or the directory of the subscription's points there, belongs to another subscription.

    What to do: Use another `[target] path`, or take the tables with `walmere run --take-over`.
    """


class ColumnMissing(SinkMismatch):
    """A table of a database lacks published columns. It waits until they are added.

    What to do: Run the ALTER TABLE of the error at the target. The table then goes on by itself.
    """


class SinkFull(SinkError):
    """The target's disk is full. Not transient: a person must free space. The changes wait in the log meanwhile.

    What to do: Free space on the target's disk. A run that is still there goes on by itself.
    """


class SinkUnavailable(SinkError):
    """There is no connection to the target, or it was lost.

    What to do: Nothing, if the target comes back: it is tried again. Otherwise correct `[target] dsn`.
    """

    transient = True


class SinkRefused(SinkError):
    """The role may not do this at the target, or may not log in there.

    What to do: Grant what the error names; `walmere check` has the statements.
    """


class Conflict(SinkError):
    """The target refuses a row: a constraint is violated, or a value does not fit. `found` describes it, as JSON.

    What to do: Correct the row at the target; or `walmere skip LSN`; or set `[target] on_conflict`.
    """

    def __init__(self, doing: str, wrong: str, hint: str = "", found: str = "{}") -> None:
        super().__init__(doing, wrong, hint)
        self.args = (doing, wrong, hint, found)
        self.found = found


class StoreError(WalmereError):
    """An error about an object store."""


class StoreUnavailable(StoreError):
    """The store does not answer, or answers with an error of its own.

    What to do: Nothing, if the store comes back: it is tried again.
    """

    transient = True


class StoreRefused(StoreError):
    """There are no credentials, they do not allow this, or there is no such bucket.

    What to do: Correct the credentials, their policy, or the name of the bucket.
    """


class StoreUnsuitable(StoreError):
    """The store ignores the condition of a put, so two writers could overwrite each other.

    What to do: Use a store that supports conditional puts, or update its server.
    """


class SparkError(WalmereError):
    """An error about Spark."""


class SparkUnavailable(SparkError):
    """Spark's master does not answer.

    What to do: Start the cluster, or correct `[spark] master`.
    """


class ExecutorUnsuitable(SparkError):
    """The Python of an executor cannot run tasks: it lacks Walmere, or has other versions than the driver.

    What to do: Install the same version of Walmere on the executors, or send an environment: see the guide "Run on a
    cluster".
    """


class SparkEnded(SparkError):
    """Spark's JVM has ended.

    What to do: Start the run again; nothing is lost. If it was out of memory, raise `spark.driver.memory`.
    """


class LakeError(WalmereError):
    """A lake has no such subscription, table or point.

    What to do: Correct the path, the subscription's name or the table's name.
    """


class PointGone(LakeError):
    """The LSN or time is older than the oldest point that can still be read.

    What to do: Read a newer point; to read further back in the future, raise `[target] keep_seconds`.
    """


class NotApplied(LakeError):
    """The LSN or time is newer than what has been applied.

    What to do: Wait until it is applied, or use `latest()`.
    """

    transient = True


class Paused(WalmereError):
    """The subscription is paused, and this would wait until it is resumed.

    What to do: `walmere resume`, then try again.
    """


class NotMirrored(WalmereError):
    """A table cannot be mirrored: the target cannot hold it, or its rows have no identity. Other tables go on.

    What to do: Correct the table, as the error says. It is then copied again by itself.
    """


class FunctionFailed(NotMirrored):
    """A function that masks a column could not be imported, raised an error, or returned something else.

    What to do: Correct the function, make it importable for Spark's executors, or correct the column's mask or type.
    """


class NotCompared(WalmereError):
    """Source and target cannot be compared now. This does not mean that they differ.

    What to do: End the transactions that are named, or call `verify` again with a longer `--wait`.
    """


class InvalidTransition(WalmereError):
    """A wrong use of a state machine: a bug in Walmere, not something that a user can fix.

    What to do: Report a bug.
    """


class SourceError(WalmereError):
    """An error about the source server."""


class SourceUnavailable(SourceError):
    """There is no connection to the source, or it was lost.

    What to do: Nothing, if the source comes back: it is tried again. Otherwise correct `[source] dsn`.
    """

    transient = True


class AccessRefused(SourceError):
    """The role may not log in, or may not do what was asked.

    What to do: Grant what the error names, or correct the password; `walmere check` has the statements.
    """


class NotConfigured(SourceError):
    """A setting of the server prevents what is needed.

    What to do: Change the setting that is named; `walmere check` has the statement.
    """


class WrongSystem(SourceError):
    """The server is another PostgreSQL system than the one this subscription started with.

    What to do: Correct `[source] dsn`. If the source was rebuilt: `walmere drop --keep-slot`, and start again.
    """


class TableLocked(SourceError):
    """Another session held a lock on a table until the lock timeout.

    What to do: Nothing: it is tried again. `walmere status` shows who holds the lock.
    """

    transient = True


class PublicationMissing(SourceError):
    """A publication named in the configuration does not exist on the source.

    What to do: Create the publication, or correct `[source] publications`.
    """


class ColumnListsDiffer(SourceError):
    """Publications have different column lists for one table, so PostgreSQL cannot decode its changes.

    What to do: Make the column lists equal; `walmere check` has the statements.
    """


class SlotMissing(SourceError):
    """The replication slot does not exist any more.

    What to do: `walmere drop --keep-slot`, then `walmere run`: all tables are copied again.
    """


class SlotInUse(SourceError):
    """Another walsender is streaming from the slot. The slot prevents that two receivers run at the same time.

    What to do: Nothing, if the other receiver ends. Otherwise end the process that is named.
    """

    transient = True


class SlotLost(SourceError):
    """The slot was invalidated; the server has removed WAL that it needed.

    What to do: `walmere drop`, then `walmere run`: all tables are copied again. Raise `max_slot_wal_keep_size`.
    """


class SlotUnsuitable(SourceError):
    """A slot of that name exists, but this subscription cannot use it.

    What to do: Use another `[source] slot`, or drop the slot that has this name.
    """
