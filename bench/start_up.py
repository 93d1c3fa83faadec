"""The time of a start: `walmere status`, `walmere run --once` with nothing to do, and a program up to its first batch
of format `pgoutput`.

Run it with `python -m bench.start_up [--rounds 5]` on a quiet machine. It also prints what the seconds of one more run
were spent on: that run is timed from inside.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.side_by_side import Report
from bench.source import Source, options, scratch_config, source

BAR = 7.0
STATUS_BAR = 0.4
"""CPU seconds."""
TABLES = 5
OURS = "walmere.session"

FIRST_BATCH = """
import json, sys, time
began = float(sys.argv[2])
import walmere
from pyspark.sql import SparkSession
marks = [("Python imports", time.time())]
if sys.argv[3] == "walmere.session":
    spark = walmere.session("local[2]")
else:
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    if sys.argv[3]:
        builder = builder.config("spark.driver.extraJavaOptions", sys.argv[3])
    spark = builder.getOrCreate()
    walmere.register(spark)
spark.sparkContext.setLogLevel("ERROR")
marks.append(("JVM and session; Spark looks up data sources", time.time()))
stream = spark.readStream.format("pgoutput").option("directory", sys.argv[1]).option("table", "t0").load()
marks.append(("load: the columns", time.time()))
rows = []
query = stream.writeStream.foreachBatch(lambda batch, _: rows.append(batch.count())).trigger(availableNow=True).start()
query.awaitTermination()
marks.append(("the first batch", time.time()))
assert rows == [1000], rows
print(json.dumps([[name, at - before] for (name, at), before in zip(marks, [began, *(at for _, at in marks)])]))
"""


def walmere(file: Path) -> None:
    python("-m", "walmere", "run", "-c", str(file), "--once")


def python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """The seconds that it took, and the CPU seconds of the processes that it has waited for."""
    began, cpu = time.monotonic(), os.times()
    work()
    after = os.times()
    used = after.children_user + after.children_system - cpu.children_user - cpu.children_system
    return time.monotonic() - began, used


def prepare(of: Source, directory: Path) -> Path:
    """A subscription that has copied its tables, and applied changes."""
    for number in range(TABLES):
        of.sql.execute(f"CREATE TABLE t{number} (id bigint PRIMARY KEY, note text)".encode())
    of.sql.execute("CREATE PUBLICATION bench FOR ALL TABLES")
    file = scratch_config(of.server, directory, "bench", "bench")
    walmere(file)
    for number in range(TABLES):
        of.sql.execute(f"INSERT INTO t{number} SELECT i, md5(i::text) FROM generate_series(1, 1000) i".encode())
    walmere(file)
    return file


def short_commands(report: Report, file: Path, rounds: int) -> None:
    """The CPU time of commands that end at once, in turn: the load of the machine affects all of them."""
    commands = {
        "python -c pass": ["-c", "pass"],
        "walmere --help": ["-m", "walmere", "--help"],
        "walmere status --json": ["-m", "walmere", "status", "-c", str(file), "--json"],
        "walmere status": ["-m", "walmere", "status", "-c", str(file)],
    }
    runs: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, arguments in commands.items():
            runs[name].append(measured(functools.partial(python, *arguments))[1])
    for name, cpu in runs.items():
        found = f"{statistics.median(cpu):.2f} CPU s (least {min(cpu):.2f})"
        met = statistics.median(cpu) <= STATUS_BAR
        report.value(name, found, f"≤ {STATUS_BAR} s", met, cpu_seconds=[round(each, 3) for each in cpu])


class Clock:
    """Measures functions of a run, by replacing them."""

    def __init__(self, began: float) -> None:
        self.marks: list[tuple[str, float]] = []
        self._last = began

    def mark(self, name: str) -> None:
        """What was done since the last mark."""
        now = time.time()
        self.marks.append((name, now - self._last))
        self._last = now

    def around(self, owner: Any, name: str, before: str, inside: str) -> None:
        """Mark when the function is called, and when it returns."""
        wrapped = getattr(owner, name)

        @functools.wraps(wrapped)
        def measured(*arguments: Any, **keywords: Any) -> Any:
            self.mark(before)
            try:
                return wrapped(*arguments, **keywords)
            finally:
                self.mark(inside)

        setattr(owner, name, measured)


def split(file: str) -> None:
    """In a process of its own: what `walmere run --once` does, with a clock. Prints the marks."""
    clock = Clock(psutil.Process(os.getpid()).create_time())
    from walmere.cli import app  # noqa: F401, PLC0415

    clock.mark("Python, and the imports of the command line")
    from walmere.api import Subscription  # noqa: PLC0415

    subscription = Subscription(file)
    clock.mark("configuration")
    until = subscription.source_position()
    clock.mark("the source's WAL position: psycopg, first connection")
    import pyspark.core.context  # noqa: PLC0415

    import walmere.running  # noqa: F401, PLC0415
    from walmere.subscription.launcher import Launcher  # noqa: PLC0415

    clock.mark("imports: PySpark, PyArrow, deltalake")
    clock.around(pyspark.core.context, "launch_gateway", "settings of Spark", "Spark's JVM")
    clock.around(Launcher, "_prepare", "Java; Spark's context and session, if it was started", "checks of the source")
    clock.around(Launcher, "_prepare_target", "(between)", "checks of the target")
    clock.around(Launcher, "_supervise", "(start of the receiver)", "receiver: imports, connection, up to the LSN")
    clock.around(Launcher, "_last_upkeep", "(between)", "upkeep")
    clock.around(Launcher, "_stop_all", "(between)", "stop")
    subscription.run(until)
    clock.mark("end of the receiver")
    print(json.dumps(clock.marks))


def child(*arguments: str) -> list[tuple[str, float]]:
    """Run a process that prints marks, and add the time of its end."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    at = time.time()
    for line in process.stdout:
        lines.append(line)
        at = time.time()
    process.wait()
    assert not process.returncode, process.stderr and process.stderr.read()
    return [*map(tuple, json.loads(lines[-1])), ("exit of Python and the JVM", time.time() - at)]


def first_batch(directory: Path, session: str) -> tuple[float, list[tuple[str, float]]]:
    """The seconds up to the end of the first batch, and what they were spent on."""
    marks = child("-c", FIRST_BATCH, str(directory), str(time.time()), session)
    return sum(part for _, part in marks[:-1]), marks


def show(title: str, marks: Sequence[tuple[str, float]]) -> None:
    print(f"\n{title}: {sum(part for _, part in marks):.2f} s")
    for name, part in marks:
        if part >= 0.005:
            print(f"  {part:5.2f}  {name}")


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--split", metavar="FILE", help="used by the benchmark itself")
    given = parser.parse_args()
    if given.split:
        split(given.split)
        return
    warm = [sys.executable, "-m", "walmere", "warm"]
    archive = subprocess.run(warm, check=True, capture_output=True, text=True).stdout.strip()
    report = Report("start_up", "Start-up")
    with source(given.server) as of, tempfile.TemporaryDirectory() as scratch:
        file = prepare(of, Path(scratch))
        report.facts["load"] = [round(each, 1) for each in os.getloadavg()]
        short_commands(report, file, 2 * given.rounds + 1)
        runs = [measured(lambda: walmere(file)) for _ in range(given.rounds)]
        name = "walmere run --once with nothing to do"
        median = statistics.median(took for took, _ in runs)
        more = {"seconds": [round(took, 2) for took, _ in runs], "cpu_seconds": [round(cpu, 2) for _, cpu in runs]}
        report.value(name, f"{median:.2f} s", f"≤ {BAR:.0f} s", median <= BAR, **more)
        show("walmere run --once", child("-m", "bench.start_up", "--split", str(file)))
        sessions = {
            "walmere.session": OURS,
            "SparkSession.builder with the archive of classes": f"-XX:SharedArchiveFile={archive}",
            "SparkSession.builder": "",
        }
        firsts: dict[str, list[tuple[float, list[tuple[str, float]]]]] = {title: [] for title in sessions}
        for _ in range(given.rounds):
            for title, session in sessions.items():
                firsts[title].append(first_batch(Path(scratch, "subscription"), session))
        for title, found in firsts.items():
            median, marks = sorted(found)[len(found) // 2]
            name = f"format pgoutput: a program's start to the end of its first batch, {title}"
            bar, met = (f"≤ {BAR:.0f} s", median <= BAR) if sessions[title] == OURS else ("stated", True)
            report.value(name, f"{median:.2f} s", bar, met, seconds=[round(total, 2) for total, _ in found])
            show(name, marks)
    report.finish()


if __name__ == "__main__":
    main()
