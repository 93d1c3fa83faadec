"""Points: LSNs of the source at which versions of all tables belong together. And how they are written down.

Tables are committed one by one, so their newest versions need not belong together. A point says which do: everything
that committed before its LSN is in its versions, in all tables, and nothing after.

Lines of JSON, oldest first; the first is about the file itself:

    {"format": "walmere ledger", "version": 1, "keep_seconds": 3600.0}
    {"lsn": "0/1A2B3C8", "commit_time": "2026-11-15T12:00:00.123456Z", "began": "2026-11-15T12:00:00.623456Z",
     "versions": {"public.orders": 7, "public.customers": 3}, "left": []}
    {"lsn": "0/1A2C000", "commit_time": …, "began": …, "versions": {"public.orders": 8}, "left": []}

The first point has the versions of all tables. Each one after it has those that are others than before, and which
tables are no longer part of it. A last line that is not whole is none: it is being written, or a crash has torn it.

How long a point can be read: while the files of its versions are there. The batch that replaces them begins when the
next point's `began` says, so they were in use until then, and a sink keeps what is out of use for `keep_seconds`. The
newest point can always be read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from walmere.errors import ChangeLogDamaged, ChangeLogVersion
from walmere.lsn import Lsn

FORMAT: Final = "walmere ledger"
VERSION: Final = 1

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def now() -> int:
    """Microseconds of Unix time."""
    return time.time_ns() // 1000


def moment(microseconds: int) -> datetime:
    """Unix time as a time."""
    return _EPOCH + timedelta(microseconds=microseconds)


def microseconds(when: datetime) -> int:
    """The inverse, exactly."""
    return (when - _EPOCH) // _MICROSECOND


def iso(time: int | None) -> str | None:
    """As it is written: ISO 8601, UTC."""
    return None if time is None else moment(time).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Entry:
    """A point at which all tables are consistent."""

    lsn: Lsn
    commit_time: int | None  # microseconds of Unix time, of the newest transaction; None: of the same as before
    versions: Mapping[str, int]  # of every table of the subscription that has been copied
    began: int = field(default_factory=now, compare=False)  # likewise, when the batch began that led here


@dataclass(frozen=True, slots=True)
class _Line:
    lsn: Lsn
    commit_time: int | None
    began: int
    versions: Mapping[str, int]
    left: Sequence[str]


class Points:
    """The points of a file, as it was when it was read."""

    def __init__(self, lines: Sequence[_Line], keep_seconds: float, *, torn: bool) -> None:
        self._lines = lines
        self.keep_seconds = keep_seconds
        self.torn = torn

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Entry]:
        """All of them, oldest first."""
        versions: Mapping[str, int] = {}
        for line in self._lines:
            if line.versions or line.left:
                versions = _moved(versions, line)
            yield Entry(line.lsn, line.commit_time, versions, line.began)

    def __getitem__(self, index: int) -> Entry:
        """One of them, by its place from the first on; what is asked for is seldom more than one."""
        versions: dict[str, int] = {}
        for line in self._lines[: index + 1]:
            versions.update(line.versions)
            for name in line.left:
                versions.pop(name, None)
        return Entry(line.lsn, line.commit_time, versions, line.began)

    @property
    def lsns(self) -> list[Lsn]:
        return [line.lsn for line in self._lines]

    @property
    def times(self) -> list[int]:
        """Of each, when its newest transaction committed. Of one before any that is known: when it was made."""
        return [line.began if line.commit_time is None else line.commit_time for line in self._lines]

    def first_readable(self, time: int) -> int:
        """The place of the oldest one whose files must still be there."""
        return expired([line.began for line in self._lines], time, self.keep_seconds)


def _moved(versions: Mapping[str, int], line: _Line) -> Mapping[str, int]:
    moved = {**versions, **line.versions}
    for name in line.left:
        moved.pop(name, None)
    return moved


def newest(values: Sequence[int], limit: int) -> int:
    """The place of the last LSN or time that is not after another, or -1."""
    return max((place for place, value in enumerate(values) if value <= limit), default=-1)


def expired(began: Sequence[int], time: int, keep_seconds: float) -> int:
    """How many points, from the oldest on, cannot be read any more for certain, by when each one began."""
    # clocks may go back; what began after something that is still needed is needed, too
    before = time - keep_seconds * 1e6
    return max(next((place for place, each in enumerate(began) if each > before), len(began)) - 1, 0)


def render_header(keep_seconds: float) -> bytes:
    """The line that a file begins with."""
    return _json({"format": FORMAT, "version": VERSION, "keep_seconds": keep_seconds})


def render(entry: Entry, before: Entry | None) -> bytes:
    """The line of a point that follows another, or none."""
    known: Mapping[str, int] = {} if before is None else before.versions
    return _json(
        {
            "lsn": str(entry.lsn),
            "commit_time": iso(entry.commit_time),
            "began": iso(entry.began),
            "versions": {name: version for name, version in entry.versions.items() if known.get(name) != version},
            "left": [name for name in known if name not in entry.versions],
        }
    )


def render_all(entries: Iterable[Entry], keep_seconds: float) -> bytes:
    """A whole file."""
    lines = [render_header(keep_seconds)]
    before: Entry | None = None
    for entry in entries:
        lines.append(render(entry, before))
        before = entry
    return b"".join(lines)


def parse(content: bytes, where: str) -> Points:
    """Read a file. Raises ChangeLogVersion for a format that is not known, ChangeLogDamaged for what is none."""
    doing = f"reading {where}"
    *whole, rest = content.split(b"\n")
    header = _header(doing, whole[0] if whole else rest)
    lines = []
    torn = bool(rest)
    for number, text in enumerate(whole[1:], 2):
        try:
            lines.append(_line(json.loads(text)))
        except (ValueError, KeyError, TypeError, AttributeError):
            if number < len(whole):
                raise ChangeLogDamaged(doing, f"line {number} cannot be read", _REMEDY) from None
            torn = True
    return Points(lines, header["keep_seconds"], torn=torn)


_REMEDY: Final = "delete the file: `walmere run` creates it again; older points can no longer be read"


def _header(doing: str, text: bytes) -> dict[str, Any]:
    try:
        header: dict[str, Any] = json.loads(text)
        known = header.get("format") == FORMAT
    except (ValueError, AttributeError):
        raise ChangeLogDamaged(doing, "this is not a ledger", _REMEDY) from None
    if not known:
        raise ChangeLogVersion(doing, "it has no format version; an early version of Walmere wrote it", _REMEDY)
    check_version(doing, header)
    return header


def check_version(doing: str, content: Mapping[str, Any]) -> None:
    """Refuse what another Walmere has written in another way."""
    if content.get("version") != VERSION:
        raise ChangeLogVersion(
            doing,
            f"it has format version {content.get('version')}, this version of Walmere reads format version {VERSION}",
            "use the version of Walmere that wrote it, or a newer one",
        )


def parse_time(text: str | None) -> int | None:
    """The inverse of `iso`."""
    return None if text is None else microseconds(datetime.fromisoformat(text))


def _line(content: Mapping[str, Any]) -> _Line:
    began = parse_time(content["began"])
    if began is None:
        raise ValueError("a point must have a time")
    return _Line(
        Lsn.parse(content["lsn"]),
        parse_time(content["commit_time"]),
        began,
        content["versions"],
        content["left"],
    )


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
