"""Time processes with their peak memory, compare two tools, and report the results as a table and as JSON."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Run:
    """A process that has ended."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def timed(command: Sequence[str | Path], **environment: str) -> Run:
    """Run a command to its end. If it fails, the benchmark ends with its output."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if process.returncode:
        sys.exit(f"{command[0]} ended with {process.returncode}:\n{output.decode(errors='replace')}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


@dataclass
class Report:
    """The results of one benchmark, and the bars that they have to meet."""

    name: str  # of the file of results
    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def ratio(
        self,
        name: str,
        bar: float | None,
        limit_tool: str,
        limit: Callable[[], Run],
        ours: Callable[[], Run],
        rounds: int,
        *,
        cpu: bool = False,
    ) -> None:
        """Run both in turn, so that load on the machine affects both, and compare their medians.

        `bar` None: the ratio is only stated. `cpu`: the bar is also one for the CPU time.
        """
        theirs, mine = [], []
        for number in range(rounds):
            theirs.append(limit())
            mine.append(ours())
            seconds = f"{limit_tool} {theirs[-1].seconds:.2f} s, ours {mine[-1].seconds:.2f} s"
            print(f"  {name} {number + 1}/{rounds}: {seconds}")
        cpu_seconds = [round(run.cpu_seconds, 2) for run in mine]
        more = {"cpu_seconds": cpu_seconds, "peak_mb": max(run.peak_bytes for run in mine) >> 20}
        self._compare(name, bar, limit_tool, [run.seconds for run in theirs], [run.seconds for run in mine], **more)
        if cpu:
            times = [[run.cpu_seconds for run in runs] for runs in (theirs, mine)]
            self._compare(f"{name}: CPU time", bar, limit_tool, *times)

    def _compare(
        self, name: str, bar: float | None, limit_tool: str, theirs: list[float], mine: list[float], **more: Any
    ) -> None:
        median = statistics.median(mine) / statistics.median(theirs)
        self.rows.append(
            {
                "bar": name,
                "limit_tool": limit_tool,
                "limit_seconds": [round(each, 2) for each in theirs],
                "seconds": [round(each, 2) for each in mine],
                **more,
                "value": round(median, 3),
                "target": f"compared with {limit_tool}: stated" if bar is None else f"≤ {bar} × {limit_tool}",
                "met": bar is None or median <= bar,
            }
        )

    def value(self, name: str, value: Any, target: str, met: bool, **more: Any) -> None:
        """A bar that is not a ratio of times."""
        print(f"  {name}: {value} ({target})")
        self.rows.append({"bar": name, "value": value, "target": target, "met": bool(met), **more})

    def finish(self) -> None:
        """Print the table and the JSON, write the JSON, and exit with 1 if a bar was missed."""
        table = Table("bar", "limit tool, s", "ours, s", "value", "target", "", title=f"{self.name}: {self.title}")
        for row in self.rows:
            times = [" ".join(map(str, row.get(key, []))) for key in ("limit_seconds", "seconds")]
            table.add_row(row["bar"], *times, str(row["value"]), row["target"], "met" if row["met"] else "MISSED")
        Console(width=160).print(table)
        result = {"title": f"{self.name}: {self.title}", **self.facts, "bars": self.rows}
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(result, indent=2, ensure_ascii=False)
        (RESULTS / f"{self.name}.json").write_text(text)
        print(text)
        sys.exit(0 if all(row["met"] for row in self.rows) else 1)
