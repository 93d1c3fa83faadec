"""How a proof is shown: on stderr while it is made; then as a table and the rows that differ, or as JSON."""

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


class Shown:
    """The progress of a proof: bars on a terminal; elsewhere a line for each table that is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()  # tables are compared side by side
        self._tasks: dict[str, TaskID] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def progress(self, table: str, done: int, pieces: int) -> None:
        """So many of its pieces are compared."""
        with self._lock:
            if table not in self._tasks:
                self._tasks[table] = self.bars.add_task(escape(table), total=pieces)
            self.bars.update(self._tasks[table], completed=done, total=pieces)

    def verdict(self, verdict: Verdict) -> None:
        """It is done."""
        with self._lock:
            if verdict.name in self._tasks:
                self.bars.remove_task(self._tasks.pop(verdict.name))
            rows = f"{verdict.source_rows:,} rows, " if verdict.error is None else ""
            line = f"{_MARKS[verdict.equal]}  {escape(verdict.name)}  {rows}{verdict.seconds:.1f} s"
            self._console.print(line, soft_wrap=True)


@contextlib.contextmanager
def comparing() -> Iterator[Shown]:
    """Show how it gets on."""
    shown = Shown(Console(file=sys.stderr, highlight=False))
    with shown.bars:
        yield shown


def proof(made: Proof, *, as_json: bool) -> None:
    """What came of it."""
    if as_json:
        print(json.dumps(made.to_json(), indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    table = Table("table", "", "source", "target", "missing", "extra", "different", box=None, pad_edge=False)
    for each in made.tables:
        counts = (each.source_rows, each.target_rows, each.missing, each.extra, each.different)
        table.add_row(escape(each.name), _MARKS[each.equal], *(f"{count:,}" for count in counts))
    console.print(table)
    for each in made.tables:
        for line in _details(each):
            console.print(escape(line))
    console.print(f"{_MARKS[made.equal]} at {made.lsn}")


def _details(verdict: Verdict) -> Iterator[str]:
    if verdict.error is not None:
        yield f"{verdict.name}: {verdict.error}"
    if verdict.unrecorded_rejects:
        yield f"{verdict.name}: {verdict.unrecorded_rejects:,} values are NULL there and not among its rejects either"
    if verdict.sample is not None:
        yield f"{verdict.name}: a sample of {verdict.sample:g} %"
    for each in verdict.examples:
        yield f"{verdict.name}: {_difference(each)}"
    named = len(verdict.examples)
    others = verdict.missing + verdict.extra + verdict.different - named
    if named and others > 0:
        yield f"{verdict.name}: and {others:,} more"


def _difference(each: Difference) -> str:
    key = ", ".join(f"{name}={'NULL' if text is None else text}" for name, text in each.key.items())
    said = f"{each.what} {f'({key})' if key else 'row'}"
    if each.columns:
        said += f" in {', '.join(each.columns)}"
    for side, values in (("source", each.source), ("target", each.target)):
        if values is not None:
            said += f"\n    {side}: " + ", ".join(f"{name}={'NULL' if v is None else v}" for name, v in values.items())
    return said
