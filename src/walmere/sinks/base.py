"""The contract of a sink: what may be relied on, whichever target is behind it.

A table is written in two ways. Its **copy** is staged by many tasks and committed once. Its **changes** arrive in
batches that end on a commit boundary of the source; the fold makes one `Net` of each, and `apply` makes it one commit.

What a sink promises:

1. **Atomic per table.** Whoever reads the table sees all of a batch or nothing of it: one commit per table and batch,
   truncation, deletes, replacements and new rows together.
2. **The LSN is in the commit.** How far a table has come is stored by the very commit that brought it there (Delta: an
   app transaction; Iceberg: the snapshot's summary; Postgres: a replication origin). `applied` reads it back. There is
   no second place that could disagree after a crash.
3. **Idempotent.** `commit` and `apply` do nothing, and say so by returning the version there is, if the table's LSN is
   already at or past the one given. So after a crash the batch is simply applied again.
4. **Attempts do not add up.** Spark may run a task again, run it twice at once (speculation), or let a task it gave up
   finish later (a zombie executor). However they interleave, one of them takes effect. `stage` gives every file a name
   that is never used again and makes nothing visible; only a commit does. A commit is made against the version at which
   the LSN was looked at, and fails if another commit has come since; then the LSN is looked at again, and the loser
   finds that the work is done. A zombie that wakes long after finds a later LSN and changes nothing either.
5. **Durable.** When `commit` or `apply` returns, a crash of the machine does not undo it (on a local disk: files, log
   and their directories are fsynced. An object store says so by itself).
6. **Exact.** A table has the published columns, in order, all nullable, and no others. A value comes back as it went
   in. Where the source's columns change, a commit gives the table its new columns and its rows together.

7. **Published.** Tables are committed one by one. Which of their versions belong together stands in the target itself,
   where every reader finds it (Delta: `_walmere/<subscription>/`), and is replaced as a whole: a reader has one point
   or another, never a mixture. A `publisher` has only points that the subscription's ledger has; after a crash it may
   be one behind, until the next run begins. A published version can be read for `keep_seconds` after another has taken
   its place, whatever is tidied up meanwhile.

8. **Owned.** A table names its owner (see `walmere.owner`) in its metadata, from the commit that creates it. A
   sink that has an owner refuses to write to a table of another one.

What a sink leaves behind: staged files that nobody committed. A task that dies, or loses, cannot know whether its
files are in use, so it removes none. They are invisible and cost only space, until the target's own clean-up takes
them (Delta: `VACUUM`, with `full=True` in `deltalake`). Its retention must be longer than the longest copy takes.

What a sink may rely on: batches of one table come in LSN order, each only after the one before is known to be applied.
Others may rewrite the table without changing rows (`OPTIMIZE`) at any time. If they change rows, `changed_by_others`
tells; whoever applies asks for it, and has the table copied again.

A sink object is small, holds no open handle, and pickles: it goes to the tasks as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from walmere.errors import SinkFull, WalmereError
from walmere.ledger.entry import Entry
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.owner import Owner

Mask: TypeAlias = NDArray[np.bool_]
Run: TypeAlias = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


def run_here(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """One after the other."""
    return list(map(function, items))


@dataclass(frozen=True, slots=True)
class Net:
    """What a batch of changes comes to for one table. Its parts are done as if in the order of the fields.

    The keys of `deletes` and `upserts` are all different. A row of `upserts` may or may not have a row of its key in
    the target; one of `appends` has none, so it needs no look.
    """

    truncate: bool  # what the target held before the batch goes
    deletes: pa.Table  # rows of the target to remove: their keys; of a multiset, whole rows, all different
    counts: NDArray[np.int64] | None  # of a multiset: how many rows go that are equal to each of `deletes`
    upserts: pa.Table  # whole rows, to replace the row of their key or to be added
    carry: tuple[Mask | None, ...]  # per column of `upserts`, where the value is the target's own; None: nowhere
    carry_from: pa.Table | None  # per row of `upserts`, under which key the target has these values *before* the batch
    appends: pa.Table  # whole rows, to be added

    @property
    def empty(self) -> bool:
        """Nothing is to be done."""
        return not (self.truncate or len(self.deletes) or len(self.upserts) or len(self.appends))

    @property
    def append_only(self) -> bool:
        """No row of the target needs to be looked at."""
        return not (len(self.deletes) or len(self.upserts))


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that is written and durable, but not yet part of its table."""

    path: str  # below the table's directory
    size: int
    rows: int
    stats: str  # Delta's statistics, JSON: rows, and per column least, greatest and number of nulls


@dataclass(frozen=True, slots=True)
class TableScan:
    """A table at one version, in pieces that tasks read side by side."""

    schema: pa.Schema
    rows: int
    pieces: Sequence[Any]  # what is in them, only the sink knows; they pickle


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a table is, by what it says itself."""

    version: int
    lsn: Lsn | None  # None: nothing of ours was committed to it
    owner: Owner | None
    columns: tuple[tuple[str, str], ...]  # names and types, in the target's words


class Mode(StrEnum):
    """What a commit of staged files does with the rows that are there."""

    APPEND = "append"
    OVERWRITE = "overwrite"


APPEND: Final = Mode.APPEND
OVERWRITE: Final = Mode.OVERWRITE


class LedgerWriter(Protocol):
    """Tells readers which versions belong together. It lives as long as a run, and is the only one."""

    def append(self, point: Entry) -> None:
        """From now on this point is the newest. It is durable when this returns."""


class Sink(Protocol):
    """See the contract above. Every version returned is one in which the effect is visible."""

    @property
    def keep_seconds(self) -> float:
        """How long a version can be read after another has taken its place."""

    def owned_by(self, owner: Owner, *, take_over: bool = False) -> Sink:
        """The same sink, writing for this owner. `take_over`: `claim` and `create` take tables from other owners."""

    def create(self, table: TableName, schema: pa.Schema) -> int:
        """Make an empty table of these columns, if there is none.

        One that is there and has come to an LSN is ours, and may have other columns: a copy will replace them. One with
        other columns and somebody else's rows is refused. So is one of another owner, unless it is taken over.
        """

    def claim(self, table: TableName) -> bool:
        """See that a table, if it is there, is the owner's: one of an earlier version of Walmere has none, and gets it.

        Raises OwnedByAnother. Or takes it over: returns True, and the table has lost its LSN, so that its rows stay
        until a copy replaces them.
        """

    def claim_points(self, subscription: str) -> None:
        """See that the points that were published under this name are the owner's. Raises OwnedByAnother."""

    def tables_of_others(self, subscription: str) -> Mapping[str, str]:
        """The tables that the newest points of other subscriptions have, each with the subscription's name."""

    def standing(self, table: TableName) -> Standing | None:
        """Where a table is; None if there is none."""

    def columns(self, schema: pa.Schema) -> tuple[tuple[str, str], ...]:
        """As `Standing.columns` has them."""

    def changed_by_others(self, table: TableName, after: int, upto: int) -> str | None:
        """Which commit after one version, up to another, is not ours and changes rows; None if none does."""

    def stage(
        self, table: TableName, batches: Iterable[pa.RecordBatch], schema: pa.Schema | None = None
    ) -> list[StagedFile]:
        """Write rows from within a task. Nothing is visible until one place commits what all tasks have staged.

        `schema`: the columns that the table will have with that commit, if they are others than now.
        """

    def commit(
        self,
        table: TableName,
        staged: Sequence[StagedFile],
        lsn: Lsn,
        mode: Mode = APPEND,
        schema: pa.Schema | None = None,
    ) -> int:
        """Make staged files part of the table, all at once, with this LSN; to overwrite it, with these columns."""

    def apply(self, table: TableName, net: Net, lsn: Lsn, identity: Identity) -> int:
        """Bring the table to this LSN. A batch that comes to nothing commits nothing, and its LSN is not stored."""

    def evolve(
        self, table: TableName, schema: pa.Schema, values: Sequence[str | pa.Scalar], run: Run = run_here
    ) -> int:
        """Give the table these columns. The LSN stays, and so do the rows.

        `values`: for each column the name that it had, or what all rows have in it. Nothing, if it has them already.
        `run` runs a function over many items, somewhere else if there is much to do.
        """

    def maintain(self, table: TableName, version: int, vacuum: bool = False) -> int:
        """After a batch has made this version, compact the table if it is time to. Returns the newest version.

        The rows stay as they are. `vacuum`: some minutes have passed, so delete the files that are no longer needed.
        """

    def applied(self, table: TableName) -> Lsn | None:
        """The LSN that the table has come to; None if it has none yet, or there is no table."""

    def count(self, table: TableName) -> int:
        """How many rows the table has; 0 if there is none."""

    def version(self, table: TableName) -> int:
        """The newest version of the table."""

    def scan(self, table: TableName, version: int, at_least: int = 1) -> TableScan:
        """All rows of a version, in at least so many pieces if they are large enough."""

    def read(self, piece: Any, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of a piece, from within a task, with few of them in memory at a time; of these columns, or all."""

    def points(self, subscription: str) -> Sequence[Entry]:
        """The points that a subscription has published, oldest first; none if they cannot be read."""

    def open_ledger(self, subscription: str, entries: Iterable[Entry]) -> LedgerWriter:
        """Begin to publish the points of a subscription, with these in place of what was published before.

        If there are none, what was published before stays until there is one.
        """


_DISK_FULL: Final = re.compile(r"No space left on device|Disk quota exceeded|os error 28\b")


def full_or(error: WalmereError, said: str = "") -> WalmereError:
    """SinkFull, if the error is that a disk is full. Else the error itself."""
    full = _DISK_FULL.search(error.wrong) or _DISK_FULL.search(said)
    if full is None:
        return error
    wrong = error.wrong if _DISK_FULL.search(error.wrong) else full[0]
    return SinkFull("writing to the target", wrong, "make room there; until then, the changes stay in the change log")
