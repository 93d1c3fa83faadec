"""What `walmere run` shows while it runs: the copies with their rate and the time left, then lag and rate.

On a terminal it is one line, written again every second. Elsewhere it is a line now and then. What has happened, such
as a table that is copied, stays on a line of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TextIO

from walmere.cli.rate import Rate
from walmere.cli.terminal import StatusLine
from walmere.errors import WalmereError
from walmere.subscription.state import Phase
from walmere.units import counted, left, rows, size, span

Report = Mapping[str, Any]
"""What `walmere run --json` prints."""
Lag = tuple[int | None, float | None]
"""In bytes and seconds; None: not known."""

_EVERY: Final = {Phase.DATA_SYNC: 10.0, Phase.READY: 60.0}
"""Elsewhere than on a terminal: seconds between two lines, while copies are running, and later."""
_RATE_FROM: Final = 1000
"""Show the rate of a copy from this many rows on: below, nearly all of its time is the start of the task."""
_TIME_FROM: Final = 10.0
"""Show the time of a copy with fewer rows if it took this many seconds: its rows are large."""


def copying(tables: Sequence[Report], now: float) -> str | None:
    """The line while tables are being copied; None: none is."""
    running = [each for each in tables if each["phase"] == Phase.DATA_SYNC]
    waiting = [each for each in tables if each["published"] and not Phase(each["phase"]).copied]
    if not running:
        return None
    parts = [_copy(each, now) for each in running]
    copied = len([each for each in tables if each["published"]]) - len(waiting)
    return f"copying {'; '.join(parts)} ({copied} of {copied + len(waiting)} tables copied)"


def _copy(table: Report, now: float) -> str:
    """`public.orders 1,200,000 of about 5,000,000 rows, 410,000 rows/s, 9 s left`."""
    if "copy_began" not in table:  # it has no snapshot yet, or is being committed
        return str(table["name"])
    number, estimated = table["rows_copied"], table["rows_estimated"]
    speed = number / max(1.0, now - table["copy_began"])
    shown = f"{rows(number)} of about {counted(estimated, 'row')}" if estimated else counted(number, "row")
    parts = [f"{table['name']} {shown}"]
    if number >= _RATE_FROM:
        parts.append(f"{rows(speed)} rows/s")
        if estimated and estimated > number:
            parts.append(f"{left((estimated - number) / speed)} left")
    return ", ".join(parts)


def following(report: Report, speed: float, lag: Lag) -> str:
    """The line while changes are applied."""
    tables = [each for each in report["tables"] if each["published"]]
    copied = [each for each in tables if Phase(each["phase"]).copied]
    lag_bytes, lag_seconds = lag
    parts = [
        *([] if report["applied_lsn"] is None else [f"applied {report['applied_lsn']}"]),
        f"lag {'unknown' if lag_seconds is None else span(lag_seconds)}",
        *([] if not lag_bytes else [size(lag_bytes)]),
        f"{rows(speed)} changes/s",
        f"{rows(_changes(report))} changes",
        f"{len(copied)} of {len(tables)} tables copied",
    ]
    return ", ".join(parts)


def _changes(report: Report) -> int:
    return sum(each["changes"] for each in report["tables"])


class RunDisplay:
    """Shows a run."""

    def __init__(self, stream: TextIO, lag: Callable[[], Lag], paused: Callable[[], bool]) -> None:
        """`lag` and `paused` are asked about once a second, in a thread."""
        self._line = StatusLine(stream)
        self._lag = lag
        self._paused = paused
        self._report: Report | None = None
        self._phases: dict[str, str] = {}
        self._copies_began: dict[str, float] = {}
        self._rate = Rate()
        self._began = time.monotonic()
        self._next = 0.0
        self._ended = threading.Event()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it while the context is open."""
        thread = threading.Thread(target=self._run, name="walmere-display", daemon=True)
        with self._line.below_the_log():
            thread.start()
            try:
                yield
            finally:
                self._ended.set()
                thread.join(1.0)  # the source may not answer
                self._line.clear()
        if self._report is not None:
            self._line.print(self._summary(self._report))

    def progress(self, report: Report) -> None:
        """Take what `walmere run --json` prints."""
        for table in report["tables"]:
            before = self._phases.get(table["name"])
            self._phases[table["name"]] = table["phase"]
            if "copy_began" in table:
                self._copies_began[table["name"]] = table["copy_began"]
            if before is not None and table["phase"] == Phase.FINISHED_COPY != before:
                self._line.print(f"{table['name']}: {counted(table['rows_copied'], 'row')} copied{self._took(table)}")
        self._report = report

    def _took(self, table: Report) -> str:
        began = self._copies_began.get(table["name"])
        if began is None:
            return ""
        number, seconds = table["rows_copied"], table["copied_at"] - began
        if number < _RATE_FROM:
            return f" in {left(seconds)}" if seconds >= _TIME_FROM else ""
        return f" in {left(seconds)}, {rows(number / seconds)} rows/s" if seconds >= 1.0 else ""

    def _run(self) -> None:
        while not self._ended.is_set():
            text, interval = self._text()
            now = time.monotonic()
            if self._line.terminal:
                self._line.show(text)
            elif now >= self._next and self._report is not None:
                self._line.print(text)
                self._next = now + interval
            self._ended.wait(1.0)

    def _text(self) -> tuple[str, float]:
        """What is going on, and how often to say it elsewhere than on a terminal."""
        report, slow = self._report, _EVERY[Phase.READY]
        if report is None:
            return f"starting Spark, {left(time.monotonic() - self._began)}", slow
        if self._paused():
            return "paused: changes are received, and not applied; `walmere resume` continues", slow
        speed = self._rate.add(_changes(report), time.monotonic())
        if (text := copying(report["tables"], time.time())) is not None:
            return text, _EVERY[Phase.DATA_SYNC]
        if not report["tables"]:
            return "reading the publications", slow
        try:
            lag = self._lag()
        except (WalmereError, OSError):  # the run will tell
            lag = None, None
        return following(report, speed, lag), slow

    def _summary(self, report: Report) -> str:
        applied = report["applied_lsn"]
        upto = "" if applied is None else f", up to {applied}"
        tables, changes = counted(len(report["tables"]), "table"), counted(_changes(report), "change")
        return f"{tables}, {changes} applied{upto}"
