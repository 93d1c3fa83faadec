"""The display of a running demo: a table that is updated in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from walmere.lsn import Lsn
from walmere.subscription.state import Phase, TableState

_PHASE_NAMES: Final = {
    Phase.INIT: "waiting",
    Phase.DATA_SYNC: "copying",
    Phase.FINISHED_COPY: "copied",
    Phase.SYNC_DONE: "caught up",
    Phase.READY: "ready",
}
_COLOURS: Final = {
    Phase.DATA_SYNC: "yellow",
    Phase.FINISHED_COPY: "cyan",
    Phase.SYNC_DONE: "cyan",
    Phase.READY: "green",
}
_REFRESH: Final = 0.25
_LINE: Final = 2.0
"""Seconds between two lines if there is no terminal."""


@dataclass(frozen=True, slots=True)
class View:
    """The state at one moment."""

    doing: str
    elapsed: float
    tables: tuple[tuple[TableState, int], ...] = ()  # with the number of applied changes
    transactions: int = 0
    per_second: float = 0.0
    source: Lsn | None = None
    applied: Lsn | None = None
    lag_seconds: float | None = None
    copy_rate: float | None = None
    stream_rate: float | None = None

    @property
    def lag_bytes(self) -> int | None:
        """The bytes of WAL between the position of the source and the applied LSN."""
        return None if self.source is None or not self.applied else max(0, self.source - self.applied)


class Display:
    """Shows views at a limited rate."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._next = 0.0
        self._phases: tuple[Phase, ...] = ()

    def print(self, text: str) -> None:
        """Print a line, with markup, that stays on the screen."""
        self._console.print(text)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Show views while the context is open."""
        if not self._console.is_terminal:
            yield
            return
        with Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        ) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def show(self, view: View) -> None:
        """Show a view, if the last one is old enough or a phase has changed."""
        now = time.monotonic()
        phases = tuple(table.phase for table, _ in view.tables)
        if now < self._next and phases == self._phases:
            return
        self._phases = phases
        self._next = now + (_LINE if self._live is None else _REFRESH)
        if self._live is None:
            self._console.print(line(view), markup=False)
        else:
            self._live.update(panel(view), refresh=True)


def panel(view: View) -> Group:
    """A view for a terminal."""
    table = Table("table", box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("phase", min_width=11)
    table.add_column("rows copied", justify="right")
    table.add_column("changes applied", justify="right")
    for state, changes in view.tables:
        colour = _COLOURS.get(state.phase, "dim")
        phase = f"[{colour}]{state.phase.value} {_PHASE_NAMES[state.phase]}[/{colour}]"
        table.add_row(escape(state.table.name), phase, f"{state.rows_copied:,}", f"{changes:,}")
    if view.tables:
        rows = sum(state.rows_copied for state, _ in view.tables)
        table.add_row("", "", f"[bold]{rows:,}[/bold]", f"[bold]{sum(changes for _, changes in view.tables):,}[/bold]")
    facts = Table.grid(padding=(0, 3, 0, 0))
    facts.add_row("source", str(view.source or "–"), _written(view))
    facts.add_row("applied", str(view.applied or "–"), _lag(view))
    facts.add_row("speed", "", _speed(view))
    return Group(Text(f"\n{view.doing}  {view.elapsed:.0f} s\n", style="bold"), table, Text(""), facts)


def line(view: View) -> str:
    """A view as one line of text."""
    parts = [f"{view.elapsed:5.1f} s  {view.doing}"]
    if view.tables:
        phases = Counter(state.phase for state, _ in view.tables)
        parts.append(
            "tables: " + ", ".join(f"{phases[phase]} {_PHASE_NAMES[phase]}" for phase in _PHASE_NAMES if phases[phase])
        )
        parts.append(f"{sum(state.rows_copied for state, _ in view.tables):,} rows copied")
    if view.transactions:
        parts += [_written(view), f"{sum(changes for _, changes in view.tables):,} changes applied"]
    if view.lag_seconds is not None:
        parts.append(_lag(view))
    return "; ".join(parts)


def size(count: float) -> str:
    """A number of bytes as text."""
    for unit in ("B", "kB", "MB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GB"


def _written(view: View) -> str:
    return f"{view.transactions:,} transactions written" + (f", {view.per_second:,.0f}/s" if view.per_second else "")


def _lag(view: View) -> str:
    if view.lag_bytes is None or view.lag_seconds is None:
        return "lag –"
    return f"lag {view.lag_seconds:.1f} s, {size(view.lag_bytes)}"


def _speed(view: View) -> str:
    copied = "–" if view.copy_rate is None else f"{view.copy_rate:,.0f} rows/s"
    streamed = "–" if view.stream_rate is None else f"{view.stream_rate:,.0f} changes/s"
    return f"copy {copied}, stream {streamed}"
