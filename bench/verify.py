"""The proof of a table of five million rows, beside two COPYs of it to /dev/null; and the memory that it takes.

Ours is `Subscription.verify` in a Spark session that is warm: the run up to the point, the snapshot, both sides, all of
it. Memory is what all processes of ours have together, sampled while they work (proportional set size, so that what
they share is counted once).

Run as `python -m bench.verify [--server 15] [--rounds 3] [--small]`, or with all others by `make bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.ours import Ours, warm
from bench.side_by_side import Report, Run
from bench.snapshot import CREATE, FILL
from bench.source import newest, scratch_config, source
from walmere.api import Subscription

MEMORY = 1 << 30


class Memory:
    """The most that this process and all its descendants had at once, but for the server's."""

    def __init__(self, without: set[int]) -> None:
        self.peak = 0
        self._without = without
        self._ended = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            total = 0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    if process.pid not in self._without and process.name() != "postgres":
                        total += process.memory_full_info().pss
            self.peak = max(self.peak, total)


def main() -> None:
    """Both bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", type=int, default=newest(), help="major version of the servers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a hundredth of the rows, to see that it works")
    arguments = parser.parse_args()
    rows = 50_000 if arguments.small else 5_000_000
    report = Report("verify: source = target", {"server": arguments.server, "small": arguments.small})
    with (
        source(arguments.server) as made,
        tempfile.TemporaryDirectory(prefix="walmere-bench-") as directory,
    ):
        others = {process.pid for process in psutil.Process().children(recursive=True)}
        print(f"making {rows:,} rows …")
        made.sql.execute(CREATE)
        made.sql.execute(FILL.format(rows=rows).encode())
        made.sql.execute("VACUUM (ANALYZE, FREEZE) b")
        made.sql.execute("CREATE PUBLICATION b FOR TABLE b")
        report.facts["spark_start_seconds"], report.facts["warm_up_seconds"] = warm(made, Path(directory))
        ours = Ours(made, Path(directory) / "ours", "b")
        ours.run("b", made.end())
        subscription = Subscription(scratch_config(made.server, ours.directory, "b", "b"))
        memory = Memory(others)
        compared: list[float] = []

        def verify() -> Run:
            began = time.perf_counter()
            proof = subscription.verify()
            assert proof.equal
            assert [each.source_rows for each in proof.tables] == [rows]
            compared.extend(each.seconds for each in proof.tables)
            return Run(time.perf_counter() - began, 0, 0)

        verify(), made.two_copies("b")  # once untimed
        compared.clear()
        with memory.watched():
            report.ratio(
                f"verify of {rows:,} rows", 3, "two COPYs", lambda: made.two_copies("b"), verify, arguments.rounds
            )
        report.facts["comparing_seconds"] = compared
        report.value("memory of all processes", f"{memory.peak >> 20} MB", "≤ 1 GB", memory.peak <= MEMORY)
    report.finish()


if __name__ == "__main__":
    main()
