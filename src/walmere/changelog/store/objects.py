"""An object of the log in a store: what one upload has put there.

    <checksum> {"format": "walmere log object", "version": 1, "number": 12, "epoch": 7, …}   the header
    <checksum> {"relation": {…}}                                                             lines of the manifest
    <checksum> {"transactions": {…, "segment": {…, "stored": [12, 1024]}}}
    (line feeds, up to byte `data`)
    the bytes of one segment file, of the next, …

So the objects of a log, in the order of their numbers, give its manifest again, and the beginning of an object is
enough to read its lines. `stored` says where a segment is: in which object, and at which byte of it.

A segment of a transaction in progress is in an object without a line that names it. That line comes with the commit, in
a later object. An object without lines and segments is a fence: see `walmere.changelog.store.claim`.

The whole log is the manifest that `head` names, and the objects from its number on, up to the first number that is
missing. Of these, an object with a lower epoch than one before it is void: its writer was fenced, and its put was late.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from walmere.changelog.manifest import Entry, parse_entry, render
from walmere.changelog.records import Prepared, Transaction, Transactions, parse_line, to_line
from walmere.changelog.segment_entry import Segment, Stored
from walmere.changelog.store.log_store import LogStore, damaged, require_version

VERSION: Final = 1
_FORMAT: Final = "walmere log object"
_ALIGNMENT: Final = 512
"""The segments begin at a multiple of this."""
_BEGINNING: Final = 32 << 10
"""Read so many bytes of an object to have its lines; more only if that is not enough."""
_READERS: Final = 16
"""Objects that are read at the same time."""


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """The first line of an object."""

    number: int
    epoch: int
    writer: str  # which start of a receiver has put it
    text: int = 0  # bytes of the lines of the manifest
    data: int = 0  # where the segments begin; 0: there are none


@dataclass(frozen=True, slots=True)
class LogObject:
    """The beginning of an object: its header, and its lines of the manifest."""

    header: ObjectHeader
    lines: bytes

    def entries(self) -> Iterator[Entry]:
        """The entries of its lines."""
        for line in self.lines.splitlines(keepends=True):
            content = parse_line(line)
            assert content is not None  # `parse` has checked the lines
            yield parse_entry(content)


@dataclass(frozen=True, slots=True)
class Upload:
    """An object to put."""

    begin: LogObject
    places: Mapping[str, Stored]  # of its segments, by file
    content: bytes


def build(
    header: ObjectHeader, entries: Sequence[Entry], files: Mapping[str, bytes], known: Mapping[str, Stored]
) -> Upload:
    """An object of these entries and segment files. `known`: where segments are that were put before."""
    begin = 0
    while True:
        places, offset = {}, begin
        for file, content in files.items():
            places[file] = Stored(header.number, offset)
            offset += len(content)
        located = {**known, **places}
        lines = b"".join(render(_located(entry, located)) for entry in entries)
        header = replace(header, text=len(lines), data=begin)
        first = _render(header)
        needed = len(first) + len(lines)
        if not files or needed <= begin:
            break
        begin = -(-needed // _ALIGNMENT) * _ALIGNMENT  # the lines have this number, so they may get longer
    padding = b"\n" * (begin - needed) if files else b""
    return Upload(LogObject(header, lines), places, b"".join([first, lines, padding, *files.values()]))


def parse(where: str, number: int, data: bytes) -> LogObject | int:
    """Read the beginning of an object. Returns how many bytes it has, if these are too few. Raises ChangeLogDamaged."""
    end = data.find(b"\n") + 1
    content = parse_line(data[:end]) if end else None
    if content is None or content.pop("format", None) != _FORMAT:
        raise damaged(where, "it is not an object of a change log, or its first line fails its checksum")
    require_version(where, content.pop("version"), VERSION)
    header = ObjectHeader(**content)
    if header.number != number:
        raise damaged(where, f"it is object {header.number}")
    if len(data) < end + header.text:
        return end + header.text
    lines = data[end : end + header.text]
    for line in lines.splitlines(keepends=True):
        if parse_line(line) is None:
            raise damaged(where, "a line of the manifest fails its checksum")
    return LogObject(header, lines)


def read_object(log: LogStore, number: int) -> LogObject | None:
    """The beginning of an object; None if there is none of this number. Raises ChangeLogDamaged."""
    needed = _BEGINNING
    for _ in range(2):
        try:
            data = log.store.get_range(log.name(number), 0, needed)
        except FileNotFoundError:
            return None
        found = parse(log.url(number), number, data)
        if not isinstance(found, int):
            return found
        needed = found
    raise damaged(log.url(number), "it ends within the lines of the manifest")


def read_objects(log: LogStore, number: int) -> Iterator[LogObject]:
    """All objects from a number on, up to the first that is missing. Several are read at once."""
    numbers: list[int] = []
    for each in log.store.list(f"{log.generation}/log", after=log.name(number - 1)):
        if each.name != log.name(number + len(numbers)):
            break
        numbers.append(number + len(numbers))
    with ThreadPoolExecutor(_READERS) as pool:
        for found in pool.map(lambda each: read_object(log, each), numbers):
            if found is None:  # retention has deleted it meanwhile
                return
            yield found


def numbers_before(log: LogStore, number: int) -> list[int]:
    """The numbers of all objects before a number that are in the store."""
    found = []
    for each in log.store.list(f"{log.generation}/log"):
        found_number = int(each.name.rpartition("/")[2])
        if found_number >= number:
            break
        found.append(found_number)
    return found


def pack_manifest(lines: bytes) -> bytes:
    """The content of a manifest in the store."""
    return gzip.compress(lines, 1, mtime=0)


def read_manifest(log: LogStore, name: str) -> bytes | None:
    """The lines of a manifest in the store; None if retention has replaced it. Raises ChangeLogDamaged."""
    found = log.store.get(name)
    if found is None:
        return None
    try:
        return gzip.decompress(found[0])
    except (OSError, EOFError, zlib.error):
        raise damaged(f"{log.store.url}/{name}", "it cannot be decompressed") from None


def _render(header: ObjectHeader) -> bytes:
    content: dict[str, Any] = {"format": _FORMAT, "version": VERSION, **asdict(header)}
    return to_line(content)


def _located(entry: Entry, places: Mapping[str, Stored]) -> Entry:
    """The entry, with the places of its segments."""
    match entry:
        case Transactions():
            return replace(entry, segment=_locate(entry.segment, places))
        case Transaction() | Prepared():
            return replace(entry, segments=tuple(_locate(segment, places) for segment in entry.segments))
    return entry


def _locate(segment: Segment, places: Mapping[str, Stored]) -> Segment:
    return segment if segment.stored is not None else replace(segment, stored=places[segment.file])
