"""The metrics of one or several subscriptions, from what `Subscription.status()` says and from a run's own counters."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, cast

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from walmere.lsn import Lsn
from walmere.metrics import names
from walmere.metrics.names import MetricName
from walmere.version import __version__

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Status = Mapping[str, Any]
_FAMILIES: Final = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
_TABLE_VALUES: Final = {
    "rows_copied": names.TABLE_COPIED,
    "rows_estimated": names.TABLE_ESTIMATED,
    "lag_bytes": names.TABLE_LAG_BYTES,
    "lag_seconds": names.TABLE_LAG_SECONDS,
    "rejects": names.TABLE_REJECTS,
    "conflicts": names.TABLE_CONFLICTS,
    "files": names.TABLE_FILES,
    "bytes": names.TABLE_SIZE,
    "deleted_rows": names.TABLE_DELETED,
    "written_bytes_per_hour": names.TABLE_WRITTEN,
}


class Samples:
    """Collects samples by metric, so that each metric is described once, whatever the number of subscriptions."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, metric: MetricName, value: float | None, *labels: str) -> None:
        """Add a sample; None: the value is not known, so there is no sample."""
        if value is not None:
            self._family(metric).add_metric(labels, float(value))

    def add_histogram(
        self, metric: MetricName, bounds: Sequence[float], counts: Sequence[int], total: float, *labels: str
    ) -> None:
        """Add a histogram. `counts`: how many values are in each bucket, and in the one without a bound."""
        upper = [*(str(bound) for bound in bounds), "+Inf"]
        buckets = [*zip(upper, accumulate(counts), strict=True)]  # each includes the ones before it
        self._family(metric).add_metric(labels, buckets, total)

    def _family(self, metric: MetricName) -> Any:
        family = self._families.get(metric.name)
        if family is None:
            family = _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.all_labels)
            self._families[metric.name] = family
        return family

    def families(self) -> Iterator[Metric]:
        """What was added."""
        yield from self._families.values()


def add_status(samples: Samples, status: Status) -> None:
    """The samples of one subscription."""
    name: str = status["subscription"]
    slot, receiver, disk = status["slot"], status["receiver"], status.get("disk") or {}
    answers = status["source_lsn"] is not None
    samples.add(names.SOURCE_UP, answers, name)
    samples.add(names.PAUSED, bool(status.get("paused")), name)
    for stage in names.STAGES:
        samples.add(names.POSITION, position(status[f"{stage}_lsn"]), name, stage)
    samples.add(names.LAG_BYTES, status["lag_bytes"], name)
    samples.add(names.LAG_SECONDS, status["lag_seconds"], name)
    if answers:
        samples.add(names.SLOT_EXISTS, slot is not None, name)
    if slot is not None:
        samples.add(names.SLOT_ACTIVE, slot["active"], name)
        samples.add(names.SLOT_RETAINED, slot["retained_bytes"], name)
        for each in names.WAL_STATUSES:
            samples.add(names.SLOT_STATUS, slot["wal_status"] == each, name, each)
    samples.add(names.RECEIVER_RUNNING, receiver["running"], name)
    samples.add(names.RECEIVER_LAG_BYTES, receiver["lag_bytes"], name)
    samples.add(names.RECEIVER_LAG_SECONDS, receiver["lag_seconds"], name)
    samples.add(names.LOG_DISK, disk.get("log_bytes"), name)
    samples.add(names.LAKE_SIZE, disk.get("lake_bytes"), name)
    for table in status["tables"]:
        _add_table(samples, name, table)


def _add_table(samples: Samples, name: str, table: Mapping[str, Any]) -> None:
    table_name = table["name"]
    for phase in names.PHASES:
        samples.add(names.TABLE_PHASE, table["phase"] == phase, name, table_name, phase)
    samples.add(names.TABLE_PUBLISHED, table["published"], name, table_name)
    samples.add(names.TABLE_ERROR, table["error"] is not None, name, table_name)
    samples.add(names.TABLE_UPKEEP, table["upkeep_waits_for"] is not None, name, table_name)
    for key, metric in _TABLE_VALUES.items():
        samples.add(metric, table.get(key), name, table_name)


class RunCounters:
    """Counts what a run has applied: changes by table, from its reports of progress, and batches."""

    def __init__(self, subscription: str) -> None:
        self._subscription = subscription
        self._lock = threading.Lock()
        self._changes: dict[str, int] = {}
        self._durations = [0] * (len(names.BATCH_BOUNDS) + 1)
        self._seconds = 0.0
        self._retries = 0

    def progress(self, now: Mapping[str, Any]) -> None:
        """Take over the numbers of a report: see `running.RunProgress`."""
        with self._lock:
            self._changes = {table["name"]: table["changes"] for table in now["tables"]}

    def batch_ended(self, seconds: float) -> None:
        """Count a batch that took so long."""
        with self._lock:
            self._durations[bisect_left(names.BATCH_BOUNDS, seconds)] += 1
            self._seconds += seconds

    def retried(self, _: Exception) -> None:
        """Count that applying has failed, and is retried."""
        with self._lock:
            self._retries += 1

    def add_to(self, samples: Samples) -> None:
        """The samples of this run."""
        with self._lock:
            changes, durations = dict(self._changes), [*self._durations]
            seconds, retries = self._seconds, self._retries
        for table, count in changes.items():
            samples.add(names.APPLIED_CHANGES, count, self._subscription, table)
        samples.add(names.BATCHES, sum(durations), self._subscription)
        samples.add(names.APPLY_RETRIES, retries, self._subscription)
        samples.add_histogram(names.BATCH_DURATION, names.BATCH_BOUNDS, durations, seconds, self._subscription)


class _Collector:
    """A collector of prometheus_client, which calls `collect` once."""

    def __init__(self, fill: Callable[[Samples], None]) -> None:
        self._fill = fill

    def collect(self) -> Iterator[Metric]:
        """All samples."""
        samples = Samples()
        samples.add(names.BUILD, 1, __version__)
        self._fill(samples)
        yield from samples.families()


def exposition(fill: Callable[[Samples], None]) -> bytes:
    """The text that `/metrics` answers with: what `fill` adds, and the resources of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(cast(Any, _Collector(fill)))
    ProcessCollector(registry=registry)
    text: bytes = generate_latest(registry)
    return text


def position(lsn: str | None) -> int | None:
    """An LSN as a number; None if it is not known."""
    return None if lsn is None else int(Lsn.parse(lsn)) or None
