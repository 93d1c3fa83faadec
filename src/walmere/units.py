"""Numbers for people: bytes, times, rows, exit codes."""

from __future__ import annotations

from contextlib import suppress
from signal import Signals


def size(count: int | None) -> str:
    """Bytes."""
    rest = float(count or 0)
    for unit in ("B", "kB", "MB", "GB"):
        if rest < 1024:
            return f"{rest:.0f} {unit}" if unit == "B" else f"{rest:.1f} {unit}"
        rest /= 1024
    return f"{rest:.1f} TB"


def span(count: float) -> str:
    """Seconds."""
    if count < 120:
        return f"{count:.1f} s"
    minutes, seconds = divmod(int(count), 60)
    return f"{minutes} min {seconds} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def rows(count: float) -> str:
    """Rows, or anything else that is counted."""
    return f"{count:,.0f}"


def counted(count: int, what: str) -> str:
    """A number of things: `1 table`, `2 tables`."""
    return f"{rows(count)} {what}{'' if count == 1 else 's'}"


def left(count: float) -> str:
    """Seconds, as people say them."""
    return f"{count:.0f} s" if count < 120 else span(count)


def how_it_ended(code: int) -> str:
    """The exit code of a process, as Python has it."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was ended by signal {-code} ({Signals(-code).name})"
    return f"was ended by signal {-code}"
