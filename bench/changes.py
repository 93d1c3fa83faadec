"""The `pgoutput` source: typed rows from a change log to Spark's no-op sink, compared with the same rows in Parquet.

Run it with `python -m bench.changes [--server 15] [--rounds 3] [--small]`, or run all with `make bench`.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from bench.load import inserts
from bench.plain_spark import plain_session, read_all
from bench.side_by_side import Report
from bench.source import options, scratch_config, source
from walmere import config as configuration
from walmere.lsn import Lsn
from walmere.subscription.receiver import Receiver

RATE = 500_000


def main() -> None:
    """Rows per second and core, and the ratio to Parquet, on one core and on two."""
    arguments = options(__doc__).parse_args()
    transactions = 20 if arguments.small else 2000
    report = Report("changes", "log → typed rows in Spark", {"server": arguments.server, "small": arguments.small})
    with tempfile.TemporaryDirectory(prefix="walmere-bench-") as scratch:
        directory = Path(scratch)
        with source(arguments.server) as made:
            load = inserts(transactions)
            end = load.backlog(made, f"{transactions * 1000:,} inserts of 7 columns")
            config = configuration.load(scratch_config(made.server, directory, load.table, load.table))
            print("receiving …")
            Receiver(config).run(Lsn.parse(end))
        for cores in (1, 2):
            _measure(report, cores, directory, transactions * 1000, arguments.rounds)
    report.finish()


def _measure(report: Report, cores: int, directory: Path, rows: int, rounds: int) -> None:
    spark = plain_session(cores)
    changes = spark.read.format("pgoutput").option("table", "a1").load(str(directory / "subscription"))
    parquet = str(directory / f"parquet-{cores}")
    changes.write.parquet(parquet)  # warms up both paths
    assert spark.read.parquet(parquet).count() == rows
    read_all(spark.read.parquet(parquet))
    ours, theirs = [], []
    for number in range(rounds):
        theirs.append(read_all(spark.read.parquet(parquet)))
        ours.append(read_all(changes))
        print(f"  {cores} cores {number + 1}/{rounds}: Parquet {theirs[-1]:.2f} s, ours {ours[-1]:.2f} s")
    rate = rows / statistics.median(ours) / cores
    times = {"limit_seconds": [round(each, 2) for each in theirs], "seconds": [round(each, 2) for each in ours]}
    name = f"{rows:,} changes to noop, local[{cores}]"
    report.value(f"{name}: typed rows/s per core", f"{rate:,.0f}", f"≥ {RATE:,}", rate >= RATE, **times)
    ratio = statistics.median(ours) / statistics.median(theirs)
    report.value(f"{name}: time compared with Parquet", round(ratio, 2), "stated", True, **times)
    spark.stop()


if __name__ == "__main__":
    main()
