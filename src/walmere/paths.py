"""The names of all files in a subscription's directory.

    changelog/            the change log
    tables.json           the state of every table: PostgreSQL's `pg_subscription_rel`
    ledger.jsonl          for every batch, the versions of the tables that belong together
    positions/            how far the target, and every named reader, has applied the log
    run/lock              held by the running launcher
    resync/               requests to copy tables again
    cuts/                 requests that a batch ends at an LSN
    receiver.json         where the receiver is, for `walmere status`
    receiver.log          what the receiver logs
    receiver.pids         receivers that a launcher has started
    receiver-error.json   the error that ended the receiver, with its class
    index/                key indexes of the target's files: a cache
    maintenance.json      what upkeep of the tables has done, for `walmere status`
    skip                  the commit LSN of a transaction that is left out
    paused                while it exists, nothing is copied or applied
    copies.json           how many rows the running copies have read, for `walmere status`
    pace.json             when the next batch may begin, if batches rewrite too many bytes
    spark.log             what Spark logs
    feed.json             the publications that a query of format pgoutput receives
    state-of              with a store: of which log there the state is a copy

They are listed here so that no name is used twice, and `walmere drop` deletes what a subscription has created.
"""

from __future__ import annotations

from typing import Final

CHANGELOG: Final = "changelog"
TABLES: Final = "tables.json"
LEDGER: Final = "ledger.jsonl"
POSITIONS: Final = "positions"
POSITIONS_OF_EARLIER_VERSIONS: Final = "origins"
RUN: Final = "run"
RESYNC: Final = "resync"
CUTS: Final = "cuts"
RECEIVER: Final = "receiver.json"
RECEIVER_LOG: Final = "receiver.log"
RECEIVER_PIDS: Final = "receiver.pids"
RECEIVER_ERROR: Final = "receiver-error.json"
INDEX: Final = "index"
MAINTENANCE: Final = "maintenance.json"
PACE: Final = "pace.json"
SKIP: Final = "skip"
PAUSED: Final = "paused"
COPIES: Final = "copies.json"
SPARK_LOG: Final = "spark.log"
FEED: Final = "feed.json"
STATE_OF: Final = "state-of"

FILES: Final = (
    RECEIVER,
    RECEIVER_LOG,
    RECEIVER_PIDS,
    RECEIVER_ERROR,
    "planner-error.json",  # of earlier versions
    MAINTENANCE,
    PACE,
    SKIP,
    PAUSED,
    COPIES,
    SPARK_LOG,
    STATE_OF,
    TABLES,
    LEDGER,
)
"""Files that `walmere drop` deletes, besides the change log."""
DIRECTORIES: Final = (POSITIONS, RUN, RESYNC, CUTS, INDEX, "checkpoint")  # the last one is of earlier versions
"""Directories that `walmere drop` deletes."""
