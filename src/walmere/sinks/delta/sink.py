"""Delta tables, written by `deltalake` and Arrow from within the task: no JVM, no jars, one commit per batch.

**Where.** `<path>/<namespace>/<table>`. In a name, what is not a letter, digit, `_`, `-` or `.` of ASCII is written as
`~` and two hexadecimal digits per byte of UTF-8, as is `~` itself and a dot at the beginning. It is percent-encoding
with another sign, because `deltalake` decodes a `%` in a path once more than it should; `~` means nothing to URLs,
file systems, shells in the middle of a word, or Hadoop. Capitals stay; on a file system that ignores case, two tables
could meet in one directory: the table's own name is in its metadata, and the second is refused.

**The fence.** Every commit of ours carries the LSN as an app transaction, and is a compare-and-set: it becomes the very
next version after the one at which that LSN was read, or fails (`max_commit_retries=0`; `deltalake` would otherwise see
whether it could go behind the others, and refuse if one has the same app id). So of two attempts one wins, and the
other looks again and finds that nothing is left to do.

**Changes of single rows.** A batch of new rows only is a new file. For all else, the files that hold one of the rows
are written anew without it, and removed, added and new files go into one commit:

1. The log has the least and greatest key of every file; only those are opened in which a key of the batch can lie.
2. Of these, the key's columns are read, one after the other and only while rows are left that match. What is found:
   the place of every row to be removed or replaced, and values that unchanged TOAST carries over.
3. Files with a hit are read, filtered and written, several at once, with a row group of each in memory. A replaced row
   stays in the file that had it, so that keys which lie together stay together. Small ones become one.

`deltalake` has a MERGE, and we do not use it. Measured beside each other it takes more time and CPU. It turns many
files into one, so that the next change of a single row rewrites the whole table. And it can neither take one of equal
rows (a multiset) nor fetch values from the row of another key (TOAST and a change of key) in the same commit.

**Tidying.** Every new file of a few rows makes reading slower: with every sixteenth version, small files are made one.
And every file that was replaced stays on the disk, for readers of older versions. `vacuum` deletes those that have
been out of use for `keep_seconds`, in whole hours. It goes by what the log says was removed, and touches nothing that a
running copy has staged. The log itself is kept for longer, by the table's own properties; a table that was made when
less was wanted gets them with its next commit.

Files with deletion vectors (Spark may leave some) are read as they should be. `deltalake` cannot remove such a file by
name, so a batch that touches one rewrites the whole table, once.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from walmere.bins import bins
from walmere.errors import ChangeLogError, ConfigError, SinkConflict, SinkError, SinkMismatch
from walmere.ledger.entry import Entry
from walmere.ledger.file import KEEP_SECONDS, History
from walmere.ledger.lake import PLACE, LakeLedger, read_latest, read_owner
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.owner import PROPERTY as OWNER
from walmere.owner import Owner, owned_by_another
from walmere.sinks.base import APPEND, OVERWRITE, Mode, Net, Run, StagedFile, Standing, TableScan, run_here
from walmere.sinks.delta import log_retention
from walmere.sinks.delta.log import MARK, changed_by_others
from walmere.sinks.delta.parquet import conform, write
from walmere.sinks.delta.rewrite import DataFile, Files, files_of, rewrite
from walmere.storage import Directory

APP_ID: Final = "walmere"

PROPERTIES: Final[Mapping[str, str]] = {
    # Opening a table reads the log behind the last checkpoint, at 0.2 ms a commit: with 10, opening and committing
    # together take 20 ms, with deltalake's 100 they take 44 ms.
    "delta.checkpointInterval": "10",
}
FILE_SIZE: Final = 16 << 20
"""Bytes. One changed row rewrites one file, so files are smaller than for a table that is only read."""

SCAN_BYTES: Final = 32 << 20
"""Of files that one task reads, about."""

COMPACT_EVERY: Final = 16
"""Compact a table after this many commits."""

_PLACE: Final = "walmere.place"
_ATTEMPTS: Final = 10
_ENCODED: Final = re.compile(rf"[^A-Za-z0-9_.-]|^\.|^_(?=(?:delta_log|{PLACE[1:]})$)")


def quote(name: str) -> str:
    """An identifier as the name of a directory."""
    return _ENCODED.sub(lambda match: "".join(f"~{byte:02X}" for byte in match[0].encode()), name)


def unquote(name: str) -> str:
    """The identifier that `quote` made this name of."""
    return re.sub(r"(?:~[0-9A-F]{2})+", lambda match: bytes.fromhex(match[0].replace("~", "")).decode(), name)


@dataclass(frozen=True, slots=True)
class DeltaSink:
    """A directory of Delta tables."""

    path: str  # local, or a URL that deltalake knows
    app_id: str = APP_ID  # LSNs are compared only under the same one: another source needs another
    storage_options: Mapping[str, str] | None = None
    properties: Mapping[str, str] = field(default_factory=lambda: dict(PROPERTIES))
    file_size: int = FILE_SIZE
    keep_seconds: float = KEEP_SECONDS
    owner: Owner | None = None  # None: whoever owns a table, it is written to
    take_over: bool = False

    def __post_init__(self) -> None:
        if "://" not in self.path:
            if "%" in self.path:
                raise ConfigError(
                    f"writing Delta tables to {self.path}",
                    "deltalake does not support % in a path",
                    "choose another path",
                )
            object.__setattr__(self, "path", os.path.abspath(self.path))  # noqa: PTH100

    def location(self, table: TableName) -> str:
        """The table's own directory."""
        return f"{self.path.rstrip('/')}/{_path(table)}"

    def owned_by(self, owner: Owner, *, take_over: bool = False) -> DeltaSink:
        """The same sink, writing for this owner."""
        return replace(self, owner=owner, take_over=take_over)

    def create(self, table: TableName, schema: pa.Schema) -> int:
        """Make an empty table of these columns, if there is none."""
        doing = f"creating the Delta table {table}"
        _require_different_names(doing, schema)
        wanted = _delta_schema(schema)
        location = self.location(table)
        if self._find(table) is None:
            try:
                DeltaTable.create(
                    location,
                    wanted,
                    mode="error",
                    name=str(table),
                    configuration={
                        **log_retention.properties(self._keep_hours),
                        **self.properties,
                        **self._ownership(),
                    },
                    storage_options=self._options(),
                    commit_properties=CommitProperties(max_commit_retries=0),  # or a loser would create it once more
                    raise_if_key_not_exists=False,
                )
            except DeltaError as error:
                if self._find(table) is None:  # else another attempt was faster
                    raise SinkError(doing, str(error), f"make sure that {self.path} is writable") from error
            self._directory(table).sync("_delta_log", "", "..", "../..")
        self.claim(table)
        there = self._open(table)
        ours = there.transaction_version(self.app_id) is not None or not there.file_uris()
        if not ours and there.schema().to_json() != wanted.to_json():
            raise SinkMismatch(
                doing,
                f"there is a table with other columns at {location}, which Walmere did not write",
                "move it to another directory",
            )
        return there.version()

    def claim(self, table: TableName) -> bool:
        """See that a table, if it is there, is the owner's; or take it over. Returns whether that was done."""
        doing = f"opening the Delta table {table}"
        for _ in range(_ATTEMPTS):
            opened = self._find(table)
            if opened is None or self.owner is None:
                return False
            theirs = _owner(opened)
            other = theirs is not None and not self.owner.same(theirs)
            if theirs is not None and other and not self.take_over:
                raise owned_by_another(doing, f"the table at {self.location(table)}", theirs)
            lsn = opened.transaction_version(self.app_id)
            ours = lsn is not None or not opened.file_uris()
            if not other and (theirs == self.owner or not ours or not self.owner.known):
                return False
            # without an LSN: that of another source means nothing here, and a copy would seem to be there already
            forget = [Transaction(self.app_id, 0, time.time_ns() // 1_000_000)] if other and lsn else None
            try:
                opened.alter.set_table_properties(
                    self._ownership(),
                    raise_if_not_exists=False,
                    commit_properties=CommitProperties(max_commit_retries=0, app_transactions=forget),
                )
            except CommitFailedError:
                continue
            except DeltaError as error:
                raise SinkError(doing, str(error), f"make sure that {self.path} is writable") from error
            self._directory(table).sync(f"_delta_log/{opened.version():020d}.json", "_delta_log")
            return other
        raise SinkConflict(doing, f"another program committed first, {_ATTEMPTS} times in a row")

    def standing(self, table: TableName) -> Standing | None:
        """Where a table is; None if there is none."""
        opened = self._find(table)
        if opened is None:
            return None
        lsn = opened.transaction_version(self.app_id)
        return Standing(opened.version(), None if lsn is None else Lsn(lsn), _owner(opened), _columns(opened.schema()))

    def columns(self, schema: pa.Schema) -> tuple[tuple[str, str], ...]:
        """As `Standing.columns` has them."""
        return _columns(_delta_schema(schema))

    def changed_by_others(self, table: TableName, after: int, upto: int) -> str | None:
        """Which commit after one version, up to another, is not ours and changes rows; None if none does."""
        return changed_by_others(self._directory(table), after, upto)

    def _ownership(self) -> dict[str, str]:
        return {} if self.owner is None or not self.owner.known else {OWNER: self.owner.to_json()}

    def _require_ours(self, table: TableName, opened: DeltaTable) -> None:
        """Another subscription may have taken the table over since the run began."""
        theirs = _owner(opened)
        if self.owner is not None and theirs is not None and not self.owner.same(theirs):
            raise owned_by_another(
                f"writing to the Delta table {table}", f"the table at {self.location(table)}", theirs
            )

    def stage(
        self, table: TableName, batches: Iterable[pa.RecordBatch], schema: pa.Schema | None = None
    ) -> list[StagedFile]:
        """Write rows from within a task. Nothing is visible until one place commits what all tasks have staged."""
        rows = (pa.Table.from_batches([batch]) for batch in batches)
        return self._write(table, schema or arrow_schema(self._open(table)), rows)

    def commit(
        self,
        table: TableName,
        staged: Sequence[StagedFile],
        lsn: Lsn,
        mode: Mode = APPEND,
        schema: pa.Schema | None = None,
    ) -> int:
        """Make staged files part of the table, all at once, with this LSN; to overwrite it, with these columns."""
        return self._commit(table, lsn, lambda _: _Change(staged, (), mode, schema))

    def evolve(
        self, table: TableName, schema: pa.Schema, values: Sequence[str | pa.Scalar], run: Run = run_here
    ) -> int:
        """Give the table these columns. The LSN stays, and so do the rows.

        Columns without values at the end are a matter of the log alone. All else writes every file anew, one item each:
        a column that was only taken out of the log would come back with its values, if one of its name was added later.
        """
        doing = f"changing the columns of the Delta table {table}"
        _require_different_names(doing, schema)
        opened = self._open(table)
        self._require_ours(table, opened)
        columns = list(opened.schema().fields)
        wanted = _delta_schema(schema)
        if wanted.to_json() == opened.schema().to_json():
            return opened.version()
        added = wanted.fields[len(columns) :]
        if wanted.fields[: len(columns)] == columns and not any(
            isinstance(value, str) or value.is_valid for value in values[len(columns) :]
        ):
            try:
                opened.alter.add_columns(added)
            except DeltaError as error:
                raise SinkError(doing, str(error), f"make sure that {self.path} is writable") from error
            self._directory(table).sync(f"_delta_log/{opened.version():020d}.json", "_delta_log")
            return opened.version()
        restage = functools.partial(self._restage, table, arrow_schema(opened), schema, tuple(values))
        staged = [file for some in run(restage, files_of(opened)[0]) for file in some]
        version = self._try_commit(table, opened, _Change(staged, (), OVERWRITE, schema), None)
        if version is None:
            raise SinkConflict(doing, "another program committed at the same time")
        return version

    def _restage(
        self, table: TableName, old: pa.Schema, schema: pa.Schema, values: tuple[str | pa.Scalar, ...], file: DataFile
    ) -> list[StagedFile]:
        """The rows of a file in new columns. Runs in a task."""
        rows = (
            pa.Table.from_arrays(
                [
                    part[value].cast(field.type) if isinstance(value, str) else pa.repeat(value, len(part))
                    for field, value in zip(schema, values, strict=True)
                ],
                schema=schema,
            )
            for part in file.tables(self._directory(table), old)
        )
        return self._write(table, schema, rows)

    def apply(self, table: TableName, net: Net, lsn: Lsn, identity: Identity) -> int:
        """Bring the table to this LSN. A batch that comes to nothing commits nothing, and its LSN is not stored."""
        if net.empty:
            return self.version(table)
        if not net.append_only:
            return self._commit(table, lsn, lambda opened: self._rewritten(table, opened, net, identity))
        mode = OVERWRITE if net.truncate else APPEND
        staged: list[list[StagedFile]] = []  # once: it does not depend on what others commit

        def appended(opened: DeltaTable) -> _Change:
            if not staged:
                staged.append(self._write(table, arrow_schema(opened), [net.appends]))
            return _Change(staged[0], (), mode)

        return self._commit(table, lsn, appended)

    def tidy(self, table: TableName, version: int, vacuum: bool = False) -> int:
        """After a batch has made this version, see whether it is time to tidy up. The rows stay as they are."""
        if version % COMPACT_EVERY == 0:
            version = self.compact(table) or version
        if vacuum:
            self.vacuum(table)
        return version

    def vacuum(self, table: TableName) -> None:
        """Delete files that have been out of use for long enough."""
        with contextlib.suppress(DeltaError):  # another attempt is at it
            self._open(table).vacuum(self._keep_hours, dry_run=False, enforce_retention_duration=False)

    @property
    def _keep_hours(self) -> int:
        """As `deltalake` wants it: in whole ones, so rather more."""
        return math.ceil(self.keep_seconds / 3600)

    def _keep(self, table: TableName, opened: DeltaTable) -> None:
        """Have the log of a table kept for as long as it is to be now. What is kept for longer already stays so."""
        short = log_retention.too_short(opened.metadata().configuration, self._keep_hours)
        if short:
            with contextlib.suppress(DeltaError):  # somebody else committed: so will the caller find
                opened.alter.set_table_properties(short)
                self._directory(table).sync(f"_delta_log/{opened.version():020d}.json", "_delta_log")

    def compact(self, table: TableName, least: int = COMPACT_EVERY // 2) -> int | None:
        """Make large files of small ones, if there are at least so many. The rows stay, and so does the LSN.

        Returns the version, or None if there was nothing to do or a batch was applied meanwhile; then try again later.
        Old versions keep their files until a vacuum.
        """
        opened = self._open(table)
        small = [file for file in files_of(opened)[0] if file.size < self.file_size // 2 and file.deleted is None]
        if len(small) < least:
            return None
        schema, directory = arrow_schema(opened), self._directory(table)
        rows = (part for file in small for part in file.tables(directory, schema))
        return self._try_commit(table, opened, _Change(self._write(table, schema, rows), small), None)

    def applied(self, table: TableName) -> Lsn | None:
        """The LSN that the table has come to; None if it has none yet, or there is no table."""
        opened = self._find(table)
        lsn = None if opened is None else opened.transaction_version(self.app_id)
        return None if lsn is None else Lsn(lsn)

    def count(self, table: TableName) -> int:
        """How many rows the table has; 0 if there is none."""
        opened = self._find(table)
        return 0 if opened is None else int(opened.to_pyarrow_dataset().count_rows())

    def version(self, table: TableName) -> int:
        """The newest version of the table."""
        return self._open(table).version()

    def scan(self, table: TableName, version: int, at_least: int = 1) -> TableScan:
        """All rows of a version, in at least so many pieces if they are large enough."""
        opened = self.open(table, version)
        schema = arrow_schema(opened)
        files, actions = files_of(opened)
        size = min(SCAN_BYTES, sum(file.size for file in files) // at_least)
        pieces = bins(files, lambda file: file.size, size)
        rows = sum(actions["num_records"].to_pylist()) - sum(
            len(file.deleted) for file in files if file.deleted is not None
        )
        return TableScan(schema, rows, [FilePiece(table, schema, tuple(some)) for some in pieces])

    def read(self, piece: FilePiece, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of a piece, from within a task; of these columns, or all."""
        directory = self._directory(piece.table)
        schema = piece.schema if columns is None else pa.schema([piece.schema.field(name) for name in columns])
        for file in piece.files:
            for rows in file.tables(directory, schema):
                yield from rows.to_batches()

    def open(self, table: TableName, version: int | None = None) -> DeltaTable:
        """The table, for reading: as it is now, or as it was at a version."""
        return self._open(table, version)

    def open_ledger(self, subscription: str, points: Iterable[Entry]) -> LakeLedger:
        """Begin to publish the points of a subscription, with these in place of what was published before."""
        lake_ledger = LakeLedger(self.ledger_directory(subscription), subscription, _path, self.keep_seconds)
        self.claim_points(subscription)
        lake_ledger.begin(points)
        if self.owner is not None and self.owner.known:
            lake_ledger.own(self.owner)
        return lake_ledger

    def claim_points(self, subscription: str) -> None:
        """See that the points that were published under this name are the owner's. Raises OwnedByAnother."""
        place = self.ledger_directory(subscription)
        try:
            theirs = None if self.owner is None or self.take_over else read_owner(place)
        except OSError as error:
            raise SinkError(
                f"reading the lake at {self.path}", str(error), "make sure that it is a writable directory"
            ) from error
        if self.owner is not None and theirs is not None and not self.owner.same(theirs):
            doing = f"writing points to {place.location}"
            raise owned_by_another(doing, f"the name {subscription}", theirs)
        if self.owner is not None and self.owner.known and self.take_over:
            LakeLedger(place, subscription, _path, self.keep_seconds).own(self.owner)

    def tables_of_others(self, subscription: str) -> dict[str, str]:
        """The tables that the newest points of other subscriptions have, each with the subscription's name."""
        found: dict[str, str] = {}
        for name in self.subscriptions():
            with contextlib.suppress(ChangeLogError):  # what cannot be read claims nothing
                newest = read_latest(self.ledger_directory(name)) if name != subscription else None
                found |= dict.fromkeys(newest.versions if newest is not None else (), name)
        return found

    def points(self, subscription: str) -> list[Entry]:
        """The points that a subscription has published, oldest first; none if they cannot be read."""
        try:
            return list(History(self.ledger_directory(subscription)).entries())
        except ChangeLogError:
            return []

    def ledger_directory(self, subscription: str) -> Directory:
        """Where the lake has the points of a subscription."""
        return Directory(self.path, self.storage_options).below(f"{PLACE}/{quote(subscription)}")

    def subscriptions(self) -> list[str]:
        """Which subscriptions have published something."""
        try:
            lake = Directory(self.path, self.storage_options)
        except TableNotFoundError:
            return []
        return [unquote(name) for name in lake.directories(PLACE)]

    def _options(self) -> dict[str, str] | None:
        return None if self.storage_options is None else dict(self.storage_options)

    def _directory(self, table: TableName) -> Directory:
        return Directory(self.location(table), self.storage_options)

    def _find(self, table: TableName, version: int | None = None) -> DeltaTable | None:
        try:
            opened = DeltaTable(self.location(table), version, storage_options=self._options())
        except TableNotFoundError:
            return None
        except DeltaError as error:
            if version is not None:
                raise
            raise SinkMismatch(
                f"opening the Delta table {table}",
                f"its log in {self.location(table)}/_delta_log cannot be read: {str(error).partition(chr(10))[0]}",
                "repair the log; or move the table's directory, then the table is copied again",
            ) from None
        name = opened.metadata().name
        if name is not None and name != str(table):
            raise SinkMismatch(
                f"opening the Delta table {table}",
                f"its directory {self.location(table)} contains the table {name}",
                "the file system ignores case: rename one of the tables, or choose another path",
            )
        return opened

    def _open(self, table: TableName, version: int | None = None) -> DeltaTable:
        opened = self._find(table, version)
        if opened is None:
            raise SinkMismatch(
                f"opening the Delta table {table}",
                f"there is no table at {self.location(table)}",
                "let the subscription copy the table again",
            )
        return opened

    def _write(self, table: TableName, schema: pa.Schema, rows: Iterable[pa.Table]) -> list[StagedFile]:
        return write(self._directory(table), schema, (conform(part, schema) for part in rows), self.file_size)

    def _rewritten(self, table: TableName, opened: DeltaTable, net: Net, identity: Identity) -> _Change:
        if opened.metadata().partition_columns:
            raise SinkMismatch(
                f"applying changes to {table}", "the Delta table is partitioned", "create it again, without partitions"
            )
        files, bounds = files_of(opened)
        old = Files(self._directory(table), arrow_schema(opened), files, bounds, self.file_size)
        new = rewrite(old, net, identity)
        return _Change(new.added, (), OVERWRITE) if new.everything else _Change(new.added, new.removed)

    def _commit(self, table: TableName, lsn: Lsn, change: Callable[[DeltaTable], _Change]) -> int:
        """Do the change, as it comes out for the version found, unless the table has come to the LSN already."""
        for attempt in range(_ATTEMPTS):
            time.sleep(0.01 * attempt)
            opened = self._open(table)
            self._require_ours(table, opened)
            there = opened.transaction_version(self.app_id)
            if there is not None and there >= lsn:
                return opened.version()
            self._keep(table, opened)
            version = self._try_commit(table, opened, change(opened), lsn)
            if version is not None:
                return version
        raise SinkConflict(
            f"committing to the Delta table {table}",
            f"another program committed first, {_ATTEMPTS} times in a row",
            "if another program writes to the table, stop it: a mirror has one writer",
        )

    def _try_commit(self, table: TableName, opened: DeltaTable, change: _Change, lsn: Lsn | None) -> int | None:
        """The very next version after the one open; None if somebody else has made it. No LSN: it stays."""
        now = time.time_ns() // 1_000_000
        moved = lsn is not None or change.schema is not None
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size, {}, now, moved, file.stats) for file in change.added
        ]
        actions += [RemoveAction(file.path, moved, now, file.size, {}) for file in change.removed]
        try:
            opened.create_write_transaction(
                actions,
                change.mode.value,
                opened.schema() if change.schema is None else _delta_schema(change.schema),
                commit_properties=CommitProperties(
                    custom_metadata={f"{MARK}tidy": "true"} if lsn is None else {f"{MARK}lsn": str(lsn)},
                    max_commit_retries=0,
                    app_transactions=None if lsn is None else [Transaction(self.app_id, int(lsn), now)],
                ),
            )
        except CommitFailedError:
            return None
        except DeltaError as error:
            hint = f"make sure that {self.path} is writable"
            raise SinkError(f"committing to the Delta table {table}", str(error), hint) from error
        version = opened.version() + 1
        self._directory(table).sync(f"_delta_log/{version:020d}.json", "_delta_log")
        return version


def _path(table: TableName) -> str:
    """Of a table, below the lake's."""
    return f"{quote(table.namespace)}/{quote(table.name)}"


def _owner(opened: DeltaTable) -> Owner | None:
    text = opened.metadata().configuration.get(OWNER)
    return None if text is None else Owner.from_json(text)


def _columns(schema: Schema) -> tuple[tuple[str, str], ...]:
    return tuple((column.name, column.type.to_json()) for column in schema.fields)


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Files of a table, for `read`."""

    table: TableName
    schema: pa.Schema
    files: tuple[DataFile, ...]


@dataclass(frozen=True, slots=True)
class _Change:
    added: Sequence[StagedFile]
    removed: Sequence[DataFile] = ()
    mode: Mode = APPEND
    schema: pa.Schema | None = None  # other columns than there are


def _require_different_names(doing: str, schema: pa.Schema) -> None:
    if len({name.lower() for name in schema.names}) < len(schema):
        raise SinkError(
            doing,
            "the names of two columns differ only in case, and Delta ignores case",
            "remove one of them from the publication, or rename it",
        )


def _delta_schema(schema: pa.Schema) -> Schema:
    """All columns may be NULL: what the source promises of them, it may take back.

    Each says its place: `deltalake` takes two schemas that differ in their order alone for the same, and would not
    store the new one.
    """
    fields = [
        pa.field(column.name, column.type, metadata={_PLACE: str(place)}) for place, column in enumerate(schema, 1)
    ]
    return Schema.from_arrow(pa.schema(fields))


def arrow_schema(opened: DeltaTable) -> pa.Schema:
    """The columns of the version that is open."""
    return pa.schema(opened.schema().to_arrow())
