"""What a status says in words: how the subscription is doing, and for each thing that is wrong, what to do. Pure.

`walmere status` and the page show the same texts. They use no colour, no markup and no values of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from walmere.units import size, span

Level = Literal["good", "busy", "warning", "problem"]
Status = Mapping[str, Any]

RETAINED_WARNING: Final = 10 << 30
"""Warn if the source keeps more WAL than this for the slot."""
_HINT: Final = "\n  hint: "  # in the text of an error


@dataclass(frozen=True, slots=True)
class Advice:
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


@dataclass(frozen=True, slots=True)
class Processes:
    """What is known about the subscription beside its status."""

    file: Path  # its configuration, for the commands
    running: bool  # whether a process on this machine runs it
    has_target: bool = True
    receiver_error: str | None = None  # what ended the last receiver


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
    lag: float = status["lag_seconds"]
    return Summary("good" if lag < 60 else "warning", f"{'less than 0.1 s' if lag < 0.1 else span(lag)} behind")


def advice(status: Status, processes: Processes) -> list[Advice]:
    """Everything that is wrong, the worst first."""
    found = [*_of_source(status, processes), *_of_run(status, processes)]
    for table in status["tables"]:
        found += _of_table(table, processes.file)
    order = ("problem", "warning", "busy", "good")
    return sorted(found, key=lambda each: order.index(each.level))


def _of_source(status: Status, processes: Processes) -> Iterator[Advice]:
    slot, file = status["slot"], processes.file
    if status["error"] is not None:
        yield Advice("problem", status["error"], f"walmere check -c {file}")
    if status["source_lsn"] is None:
        return
    again = f"walmere drop -c {file}, then walmere run -c {file}: all tables are copied again"
    if slot is None:
        if status["durable_lsn"] is not None:
            yield Advice("problem", "the replication slot does not exist any more", again)
        return
    if slot["wal_status"] == "lost":
        what = f"slot {slot['name']} is lost: the source has removed WAL that it needed"
        yield Advice("problem", what, f"{again}; and increase max_slot_wal_keep_size")
    elif slot["wal_status"] == "unreserved":
        do = "start the receiver now, or increase max_slot_wal_keep_size"
        yield Advice("problem", f"slot {slot['name']} is about to be lost: the source may remove its WAL", do)
    if processes.running and not slot["active"]:
        yield Advice("warning", f"slot {slot['name']} is not active: nothing is being received", "see receiver.log")
    if (slot["retained_bytes"] or 0) > RETAINED_WARNING:
        what = f"the source keeps {size(slot['retained_bytes'])} of WAL for slot {slot['name']}"
        yield Advice("warning", what, "start the receiver if none is running; look for a long open transaction")


def _of_run(status: Status, processes: Processes) -> Iterator[Advice]:
    receiving, command = status["receiver"]["running"], "run" if processes.has_target else "receive"
    start = f"walmere {command} -c {processes.file}"
    if processes.receiver_error is not None and not receiving:
        what, _, do = processes.receiver_error.partition(_HINT)
        yield Advice("problem", f"the receiver has ended: {what}", do)
    if status["paused"]:
        what = "paused: changes are received, and not applied"
        yield Advice("warning", what, f"walmere resume -c {processes.file}")
    if status["slot"] is None and status["durable_lsn"] is None:
        if not processes.running:
            yield Advice("warning", "not started yet: nothing is received or copied", start)
    elif not receiving and not processes.running:
        yield Advice("warning", "nothing receives, and the source keeps its WAL meanwhile", start)
    elif not processes.running and processes.has_target and not status["paused"]:
        yield Advice("warning", "no process on this machine applies changes", start)
    if status["next_batch"] is not None:
        what = f"the next batch begins at {status['next_batch']}: [target] max_rewrite_bytes_per_hour"
        yield Advice("warning", what, "increase it, or set deletion_vectors = true")


def _of_table(table: Mapping[str, Any], file: Path) -> Iterator[Advice]:
    name = table["name"]
    again = f"walmere resync {name} -c {file}"
    if table["error"] is not None:
        what, _, do = table["error"].partition(_HINT)
        yield Advice("problem", what, do or f"no action needed if it is being copied again; or {again}", name)
    if table["locked"] is not None:
        yield Advice("warning", f"the table is locked at the source: {table['locked']}", "end that session", name)
    if table["next_copy"] is not None:
        what = f"its changes were refused again after a copy; the next copy is at {table['next_copy']}"
        yield Advice("problem", what, f"alter the table, or {again}", name)
    if table["upkeep_waits_for"] is not None:
        what = f"rewriting its files waits for {table['upkeep_waits_for']}"
        yield Advice("warning", what, "increase [maintenance] bytes_per_hour", name)
    if table["rejects"]:
        what = f"{table['rejects']} values do not fit the target's type: NULL in the table, the text in its rejects"
        yield Advice("warning", what, f"read the table _rejects.{name} of the target", name)
    if table["conflicts"]:
        do = "see the table conflicts in the target's [target] schema"
        yield Advice("warning", f"{table['conflicts']} changes met a conflict in the target", do, name)
