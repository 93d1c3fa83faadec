"""The proof that source and target agree: every row and every column of every table, at one LSN.

First the definitions of the tables at the source (columns, row filter, pages) are read, in the snapshot. Some catalog
functions do not use the snapshot, so a table that was altered since its target was made is not compared. Then several
tables are compared at a time, each by many tasks: fingerprints of all pieces of both sides, and the rows of the buckets
that differ. A table that cannot be compared at this point, because it is being copied, was refused, rewritten, altered
or is locked, is neither equal nor different, and the verdict has the reason.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Protocol

import pyarrow as pa

from walmere.apply.rejects import Rejects
from walmere.config import Source
from walmere.definition import PublishedColumn, Shaping
from walmere.errors import NotCompared, NotMirrored, SinkMismatch, WalmereError
from walmere.lsn import Lsn
from walmere.publisher import snapshot, table
from walmere.publisher.connect import translate_errors
from walmere.publisher.table import Part, Range, Table
from walmere.shaping.columns import TargetColumns
from walmere.shaping.rules import TableRules
from walmere.sinks.base import Sink, TableScan, is_lake
from walmere.sinks.postgres.relation import missing_columns
from walmere.sinks.postgres.sink import PostgresSink
from walmere.subscription.state import TableState
from walmere.subscription.tablesync import CopyTask, Tasks, look
from walmere.types import PgType, TypType
from walmere.types.builtin import BUILT_IN
from walmere.types.codec import codec
from walmere.verify import rows as row_by_row
from walmere.verify import sample
from walmere.verify.fingerprint import DIFFERENT_ROWS, RowLayout, buckets_for, empty
from walmere.verify.pg_text import SourceType
from walmere.verify.pieces import Counted, DifferingRows, SourcePiece, TargetPiece, TextPiece, count
from walmere.verify.point import APPLICATION, ConsistentPoint
from walmere.verify.rows import Difference

AT_ONCE: Final = 4
"""Tables that are compared at the same time."""
FLOAT4, FLOAT8 = 700, 701
"""OIDs in pg_type."""


class Adding(Tasks, Protocol):
    """Tasks whose results are added by Spark."""

    def add(
        self, function: Callable[[Any], Any], items: Sequence[Any], zero: Any, on_progress: Callable[[int, int], None]
    ) -> Any:
        """The sum of all results. There may be very many: they are not all sent to the driver."""


class Shuffle(Protocol):
    """Groups the rows of many pieces."""

    def reduce(
        self,
        pieces: Sequence[DifferingRows],
        schema: str,
        by: str,
        function: Callable[[pa.Table], pa.Table],
        reduced: str,
    ) -> list[Any]:
        """The function's results for the rows with the same value in the column `by`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one table."""

    name: str
    source_rows: int = 0
    target_rows: int = 0
    missing: int = 0  # rows that only the source has
    extra: int = 0  # rows that only the target has, or that it has more often
    different: int = 0  # rows with the same key and other values
    unrecorded_rejects: int = 0  # distinct values that the target cannot hold and that are not in its rejects
    seconds: float = 0.0
    sample: float | None = None  # percent of the rows that were compared; None: all
    examples: tuple[Difference, ...] = ()
    error: str | None = None  # why it could not be compared, or how its columns differ
    compared: bool = True
    passing: bool = False  # comparing it at a newer point may succeed

    @property
    def equal(self) -> bool | None:
        """Whether both sides hold the same rows; None: they could not be compared."""
        if not self.compared:
            return None
        return not (self.missing or self.extra or self.different or self.unrecorded_rejects or self.error)

    @property
    def outcome(self) -> str:
        """`equal` in words."""
        return {True: "equal", False: "different", None: "not compared"}[self.equal]

    def to_json(self) -> dict[str, Any]:
        """As `verify --json` prints it."""
        counts = asdict(self)
        del counts["compared"], counts["passing"]
        return {"equal": self.equal, "outcome": self.outcome, **counts}


@dataclass(frozen=True, slots=True)
class Proof:
    """The result for all tables."""

    lsn: Lsn
    tables: tuple[Verdict, ...]

    @property
    def equal(self) -> bool | None:
        """Whether every table is equal; None: none differs, but some could not be compared."""
        outcomes = {verdict.equal for verdict in self.tables}
        return False if False in outcomes else None if None in outcomes else True

    def to_json(self) -> dict[str, Any]:
        """As `verify --json` prints it."""
        return {"lsn": str(self.lsn), "equal": self.equal, "tables": [each.to_json() for each in self.tables]}


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Options of `verify`."""

    sample: float | None = None  # percent
    show_values: bool = False
    examples: int = 20  # of a table
    seed: int = field(default_factory=lambda: random.SystemRandom().randrange(1 << 31))  # of the sample


OnProgress = Callable[[str, int, int], None]
"""Is called with a table's name, how many of its pieces are compared, and how many it has."""
OnVerdict = Callable[[Verdict], None]


@dataclass(frozen=True, slots=True)
class _SourceTable:
    """A table at the source."""

    task: CopyTask  # to read all of it
    types: tuple[SourceType, ...]  # of each column
    declared: Mapping[str, str]  # of each column, its type in SQL


class Prover:
    """Compares tables at one point."""

    def __init__(  # noqa: PLR0913  the parts of a comparison, and its callbacks
        self,
        source: Source,
        point: ConsistentPoint,
        sink: Sink,
        *,
        tasks: Adding,
        shuffle: Shuffle,
        options: VerifyOptions,
        rules: TableRules,
        on_progress: OnProgress = lambda *_: None,
        on_verdict: OnVerdict = lambda _: None,
        running: bool = False,
        retries: bool = False,
    ) -> None:
        """`running`: a process runs the subscription, and may apply an altered definition soon.

        `retries`: tables that may succeed at a newer point are compared again; `on_verdict` is called after that.
        """
        self._source = source
        self._point = point
        self._sink = sink
        self._tasks = tasks
        self._shuffle = shuffle
        self._options = options
        self._rules = rules
        self._on_progress = on_progress
        self._on_verdict = on_verdict
        self._running = running
        self._retries = retries

    def prove(self, tables: Sequence[TableState], gather: bool) -> Proof:
        """Compare these tables."""
        described = self._describe(tables, gather)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                verdicts = list(pool.map(self._verdict, tables, described))
            except BaseException:  # Ctrl-C
                pool.shutdown(wait=False, cancel_futures=True)
                self._tasks.cancel()
                raise
        return Proof(self._point.lsn, tuple(verdicts))

    def _describe(self, tables: Sequence[TableState], gather: bool) -> list[_SourceTable | WalmereError]:
        """Each table as it is at the source; or the error that kept us from reading its description."""
        source, made = self._source, self._point.snapshot
        found: list[_SourceTable | WalmereError] = []
        with snapshot.imported(source, APPLICATION, made) as connection:
            for known in tables:
                try:
                    # in a savepoint: an error, such as a lock timeout, must not end the transaction of all tables
                    with translate_errors(source, f"reading the definition of {known.name}"), connection.transaction():
                        described, types = look(connection, source, known.oid, gather)
                        declared = table.declared_types(connection, described.columns)
                    _require_same(known, described)
                    whole = Range(Part(described.schema, described.name, None, whole_tree=True), 0, None)
                    shaping = self._shaping(known, described, types)
                    columns = self._rules.columns(described.columns, types, shaping)
                    task = CopyTask(source, made, described, whole, columns, self._sink, known.table)
                    if is_lake(self._sink):
                        kinds = source_types(described.columns, columns, types)
                    else:
                        kinds = (SourceType(None),) * len(described.columns)  # text is compared with text
                    found.append(_SourceTable(task, kinds, declared))
                except WalmereError as error:
                    found.append(error)
        return found

    def _shaping(self, known: TableState, described: Table, types: Mapping[int, PgType]) -> Shaping | None:
        """How the target differs from the source. Raises if the configuration says something else than the target."""
        now = self._rules.shaping(known.source_table, described.columns, described.key, types, known.hidden)
        if known.definition is not None and now != known.definition.shaping:
            raise NotMirrored(
                f"comparing {known.name}",
                "the sections [[table]] or [types], or the key of hashes, were changed since the table was copied",
                "restart `walmere run`: it copies the table again",
            )
        return now

    def _verdict(self, known: TableState, source: _SourceTable | WalmereError) -> Verdict:
        began = time.monotonic()
        try:
            if isinstance(source, WalmereError):
                raise source
            found = self._compare(known, source)
        except SinkMismatch as error:
            found = Verdict(known.name, error=str(error), passing=self._running)
        except WalmereError as error:
            found = Verdict(known.name, error=str(error), compared=False, passing=known.error is None)
        except Exception as error:  # the other tables are compared all the same
            found = Verdict(known.name, error=f"comparing {known.name}: {error!r}", compared=False)
        found = replace(found, seconds=round(time.monotonic() - began, 3))
        if not (found.passing and self._retries):
            self._on_verdict(found)
        return found

    def _compare(self, known: TableState, source: _SourceTable) -> Verdict:
        work = source.task
        version = self._point.entry.versions.get(known.name)
        if version is None:
            raise NotMirrored(
                f"comparing {known.name}",
                known.error or f"it is not at {self._point.lsn} with the others: it is being copied",
                "see `walmere status`; then verify again",
            )
        scan = self._sink.scan(known.table, version, self._tasks.parallelism)
        described, schema = work.table, work.columns.schema
        compared = work.columns.mirrored
        if isinstance(self._sink, PostgresSink):  # it may have other columns, too
            compared = schema = pa.schema([(name, pa.string()) for name in schema.names])
            missing = [name for name in schema.names if name not in scan.schema.names]
            if missing:
                raise missing_columns(known.table, missing, f"comparing {known.name}")
        elif not schema.equals(scan.schema):
            raise SinkMismatch(
                f"comparing {known.name}",
                f"its columns are {_columns(schema)} at the source, and {_columns(scan.schema)} in the target",
                "a new definition is applied with the next changed row; or copy the table again: `walmere resync`",
            )
        layout = RowLayout(compared, described.key, buckets_for(scan.rows), source.types)
        pieces, sampled = self._pieces(source, scan, layout)
        none = empty(layout.buckets)
        counted = self._tasks.add(count, pieces, Counted(none, none), functools.partial(self._on_progress, known.name))
        differing = counted.source.differing(counted.target)
        found = Verdict(
            known.name,
            counted.source.total,
            counted.target.total,
            unrecorded_rejects=self._unrecorded(known, counted.rejects),
            sample=self._options.sample if sampled else None,
        )
        if not len(differing):
            return found
        most = self._options.examples
        compared = self._shuffle.reduce(
            [DifferingRows(piece, differing, self._options.show_values) for piece in pieces],
            DIFFERENT_ROWS,
            "bucket",
            functools.partial(row_by_row.compare, examples=-(-most // len(differing))),
            row_by_row.COMPARED,
        )
        rows = row_by_row.gather(compared, layout.schema.names, described.key, most)
        if not (rows.missing or rows.extra or rows.different):
            raise NotCompared(f"comparing {known.name}", "fingerprints differ, and rows do not", "verify again")
        return replace(found, missing=rows.missing, extra=rows.extra, different=rows.different, examples=rows.examples)

    def _pieces(
        self, source: _SourceTable, scan: TableScan, layout: RowLayout
    ) -> tuple[list[SourcePiece | TargetPiece | TextPiece], bool]:
        """All pieces of both sides, and whether they are a sample."""
        work, described = source.task, source.task.table
        if isinstance(self._sink, PostgresSink):
            ranges = table.ranges(described, self._tasks.parallelism)
            there = [TextPiece(self._sink, piece, layout, source.declared) for piece in scan.pieces]
            return [*(SourcePiece(replace(work, piece=piece), layout) for piece in ranges), *there], False
        assert is_lake(self._sink)
        deleted = work.columns.soft_deletes
        target = [TargetPiece(self._sink, piece, layout, soft_deletes=deleted) for piece in scan.pieces]
        intervals = self._sample(described, scan, layout)
        if intervals is None:
            ranges = table.ranges(described, self._tasks.parallelism)
            return [*(SourcePiece(replace(work, piece=piece), layout) for piece in ranges), *target], False
        [column] = [each for each in described.columns if each.name == described.key[0]]
        place = layout.schema.names.index(column.name)
        where = sample.in_target(place, layout.schema.field(place).type, intervals)
        tasks = min(self._tasks.parallelism, len(intervals))
        chosen = [
            SourcePiece(
                replace(work, piece=Range(replace(part, pages=None), 0, None)),
                layout,
                sample.at_source(column.name, column.type_oid, intervals[number::tasks]),
            )
            for part in described.parts
            for number in range(tasks)
        ]
        return [*chosen, *(replace(piece, where=where) for piece in target)], True

    def _sample(self, described: Table, scan: TableScan, layout: RowLayout) -> list[sample.Interval] | None:
        """The intervals of the key that are compared; None: all."""
        percent = self._options.sample
        if percent is None or percent >= 100 or not described.key or not scan.pieces or not is_lake(self._sink):
            return None
        [column] = [each for each in described.columns if each.name == described.key[0]]
        key = layout.schema.field(column.name)
        if layout.source[layout.schema.names.index(column.name)].shaped:
            return None  # its values are not those of the source
        if not sample.can_sample(column.type_oid, key.type):
            return None
        each = -(-sample.boundaries(percent) // len(scan.pieces))
        tasks = [sample.KeySample(self._sink, piece, key, each, self._options.seed) for piece in scan.pieces]
        keys = [key for group in self._tasks.map(sample.sample_keys, tasks) for key in group]
        return sample.choose(keys, sample.order_of(key.type), percent, random.Random(self._options.seed))  # noqa: S311

    def _unrecorded(self, known: TableState, rejected: frozenset[str]) -> int:
        """How many of these texts, which the target cannot hold, are not in the table's rejects."""
        missing = set(rejected)
        name = Rejects.table(known.table)
        if missing and is_lake(self._sink) and self._sink.count(name):
            for piece in self._sink.scan(name, self._sink.version(name)).pieces:
                for batch in self._sink.read(piece, ["value"]):
                    missing.difference_update(batch.column("value").unique().to_pylist())
        return len(missing)


def _require_same(known: TableState, described: Table) -> None:
    """Refuse a table that is published in another way, or has other partitions, than when its target was made."""
    now, then = described.published, known.definition
    if (described.schema, described.name) != known.source_table or (
        then is not None and (now.publication_fingerprint, now.leaves) != (then.publication_fingerprint, then.leaves)
    ):
        raise NotMirrored(
            f"comparing {known.name}",
            "it was altered, or its publication or partitions were",
            "verify again when the subscription has noticed it: after some seconds, or after a new copy",
        )


def source_types(
    columns: Sequence[PublishedColumn], made: TargetColumns, types: Mapping[int, PgType]
) -> tuple[SourceType, ...]:
    """What has to be known of each column that the target has."""
    by_name = {each.name: each for each in columns}
    found = []
    for name, made_codec in zip(made.names, made.codecs, strict=True):
        column = by_name[name]
        kind, usual = made_codec.arrow, codec(column.type_oid, column.typmod, types).arrow
        if made_codec.hides:
            found.append(SourceType(masked=True, shaped=True))
        elif kind == usual:
            found.append(source_type(column.type_oid, types))
        elif pa.types.is_decimal(kind):
            found.append(SourceType(decimal=(kind.precision, kind.scale), shaped=True))
        else:
            found.append(SourceType(uuid_bytes=bool(pa.types.is_binary(kind)), shaped=True))
    return tuple(found)


def source_type(type_oid: int, types: Mapping[int, PgType]) -> SourceType:
    """What has to be known of a type to compare its values. A domain is what it is over."""
    found = BUILT_IN.get(type_oid) or types[type_oid]
    if found.typtype is TypType.DOMAIN:
        return source_type(found.basetype, types)
    if found.elem:
        element, inner = BUILT_IN.get(found.elem) or types[found.elem], source_type(found.elem, types)
        return SourceType(inner.floats, element.delimiter + inner.delimiters)
    if (found.extension, found.name) in (("vector", "vector"), ("vector", "halfvec")):
        return SourceType("FLOAT", ",")
    return SourceType({FLOAT4: "FLOAT", FLOAT8: "DOUBLE"}.get(type_oid))


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
