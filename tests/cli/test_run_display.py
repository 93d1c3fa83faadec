"""What `walmere run` shows: copies with their rate and the time left, then lag and rate; calm, and never in the way."""

from __future__ import annotations

import io
import logging
import os
import pty
from typing import Any

import pytest

from walmere.cli.rate import Rate, Speeds
from walmere.cli.run_display import RunDisplay, copying, following
from walmere.cli.terminal import StatusLine

NOW = 1_800_000_000.0


def table(name: str, phase: str, rows: int = 0, **more: Any) -> dict[str, Any]:
    return {"name": name, "phase": phase, "published": True, "rows_copied": rows, "changes": 0, **more}


BIG = table("public.big", "d", 1_200_000, rows_estimated=5_000_000, copy_began=NOW - 3)


def test_copies_are_shown_with_rate_and_time_left() -> None:
    waiting, ready = table("public.a", "i"), table("public.b", "r", 7)
    assert copying([BIG, waiting, ready], NOW) == (
        "copying public.big 1,200,000 of about 5,000,000 rows, 400,000 rows/s, 10 s left (1 of 3 tables copied)"
    )
    unknown = table("public.c", "d", 10, rows_estimated=None, copy_began=NOW - 10)
    assert copying([unknown], NOW) == "copying public.c 10 rows (0 of 1 tables copied)"
    one = table("public.c", "d", 0, rows_estimated=1, copy_began=NOW - 10)
    assert copying([one], NOW) == "copying public.c 0 of about 1 row (0 of 1 tables copied)"
    assert copying([waiting, ready], NOW) is None


@pytest.mark.parametrize(
    ("lag", "shown"),
    [((12_288, 0.42), "lag 0.4 s, 12.0 kB"), ((0, 0.0), "lag 0.0 s"), ((None, None), "lag unknown")],
)
def test_later_lag_and_rate_are_shown(lag: tuple[int | None, float | None], shown: str) -> None:
    report = {"applied_lsn": "0/5C0D788", "tables": [table("public.b", "r", 7, changes=1530), table("public.a", "i")]}
    line = following(report, 12.6, lag)
    assert line == f"applied 0/5C0D788, {shown}, 13 changes/s, 1,530 changes, 1 of 2 tables copied"


def test_a_rate_is_that_of_the_last_seconds_and_begins_anew_when_the_number_falls() -> None:
    rate = Rate()
    assert rate.add(0, 0.0) == 0.0
    assert rate.add(100, 1.0) == 100.0
    for second in range(2, 20):
        rate.add(100, float(second))
    assert rate.add(100, 20.0) == 0.0
    assert rate.add(5, 21.0) == 0.0
    speeds = Speeds()
    for second in range(3):
        copy = table("public.big", "d", 1000 * second)
        speeds.add({"received_lsn": f"0/{second}00", "applied_lsn": None, "tables": [copy]}, float(second))
    assert speeds.wal == {"received": 256.0}
    assert speeds.copies == {"public.big": 1000.0}


def test_elsewhere_than_on_a_terminal_there_are_plain_lines() -> None:
    stream = io.StringIO()
    display = RunDisplay(stream, lambda: (0, 0.0), lambda: False)
    with display.shown():
        small = table("public.small", "d", rows_estimated=1, copy_began=NOW - 3)
        display.progress({"applied_lsn": None, "tables": [BIG, small]})
        copied = {**small, "phase": "f", "rows_copied": 1, "copied_at": NOW}
        display.progress({"applied_lsn": None, "tables": [BIG, copied]})
        slow = table("public.slow", "d", rows_estimated=1, copy_began=NOW - 90)
        display.progress({"applied_lsn": None, "tables": [BIG, slow]})
        copied = {**slow, "phase": "f", "rows_copied": 9, "copied_at": NOW}
        display.progress({"applied_lsn": None, "tables": [BIG, copied]})
        done = table("public.big", "f", 5_000_000, copied_at=NOW + 7)
        display.progress({"applied_lsn": "0/1", "tables": [done]})
        display.progress({"applied_lsn": "0/1", "tables": [{**done, "phase": "r", "changes": 3}]})
    lines = stream.getvalue().splitlines()
    assert "public.big: 5,000,000 rows copied in 10 s, 500,000 rows/s" in lines
    assert "public.small: 1 row copied" in lines
    assert "public.slow: 9 rows copied in 90 s" in lines
    assert lines[-1] == "1 table, 3 changes applied, up to 0/1"
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_warning_is_not_mixed_up_with_the_line_of_a_terminal() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        line = StatusLine(stream)
        assert line.terminal
        handler = logging.StreamHandler(stream)
        logging.getLogger().addHandler(handler)
        try:
            with line.below_the_log():
                line.show("copying")
                logging.getLogger("walmere").warning("careful")
                line.show("x" * 1000)
        finally:
            logging.getLogger().removeHandler(handler)
        shown = ""
        while not shown.endswith("…\r\x1b[K"):
            shown += os.read(master, 10_000).decode()
    os.close(master)
    assert shown.startswith("\r\x1b[Kcopying\r\x1b[Kcareful\r\n\r\x1b[Kx")
    assert len(shown) < 200, "it fits into the terminal, and is removed at the end"
