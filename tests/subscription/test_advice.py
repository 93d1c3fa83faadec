"""A status in words: the summary, and what to do about each thing that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from walmere.subscription.advice import Advice, Processes, advice, summary

TABLE: dict[str, Any] = {
    "name": "public.orders", "phase": "r", "error": None, "published": True, "locked": None, "next_copy": None,
    "upkeep_waits_for": None, "rejects": 0, "conflicts": 0,
}  # fmt: skip
STATUS: dict[str, Any] = {
    "subscription": "shop", "paused": False, "source_lsn": "0/1", "durable_lsn": "0/1", "lag_seconds": 0.0,
    "caught_up": True, "receiver": {"running": True}, "tables": [TABLE], "error": None, "next_batch": None,
    "slot": {"name": "s", "active": True, "wal_status": "reserved", "retained_bytes": 1000},
}  # fmt: skip
FILE = Path("shop.toml")


def found(status: dict[str, Any], *, running: bool = True, **others: Any) -> list[Advice]:
    return advice({**STATUS, **status}, Processes(FILE, running=running, **others))


def table(**values: Any) -> dict[str, Any]:
    return {"tables": [TABLE | values]}


def test_nothing_is_wrong_with_a_subscription_that_is_caught_up() -> None:
    assert found({}) == []
    assert summary(STATUS, running=True).text == "caught up"


@pytest.mark.parametrize(
    ("status", "running", "level", "text"),
    [
        ({"paused": True}, True, "warning", "paused"),
        ({"source_lsn": None}, True, "problem", "the source does not answer"),
        ({"receiver": {"running": False}}, False, "problem", "not running"),
        ({}, False, "warning", "receiving only"),
        (table(error="no key"), True, "problem", "a table has an error"),
        (table(phase="d"), True, "busy", "copying 1 of 1 tables"),
        ({"caught_up": False, "lag_seconds": None}, True, "busy", "catching up"),
        ({"caught_up": False, "lag_seconds": 0.0}, True, "good", "less than 0.1 s behind"),
        ({"caught_up": False, "lag_seconds": 0.71}, True, "good", "0.7 s behind"),
        ({"caught_up": False, "lag_seconds": 7300.0}, True, "warning", "2 h 1 min behind"),
        (table(phase="i", published=False), True, "good", "caught up"),
    ],
)
def test_the_summary_says_how_it_is_doing(status: dict[str, Any], running: bool, level: str, text: str) -> None:
    its = summary({**STATUS, **status}, running=running)
    assert (its.level, its.text) == (level, text)


@pytest.mark.parametrize(
    ("status", "what", "do"),
    [
        ({"error": "connecting: refused", "source_lsn": None}, "connecting: refused", "walmere check -c shop.toml"),
        ({"slot": None}, "does not exist", "walmere drop -c shop.toml"),
        ({"slot": {**STATUS["slot"], "wal_status": "lost"}}, "is lost", "max_slot_wal_keep_size"),
        ({"slot": {**STATUS["slot"], "wal_status": "unreserved"}}, "about to be lost", "start the receiver"),
        ({"slot": {**STATUS["slot"], "active": False}}, "not active", "receiver.log"),
        ({"slot": {**STATUS["slot"], "retained_bytes": 11 << 30}}, "keeps 11.0 GB of WAL", "open transaction"),
        ({"paused": True}, "paused", "resume"),
        ({"next_batch": "2026-11-17T20:00:00+00:00"}, "the next batch begins at", "deletion_vectors"),
        (table(error="casting: no\n  hint: remove it"), "casting: no", "remove it"),
        (table(error="casting: no"), "casting: no", "walmere resync public.orders -c shop.toml"),
        (table(locked="process 7"), "locked at the source: process 7", "end that session"),
        (table(next_copy="2026-11-17"), "the next copy is at 2026-11-17", "walmere resync public.orders"),
        (table(upkeep_waits_for="[maintenance] bytes_per_hour"), "waits for", "increase"),
        (table(rejects=3), "3 values do not fit", "_rejects.public.orders"),
        (table(conflicts=2), "2 changes met a conflict", "conflicts"),
    ],
)
def test_each_problem_says_what_to_do(status: dict[str, Any], what: str, do: str) -> None:
    [one] = found(status)
    assert what in one.what
    assert do in one.do
    assert one.level in ("warning", "problem")


def test_the_error_of_a_receiver_that_has_ended_is_shown_and_the_worst_comes_first() -> None:
    error = "receiving: the slot is gone\n  hint: run `walmere drop`"
    shown = found({"receiver": {"running": False}, **table(rejects=1)}, running=False, receiver_error=error)
    assert [each.level for each in shown] == ["problem", "warning", "warning"]
    assert shown[0].what == "the receiver has ended: receiving: the slot is gone"
    assert shown[0].do == "run `walmere drop`"
    assert not found({}, receiver_error=error), "it was started again since"


@pytest.mark.parametrize(
    ("status", "others", "what", "do"),
    [
        ({"slot": None, "durable_lsn": None}, {}, "not started yet", "walmere run -c shop.toml"),
        ({"slot": None, "durable_lsn": None}, {"has_target": False}, "not started yet", "walmere receive"),
        ({"receiver": {"running": False}}, {}, "nothing receives", "walmere run -c shop.toml"),
        ({}, {}, "no process on this machine applies changes", "walmere run -c shop.toml"),
    ],
)
def test_what_is_not_running_is_said_once(status: dict[str, Any], others: dict[str, Any], what: str, do: str) -> None:
    [one] = found(status, running=False, **others)
    assert what in one.what
    assert do in one.do


def test_a_subscription_that_is_only_received_lacks_no_process_that_applies() -> None:
    assert found({}, running=False, has_target=False) == []
