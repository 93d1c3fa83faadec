"""Points: LSNs of the source at which versions of all tables belong together. And the format of their file.

Tables are committed one by one, so their newest versions may not belong together. A point has versions that do: they
contain everything that committed before its LSN, in all tables, and nothing after.

The file has lines of JSON, oldest first. The first line is the header:

    {"format": "walmere ledger", "version": 1, "keep_seconds": 3600.0}
    {"lsn": "0/1A2B3C8", "commit_time": "2026-11-15T12:00:00.123456Z", "began": "2026-11-15T12:00:00.623456Z",
     "versions": {"public.orders": 7, "public.customers": 3}, "left": []}
    {"lsn": "0/1A2C000", "commit_time": …, "began": …, "versions": {"public.orders": 8}, "left": []}

The first point has the versions of all tables. Each later one has the versions that have changed, and in `left` the
tables that are no longer part of it. An incomplete last line is ignored: it is being written, or a crash has torn it.

A point can be read while the files of its versions exist. They are in use until the batch of the next point begins,
which is that point's `began`, and the sink keeps them for `keep_seconds` after that. The newest point can always be
read.
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
    """A time from microseconds of Unix time."""
    return _EPOCH + timedelta(microseconds=microseconds)


def microseconds(when: datetime) -> int:
    """The inverse of `moment`, without rounding."""
    return (when - _EPOCH) // _MICROSECOND


def iso(time: int | None) -> str | None:
    """A time as it is written to files: ISO 8601, UTC."""
    return None if time is None else moment(time).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Entry:
    """A point at which all tables are consistent."""

    lsn: Lsn
    commit_time: int | None  # of the newest transaction, in microseconds of Unix time; None: as in the point before
    versions: Mapping[str, int]  # of each table of the subscription that has been copied
    began: int = field(default_factory=now, compare=False)  # when the batch of this point began, likewise


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
        """All points, oldest first."""
        versions: Mapping[str, int] = {}
        for line in self._lines:
            if line.versions or line.left:
                versions = _versions_after(versions, line)
            yield Entry(line.lsn, line.commit_time, versions, line.began)

    def __getitem__(self, index: int) -> Entry:
        """The point with this index. Slower than iterating, if all are needed."""
        versions: dict[str, int] = {}
        for line in self._lines[: index + 1]:
            versions.update(line.versions)
            for name in line.left:
                versions.pop(name, None)
        return Entry(line.lsn, line.commit_time, versions, line.began)

    def versions_of(self, table: str, first: int) -> set[int]:
        """The versions of one table in the points from an index on."""
        found: set[int] = set()
        version: int | None = None
        for index, line in enumerate(self._lines):
            version = None if table in line.left else line.versions.get(table, version)
            if index >= first and version is not None:
                found.add(version)
        return found

    @property
    def lsns(self) -> list[Lsn]:
        return [line.lsn for line in self._lines]

    @property
    def times(self) -> list[int]:
        """For each point, the commit time of its newest transaction; if that is not known, when the point was made."""
        return [line.began if line.commit_time is None else line.commit_time for line in self._lines]

    def first_readable(self, time: int) -> int:
        """The index of the oldest point whose files must still exist."""
        return expired([line.began for line in self._lines], time, self.keep_seconds)


def _versions_after(versions: Mapping[str, int], line: _Line) -> Mapping[str, int]:
    after = {**versions, **line.versions}
    for name in line.left:
        after.pop(name, None)
    return after


def newest(values: Sequence[int], limit: int) -> int:
    """The index of the last value that is not greater than `limit`, or -1."""
    return max((index for index, value in enumerate(values) if value <= limit), default=-1)


def expired(began: Sequence[int], time: int, keep_seconds: float) -> int:
    """How many points, from the oldest on, may no longer be readable, by when each of them began."""
    # clocks may go back: everything after a point that is still needed is needed too
    before = time - keep_seconds * 1e6
    return max(next((index for index, each in enumerate(began) if each > before), len(began)) - 1, 0)


def render_header(keep_seconds: float) -> bytes:
    """The first line of a file."""
    return _json({"format": FORMAT, "version": VERSION, "keep_seconds": keep_seconds})


def render(entry: Entry, before: Entry | None) -> bytes:
    """The line of a point. `before` is the point in the line before, if there is one."""
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
    """The content of a file."""
    lines = [render_header(keep_seconds)]
    before: Entry | None = None
    for entry in entries:
        lines.append(render(entry, before))
        before = entry
    return b"".join(lines)


def parse(content: bytes, where: str) -> Points:
    """Read a file. Raises ChangeLogVersion for an unknown version, ChangeLogDamaged for what is not a ledger."""
    doing = f"reading {where}"
    *complete, rest = content.split(b"\n")
    header = _header(doing, complete[0] if complete else rest)
    lines = []
    torn = bool(rest)
    for number, text in enumerate(complete[1:], 2):
        try:
            lines.append(_line(json.loads(text)))
        except (ValueError, KeyError, TypeError, AttributeError):
            if number < len(complete):
                raise ChangeLogDamaged(doing, f"line {number} cannot be read", _HINT) from None
            torn = True
    return Points(lines, header["keep_seconds"], torn=torn)


_HINT: Final = "delete the file: `walmere run` creates it again; older points can no longer be read"


def _header(doing: str, text: bytes) -> dict[str, Any]:
    try:
        header: dict[str, Any] = json.loads(text)
        known = header.get("format") == FORMAT
    except (ValueError, AttributeError):
        raise ChangeLogDamaged(doing, "this is not a ledger", _HINT) from None
    if not known:
        raise ChangeLogVersion(doing, "it has no format version; an early version of Walmere wrote it", _HINT)
    check_version(doing, header)
    return header


def check_version(doing: str, content: Mapping[str, Any]) -> None:
    """Refuse a format version that this version of Walmere does not read."""
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
