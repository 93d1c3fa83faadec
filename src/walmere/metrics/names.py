"""The name, type, labels and help text of every metric. `make reference` makes docs/reference/metrics.md of it.

Names follow Prometheus's rules: base units (seconds, bytes) as the suffix, `_total` for counters and only for these, no
type in the name. An LSN is a byte position in the WAL, so it is a number of bytes.

A value that is not known (the source does not answer, no copy yet) has no sample: it is absent, not 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class MetricName:
    """A metric. Every sample has the label `subscription` too, unless `labels` is None."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] | None = ()

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The names of the labels of a sample."""
        return ("version",) if self.labels is None else ("subscription", *self.labels)


BUILD: Final = MetricName("walmere_build_info", "gauge", "Always 1; the label has the version of Walmere.", None)

SOURCE_UP: Final = MetricName("walmere_source_up", "gauge", "1 if the source answers, else 0.")
STATUS_AGE: Final = MetricName(
    "walmere_status_age_seconds", "gauge", "Age of these values: the status is read every 10 s, or less often if slow."
)
RUNNING: Final = MetricName("walmere_running", "gauge", "1 if `walmere run` is running on this machine, else 0.")
PAUSED: Final = MetricName("walmere_paused", "gauge", "1 if the subscription is paused, else 0.")
POSITION: Final = MetricName(
    "walmere_wal_position_bytes",
    "gauge",
    "LSN as a byte position in the WAL. `stage`: source, received, durable (in the change log), applied.",
    ("stage",),
)
LAG_BYTES: Final = MetricName("walmere_lag_bytes", "gauge", "WAL between the applied LSN and the end of the source's.")
LAG_SECONDS: Final = MetricName(
    "walmere_lag_seconds", "gauge", "Age of the oldest commit that was received and is not applied; 0 if there is none."
)

SLOT_EXISTS: Final = MetricName("walmere_slot_exists", "gauge", "1 if the replication slot exists, else 0.")
SLOT_ACTIVE: Final = MetricName(
    "walmere_slot_active", "gauge", "1 if a walsender streams from the replication slot, else 0."
)
SLOT_RETAINED: Final = MetricName(
    "walmere_slot_retained_wal_bytes", "gauge", "WAL that the source keeps for the replication slot."
)
SLOT_STATUS: Final = MetricName(
    "walmere_slot_wal_status",
    "gauge",
    "1 for the `wal_status` of the slot in pg_replication_slots, 0 for the others.",
    ("status",),
)

RECEIVER_RUNNING: Final = MetricName("walmere_receiver_running", "gauge", "1 if a receiver is running, else 0.")
RECEIVER_CONNECTED: Final = MetricName(
    "walmere_receiver_connected", "gauge", "1 if the receiver streams, 0 while it retries after an error."
)
RECEIVER_LAG_BYTES: Final = MetricName("walmere_receiver_lag_bytes", "gauge", "WAL that was not received yet.")
RECEIVER_LAG_SECONDS: Final = MetricName(
    "walmere_receiver_lag_seconds", "gauge", "How far the received stream is behind the source; 0 if it has all of it."
)
RECEIVED_BYTES: Final = MetricName(
    "walmere_receiver_received_bytes_total", "counter", "Bytes of the stream that were received since it started."
)
RECEIVED_TRANSACTIONS: Final = MetricName(
    "walmere_receiver_transactions_total", "counter", "Transactions that were written to the change log."
)
LOGGED_BYTES: Final = MetricName(
    "walmere_receiver_written_bytes_total", "counter", "Bytes of segments that were written to the change log."
)
RECONNECTS: Final = MetricName(
    "walmere_receiver_reconnects_total", "counter", "Retries of the receiver after a lost connection or another error."
)

LOG_DISK: Final = MetricName("walmere_changelog_disk_bytes", "gauge", "Size of the change log on the local disk.")
LAKE_SIZE: Final = MetricName("walmere_lake_size_bytes", "gauge", "Size of the newest version of all mirrored tables.")

TABLE_PHASE: Final = MetricName(
    "walmere_table_phase",
    "gauge",
    "1 for the phase of the table (srsubstate of pg_subscription_rel: i, d, f, s, r), 0 for the others.",
    ("table", "phase"),
)
TABLE_PUBLISHED: Final = MetricName(
    "walmere_table_published", "gauge", "1 if the table is in a publication, 0 if it was removed from all.", ("table",)
)
TABLE_ERROR: Final = MetricName(
    "walmere_table_error", "gauge", "1 if the table has an error, so that it is set aside or retried.", ("table",)
)
TABLE_COPIED: Final = MetricName(
    "walmere_table_copied_rows", "gauge", "Rows of the copy, so far or when it was complete.", ("table",)
)
TABLE_ESTIMATED: Final = MetricName(
    "walmere_table_estimated_rows",
    "gauge",
    "Rows of the table at the source, as PostgreSQL estimates them.",
    ("table",),
)
TABLE_LAG_BYTES: Final = MetricName(
    "walmere_table_lag_bytes", "gauge", "WAL between the table's LSN and the end of the source's.", ("table",)
)
TABLE_LAG_SECONDS: Final = MetricName(
    "walmere_table_lag_seconds", "gauge", "Age of the oldest received commit that the table lacks.", ("table",)
)
TABLE_REJECTS: Final = MetricName(
    "walmere_table_rejects", "gauge", "Values since the copy that the target's type cannot hold.", ("table",)
)
TABLE_CONFLICTS: Final = MetricName(
    "walmere_table_conflicts", "gauge", "Changes that met a conflict in a database as the target.", ("table",)
)
TABLE_FILES: Final = MetricName("walmere_table_files", "gauge", "Data files of the table's newest version.", ("table",))
TABLE_SIZE: Final = MetricName(
    "walmere_table_size_bytes", "gauge", "Size of the data files of the table's newest version.", ("table",)
)
TABLE_DELETED: Final = MetricName(
    "walmere_table_deleted_rows", "gauge", "Rows in data files that are marked as deleted.", ("table",)
)
TABLE_WRITTEN: Final = MetricName(
    "walmere_table_hourly_written_bytes",
    "gauge",
    "Bytes that were written to the table within the last hour.",
    ("table",),
)
TABLE_UPKEEP: Final = MetricName(
    "walmere_table_upkeep_waiting",
    "gauge",
    "1 if joining files and purging deleted rows waits for [maintenance] bytes_per_hour.",
    ("table",),
)
APPLIED_CHANGES: Final = MetricName(
    "walmere_applied_changes_total", "counter", "Changes that this `walmere run` has applied to the table.", ("table",)
)
BATCHES: Final = MetricName(
    "walmere_batches_total",
    "counter",
    "Batches that this `walmere run` has applied.",
)
APPLY_RETRIES: Final = MetricName(
    "walmere_apply_retries_total",
    "counter",
    "Retries after an error of the target, of the store or of Spark that kept this `walmere run` from applying.",
)
BATCH_DURATION: Final = MetricName(
    "walmere_batch_duration_seconds",
    "histogram",
    "How long the batches of this `walmere run` took, from the start of their tasks to the ledger.",
)

EVERY: Final = tuple(each for each in list(globals().values()) if isinstance(each, MetricName))
"""All metrics, in the order of this module."""

PHASES: Final = ("i", "d", "f", "s", "r")
WAL_STATUSES: Final = ("reserved", "extended", "unreserved", "lost")
STAGES: Final = ("source", "received", "durable", "applied")
BATCH_BOUNDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets of `walmere_batch_duration_seconds`: a batch takes 0.1 s at least, a backlog minutes."""
