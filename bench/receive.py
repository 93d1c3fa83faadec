"""Receiving, compared with pg_recvlogical: slot → fsynced change log, and slot → /dev/null.

Both are processes, timed from start to end with their start-up, over TCP, on a backlog that was made before. Each run
has a copy of the same slot.

Run it with `make bench-receive`, or `python -m bench.receive [--server 15] [--rounds 3] [--small]`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.load import Load, inserts, mixed
from bench.side_by_side import Report, Run, timed
from bench.source import Source, options, scratch_config, source

LARGE = "CREATE TABLE a3 (id bigint PRIMARY KEY, note text)"
FILL_LARGE = "INSERT INTO a3 SELECT i, md5(i::text) || md5(i::text) FROM generate_series({first}, {last}) i"


@dataclass(frozen=True)
class Bench:
    """A source, a scratch directory, and the report."""

    source: Source
    scratch: Path
    report: Report

    def receive(self, slot: str, publication: str, end: str, *, streaming: bool = True) -> Run:
        """Run `walmere receive --until`."""
        with self.source.copy_of(slot) as copy:
            more = f"streaming = {str(streaming).lower()}\n"
            config = scratch_config(self.source.server, self.scratch, publication, copy, more)
            run = timed([Path(sys.executable).parent / "walmere", "receive", "-c", config, "--until", end])
        shutil.rmtree(self.scratch / "subscription")
        return run

    def backlog(self, name: str, bar: float, load: Load, rounds: int) -> None:
        """Make a backlog, then let both tools read it."""
        end = load.backlog(self.source, name)
        self.report.ratio(
            name,
            bar,
            "pg_recvlogical",
            lambda: self.source.recvlogical(load.table, load.table, end),
            lambda: self.receive(load.table, load.table, end),
            rounds,
        )
        self.source.drop(load.table)

    def memory(self, rows: int) -> None:
        """Compare the receiver's peak memory for a small transaction and for a large one."""
        self.source.sql.execute(LARGE + "; CREATE PUBLICATION a3 FOR TABLE a3")
        peaks: dict[tuple[int, bool], Run] = {}
        for count, first in ((1000, 0), (rows, 1_000_000)):
            print(f"making one transaction of {count:,} rows …")
            self.source.slot("a3")
            self.source.sql.execute(FILL_LARGE.format(first=first, last=first + count - 1).encode())
            end = self.source.end()
            for streaming in (True, False):
                peaks[count, streaming] = self.receive("a3", "a3", end, streaming=streaming)
            self.source.drop("a3")
        for streaming in (True, False):
            small, large = peaks[1000, streaming], peaks[rows, streaming]
            more = (large.peak_bytes - small.peak_bytes) / (1 << 20)
            self.report.value(
                f"one transaction of {rows:,} rows, streaming {'on' if streaming else 'off'}",
                f"+{more:.0f} MB",
                "peak ≤ that of 1,000 rows + 150 MB",
                more <= 150,
                peak_mb={"1000": small.peak_bytes >> 20, str(rows): large.peak_bytes >> 20},
                seconds=[round(large.seconds, 2)],
            )


def main() -> None:
    """Run all parts."""
    arguments = options(__doc__).parse_args()
    scale = 100 if arguments.small else 1
    report = Report("receive", "slot → durable change log", {"server": arguments.server, "small": arguments.small})
    with source(arguments.server) as made, tempfile.TemporaryDirectory(prefix="walmere-bench-") as directory:
        bench = Bench(made, Path(directory), report)
        transactions, rows = 2000 // scale, 300_000 // scale
        bench.backlog(f"{transactions * 1000:,} inserts", 0.55, inserts(transactions), arguments.rounds)
        bench.backlog(f"{rows:,} one-row transactions", 0.6, mixed(rows, 100_000), arguments.rounds)
        bench.memory(5_000_000 // scale)
    _kills(report)
    report.finish()


def _kills(report: Report) -> None:
    print("killing the receiver 20 times …")
    story = Path(__file__).parents[1] / "tests" / "stories" / "003_crash.py"
    command = [sys.executable, "-m", "pytest", "-q", str(story), "-m", "long", "-k", "20 and times"]
    passed = subprocess.run(command, cwd=story.parents[2], capture_output=True, text=True, check=False)
    target = "every committed transaction once, in order; confirmed ≤ durable after every kill"
    report.value(
        "20 × kill -9 during a mixed load", passed.stdout.strip().splitlines()[-1], target, not passed.returncode
    )


if __name__ == "__main__":
    main()
