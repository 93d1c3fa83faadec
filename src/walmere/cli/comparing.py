"""The output of `verify`: progress on stderr, then a table and the rows that differ, or JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from walmere.verify.proof import Proof, Verdict
from walmere.verify.rows import Difference

_MARKS: Final = {
    True: "[green]equal[/green]",
    False: "[red]different[/red]",
    None: "[yellow]not compared[/yellow]",
}


class ProgressDisplay:
    """The progress of a comparison: bars on a terminal; elsewhere a line for each table that is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()  # tables are compared in parallel
        self._tasks: dict[str, TaskID] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def progress(self, table: str, done: int, pieces: int) -> None:
        """Show how many pieces of a table are compared."""
        with self._lock:
            if table not in self._tasks:
                self._tasks[table] = self.bars.add_task(escape(table), total=pieces)
            self.bars.update(self._tasks[table], completed=done, total=pieces)

    def verdict(self, verdict: Verdict) -> None:
        """Show the result of a table."""
        with self._lock:
            if verdict.name in self._tasks:
                self.bars.remove_task(self._tasks.pop(verdict.name))
            rows = f"{verdict.source_rows:,} rows, " if verdict.error is None else ""
            line = f"{_MARKS[verdict.equal]}  {escape(verdict.name)}  {rows}{verdict.seconds:.1f} s"
            self._console.print(line, soft_wrap=True)


@contextlib.contextmanager
def progress_display() -> Iterator[ProgressDisplay]:
    """Show the progress on stderr while the context is open."""
    display = ProgressDisplay(Console(file=sys.stderr, highlight=False))
    with display.bars:
        yield display


class _Console(Console):
    """Raises BrokenPipeError if nobody reads stdout any more. The usual one ends the process with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def proof(result: Proof, *, as_json: bool) -> None:
    """Print the result."""
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    console = _Console(highlight=False, soft_wrap=True)
    table = Table("table", "", "source", "target", "missing", "extra", "different", box=None, pad_edge=False)
    for verdict in result.tables:
        counts = (verdict.source_rows, verdict.target_rows, verdict.missing, verdict.extra, verdict.different)
        table.add_row(escape(verdict.name), _MARKS[verdict.equal], *(f"{count:,}" for count in counts))
    console.print(table)
    for verdict in result.tables:
        for line in _details(verdict):
            console.print(escape(line))
    console.print(f"{_MARKS[result.equal]} at {result.lsn}")


def _details(verdict: Verdict) -> Iterator[str]:
    if verdict.error is not None:
        yield f"{verdict.name}: {verdict.error}"
    if verdict.unrecorded_rejects:
        yield f"{verdict.name}: {verdict.unrecorded_rejects:,} values are NULL in the target and not in its rejects"
    if verdict.sample is not None:
        yield f"{verdict.name}: only a sample of {verdict.sample:g} % was compared"
    for example in verdict.examples:
        yield f"{verdict.name}: {_difference(example)}"
    listed = len(verdict.examples)
    others = verdict.missing + verdict.extra + verdict.different - listed
    if listed and others > 0:
        yield f"{verdict.name}: and {others:,} more"


def _difference(example: Difference) -> str:
    key = ", ".join(f"{name}={'NULL' if text is None else text}" for name, text in example.key.items())
    line = f"{example.what} {f'({key})' if key else 'row'}"
    if example.columns:
        line += f" in {', '.join(example.columns)}"
    for side, values in (("source", example.source), ("target", example.target)):
        if values is not None:
            line += f"\n    {side}: " + ", ".join(f"{name}={'NULL' if v is None else v}" for name, v in values.items())
    return line
