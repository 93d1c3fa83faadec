"""Verify a table of five million rows, compared with two COPYs of it to /dev/null; and the memory that it needs.

Ours is `Subscription.verify` in a running Spark session, while `walmere run` runs in another process. The time includes
the snapshot, the wait for a batch that ends there, and reading both sides. Memory is that of `walmere verify` with all
its processes and the JVM, sampled while they run (proportional set size: shared memory is counted once).

Run it with `python -m bench.verify [--server 15] [--rounds 3] [--small]`, or run all with `make bench`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.ours import Ours, warm
from bench.side_by_side import Report, Run
from bench.snapshot import fill
from bench.source import options, source
from walmere.api import Subscription

MEMORY = 1 << 30


def measured(command: list[str]) -> Run:
    """Run a command, and measure the peak memory of it and all its child processes together."""
    began = time.perf_counter()
    process = psutil.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        total = 0
        with contextlib.suppress(psutil.Error):
            for each in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    total += each.memory_full_info().pss
        peak = max(peak, total)
        time.sleep(0.1)
    assert process.returncode == 0
    return Run(time.perf_counter() - began, 0, peak)


def main() -> None:
    """Run both comparisons."""
    arguments = options(__doc__).parse_args()
    rows = 50_000 if arguments.small else 5_000_000
    report = Report("verify", "source = target", {"server": arguments.server, "small": arguments.small})
    with (
        source(arguments.server) as made,
        tempfile.TemporaryDirectory(prefix="walmere-bench-") as directory,
    ):
        fill(made, rows)
        report.facts["spark_start_seconds"], report.facts["warm_up_seconds"] = warm(made, Path(directory))
        ours = Ours(made, Path(directory) / "ours", "b")
        ours.run("b", made.end())
        subscription = Subscription(ours.config_file())
        compared: list[float] = []

        def verify() -> Run:
            began = time.perf_counter()
            proof = subscription.verify()
            assert proof.equal
            assert [each.source_rows for each in proof.tables] == [rows]
            compared.extend(each.seconds for each in proof.tables)
            return Run(time.perf_counter() - began, 0, 0)

        with ours.process():
            verify(), made.two_copies("b")  # once without timing
            compared.clear()
            report.ratio(
                f"verify of {rows:,} rows", 3, "two COPYs", lambda: made.two_copies("b"), verify, arguments.rounds
            )
            alone = measured([sys.executable, "-m", "walmere", "verify", "-c", str(subscription.file)])
        report.facts["comparing_seconds"] = compared
        report.facts["command_seconds"] = round(alone.seconds, 2)
        report.value("memory of all processes", f"{alone.peak_bytes >> 20} MB", "≤ 1 GB", alone.peak_bytes <= MEMORY)
    report.finish()


if __name__ == "__main__":
    main()
