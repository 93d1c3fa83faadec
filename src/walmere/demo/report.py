"""The report at the end of the demo: numbers, the comparison, the files, and commands to try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from walmere.demo import shell
from walmere.demo.compare import TableComparison
from walmere.demo.place import Place
from walmere.demo.subscriber import RunReport
from walmere.demo.target import TargetDatabase


@dataclass(slots=True)
class Measured:
    """Measured values. Times are in seconds; those of Spark count from the start of `walmere run`."""

    rows_loaded: int = 0
    spark_start: float | None = None
    first_result: float | None = None
    copy_began: float | None = None
    copy_ended: float | None = None
    writing: float = 0.0
    catch_up: float = 0.0
    compare: float = 0.0
    total: float = 0.0
    transactions: Mapping[str, int] = field(default_factory=dict)
    lags: list[float] = field(default_factory=list)

    @property
    def copy(self) -> float | None:
        """From the start of the first copy to the end of the last one."""
        return None if self.copy_began is None or self.copy_ended is None else self.copy_ended - self.copy_began


@dataclass(frozen=True, slots=True)
class Report:
    """The results of the demo."""

    place: Place
    progress: RunReport
    measured: Measured
    verdicts: tuple[TableComparison, ...]
    database: TargetDatabase | None = None  # None: the target is a lake

    @property
    def equal(self) -> bool:
        """Whether every table equals its source."""
        return all(verdict.equal for verdict in self.verdicts)

    @property
    def exit_code(self) -> int:
        """The exit code of the demo."""
        return 0 if self.equal else 1

    @property
    def changes_per_second(self) -> float:
        """Applied changes per second, from the start of the writers until everything was applied."""
        return self.progress.changes_applied / max(0.001, self.measured.writing + self.measured.catch_up)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON."""
        seen, progress = self.measured, self.progress
        states = {table.name: table for table in progress.tables}
        return {
            "equal": self.equal,
            "tables": [
                {
                    "name": verdict.name,
                    "rows": verdict.rows,
                    "equal": verdict.equal,
                    "missing": verdict.missing,
                    "extra": verdict.extra,
                    "different": verdict.different,
                    "wrong": None if verdict.equal else str(verdict),
                    "phase": states[verdict.name].phase.value,
                    "rows_copied": states[verdict.name].rows_copied,
                    "changes": (progress.changes or {})[verdict.name],
                }
                for verdict in self.verdicts
            ],
            "loaded_rows": seen.rows_loaded,
            "copied_rows": progress.rows_copied,
            "copy_seconds": _rounded(seen.copy),
            "transactions": sum(seen.transactions.values()),
            "transactions_by_kind": dict(seen.transactions),
            "changes": progress.changes_applied,
            "changes_per_second": round(self.changes_per_second, 1),
            "lag_seconds": {
                "median": _rounded(median(seen.lags) if seen.lags else None),
                "max": _rounded(max(seen.lags, default=None)),
            },
            "spark_start_seconds": _rounded(seen.spark_start),
            "first_result_seconds": _rounded(seen.first_result),
            "catch_up_seconds": _rounded(seen.catch_up),
            "compare_seconds": _rounded(seen.compare),
            "seconds": _rounded(seen.total),
            **({"lake": str(self.place.lake)} if self.database is None else {"target": self.database.dsn}),
            "config": str(self.place.config_file),
            "log": str(self.place.log),
            "next": [command for _, command in self.next_commands()],
        }

    def next_commands(self) -> list[tuple[str, str]]:
        """Commands to try, with descriptions. They work without the source."""
        log = shell.program("walmere") + f" log -c {shell.quoted(self.place.config_file)}"
        return [
            *(self._lake_commands() if self.database is None else self.database.next_commands()),
            ("the transactions of the change log", f"{log} --table products | head -n 20"),
        ]

    def _lake_commands(self) -> list[tuple[str, str]]:
        lake = f"import walmere; lake = walmere.lake('{self.place.lake}')"
        by_status = "lake.latest().duckdb('orders').aggregate('status, count(*), sum(total)')"
        by_point = "[len(point.arrow('carts')) for point in lake.points()]"
        python = shell.program("python")
        return [
            ("the orders in the lake, by status", f"{python} -c {shell.quoted(f'{lake}; print({by_status})')}"),
            (
                "time travel: the number of carts at each point; you can see the TRUNCATE",
                f"{python} -c {shell.quoted(f'{lake}; print({by_point})')}",
            ),
        ]

    def print(self, console: Console) -> None:
        """The report as text."""
        seen, progress = self.measured, self.progress
        console.print()
        console.print(self._verdicts())
        console.print()
        if self.equal:
            rows = sum(verdict.rows for verdict in self.verdicts)
            console.print(
                f"[bold green]Every table equals its source:[/bold green] {rows:,} rows, {len(self.verdicts)} tables, "
                f"every column, compared in {seen.compare:.1f} s"
            )
        else:
            wrong = ", ".join(verdict.name for verdict in self.verdicts if not verdict.equal)
            console.print(
                f"[bold red]NOT EQUAL: {escape(wrong)}. This is a bug in Walmere. Please report it.[/bold red]"
            )
        transactions = sum(seen.transactions.values())
        console.print()
        if seen.copy:
            rate = progress.rows_copied / seen.copy
            console.print(f"  copied    {progress.rows_copied:,} rows in {seen.copy:.1f} s, {rate:,.0f} rows/s")
        console.print(
            f"  followed  {transactions:,} transactions in {seen.writing:.0f} s: {progress.changes_applied:,} changes, "
            f"{self.changes_per_second:,.0f}/s; caught up {seen.catch_up:.1f} s after the last one"
        )
        if seen.lags:
            console.print(f"  lag       {median(seen.lags):.1f} s in the median, {max(seen.lags):.1f} s at most")
        if seen.spark_start is not None and seen.first_result is not None:
            console.print(
                f"  started   Spark in {seen.spark_start:.1f} s, the first table in the {self._word} after "
                f"{seen.first_result:.1f} s; {seen.total:.0f} s in all"
            )
        console.print(f"  files     {self._files()}")
        console.print(f"            {escape(str(self.place.config_file))} is the configuration of `walmere run`")
        console.print()
        console.print(f"[bold]What to try next[/bold] ({self._what_is_left()})")
        for what, command in self.next_commands():
            console.print(f"  # {what}", style="dim")
            console.print(f"  {command}", markup=False)

    @property
    def _word(self) -> str:
        return "lake" if self.database is None else "target"

    def _files(self) -> str:
        if self.database is None:
            return f"[cyan]{escape(str(self.place.lake))}[/cyan] has the Delta tables"
        if self.database.cluster is None:
            return f"{escape(str(self.place.log))} is the log of `walmere run`"
        return f"[cyan]{escape(str(self.database.cluster))}[/cyan] is the cluster of the target's server"

    def _what_is_left(self) -> str:
        if self.database is None:
            return "the server of the demo is removed; lake and change log are still there"
        if self.database.cluster is None:
            return "the servers of the demo are removed; the change log is still there"
        return "the source's server is removed, the target's server is stopped; the change log is still there"

    def _verdicts(self) -> Table:
        table = Table("table", box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
        for column in ("rows", "changes"):
            table.add_column(column, justify="right")
        table.add_column(f"source and {self._word}")
        for verdict in self.verdicts:
            colour = "green" if verdict.equal else "bold red"
            changes = (self.progress.changes or {}).get(verdict.name, 0)
            text = f"[{colour}]{escape(str(verdict))}[/{colour}]"
            table.add_row(verdict.name.partition(".")[2], f"{verdict.rows:,}", f"{changes:,}", text)
        return table


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
