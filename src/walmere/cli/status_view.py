"""The output of `walmere status`: what a tired person needs to see first comes first.

What is wrong with the subscription is at the top, what is wrong with a table below the tables; each with what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from walmere.cli.rate import Speeds
from walmere.lsn import INVALID_LSN
from walmere.subscription.advice import Advice, Level
from walmere.subscription.state import Phase
from walmere.units import rows as row_count
from walmere.units import size, span

State = Mapping[str, Any]

_COLOURS: Final[Mapping[Level, str]] = {"problem": "red", "warning": "yellow", "busy": "default", "good": "green"}


def status(state: State, advice: Sequence[Advice]) -> None:
    """Print the output of `status`, for people."""
    # in a file or a pipe, a table need not fit into a terminal
    console = Console(highlight=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    for each in lines(state, advice):
        console.print(each)


def lines(state: State, advice: Sequence[Advice], speeds: Speeds | None = None) -> Iterator[RenderableType]:
    """What `status` shows. `speeds`: if it is read again and again."""
    yield f"[bold]{escape(state['subscription'])}[/bold]"
    for each in advice:
        if each.table is None:
            yield from _advice(each)
    if slot := state["slot"]:
        use = "active" if slot["active"] else "not active"
        retained = size(slot["retained_bytes"])
        yield f"  slot {slot['name']}: {use}, {slot['wal_status']}, holds {retained} of WAL on the source"
    if (store := state["store"]) is not None:
        writer = "no receiver yet" if store["receiver"] is None else f"epoch {store['epoch']}, {store['receiver']}"
        yield f"  store {escape(store['url'])}: {escape(writer)}"
    for label in ("source", "received", "durable", "applied"):
        yield f"  {label:<9} {_position(state[label + '_lsn'])}"
    yield f"  lag       {lag(state)}"
    receiver = state["receiver"]
    known = receiver["lag_bytes"] is not None or receiver["lag_seconds"] is not None
    behind = f", behind by {lag(receiver)}" if known else ""
    yield f"  receiver  {'running' if receiver['running'] else 'not running'}{behind}"
    if speeds is not None and speeds.wal:
        shown = ", ".join(f"{what} {size(round(speed))}/s" for what, speed in speeds.wal.items())
        yield f"  rate      {shown} of WAL"
    lake = state["disk"]["lake_bytes"]
    yield f"  disk      {size(state['disk']['log_bytes'])} change log" + (f", {size(lake)} lake" if lake else "")
    if state["behind"]:
        yield f"  behind    {escape(', '.join(state['behind']))}"
    elif state["caught_up"]:
        yield "  caught up"
    if state["tables"]:
        yield from _tables(state["tables"], {} if speeds is None else speeds.copies)
    for each in advice:
        if each.table is not None:
            yield from _advice(each)


def _position(lsn: str | None) -> str:
    return "–" if lsn in (None, str(INVALID_LSN)) else str(lsn)


def _advice(each: Advice) -> Iterator[RenderableType]:
    what = each.what if each.table is None else f"{each.table}: {each.what}"
    yield f"  [{_COLOURS[each.level]}]{escape(what)}[/]"
    if each.do:
        yield f"    hint: {escape(each.do)}"


def _tables(states: Sequence[State], speeds: Mapping[str, float]) -> Iterator[RenderableType]:
    table = Table("table", "phase", "copied", "applied", "lag", "rejects", box=None, pad_edge=False)
    for each in states:
        speed = f", {row_count(speeds[each['name']])} rows/s" if speeds.get(each["name"]) else ""
        table.add_row(
            escape(each["name"]),
            phase(each),
            copied(each) + speed,
            each["applied_lsn"] or "–",
            "–" if each["lag_seconds"] is None else span(each["lag_seconds"]),
            row_count(each["rejects"]),
        )
    yield table
    yield from _extents([each for each in states if each["files"] is not None])


def phase(table: State) -> str:
    """PostgreSQL's letter, and what it means."""
    if not table["published"]:
        return "no longer published"
    return f"{table['phase']} {Phase(table['phase']).words}"


def copied(table: State) -> str:
    """The rows that were copied; while a copy is running, of how many."""
    number = row_count(table["rows_copied"])
    if table["phase"] != Phase.DATA_SYNC or not table["rows_estimated"]:
        return number
    return f"{number} of about {row_count(table['rows_estimated'])}"


def lag(of: State) -> str:
    """The lag in bytes and seconds, of the subscription or of its receiver."""
    missing = None if of["lag_bytes"] is None else size(of["lag_bytes"])
    if of["lag_seconds"] is not None:
        return ", ".join(part for part in (missing, span(of["lag_seconds"])) if part)
    why = "" if of.get("receiver", {"running": True})["running"] else ": no receiver is running"
    return ", ".join(part for part in (missing, f"seconds unknown{why}") if part)


def _extents(states: Sequence[State]) -> Iterator[RenderableType]:
    """How large the target's tables are."""
    table = Table("table", "files", "size", "deleted rows", "written per hour", box=None, pad_edge=False)
    for each in states:
        written = each["written_bytes_per_hour"]
        table.add_row(
            escape(each["name"]),
            str(each["files"]),
            size(each["bytes"]),
            row_count(each["deleted_rows"]),
            "–" if written is None else size(written),
        )
    if states:
        yield table
