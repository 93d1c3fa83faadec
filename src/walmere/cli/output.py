"""The output of the commands: text for a terminal, or JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from walmere.changelog.reader import Change, LoggedTransaction
from walmere.pgoutput import messages as m
from walmere.publisher.finding import Finding

_MARKS = {"ok": "[green]✓[/green]", "warning": "[yellow]![/yellow]", "problem": "[red]✗[/red]"}


def findings(source: str, report: Sequence[Finding], *, as_json: bool) -> None:
    """Print the findings of `check`."""
    if as_json:
        fine = all(finding.level != "problem" for finding in report)
        print(json.dumps({"source": source, "ok": fine, "findings": [asdict(finding) for finding in report]}, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(source)}[/bold]")
    for finding in report:
        console.print(f" {_MARKS[finding.level]} {finding.name}: {escape(finding.what)}")
        for line in finding.fix.splitlines():
            console.print(f"     [cyan]{escape(line)}[/cyan]")
    problems = sum(finding.level == "problem" for finding in report)
    warnings = sum(finding.level == "warning" for finding in report)
    console.print(f"{problems} problems, {warnings} warnings")


def status(state: dict[str, Any], *, as_json: bool) -> None:
    """Print the output of `status`."""
    if as_json:
        print(json.dumps(state, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    slot = state["slot"]
    console.print(f"[bold]{escape(state['subscription'])}[/bold]")
    if state["error"]:
        console.print(f"  [red]{escape(state['error'])}[/red]")
    if slot:
        use = "active" if slot["active"] else "not active"
        retained = _bytes(slot["retained_bytes"])
        console.print(f"  slot {slot['name']}: {use}, {slot['wal_status']}, holds {retained} of WAL on the source")
    if (store := state["store"]) is not None:
        writer = "no receiver yet" if store["receiver"] is None else f"epoch {store['epoch']}, {store['receiver']}"
        console.print(f"  store {escape(store['url'])}: {escape(writer)}")
    for label in ("source", "received", "durable", "applied"):
        console.print(f"  {label:<9} {state[label + '_lsn'] or '–'}")
    console.print(f"  lag       {_lag(state)}")
    receiver = state["receiver"]
    console.print(f"  receiver  {'running' if receiver['running'] else 'not running'}, {_lag(receiver)} behind")
    if state["behind"]:
        console.print(f"  behind    {escape(', '.join(state['behind']))}")
    elif state["caught_up"]:
        console.print("  caught up")
    if state["next_batch"] is not None:
        console.print(f"  batches   are larger, the next is at {state['next_batch']}: max_rewrite_bytes_per_hour")
    if state["tables"]:
        _tables(console, state["tables"])


def _tables(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table("table", "phase", "copied", "applied", "lag", "rejects", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            escape(row["name"]),
            row["phase"] if row["published"] else "no longer published",
            str(row["rows_copied"]),
            row["applied_lsn"] or "–",
            "–" if row["lag_seconds"] is None else _seconds(row["lag_seconds"]),
            str(row["rejects"]),
        )
    console.print(table)
    _extents(console, [row for row in rows if row["files"] is not None])
    for row in rows:
        if row["upkeep_waits_for"] is not None:
            console.print(f"  {escape(row['name'])}: rewriting its files waits for {escape(row['upkeep_waits_for'])}")
        if row["conflicts"]:
            conflicts = f"{row['conflicts']} changes met a conflict: see the table conflicts in the target's schema"
            console.print(f"  {escape(row['name'])}: {conflicts}")
        if row["error"] is not None:
            console.print(f"  {escape(row['name'])}: {escape(row['error'])}")
        if row["next_copy"] is not None:
            console.print(
                f"  {escape(row['name'])}: its changes were refused again after a copy; the next copy is at"
                f" {row['next_copy']}, when the table is altered, or with `walmere resync {escape(row['name'])}`"
            )
        if row["locked"] is not None:
            console.print(f"  {escape(row['name'])}: the table is locked at the source: {escape(row['locked'])}")


def _lag(of: Mapping[str, Any]) -> str:
    size = None if of["lag_bytes"] is None else _bytes(of["lag_bytes"])
    if of["lag_seconds"] is not None:
        return ", ".join(part for part in (size, _seconds(of["lag_seconds"])) if part)
    why = "" if of.get("receiver", {"running": True})["running"] else ": no receiver is running"
    return ", ".join(part for part in (size, f"seconds unknown{why}") if part)


def _extents(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """How large the target's tables are."""
    table = Table("table", "files", "size", "deleted rows", "written per hour", box=None, pad_edge=False)
    for row in rows:
        written = row["written_bytes_per_hour"]
        table.add_row(
            escape(row["name"]),
            str(row["files"]),
            _bytes(row["bytes"]),
            str(row["deleted_rows"]),
            "–" if written is None else _bytes(written),
        )
    if rows:
        console.print(table)


def _seconds(count: float) -> str:
    if count < 120:
        return f"{count:.1f} s"
    minutes, seconds = divmod(int(count), 60)
    return f"{minutes} min {seconds} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def progress(now: Mapping[str, Any]) -> None:
    """Print the progress of a run as a line of JSON. `time` is Unix time in seconds."""
    print(json.dumps({"time": round(time.time(), 3), **now}), flush=True)


def transaction(logged: LoggedTransaction, *, as_json: bool) -> None:
    """Print one transaction, change by change: it may be larger than memory."""
    if as_json:
        escaped = sys.stdout.encoding.lower() != "utf-8"  # then write JSON in ASCII
        head = {
            "xid": logged.xid,
            "commit_lsn": str(logged.commit_lsn),
            "commit_time": logged.commit_time.isoformat(),
            "origin": logged.origin,
        }
        print(json.dumps(head, ensure_ascii=escaped)[:-1], end=', "changes": [')
        for index, change in enumerate(logged.changes):
            print(", " * (index > 0) + json.dumps(_change(change), ensure_ascii=escaped), end="")
        print("]}", flush=True)
        return
    origin = f"  origin {logged.origin}" if logged.origin else ""
    what = f"transaction {logged.xid}" if logged.xid else "message outside transactions"
    print(f"{logged.commit_lsn}  {logged.commit_time:%Y-%m-%d %H:%M:%S.%f%z}  {what}{origin}")
    for change in logged.changes:
        print(f"  {_line(change)}")
    sys.stdout.flush()


def _change(change: Change) -> dict[str, Any]:
    """A change as JSON. Values are PostgreSQL's text."""
    shown: dict[str, Any] = {"kind": type(change.message).__name__.lower(), "lsn": str(change.lsn)}
    match message := change.message:
        case m.LogicalMessage():
            shown |= {"kind": "message", "transactional": message.transactional, "prefix": message.prefix}
            shown["content"] = message.content.decode(errors="backslashreplace")
        case m.Truncate():
            shown["tables"] = [_name(relation) for relation in change.relations]
            shown |= {"cascade": message.cascade, "restart_identity": message.restart_identity}
        case _:
            relation = change.relations[0]
            shown["table"] = _name(relation)
            for part in ("key", "old", "new"):
                if (values := getattr(message, part, None)) is not None:
                    shown[part] = {c: _text(v) for c, v in _pairs(relation, values, part) if v is not m.UNCHANGED}
            if unchanged := [c for c, v in _pairs(relation, getattr(message, "new", ()), "new") if v is m.UNCHANGED]:
                shown["unchanged"] = unchanged
    return shown


def _line(change: Change) -> str:
    """A change as a line of text."""
    match message := change.message:
        case m.LogicalMessage():
            return f"MESSAGE {message.prefix}: {message.content.decode(errors='backslashreplace')!r}"
        case m.Truncate():
            options = " RESTART IDENTITY" * message.restart_identity + " CASCADE" * message.cascade
            return f"TRUNCATE {', '.join(_name(relation) for relation in change.relations)}{options}"
        case m.Update(key=key, old=old, new=new):
            relation = change.relations[0]
            before = _values(relation, key or old, "key" if key else "old") if key or old else ""
            return f"UPDATE {_name(relation)}  {before + ' → ' if before else ''}{_values(relation, new, 'new')}"
        case m.Insert(new=new):
            return f"INSERT {_name(change.relations[0])}  {_values(change.relations[0], new, 'new')}"
        case m.Delete(key=key, old=old):
            shown = _values(change.relations[0], key or old or (), "key" if key else "old")
            return f"DELETE {_name(change.relations[0])}  {shown}"


def _pairs(relation: m.Relation, values: m.Tuple, part: str) -> Iterable[tuple[str, m.Value]]:
    """Columns and values; of a key tuple only the key columns, because the others are not sent."""
    for column, value in zip(relation.columns, values, strict=False):
        if part != "key" or column.is_key:
            yield column.name, value


def _values(relation: m.Relation, values: m.Tuple | None, part: str) -> str:
    return "  ".join(f"{name}={_shown(value)}" for name, value in _pairs(relation, values or (), part))


def _shown(value: m.Value) -> str:
    if value is m.UNCHANGED:
        return "(unchanged)"
    return "NULL" if value is None else repr(_text(value))


def _text(value: m.Value) -> str | None:
    data = value.data if isinstance(value, m.Binary) else value
    return data.decode(errors="backslashreplace") if isinstance(data, bytes) else None


def _name(relation: m.Relation) -> str:
    return f"{relation.namespace or 'pg_catalog'}.{relation.name}"


def _bytes(count: int | None) -> str:
    size = float(count or 0)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"
