"""What a query of the `pgoutput` source has to read, and how far it is.

Its offsets are LSNs at commit boundaries: a batch holds the transactions that committed from its start on, up to its
end. A batch is planned from the change log alone, which never changes, so planning it again after a crash gives the
same rows. That, and Spark's checkpoint, is exactly once.

A stream is asked (seen with Spark 4.1), when it begins, when it goes on from a checkpoint at 40, and when the batch up
to there was interrupted:

    latestOffset, initialOffset, partitions(initial, latest), latestOffset, commit, partitions, …
    partitions(40, 40), latestOffset, commit(40), partitions(40, latest), …
    partitions(40, 40), partitions(30, 40), latestOffset, …

Nobody says which trigger it has; and of a Python source, AvailableNow takes the first `latestOffset` for all there is,
reads up to there in one batch, and ends. So the first answer is the log's end, whatever `maxBytesPerTrigger` says, and
with a receiver of its own the query first receives what the source has. Only a query that promises not to have that
trigger has its first batch limited, too. An interrupted batch is the one batch that AvailableNow then does, and nobody
asks any more: all that can be done here is to say so. (With Spark's `triggerAvailableNowWrapper` it goes on; then
`latestOffset` is asked before anything is known of the checkpoint.)

The columns of a table are those of its newest definition when the query begins. Rows of older ones are mapped to them
by name. A newer one with other columns ends the query, and its next start has them: nothing is dropped in silence.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from walmere import paths
from walmere.bins import bins
from walmere.changelog.manifest import NAME as MANIFEST
from walmere.changelog.manifest import Manifest
from walmere.changelog.plan import BlockRef, Blocks, Plan, Planner
from walmere.errors import (
    ChangeLogDamaged,
    ChangeLogError,
    ChangeLogInUse,
    ChangeLogMismatch,
    ChangesRemoved,
    ConfigError,
    PublicationMissing,
    TypeMismatch,
    UnknownType,
)
from walmere.lsn import Lsn
from walmere.pgoutput.messages import Relation
from walmere.pgoutput.relation import RelationVersion
from walmere.source.change_rows import Format, OutputColumn, ReadJob, removed
from walmere.source.json_rows import JsonRows
from walmere.source.options import EARLIEST, SourceOptions, parse
from walmere.source.table_rows import TableRows
from walmere.storage import Lock
from walmere.subscription.progress import SinkPositions
from walmere.subscription.tables import Tables
from walmere.types import PgType
from walmere.types.codec import codec

if TYPE_CHECKING:
    from walmere.source.feed import Feed, SourceServer

_log = logging.getLogger(__name__)

TASK_BYTES: Final = (16 << 20, 64 << 20)
"""Of the log, for each task, at least and at most: a task costs as much as decoding a megabyte or two."""
_TASKS: Final = 4
"""If they are not too small then. How many cores there are, nobody tells a source."""
_ALL: Final = 1 << 62
_READER_FREE: Final = 10.0
"""Wait this many seconds for another query that has the reader's name to end."""


@dataclass(frozen=True, slots=True)
class _Definition:
    """The columns of a table from an LSN on."""

    lsn: Lsn
    columns: tuple[OutputColumn, ...]

    @classmethod
    def of(cls, version: RelationVersion) -> _Definition:
        return cls(version.lsn, _columns(version.relation))


def _columns(relation: Relation) -> tuple[OutputColumn, ...]:
    return tuple(OutputColumn(each.name, each.type_oid, each.type_modifier) for each in relation.columns)


def schema_of(given: Mapping[str, str]) -> StructType:
    """The columns that a query will have."""
    log = _Log(parse(given))
    return log.struct(log.format())


def plan_once(given: Mapping[str, str], schema: StructType) -> list[ReadJob]:
    """What a query reads that is not a stream: all there is, or what lies between two LSNs."""
    options = parse(given)
    log = _Log(options)
    log.require_log_of_slot()
    if (feed := log.feed()) is not None:
        feed.receive_now()
    planner = log.planner()
    start = log.starting(planner)
    end = _end(planner, start)
    if options.ending is not None and options.ending > end:
        raise ChangeLogError(
            f"reading the change log in {log.changelog} up to {options.ending}",
            f"it ends at {end}",
            "read it when it has come so far, or leave endingLsn away",
        )
    return list(log.jobs(planner, start, options.ending or end, log.format(schema)))


class StreamQuery:
    """A stream, beside the driver."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        self._log = _Log(parse(given))
        options = self._log.options
        if options.ending is not None:
            raise ConfigError(
                "reading a stream with format pgoutput", "option endingLsn is for batch reads", "leave it away"
            )
        self._log.require_fitting(schema)
        self._feed = self._log.feed()
        self._reader = self._log.take_reader()
        if self._feed is not None:
            self._feed.prepare()
            self._feed.start(catch_up=options.available_now)
            if options.available_now:
                self._feed.wait()
        self._planner = self._log.planner()
        self._format = self._log.format(schema)
        self._first: Lsn | None = None
        self._position: Lsn | None = None  # the end of the last batch
        self._asked = False

    def first(self) -> dict[str, str]:
        """Where a query begins that has no checkpoint."""
        if self._first is None:
            self._first = self._log.starting(self._planner)
        return self._offset(self._first)

    def latest(self) -> dict[str, str]:
        """How far the next batch goes."""
        if self._feed is not None:
            self._feed.check()
        start, options = self._position, self._log.options
        if start is None:
            start = self._planner.start_lsn
            with contextlib.suppress(ChangeLogError):  # `first` says so again if it counts: if there is no checkpoint
                start = Lsn.parse(self.first()["lsn"])
        limited = self._asked or not options.available_now
        self._asked = True
        with self._log.kept(self._planner, start):
            self._position = self._planner.end_of_batch(start, (limited and options.max_bytes) or _ALL)
        return self._offset(self._position)

    def plan(self, start: Mapping[str, str], end: Mapping[str, str]) -> list[ReadJob]:
        """What the tasks of a batch read."""
        first, last = self._lsn(start), self._lsn(end)
        self._position = last
        if first < last and not self._asked:
            _log.warning(
                "the batch up to %s was interrupted, and is read again. With Trigger.AvailableNow, Spark ends after it:"
                " run the query once more for what came later",
                last,
            )
        return list(self._log.jobs(self._planner, first, last, self._format))

    def commit(self, end: Mapping[str, str]) -> None:
        """All batches up to there are where they belong."""
        self._log.commit(Lsn.parse(end["lsn"]))

    def _offset(self, lsn: Lsn) -> dict[str, str]:
        return {"lsn": str(lsn), "system": self._planner.system_identifier}

    def _lsn(self, offset: Mapping[str, str]) -> Lsn:
        """Of an offset that is of this log, and not ahead of it: rows that are not there yet would be missed."""
        lsn, system, ours = Lsn.parse(offset["lsn"]), offset["system"], self._planner.system_identifier
        doing = f"going on from a checkpoint at {lsn} with the change log in {self._log.changelog}"
        anew = "begin the query anew, with a new checkpoint"
        if system != ours:
            raise ChangeLogMismatch(doing, f"the checkpoint is of system {system}, the log of {ours}", anew)
        ends, begins = self._planner.end_lsn, self._log.options.starting
        if lsn > ends and lsn != begins:
            hint = f"start the query again when the log has come so far; if it was made anew, {anew}"
            raise ChangeLogMismatch(doing, f"the log ends at {ends}", hint)
        return lsn

    def stop(self) -> None:
        """End receiving."""
        if self._feed is not None:
            self._feed.stop()
        if self._reader is not None:
            self._reader.close()


def _end(planner: Planner, start: Lsn) -> Lsn:
    return planner.end_of_batch(start, _ALL)


class _Log:
    """The change log that a query reads, and all that is known about its tables."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._publisher = self._asked(options)
        self.directory = options.directory or state_directory(options.slot)
        self.changelog = self.directory / paths.CHANGELOG
        self._types: dict[int, PgType] = {}

    @staticmethod
    def _asked(options: SourceOptions) -> SourceServer | None:
        """Who can be asked about the source. A process that only reads the log does without its driver."""
        if not options.dsn:
            return None
        from walmere.source.feed import SourceServer  # noqa: PLC0415

        return SourceServer.of(options.dsn, options.publications, options.slot)

    def planner(self) -> Planner:
        """One to whom it is never late: it may not judge that a batch had better wait for more."""
        return Planner(self.changelog, wait_for_more=False)

    @property
    def _reader(self) -> str:
        return f"query-{self.options.reader}"

    def require_log_of_slot(self) -> None:
        """Refuse a batch read through a slot that is not there yet: it would make one, and have nothing to read."""
        if self.options.slot and not (self.changelog / MANIFEST).exists():
            raise ConfigError(
                "reading with format pgoutput",
                f"there is no change log in {self.directory}: nothing was received through slot {self.options.slot}",
                "a stream (readStream) with the same dsn, publications, slot and directory makes both;"
                ' or read the log of a subscription: option("directory", "…") alone',
            )

    def require_fitting(self, schema: StructType) -> None:
        """Refuse a new query whose columns are not those of its table, before a slot is made for it."""
        if not (self.changelog / MANIFEST).exists():
            self.format(schema)

    def feed(self) -> Feed | None:
        """A receiver of the query's own, if it has one."""
        if self._publisher is None or not self.options.slot:
            return None
        from walmere.source.feed import Feed  # noqa: PLC0415

        return Feed(self._publisher, self.directory, self._reader)

    def take_reader(self) -> Lock | None:
        """Have the log kept for this query, and for no other under its name."""
        if self.options.reader is None:
            return None
        place = self.directory / paths.POSITIONS / self._reader
        deadline = time.monotonic() + _READER_FREE
        while True:
            try:
                lock = Lock(place)
                break
            except ChangeLogInUse:
                if time.monotonic() > deadline:
                    raise ChangeLogInUse(
                        f"taking reader {self.options.reader} in {self.directory}",
                        f"process {Lock.holder(place)} has it: another query that runs",
                        'give each query a name of its own: option("reader", "…")',
                    ) from None
                time.sleep(0.1)
        SinkPositions(self.directory).join(self._reader)
        return lock

    def commit(self, lsn: Lsn) -> None:
        """The query has everything before it."""
        if self.options.reader is not None:
            SinkPositions(self.directory).advance(self._reader, lsn)

    def starting(self, planner: Planner) -> Lsn:
        """Where a query begins."""
        wanted, begins = self.options.starting, planner.start_lsn
        if isinstance(wanted, Lsn):
            if wanted < begins:
                raise removed(self.changelog, wanted, begins)
            return wanted
        return begins if wanted == EARLIEST else _end(planner, begins)

    @contextlib.contextmanager
    def kept(self, planner: Planner, position: Lsn) -> Iterator[None]:
        """Say what a query can do if what it is about to read was not kept for it."""
        try:
            yield
        except ChangesRemoved:
            raise removed(self.changelog, position, planner.start_lsn) from None

    def jobs(self, planner: Planner, start: Lsn, end: Lsn, rows: Format) -> Iterator[ReadJob]:
        """A batch, divided into tasks, in order."""
        if start >= end:
            return
        with self.kept(planner, start):
            plan = planner.plan_all(start, end)
        if start < planner.start_lsn:
            raise removed(self.changelog, start, planner.start_lsn)
        refs = [ref for ref in plan.blocks.get(0, []) if self._is_wanted(plan, ref)]
        used = {(ref.block.relation, ref.version) for ref in refs}
        versions = {number: plan.definitions[number] for number in used}
        rows = self._fitting(rows, versions.values())
        for some in _divided(refs):
            numbers = {(ref.block.relation, ref.version) for ref in some}
            blocks = Blocks(self.changelog, some, {number: versions[number] for number in numbers})
            yield ReadJob(blocks, rows)

    def _is_wanted(self, plan: Plan, ref: BlockRef) -> bool:
        version = plan.definitions.get((ref.block.relation, ref.version))
        if version is None:
            if ref.aborted:  # then it was rolled back, and so were its rows
                return False
            raise ChangeLogDamaged(
                f"reading the change log in {self.changelog}",
                f"it lacks definition {ref.version} of relation {ref.block.relation}",
                "`walmere drop`, and begin the subscription anew",
            )
        return self.options.table in (None, (version.relation.namespace, version.relation.name))

    def _fitting(self, rows: Format, used: Iterable[RelationVersion]) -> Format:
        """See that rows of these definitions can be given in the query's columns."""
        if isinstance(rows, JsonRows):
            self._learn(column for each in used for column in _columns(each.relation))
            return replace(rows, types=self._types)
        assert isinstance(rows, TableRows)
        for each in used:
            if each.lsn > rows.since and (changed := self._changed(rows, _columns(each.relation))):
                raise TypeMismatch(
                    f"reading table {'.'.join(self.options.table or ())} at {each.lsn}",
                    f"it has other columns from there on: {', '.join(changed)}",
                    "start the query again, from the same checkpoint: it takes on the new columns",
                )
        return rows

    def _changed(self, rows: TableRows, columns: Sequence[OutputColumn]) -> list[str]:
        """Which of the columns that the query has, or would have now, are others."""
        had = {name: each.arrow for name, each in rows.codecs.items()}
        has: dict[str, pa.DataType | None] = {}
        for each in columns:
            with contextlib.suppress(UnknownType):
                has[each.name] = None
                self._learn([each])
                has[each.name] = codec(each.type_oid, each.typmod, self._types).arrow
        changed = sorted(name for name in had.keys() | has.keys() if had.get(name) != has.get(name))
        if not self.options.columns or {"_before", "_unchanged"} & {*rows.wanted}:  # which have all columns in them
            return changed
        return [name for name in changed if name in rows.wanted]

    def format(self, schema: StructType | None = None) -> Format:
        """How rows look: with `schema`, as it was said when the query was made."""
        if self.options.table is None:
            return self._checked(JsonRows({}), schema)
        definitions = self._definitions()
        for each in reversed(definitions):
            rows = TableRows(each.columns, self._learn(each.columns), since=each.lsn)
            _require_other_names(rows)
            if schema is None or self._has(rows, schema):
                return self._checked(rows, schema)
        return self._checked(rows, schema)

    def struct(self, rows: Format) -> StructType:
        """The columns of rows."""
        assert isinstance(rows, JsonRows | TableRows)
        found: StructType = from_arrow_schema(rows.schema(), prefer_timestamp_ntz=True)
        wanted = self.options.columns
        if not wanted:
            return found
        odd = [name for name in wanted if name not in found.names]
        if odd:
            raise ConfigError(
                "reading with format pgoutput",
                f"option columns: there is no {', '.join(odd)}",
                f"there is {', '.join(found.names)}",
            )
        return StructType([found[name] for name in wanted])

    def _has(self, rows: Format, schema: StructType) -> bool:
        """Whether these are the columns of the query."""
        try:
            found = self.struct(rows)
        except ConfigError:
            return False
        return {each.name: each.dataType for each in found} == {each.name: each.dataType for each in schema}

    def _checked(self, rows: JsonRows | TableRows, schema: StructType | None) -> Format:
        if schema is None:
            return rows
        if not self._has(rows, schema):
            raise ConfigError(
                "reading with format pgoutput",
                "the columns of the query are not those of the table",
                'load it anew, without schema(…); option("columns", "id, amount, _op") gives some of them',
            )
        return replace(rows, wanted=tuple(schema.names))

    def _definitions(self) -> list[_Definition]:
        """Of the table, oldest first; there is at least one."""
        schema, name = self.options.table or ("", "")
        found: list[_Definition] = []
        others: set[str] = set()
        try:
            with Manifest(self.changelog) as manifest:
                for entry in manifest.entries():
                    if isinstance(entry, RelationVersion):
                        its = entry.relation
                        if (its.namespace, its.name) == (schema, name):
                            found.append(_Definition.of(entry))
                        others.add(f"{its.namespace}.{its.name}")
        except ChangeLogDamaged:
            if self._publisher is None or (self.changelog / "manifest.jsonl").exists():
                raise
        if found:
            return sorted(found, key=lambda each: each.lsn)
        if self._publisher is not None and self.options.publications:
            asked = self._publisher.columns(schema, name)
            if asked is None:
                raise PublicationMissing(
                    f"looking for table {schema}.{name}",
                    "neither the change log nor the publications have it",
                    "ALTER PUBLICATION … ADD TABLE it, or correct option table; without publish_via_partition_root,"
                    " a partitioned table's changes are those of its partitions",
                )
            now, columns = asked
            return [_Definition(now, tuple(OutputColumn(each.name, each.type_oid, each.typmod) for each in columns))]
        has = f"it has {', '.join(sorted(others)[:10])}{' …' if len(others) > 10 else ''}" if others else "it is empty"
        raise ConfigError(
            f"looking for table {schema}.{name} in {self.changelog}",
            f"the log does not have it; {has}",
            "a table is there from its first change on; with options dsn and publications, from the beginning",
        )

    def _learn(self, columns: Iterable[OutputColumn]) -> dict[int, PgType]:
        """The types of these columns that are not built in, and of all asked for before."""
        unknown = [each for each in columns if not self._knows(each)]
        if unknown:
            self._types |= Tables(self.directory).types
            unknown = [each for each in unknown if not self._knows(each)]
        if unknown and self._publisher is not None:
            self._types |= self._publisher.types(each.type_oid for each in unknown)
            unknown = [each for each in unknown if not self._knows(each)]
        if unknown:
            raise UnknownType(
                f"looking up the type of column {unknown[0].name}",
                f"OID {unknown[0].type_oid} is not built in, and "
                + ("the source does not have it any more" if self._publisher else "there is nobody to ask"),
                "it may have been dropped" if self._publisher else 'option("dsn", "postgresql://…") of the source',
            )
        return self._types

    def _knows(self, column: OutputColumn) -> bool:
        try:
            codec(column.type_oid, column.typmod, self._types)
        except UnknownType:
            return False
        return True


def state_directory(slot: str) -> Path:
    """Where a query keeps its log if it was not told where."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "walmere" / slot


def _require_other_names(rows: TableRows) -> None:
    names = rows.schema().names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            "reading with format pgoutput",
            f"the table has a column {', '.join(twice)}, which is a name that the source itself gives",
            'leave option("table", …) away: all rows as JSON have room for it',
        )


def _divided(refs: Sequence[BlockRef]) -> Iterator[list[BlockRef]]:
    """Parts of about the same size."""
    least, most = TASK_BYTES
    wanted = min(max(sum(ref.block.length for ref in refs) // _TASKS, least), most)
    return bins(refs, lambda ref: ref.block.length, wanted)
