"""The records of a manifest, and its header, each a line: a CRC-32 and a JSON object. `manifest` describes them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from walmere.changelog.segment_entry import Block, Segment, Stored
from walmere.errors import ChangeLogDamaged, ChangeLogVersion
from walmere.lsn import Lsn

VERSION: Final = 1
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


def parse_header(path: Path, content: dict[str, Any]) -> Header:
    """The inverse of `render_header`, of the manifest at a path."""
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


def render_record(record: Record) -> bytes:
    """One line of the manifest."""
    match record:
        case Transactions():
            kind = "transactions"
            body: dict[str, Any] = {
                "count": record.count,
                "commit_lsn": str(record.commit_lsn),
                "commit_time": record.commit_time,
            }
            body["segment"] = _segment_json(record.segment)
        case Transaction():
            kind = "transaction"
            body = {"commit_lsn": str(record.commit_lsn), "commit_time": record.commit_time, **_large_json(record)}
        case Prepared():
            kind, body = "prepare", _large_json(record)
        case RolledBack():
            kind, body = "rollback", {"gid": record.gid}
        case Position():
            kind, body = "position", {}
    return to_line({kind: {"end_lsn": str(record.end_lsn), "last_sequence": record.last_sequence, **body}})


def parse_record(content: Mapping[str, Any]) -> Record:
    """The inverse of `render_record`, after `parse_line`."""
    [(kind, body)] = content.items()
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
