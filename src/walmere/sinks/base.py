"""The contract of a sink: what every target guarantees.

A table is written in two ways. Its **copy** is staged by many tasks and committed once. Its **changes** arrive in
batches that end on a commit boundary of the source; the fold makes one `Net` of each, and `apply` makes it one commit.

What a sink promises:

1. **Atomic per table.** A reader of the table sees all of a batch or nothing of it. There is one commit per table and
   batch: truncation, deletes, replacements and new rows together. In a database, a batch of all tables is one
   transaction.
2. **The LSN is in the commit.** The commit that brings a table to an LSN stores that LSN (Delta: an app transaction;
   Iceberg: the snapshot's summary; Postgres: a replication origin). `applied` reads it. It is stored nowhere else, so
   nothing can disagree after a crash.
3. **Idempotent.** If the table's LSN is already at or past the given one, `commit` and `apply` do nothing, and return
   the version that exists. So after a crash the batch is applied again.
4. **Several attempts take effect once.** Spark may run a task again, run it twice at once (speculation), or let a task
   that it gave up finish later (a zombie executor). In any order, one of them takes effect. `stage` gives every file a
   unique name and makes nothing visible; only a commit does. A commit is made against the version at which the LSN was
   read, and fails if there is a later one. Then the LSN is read again, and the loser finds that the work is done. A
   zombie that commits much later finds a later LSN, and changes nothing either. If the batches of two attempts end at
   different LSNs, the longer one may find a part of its work done: it fails, and is retried from there (`after`).
5. **Durable.** When `commit` or `apply` returns, a crash of the machine does not undo it. (On a local disk, files, log
   and directories are fsynced. An object store does it by itself.)
6. **Exact.** A table has the published columns, in order, all nullable, and no others. Values are not changed. When the
   source's columns change, one commit gives the table its new columns together with its rows.
7. **Consistent points.** Tables are committed one by one. The target itself stores which of their versions belong
   together, where every reader finds it (Delta: `_walmere/<subscription>/`). It is replaced atomically: a reader has
   one point or another, never a mixture. The target has only points that the subscription's ledger has; after a crash
   it may be one behind, until the next run begins. A version of a point can be read for `keep_seconds` after it was
   replaced, whatever upkeep does. A database has only its newest point.
8. **Owned.** A table has its owner (see `walmere.owner`) in its metadata, from the commit that creates it. A sink with
   an owner refuses to write to a table of another owner.

What a sink leaves: staged files that were never committed. A task that dies or loses cannot know whether its files are
in use, so it deletes none. They are invisible and only take space, until `vacuum` deletes them: a week after they were
written, so a copy must not take longer.

What a sink may rely on: batches of one table come in LSN order, each only after the one before is applied. Other
programs may rewrite the table without changing rows (`OPTIMIZE`) at any time. If they change rows, `changed_by_others`
returns the commit, and the caller has the table copied again.

A sink object is small, has no open handle, and pickles: it is sent to the tasks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol, TypeAlias, TypeGuard

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from walmere.errors import SinkError, SinkFull, WalmereError
from walmere.ledger.entry import Entry
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.owner import Owner
from walmere.sinks.table_size import TableSize

Mask: TypeAlias = NDArray[np.bool_]
Run: TypeAlias = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


def run_here(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Run a function over items in this process, one after the other."""
    return list(map(function, items))


@dataclass(frozen=True, slots=True)
class Net:
    """The net effect of a batch on one table. Its parts are applied as if in the order of the fields.

    The keys of `deletes` and `upserts` are all different. The target may have a row with the key of an upsert. It has
    no row with the key of an append, so it does not have to be searched.
    """

    truncate: bool  # remove all rows that the target had before the batch
    deletes: pa.Table  # keys of the rows to remove; of a multiset, whole rows, all different
    counts: NDArray[np.int64] | None  # of a multiset: how many rows equal to each of `deletes` to remove
    upserts: pa.Table  # rows that replace the row with their key, or are added
    carry: tuple[Mask | None, ...]  # per column of `upserts`, where the value is taken from the target; None: nowhere
    carry_from: pa.Table | None  # per row of `upserts`, the key that has these values in the target *before* the batch
    appends: pa.Table  # rows that are added

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.truncate or len(self.deletes) or len(self.upserts) or len(self.appends))

    @property
    def append_only(self) -> bool:
        """Whether no row of the target has to be searched."""
        return not (len(self.deletes) or len(self.upserts))


@dataclass(frozen=True, slots=True)
class RowNet:
    """The net effect of a batch on the rows of one table of a database. Its parts are applied in order."""

    deletes: pa.Table  # keys of the rows to delete; of a multiset, whole rows, all different
    counts: NDArray[np.int64] | None  # of a multiset: how many rows equal to each of `deletes` to delete
    updates: pa.Table  # rows with their new values
    update_keys: pa.Table  # and the keys that they had before the batch
    unchanged: tuple[Mask | None, ...]  # per column of `updates`, where the value stays; None: nowhere
    inserts: pa.Table


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A durable file that is not yet part of its table."""

    path: str  # relative to the table's directory
    size: int
    rows: int
    stats: str  # Delta's statistics, JSON: rows, and per column least, greatest and number of nulls


@dataclass(frozen=True, slots=True)
class TableScan:
    """A table at one version, in pieces that tasks read in parallel."""

    schema: pa.Schema
    rows: int
    pieces: Sequence[Any]  # opaque to others than the sink; they pickle


@dataclass(frozen=True, slots=True)
class Standing:
    """A table of the target, as it is now."""

    version: int
    lsn: Lsn | None  # None: Walmere has not committed to it
    owner: Owner | None
    columns: tuple[tuple[str, str], ...]  # names, and types as the target writes them


@dataclass(frozen=True, slots=True)
class Upkeep:
    """When files are rewritten."""

    deleted_share: float = 0.1  # rewrite a file when so many of its rows are deleted


class UpkeepWork(Protocol):
    """What one task does for the upkeep of a table."""

    @property
    def bytes(self) -> int:
        """About how many bytes it writes."""


@dataclass(frozen=True, slots=True)
class Extent(TableSize):
    """How large a table is, and at which version."""

    version: int
    rows: int
    written: int  # bytes of all files, since this process first read the table


class Mode(StrEnum):
    """What a commit of staged files does with the existing rows."""

    APPEND = "append"
    OVERWRITE = "overwrite"


APPEND: Final = Mode.APPEND
OVERWRITE: Final = Mode.OVERWRITE


class LedgerWriter(Protocol):
    """Writes points to the target, for readers. A run has one, and it is the only writer."""

    def append(self, point: Entry) -> None:
        """Make this point the newest. It is durable when this returns."""


class Sink(Protocol):
    """A target: a lake, or a database. In every version that a method returns, its effect is visible."""

    @property
    def keep_seconds(self) -> float:
        """How long a version can be read after it was replaced."""

    @property
    def spreads(self) -> bool:
        """Whether `stage_changes` is supported, and a batch costs what it changes."""

    @property
    def transactional(self) -> bool:
        """Whether a batch of all tables is one transaction, and values are PostgreSQL's text: a database."""

    @property
    def two_phase(self) -> bool:
        """Whether the target prepares transactions that the source has prepared."""

    @property
    def batch_interval(self) -> float:
        """Seconds between the beginnings of two batches, at least, in a run without an end: each has a fixed cost."""

    def portable(self) -> Sink:
        """The same sink, for tasks on other machines: it needs no file of this machine."""

    def owned_by(self, owner: Owner, *, take_over: bool = False) -> Sink:
        """The same sink, writing for this owner. `take_over`: `claim` and `create` take tables from other owners."""

    def claim(self, table: TableName) -> bool:
        """Make sure that a table, if it exists, belongs to the owner. A table of an earlier version gets it.

        Raises OwnedByAnother. With `take_over`, returns True instead: then the table has lost its LSN, and its rows
        stay until a copy replaces them.
        """

    def claim_points(self, subscription: str) -> None:
        """Make sure that the points under this name belong to the owner. Raises OwnedByAnother."""

    def tables_of_others(self, subscription: str) -> Mapping[str, str]:
        """The tables in the newest points of other subscriptions, each with the name of its subscription."""

    def standing(self, table: TableName) -> Standing | None:
        """A table as it is now; None if it does not exist."""

    def columns(self, schema: pa.Schema) -> tuple[tuple[str, str], ...]:
        """A schema as `Standing.columns` has it."""

    def changed_by_others(self, table: TableName, after: int, upto: int) -> str | None:
        """The first commit after a version, up to another, in which another program changes rows; None: none does."""

    def extent(self, table: TableName) -> Extent | None:
        """How large a table is now; None if it does not exist."""

    def plan_upkeep(self, table: TableName, identity: Identity | None, limits: Upkeep) -> Sequence[UpkeepWork]:
        """What of the table is to be rewritten now, without changing its rows. Each item is work for one task."""

    def rewrite_files(self, work: Any) -> Any:
        """Do an item of `plan_upkeep`, from within a task. Batches may be applied meanwhile. Nothing is visible."""

    def replace_files(self, table: TableName, done: Sequence[Any]) -> int | None:
        """Commit what tasks have rewritten. LSN and rows stay. Returns the version; None: there was nothing to commit.

        Rows that batches have changed meanwhile stay changed.
        """

    def vacuum(self, table: TableName) -> None:
        """Delete the files that are no longer needed: no version that can be read has them."""

    def applied(self, table: TableName) -> Lsn | None:
        """The LSN that the table has reached; None if it has none, or does not exist."""

    def count(self, table: TableName) -> int:
        """The number of rows; 0 if the table does not exist."""

    def version(self, table: TableName) -> int:
        """The newest version of the table."""

    def scan(self, table: TableName, version: int, at_least: int = 1) -> TableScan:
        """All rows of a version, in at least so many pieces if the table is large enough."""

    def pinned(self) -> AbstractContextManager[Sink]:
        """A context in which the versions of the newest point can be read, whatever is applied meanwhile.

        It is entered while nothing is applied. Returns the sink to read with.
        """

    def points(self, subscription: str) -> Sequence[Entry]:
        """The points of a subscription in the target, oldest first; none if they cannot be read."""

    def open_ledger(self, subscription: str, entries: Iterable[Entry]) -> LedgerWriter:
        """Become the writer of a subscription's points. `entries` replace the points in the target.

        If there are none, the points in the target stay until the first `append`.
        """


class LakeSink(Sink, Protocol):
    """A target of files: tables are committed one by one, and tasks stage files for it."""

    def create(self, table: TableName, schema: pa.Schema) -> int:
        """Create an empty table with these columns, if it does not exist.

        An existing table that has an LSN was written by Walmere, and may have other columns: a copy will replace them.
        A table with other columns and rows of another program is refused. So is one of another owner, unless
        `take_over` is set.
        """

    def stage(
        self,
        table: TableName,
        batches: Iterable[pa.RecordBatch],
        schema: pa.Schema | None = None,
        identity: Identity | None = None,
    ) -> list[StagedFile]:
        """Write rows from within a task. They become visible when the files of all tasks are committed.

        `schema`: the columns that the table will have after that commit, if they change. `identity`: how later batches
        will find the rows, if that is known.
        """

    def commit(
        self,
        table: TableName,
        staged: Sequence[StagedFile],
        lsn: Lsn,
        mode: Mode = APPEND,
        schema: pa.Schema | None = None,
        after: Lsn | None = None,
    ) -> int:
        """Make staged files part of the table, all at once, with this LSN; with OVERWRITE, also with these columns.

        `after`: the LSN that the table had when the rows were chosen, 0/0 if it had none. If it has another one now,
        and not `lsn`, SinkConflict is raised; None: it is not compared.
        """

    def apply(self, table: TableName, net: Net, lsn: Lsn, identity: Identity, after: Lsn | None = None) -> int:
        """Bring the table to this LSN. An empty batch commits nothing, and its LSN is not stored.

        `after` is that of `commit`: the changes are those after this LSN.
        """

    def stage_changes(self, table: TableName, net: Net, identity: Identity, after: Lsn | None = None) -> Any:
        """Do all but the commit of `apply`, for a part of a batch, from within a task. It has no TRUNCATE.

        Parts of a batch have different keys. Nothing is visible until `commit_changes` gets the results of all tasks.
        `after` is that of `commit`.
        """

    def commit_changes(self, table: TableName, parts: Sequence[Any], lsn: Lsn) -> int:
        """Bring the table to this LSN, by what tasks have staged."""

    def evolve(
        self, table: TableName, schema: pa.Schema, values: Sequence[str | pa.Scalar], run: Run = run_here
    ) -> int:
        """Change the columns of the table. LSN and rows stay. Does nothing if the table has these columns.

        `values`: for each column its old name, or the value that all rows get. `run` runs a function over many items,
        perhaps in tasks.
        """

    def read(self, piece: Any, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of a piece, from within a task, a few at a time; with these columns, or all."""


def is_lake(sink: Sink) -> TypeGuard[LakeSink]:
    """Whether tables are committed one by one. Otherwise it is a database: `walmere.sinks.postgres.sink`."""
    return not sink.transactional


_DISK_FULL: Final = re.compile(r"No space left on device|Disk quota exceeded|os error 28\b")


def full_or(error: WalmereError, output: str = "") -> WalmereError:
    """SinkFull, if the error or the output says that a disk is full. Otherwise the error itself.

    Other disks can be full, too: an error of the source or of the change log stays as it is.
    """
    if type(error) is not WalmereError and not isinstance(error, SinkError):
        return error
    full = _DISK_FULL.search(error.wrong) or _DISK_FULL.search(output)
    if full is None:
        return error
    wrong = error.wrong if _DISK_FULL.search(error.wrong) else full[0]
    return SinkFull("writing to the target", wrong, "make room there; until then, the changes stay in the change log")
