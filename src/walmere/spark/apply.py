"""The apply worker: applies the change log to the tables of the target, one batch after the other.

A thread of the driver plans a batch: references to blocks of the log. A Spark job applies it. Each task gets some
pickled `ApplyJob`s, opens the log itself, decodes, folds, and commits to their tables. (If a table has many changes in
a batch, several tasks stage them, and one commit has them all. Tables with few changes share a task.) Then the results
are recorded. So Spark schedules, distributes and retries, and no row of a table passes through the JVM or the driver.

A batch ends on a commit boundary. One without changes for any table is recorded without a job, so a run that finds
nothing to apply does not start Spark.

A table whose stream has a definition that its target does not have is applied up to there, and waits. A table that
cannot be applied is set aside with the error. The other tables continue.
"""

from __future__ import annotations

import functools
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, TypeAlias

from py4j.protocol import Py4JError
from pydantic import SecretStr
from pyspark import SparkContext

from walmere.apply.jobs import ApplyJob, Batch
from walmere.apply.worker import Applied
from walmere.errors import ChangeLogError, SinkError, WalmereError
from walmere.ledger.entry import now
from walmere.lsn import Lsn
from walmere.sinks.base import full_or
from walmere.spark.apply_task import apply_jobs
from walmere.spark.executors import Versions
from walmere.spark.failures import Failure, attempts, from_spark, log_traceback, raise_first
from walmere.spark.late_session import LateSession
from walmere.spark.placement import Placement, parallelism, tagged
from walmere.subscription.batches import Batches
from walmere.subscription.tables import Tables
from walmere.subscription.target.recorder import Recorder

OnBatch: TypeAlias = Callable[[list[Applied], Lsn], None]
OnBatchEnd: TypeAlias = Callable[[float], None]
_POLL: Final = 0.02
"""Seconds between two looks for changes, and between two attempts to cancel a job."""
_FULL_BELOW: Final = 1 << 20
"""A disk with fewer free bytes is full."""


class ApplyWorker:
    """Applies what comes, in a thread, until it is stopped or an error ends it."""

    def __init__(  # noqa: PLR0913  what it works with, its pace, and its callbacks
        self,
        spark: LateSession,
        directory: Path,
        tables: Tables,
        recorder: Recorder,
        *,
        interval: float = 0.0,
        until: Lsn | None = None,
        hash_key: SecretStr | None = None,
        on_batch: OnBatch = lambda *_: None,
        on_batch_end: OnBatchEnd = lambda *_: None,
    ) -> None:
        """Batches begin at least `interval` seconds after each other. `hash_key`: for columns that are hashed.

        `until`: the LSN at which the run ends, so that its last batch does not wait for more. `on_batch` is called
        after each batch, with the results by table and the LSN of its end, `on_batch_end` with the seconds it took.
        """
        self._spark = spark
        self._directory = directory
        self._tables = tables
        self._recorder = recorder
        self._interval = interval
        self._hash_key = hash_key
        self._on_batch = on_batch
        self._on_batch_end = on_batch_end
        self._tag: str | None = None  # of the job that is running
        self._error: WalmereError | None = None
        self._stopping = threading.Event()
        self._until = until
        self._thread = threading.Thread(target=self._run, name="walmere-apply", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it. A job that is running is cancelled."""
        self._stopping.set()
        while self._thread.is_alive():
            if self._tag is not None:
                with suppress(Py4JError, OSError):  # the JVM has ended, and the job with it
                    self._context.cancelJobsWithTag(self._tag)
            self._thread.join(_POLL)

    def finish(self, seconds: float) -> None:
        """Let a batch that is being applied end, if it does so within some seconds, and begin no other one."""
        if self._recorder.committing.acquire(timeout=seconds):
            self._stopping.set()
            self._recorder.committing.release()

    def error(self) -> WalmereError | None:
        """The error that has ended it."""
        return self._error

    @property
    def _context(self) -> SparkContext:
        return self._spark.get().sparkContext

    @functools.cached_property
    def _placement(self) -> Placement:
        return Placement(self._context)

    def _run(self) -> None:
        try:
            self._recorder.open_ledger()
            with closing(self._plan_batches()) as batches:
                begin_at = 0.0
                while not self._stopping.is_set():
                    if time.monotonic() < begin_at or (end := batches.next_end()) is None:
                        self._stopping.wait(_POLL)
                    else:
                        begin_at = time.monotonic() + self._interval
                        self._apply(batches, end)
        except Exception as error:
            if not self._stopping.is_set():
                translated = self._translate(error)
                if translated is not error:
                    translated.__cause__ = error.__cause__ or error  # it may say that the JVM has ended
                self._error = translated

    def _plan_batches(self) -> Batches:
        sink = self._recorder.sink
        return Batches(
            self._directory,
            self._tables,
            lambda: parallelism(self._context),
            spread=sink.spreads,
            transactional=sink.transactional,
            two_phase=sink.two_phase,
            until=self._until,
        )

    def _apply(self, batches: Batches, end: Lsn) -> None:
        """Apply the batch that ends here."""
        with self._recorder.committing:
            if self._stopping.is_set():
                return
            began, began_at = time.monotonic(), now()
            self._tables.shared.check()
            self._recorder.skip_written()
            batch, tasks = batches.plan(end)
            results = self._run_job(batch, tasks) if tasks else []
            if self._stopping.is_set():  # the next run repeats the batch; tables that have it do nothing
                return
            applied = self._recorder.record(batch, results, began_at)
            self._on_batch(applied, end)
            self._on_batch_end(time.monotonic() - began)

    def _run_job(self, batch: Batch, tasks: Sequence[Sequence[ApplyJob]]) -> list[Applied]:
        """Run the job of a batch. Returns the results of its tasks."""
        apply = functools.partial(
            apply_jobs,
            batch=pickle.dumps(batch),
            sink=self._recorder.sink,
            hash_key=self._hash_key,
            tries=attempts(self._context),
            driver=Versions.here(),
        )
        work = [(_key(jobs), [pickle.dumps(job) for job in jobs]) for jobs in tasks]
        try:
            with tagged(self._context, "apply") as self._tag:
                results = self._placement.items(work).flatMap(apply).collect()
        except Exception as error:
            if self._stopping.is_set():  # it was cancelled
                return []
            raise from_spark(error) from error
        finally:
            self._tag = None
        raise_first(each for each in results if isinstance(each, Failure))
        return results

    def _translate(self, error: Exception) -> WalmereError:
        if isinstance(error, WalmereError):
            return full_or(error)
        if isinstance(error, OSError):  # of a state file, or else of a lake on this machine
            if self._is_disk_full():
                return ChangeLogError(f"writing below {self._directory}", str(error), "make room or repair the disk")
            return full_or(SinkError("writing to the target", str(error), "make the target writable"))
        log_traceback(error)
        return WalmereError("applying changes", " ".join(repr(error).split()))

    def _is_disk_full(self) -> bool:
        with suppress(OSError):  # the disk itself may be what has failed
            return shutil.disk_usage(self._directory).free < _FULL_BELOW
        return False


def _key(jobs: Sequence[ApplyJob]) -> str:
    """By which a task is placed: the table, and the part of its keys, of its largest job."""
    if not jobs:
        return ""
    part = jobs[0].part
    return f"{jobs[0].oid} {part.number if part is not None else 0}"
