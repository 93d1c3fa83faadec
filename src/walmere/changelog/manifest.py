"""The manifest: the list of what the change log has, in commit order.

It is a file of lines, appended and fsynced. Each line is a CRC-32 and a JSON object, so that people can read it and a
torn end is detected. A segment is part of the log only if the manifest names it: other files are left from a crash.

    header        the format's version, and which system, database and slot this log belongs to
    relation      a definition (Relation message, with the Type messages of its columns) under its version number
    transactions  a segment of whole transactions
    transaction   one large transaction, in its own segments
    prepare       the same, before its COMMIT PREPARED
    rollback      ROLLBACK PREPARED: its segments are deleted
    position      nothing to store, but everything before this LSN has been received

Every record but `relation` ends at an LSN: everything that committed before it is in the log. These LSNs only grow. The
last one is the durable position, which may be confirmed to PostgreSQL.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from walmere.changelog.segment import Block, Segment, Stored
from walmere.errors import ChangeLogDamaged, ChangeLogVersion
from walmere.lsn import INVALID_LSN, Lsn
from walmere.pgoutput.decode import decode
from walmere.pgoutput.messages import Relation, Type
from walmere.pgoutput.relation import RelationVersion
from walmere.storage import write_lines_durably

VERSION: Final = 1
NAME: Final = "manifest.jsonl"
_FORMAT: Final = "walmere change log"


@dataclass(frozen=True, slots=True)
class Header:
    """The source that the log belongs to, and where the log begins."""

    system_identifier: str
    database: str
    slot: str
    start_lsn: Lsn
    first_sequence: int = 1
    database_oid: int = 0  # 0: not known, the log was created by an earlier version


@dataclass(frozen=True, slots=True)
class Transactions:
    """A segment of whole transactions."""

    segment: Segment
    count: int
    commit_lsn: Lsn  # of the last
    end_lsn: Lsn
    commit_time: int  # of the last; microseconds of Unix time
    last_sequence: int

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segment, as the other records have it."""
        return (self.segment,)


@dataclass(frozen=True, slots=True)
class Transaction:
    """One large transaction, with the segments that were written while it was in progress."""

    xid: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int
    last_sequence: int  # the last one that was used when it committed
    segments: tuple[Segment, ...]
    aborted: frozenset[int] = frozenset()  # subtransactions that were rolled back
    origin: str | None = None
    gid: str | None = None  # of a prepared transaction


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared transaction. It becomes visible with its COMMIT PREPARED."""

    gid: str
    xid: int
    end_lsn: Lsn
    last_sequence: int
    segments: tuple[Segment, ...]
    aborted: frozenset[int] = frozenset()
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A prepared transaction that will never be visible."""

    gid: str
    end_lsn: Lsn
    last_sequence: int


@dataclass(frozen=True, slots=True)
class Position:
    """Everything before `end_lsn` is in the log."""

    end_lsn: Lsn
    last_sequence: int


Record = Transactions | Transaction | Prepared | RolledBack | Position
Entry = Record | RelationVersion


@dataclass(slots=True)
class Summary:
    """What a writer needs to know of an existing log."""

    header: Header
    end_lsn: Lsn
    commit_lsn: Lsn = INVALID_LSN
    commit_time: int | None = None
    last_sequence: int = 0
    prepared: dict[str, Prepared] = field(default_factory=dict)
    relations: list[RelationVersion] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        if isinstance(entry, RelationVersion):
            self.relations.append(entry)
            return
        self.end_lsn = max(self.end_lsn, entry.end_lsn)
        # retention keeps a prepared transaction, which may be older than the log's beginning
        self.last_sequence = max(self.last_sequence, entry.last_sequence)
        match entry:
            case Prepared():
                self.prepared[entry.gid] = entry
            case RolledBack():
                self.prepared.pop(entry.gid, None)
            case Transaction() | Transactions():
                self.commit_lsn, self.commit_time = entry.commit_lsn, entry.commit_time
                if isinstance(entry, Transaction) and entry.gid is not None:
                    self.prepared.pop(entry.gid, None)


class Manifest:
    """Reads the manifest from its beginning, and goes on as it grows."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        try:
            self._file: BinaryIO = self.path.open("rb")
        except FileNotFoundError:
            raise ChangeLogDamaged(
                f"opening the change log in {directory}", "there is no change log", "`walmere receive` creates it"
            ) from None
        self.position = 0
        try:
            line = self._line()
            if line is None:
                raise self._damaged("its first line is incomplete")
            self.header = _header(self.path, line)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def entries(self) -> Iterator[Entry]:
        """The entries that have not been read yet, up to the end or an incomplete line."""
        while (line := self._line()) is not None:
            yield parse_entry(line)

    def replaced(self) -> bool:
        """Whether retention has replaced the file, or `walmere drop` has removed it."""
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return True

    def _line(self) -> dict[str, Any] | None:
        self._file.seek(self.position)
        line = self._file.readline()
        if not line.endswith(b"\n"):
            return None
        content = parse_line(line)
        if content is None:
            if self._file.read(1):
                raise self._damaged(f"the line at byte {self.position} fails its checksum")
            return None  # torn by a crash: it was never confirmed
        self.position += len(line)
        return content

    def _damaged(self, wrong: str) -> ChangeLogDamaged:
        return ChangeLogDamaged(
            f"reading the manifest {self.path}", wrong, "run `walmere drop`, then start the subscription again"
        )


def summarise(manifest: Manifest) -> Summary:
    """Read the whole manifest and keep what a writer needs."""
    header = manifest.header
    summary = Summary(header, header.start_lsn, last_sequence=header.first_sequence - 1)
    for entry in manifest.entries():
        summary.add(entry)
    return summary


def create(directory: Path, header: Header, entries: Iterable[Entry] = ()) -> None:
    """Write a new manifest, atomically. It replaces an existing one."""
    write_lines_durably(directory / NAME, itertools.chain([render_header(header)], map(render, entries)))


def render(entry: Entry) -> bytes:
    """One line of the manifest."""
    match entry:
        case RelationVersion():
            body: dict[str, Any] = {
                "oid": entry.oid,
                "version": entry.version,
                "lsn": str(entry.lsn),
                "name": f"{entry.relation.namespace}.{entry.relation.name}",
                "message": base64.b64encode(entry.raw).decode(),
                "types": [[t.oid, t.namespace, t.name] for t in entry.types],
            }
            return to_line({"relation": body})
        case Transactions():
            kind = "transactions"
            body = {"count": entry.count, "commit_lsn": str(entry.commit_lsn), "commit_time": entry.commit_time}
            body["segment"] = _segment_json(entry.segment)
        case Transaction():
            kind = "transaction"
            body = {"commit_lsn": str(entry.commit_lsn), "commit_time": entry.commit_time, **_large_json(entry)}
        case Prepared():
            kind, body = "prepare", _large_json(entry)
        case RolledBack():
            kind, body = "rollback", {"gid": entry.gid}
        case Position():
            kind, body = "position", {}
    return to_line({kind: {"end_lsn": str(entry.end_lsn), "last_sequence": entry.last_sequence, **body}})


def to_line(content: dict[str, Any]) -> bytes:
    """A line with its checksum."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The inverse of `to_line`; None if the line fails its checksum."""
    if len(line) < 10 or line[:8] != f"{zlib.crc32(line[9:-1]):08x}".encode():
        return None
    content: dict[str, Any] = json.loads(line[9:])
    return content


def render_header(header: Header) -> bytes:
    """The first line of a manifest."""
    return to_line(
        {
            "format": _FORMAT,
            "version": VERSION,
            "system_identifier": header.system_identifier,
            "database": header.database,
            "database_oid": header.database_oid,
            "slot": header.slot,
            "start_lsn": str(header.start_lsn),
            "first_sequence": header.first_sequence,
        }
    )


def _large_json(entry: Transaction | Prepared) -> dict[str, Any]:
    return {
        "xid": entry.xid,
        "gid": entry.gid,
        "origin": entry.origin,
        "aborted": sorted(entry.aborted),
        "segments": [_segment_json(segment) for segment in entry.segments],
    }


def _segment_json(segment: Segment) -> dict[str, Any]:
    body = {
        "file": segment.file,
        "length": segment.length,
        "streamed": segment.streamed,
        "blocks": [list(astuple(block)) for block in segment.blocks],
    }
    if segment.stored is not None:
        body["stored"] = list(segment.stored)
    return body


def _segment(body: dict[str, Any]) -> Segment:
    blocks = tuple(Block(*fields) for fields in body["blocks"])
    stored = body.get("stored")
    return Segment(body["file"], body["length"], body["streamed"], blocks, None if stored is None else Stored(*stored))


def _header(path: Path, content: dict[str, Any]) -> Header:
    if content.get("format") != _FORMAT:
        raise ChangeLogDamaged(f"opening {path}", "this is not the manifest of a change log")
    if content["version"] != VERSION:
        raise ChangeLogVersion(
            f"opening {path}",
            f"it has format version {content['version']}, this version of Walmere reads format version {VERSION}",
            "use the version of Walmere that wrote it, or a newer one",
        )
    return Header(
        content["system_identifier"],
        content["database"],
        content["slot"],
        Lsn.parse(content["start_lsn"]),
        content["first_sequence"],
        content.get("database_oid", 0),
    )


def parse_entry(content: dict[str, Any]) -> Entry:
    """The entry of a line."""
    [(kind, body)] = content.items()
    if kind == "relation":
        raw = base64.b64decode(body["message"])
        relation = decode(raw, streamed=False)
        assert isinstance(relation, Relation)
        types = tuple(Type(oid, namespace, name) for oid, namespace, name in body["types"])
        return RelationVersion(body["oid"], body["version"], Lsn.parse(body["lsn"]), relation, raw, types)
    end_lsn, last_sequence = Lsn.parse(body["end_lsn"]), body["last_sequence"]
    match kind:
        case "transactions":
            return Transactions(
                _segment(body["segment"]),
                body["count"],
                Lsn.parse(body["commit_lsn"]),
                end_lsn,
                body["commit_time"],
                last_sequence,
            )
        case "transaction":
            return Transaction(
                body["xid"],
                Lsn.parse(body["commit_lsn"]),
                end_lsn,
                body["commit_time"],
                last_sequence,
                tuple(map(_segment, body["segments"])),
                frozenset(body["aborted"]),
                body["origin"],
                body["gid"],
            )
        case "prepare":
            return Prepared(
                body["gid"],
                body["xid"],
                end_lsn,
                last_sequence,
                tuple(map(_segment, body["segments"])),
                frozenset(body["aborted"]),
                body["origin"],
            )
        case "rollback":
            return RolledBack(body["gid"], end_lsn, last_sequence)
        case "position":
            return Position(end_lsn, last_sequence)
    raise ChangeLogVersion(
        "reading the manifest", f"it has an entry of an unknown kind, {kind!r}", "use a newer version of Walmere"
    )
