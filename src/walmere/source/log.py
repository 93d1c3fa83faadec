"""The change log that a query of the `pgoutput` source reads: where it is, who keeps it, and what its tasks read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql.types import StructType

from walmere import paths
from walmere.bins import bins
from walmere.changelog.manifest_file import NAME as MANIFEST
from walmere.changelog.plan import BlockRef, Blocks, Plan, Planner
from walmere.changelog.store.log_store import store_of
from walmere.errors import ChangeLogDamaged, ChangeLogInUse, ChangesRemoved, ConfigError
from walmere.lsn import Lsn
from walmere.source.change_rows import Format, ReadJob, removed
from walmere.source.columns import QueryColumns
from walmere.source.options import EARLIEST, SourceOptions, default_directory
from walmere.storage import Lock
from walmere.subscription.progress import SinkPositions

if TYPE_CHECKING:
    from walmere.source.feed import Feed, SourceServer

TASK_BYTES: Final = (16 << 20, 64 << 20)
"""Bytes of the log per task, at least and at most. Starting a task costs as much as decoding one or two megabytes."""
_TASKS: Final = 4
"""Divide a batch into this many tasks, within TASK_BYTES. A data source cannot find out how many cores there are."""
_UNLIMITED: Final = 1 << 62
_READER_TIMEOUT: Final = 10.0
"""Wait this many seconds for another query that has the reader's name to end."""


def end_of(planner: Planner, start: Lsn, max_bytes: int | None = None) -> Lsn:
    """Where a batch from `start` ends: at the end of the log, or after `max_bytes`."""
    return planner.end_of_batch(start, max_bytes or _UNLIMITED)


class QueryLog:
    """The change log of one query."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._server = self._source_server(options)
        self.directory = options.directory or default_directory(options.slot)
        self.changelog = self.directory / paths.CHANGELOG
        self.columns = QueryColumns(options, self.directory, self._server)

    @staticmethod
    def _source_server(options: SourceOptions) -> SourceServer | None:
        """Imported late: a process that only reads the log needs no database driver."""
        if not options.dsn:
            return None
        from walmere.source.feed import SourceServer  # noqa: PLC0415

        return SourceServer.of(options.dsn, options.publications, options.slot)

    def planner(self) -> Planner:
        """A planner whose batches never wait for more changes."""
        return Planner(self.changelog, wait_for_more=False)

    @property
    def _reader(self) -> str:
        return f"query-{self.options.reader}"

    def require_log_of_slot(self) -> None:
        """Refuse a batch read through a slot that does not exist: it would create one and have nothing to read."""
        if self.options.slot and not (self.changelog / MANIFEST).exists():
            raise ConfigError(
                "reading with format pgoutput",
                f"there is no change log in {self.directory}: nothing was received through slot {self.options.slot}",
                "a stream (readStream) with the same dsn, publications, slot and directory creates both;"
                ' or read the log of a subscription: option("directory", "…") alone',
            )

    def require_columns(self, schema: StructType) -> None:
        """Refuse a new query whose columns are not those of its table, before a slot is created for it."""
        if not (self.changelog / MANIFEST).exists():
            self.columns.format(schema)

    def feed(self) -> Feed | None:
        """The receiver of this query. None: another process receives."""
        if self._server is None or not self.options.slot:
            return None
        from walmere.source.feed import Feed  # noqa: PLC0415

        return Feed(self._server, self.directory, self._reader)

    def lock_reader(self) -> Lock | None:
        """Keep the log for this query. The lock refuses a second query with the same reader."""
        if self.options.reader is None:
            return None
        place = self.directory / paths.POSITIONS / self._reader
        deadline = time.monotonic() + _READER_TIMEOUT
        while True:
            try:
                lock = Lock(place)
                break
            except ChangeLogInUse:
                if time.monotonic() > deadline:
                    raise ChangeLogInUse(
                        f"taking reader {self.options.reader} in {self.directory}",
                        f"process {Lock.holder(place)} has it: another query is running with this name",
                        'give each query its own name: option("reader", "…")',
                    ) from None
                time.sleep(0.1)
        SinkPositions(self.directory).join(self._reader)
        return lock

    def commit(self, lsn: Lsn) -> None:
        """Record that the query has everything before the LSN."""
        if self.options.reader is not None:
            SinkPositions(self.directory).advance(self._reader, lsn)

    def starting(self, planner: Planner) -> Lsn:
        """Where a query without a checkpoint begins."""
        wanted, log_start = self.options.starting, planner.start_lsn
        if isinstance(wanted, Lsn):
            if wanted < log_start:
                raise removed(self.changelog, wanted, log_start)
            return wanted
        return log_start if wanted == EARLIEST else end_of(planner, log_start)

    @contextlib.contextmanager
    def explain_removed(self, planner: Planner, position: Lsn) -> Iterator[None]:
        """Raise ChangesRemoved with a hint for queries."""
        try:
            yield
        except ChangesRemoved:
            raise removed(self.changelog, position, planner.start_lsn) from None

    def jobs(self, planner: Planner, start: Lsn, end: Lsn, rows: Format) -> Iterator[ReadJob]:
        """The tasks of a batch, in order."""
        if start >= end:
            return
        with self.explain_removed(planner, start):
            plan = planner.plan_all(start, end)
        if start < planner.start_lsn:
            raise removed(self.changelog, start, planner.start_lsn)
        refs = [ref for ref in plan.blocks.get(0, []) if self._is_wanted(plan, ref)]
        used = {(ref.block.relation, ref.version) for ref in refs}
        versions = {number: plan.definitions[number] for number in used}
        rows = self.columns.accept(rows, versions.values())
        store = store_of(self.changelog)
        for task_refs in _divided(refs):
            numbers = {(ref.block.relation, ref.version) for ref in task_refs}
            blocks = Blocks(self.changelog, task_refs, {number: versions[number] for number in numbers}, store=store)
            yield ReadJob(blocks, rows)

    def _is_wanted(self, plan: Plan, ref: BlockRef) -> bool:
        version = plan.definitions.get((ref.block.relation, ref.version))
        if version is None:
            if ref.aborted:  # the definition was rolled back, together with its rows
                return False
            raise ChangeLogDamaged(
                f"reading the change log in {self.changelog}",
                f"it lacks definition {ref.version} of relation {ref.block.relation}",
                "run `walmere drop`, then start the subscription again",
            )
        return self.options.table in (None, (version.relation.namespace, version.relation.name))


def _divided(refs: Sequence[BlockRef]) -> Iterator[list[BlockRef]]:
    least, most = TASK_BYTES
    size = min(max(sum(ref.block.length for ref in refs) // _TASKS, least), most)
    return bins(refs, lambda ref: ref.block.length, size)
