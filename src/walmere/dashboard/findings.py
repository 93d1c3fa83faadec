"""What a status says in words: how the subscription is doing, and for each thing that is wrong, what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from walmere.subscription.state import Phase

Level = Literal["good", "busy", "warning", "problem"]
Status = Mapping[str, Any]

PHASES: Final = {phase.value: phase.words for phase in Phase}
"""The letters of `srsubstate` in words."""
RETAINED_WARNING: Final = 10 << 30
"""Warn if the source keeps more WAL than this for the slot."""


@dataclass(frozen=True, slots=True)
class Found:
    """Something that is wrong, and what to do."""

    level: Level
    what: str
    do: str = ""
    table: str | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """How the subscription is doing, in a few words."""

    level: Level
    text: str


def summary(status: Status, *, running: bool) -> Summary:
    """The state of a subscription in a few words."""
    tables = [each for each in status["tables"] if each["published"]]
    copying = sum(each["phase"] in ("i", "d") for each in tables)
    if status.get("paused"):
        return Summary("warning", "paused")
    if status["source_lsn"] is None:
        return Summary("problem", "the source does not answer")
    if not running and not status["receiver"]["running"]:
        return Summary("problem", "not running")
    if not running:
        return Summary("warning", "receiving only")
    if any(each["error"] for each in tables):
        return Summary("problem", "a table has an error")
    if copying:
        return Summary("busy", f"copying {copying} of {len(tables)} tables")
    if status["caught_up"]:
        return Summary("good", "caught up")
    if status["lag_seconds"] is None:
        return Summary("busy", "catching up")
    return Summary("good" if status["lag_seconds"] < 60 else "warning", f"{_seconds(status['lag_seconds'])} behind")


def findings(status: Status, file: Path, *, running: bool, receiver_error: str | None = None) -> list[Found]:
    """Everything that is wrong, the worst first."""
    found = [*_of_source(status, file, running=running), *_of_run(status, file, running=running)]
    if receiver_error is not None and not status["receiver"]["running"]:
        what, _, do = receiver_error.partition("\n  hint: ")
        found.append(Found("problem", f"the receiver has ended: {what}", do))
    for table in status["tables"]:
        found += _of_table(table, file)
    order = ("problem", "warning", "busy", "good")
    return sorted(found, key=lambda each: order.index(each.level))


def _of_source(status: Status, file: Path, *, running: bool) -> Iterator[Found]:
    slot = status["slot"]
    if status["error"] is not None:
        yield Found("problem", status["error"], f"walmere check -c {file}")
    if status["source_lsn"] is None:
        return
    if slot is None:
        if status["durable_lsn"] is not None:
            again = f"walmere drop -c {file}, then walmere run -c {file}: all tables are copied again"
            yield Found("problem", "the replication slot does not exist any more", again)
        return
    if slot["wal_status"] == "lost":
        again = f"walmere drop -c {file}, then walmere run -c {file}; and increase max_slot_wal_keep_size"
        yield Found("problem", f"slot {slot['name']} is lost: the source has removed WAL that it needed", again)
    elif slot["wal_status"] == "unreserved":
        do = "start the receiver now, or increase max_slot_wal_keep_size"
        yield Found("problem", f"slot {slot['name']} is about to be lost: the source may remove its WAL", do)
    if running and not slot["active"]:
        yield Found("warning", f"slot {slot['name']} is not active: nothing is being received", "see receiver.log")
    if (slot["retained_bytes"] or 0) > RETAINED_WARNING:
        what = f"the source keeps {_size(slot['retained_bytes'])} of WAL for slot {slot['name']}"
        yield Found("warning", what, "start the receiver if none is running; look for a long open transaction")


def _of_run(status: Status, file: Path, *, running: bool) -> Iterator[Found]:
    if status.get("paused"):
        yield Found("warning", "paused: nothing is copied or applied; changes wait in the change log", "resume it")
    elif not running:
        yield Found("warning", "no process applies changes", f"walmere run -c {file}")
    if status["next_batch"] is not None:
        what = f"the next batch begins at {status['next_batch']}: [target] max_rewrite_bytes_per_hour"
        yield Found("warning", what, "increase it, or set deletion_vectors = true")


def _of_table(table: Mapping[str, Any], file: Path) -> Iterator[Found]:
    name = table["name"]
    again = f"walmere resync {name} -c {file}"
    if table["error"] is not None:
        what, _, do = table["error"].partition("\n  hint: ")
        yield Found("problem", what, do or f"no action needed if it is being copied again; or {again}", name)
    if table["locked"] is not None:
        yield Found("warning", f"the table is locked at the source: {table['locked']}", "end that session", name)
    if table["next_copy"] is not None:
        what = f"its changes were refused again after a copy; the next copy is at {table['next_copy']}"
        yield Found("problem", what, f"alter the table, or {again}", name)
    if table["upkeep_waits_for"] is not None:
        what = f"rewriting its files waits for {table['upkeep_waits_for']}"
        yield Found("warning", what, "increase [maintenance] bytes_per_hour", name)
    if table["rejects"]:
        what = f"{table['rejects']} values do not fit the target's type: NULL in the table, the text in its rejects"
        yield Found("warning", what, f"read the table _rejects.{name} of the target", name)
    if table["conflicts"]:
        yield Found("warning", f"{table['conflicts']} changes met a conflict", "see the table conflicts there", name)


def _seconds(count: float) -> str:
    if count < 120:
        return f"{count:.1f} s"
    minutes = int(count) // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"
