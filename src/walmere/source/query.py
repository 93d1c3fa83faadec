"""Queries of the `pgoutput` source: what Spark asks for, and how far a query is.

Offsets are LSNs at commit boundaries: a batch has the transactions that committed from its start up to its end. A batch
is planned from the change log alone, which never changes, so planning it again after a crash gives the same rows.
Together with Spark's checkpoint, this is exactly once.

Spark 4.1 calls a stream in this order: for a new query, for a query that continues from a checkpoint at 40, and for one
whose batch up to 40 was interrupted:

    latestOffset, initialOffset, partitions(initial, latest), latestOffset, commit, partitions, …
    partitions(40, 40), latestOffset, commit(40), partitions(40, latest), …
    partitions(40, 40), partitions(30, 40), latestOffset, …

A source cannot see the query's trigger. With a Python source, AvailableNow takes the first `latestOffset` as the end,
reads up to there in one batch, and ends. So the first answer is always the end of the log, whatever
`maxBytesPerTrigger` is, and a query that receives by itself first receives what the source has. With option
`availableNow` false, the first batch is limited, too. After an interrupted batch, AvailableNow repeats only that batch:
all that can be done here is to log a warning. (With Spark's `triggerAvailableNowWrapper` it continues; then
`latestOffset` is called before the checkpoint is known.)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping

from pyspark.sql.types import StructType

from walmere.errors import ChangeLogError, ChangeLogMismatch
from walmere.lsn import Lsn
from walmere.source.change_rows import ReadJob
from walmere.source.log import QueryLog, end_of
from walmere.source.options import parse, refuse

_log = logging.getLogger(__name__)


def schema_of(given: Mapping[str, str]) -> StructType:
    """The columns of a query with these options."""
    columns = QueryLog(parse(given)).columns
    return columns.struct(columns.format())


def plan_once(given: Mapping[str, str], schema: StructType) -> list[ReadJob]:
    """What the tasks of a batch query read: the whole log, or the part between two LSNs."""
    refuse(given, ("maxBytesPerTrigger", "availableNow"), "streams (readStream)")
    options = parse(given)
    log = QueryLog(options)
    log.require_log_of_slot()
    if (feed := log.feed()) is not None:
        feed.receive_now()
    planner = log.planner()
    start = log.starting(planner)
    end = end_of(planner, start)
    if options.ending is not None and options.ending > end:
        raise ChangeLogError(
            f"reading the change log in {log.changelog} up to {options.ending}",
            f"it ends at {end}",
            "read it when it has reached that LSN, or remove endingLsn",
        )
    return list(log.jobs(planner, start, options.ending or end, log.columns.format(schema)))


class StreamQuery:
    """A streaming query. Runs in a Python process beside the driver."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        refuse(given, ("endingLsn",), "batch reads (read)")
        self._log = QueryLog(parse(given))
        options = self._log.options
        self._log.require_columns(schema)
        self._feed = self._log.feed()
        self._reader = self._log.lock_reader()
        if self._feed is not None:
            self._feed.prepare()
            self._feed.start(catch_up=options.available_now)
            if options.available_now:
                self._feed.wait()
        self._planner = self._log.planner()
        self._format = self._log.columns.format(schema)
        self._first: Lsn | None = None
        self._position: Lsn | None = None  # the end of the last batch
        self._has_answered = False  # whether `latest` was called

    def first(self) -> dict[str, str]:
        """Where a query without a checkpoint begins."""
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
            with contextlib.suppress(ChangeLogError):  # without a checkpoint, Spark calls `first` and gets the error
                start = Lsn.parse(self.first()["lsn"])
        limited = self._has_answered or not options.available_now
        self._has_answered = True
        with self._log.explain_removed(self._planner, start):
            self._position = end_of(self._planner, start, options.max_bytes if limited else None)
        return self._offset(self._position)

    def plan(self, start: Mapping[str, str], end: Mapping[str, str]) -> list[ReadJob]:
        """What the tasks of a batch read."""
        first, last = self._lsn(start), self._lsn(end)
        self._position = last
        if first < last and not self._has_answered:
            _log.warning(
                "the batch up to %s was interrupted, and is read again. With Trigger.AvailableNow, Spark ends after it:"
                " run the query again for later changes",
                last,
            )
        return list(self._log.jobs(self._planner, first, last, self._format))

    def commit(self, end: Mapping[str, str]) -> None:
        """Record that Spark has committed all batches up to this offset."""
        self._log.commit(Lsn.parse(end["lsn"]))

    def _offset(self, lsn: Lsn) -> dict[str, str]:
        return {"lsn": str(lsn), "system": self._planner.system_identifier}

    def _lsn(self, offset: Mapping[str, str]) -> Lsn:
        """The LSN of an offset. Refuses one of another log, and one after the log's end: rows would be missed."""
        lsn, system, log_system = Lsn.parse(offset["lsn"]), offset["system"], self._planner.system_identifier
        doing = f"continuing from a checkpoint at {lsn} with the change log in {self._log.changelog}"
        new_checkpoint = "start the query with a new checkpoint"
        if system != log_system:
            raise ChangeLogMismatch(
                doing, f"the checkpoint is of system {system}, the log of {log_system}", new_checkpoint
            )
        log_end, starting = self._planner.end_lsn, self._log.options.starting
        if lsn > log_end and lsn != starting:
            hint = f"start the query again when the log has reached {lsn}; if the log was replaced, {new_checkpoint}"
            raise ChangeLogMismatch(doing, f"the log ends at {log_end}", hint)
        return lsn

    def stop(self) -> None:
        """Stop receiving, and release the reader."""
        if self._feed is not None:
            self._feed.stop()
        if self._reader is not None:
            self._reader.close()
