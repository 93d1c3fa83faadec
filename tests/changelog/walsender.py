"""What a walsender would send, made by hand: for tests about the log alone, where no server is needed."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

from pgoutput.wire import row
from walmere.changelog.assembly import Assembly
from walmere.changelog.manifest import Manifest
from walmere.changelog.reader import Reader
from walmere.changelog.records import Header, Transaction, Transactions
from walmere.changelog.writer import Writer, create
from walmere.lsn import INVALID_LSN, Lsn
from walmere.pgoutput import messages as m
from walmere.pgoutput.relation import RelationVersion

START = Lsn(0x1000)
T, U = 16384, 16385
NAMES = {T: b"t", U: b"u"}
TIME = 800_000_000_000_000  # of 2025, in PostgreSQL's microseconds


class Walsender:
    """Each message takes 16 bytes of WAL, and every commit record as well."""

    def __init__(self, lsn: Lsn = START) -> None:
        self.lsn = lsn
        self.time = TIME
        self._xids = itertools.count(700)

    def frame(self, body: bytes, lsn: int | None = None) -> memoryview:
        header = struct.pack("!cQQq", b"w", self.lsn if lsn is None else lsn, self.lsn, self.time)
        return memoryview(header + body)

    def forward(self, count: int = 16) -> Lsn:
        self.lsn = Lsn(self.lsn + count)
        return self.lsn

    def transaction(self, *bodies: bytes, xid: int | None = None) -> list[memoryview]:
        """Begin, these, Commit."""
        xid = next(self._xids) if xid is None else xid
        inside = [self.frame(body, self.forward()) for body in bodies]
        commit, end = self.forward(), self.forward()
        begin = self.frame(struct.pack("!cQqI", b"B", commit, self.time, xid), commit)
        return [begin, *inside, self.frame(struct.pack("!cBQQq", b"C", 0, commit, end, self.time), end)]

    def inserts(self, *ids: int, oid: int = T) -> list[memoryview]:
        """One transaction that inserts these."""
        return self.transaction(relation(oid), *(insert(i, oid) for i in ids))

    def prepared(self, gid: bytes, *bodies: bytes) -> list[memoryview]:
        """Begin Prepare, these, Prepare."""
        xid = next(self._xids)
        inside = [self.frame(body, self.forward()) for body in bodies]
        prepare, end = self.forward(), self.forward()
        name = gid + b"\0"
        begin = self.frame(struct.pack("!cQQqI", b"b", prepare, end, self.time, xid) + name)
        return [begin, *inside, self.frame(struct.pack("!cBQQqI", b"P", 0, prepare, end, self.time, xid) + name)]

    def commit_prepared(self, gid: bytes) -> list[memoryview]:
        commit, end = self.forward(), self.forward()
        return [self.frame(struct.pack("!cBQQqI", b"K", 0, commit, end, self.time, 1) + gid + b"\0")]

    def rollback_prepared(self, gid: bytes) -> list[memoryview]:
        prepared, end = self.lsn, self.forward()
        return [self.frame(struct.pack("!cBQQqqI", b"r", 0, prepared, end, self.time, self.time, 1) + gid + b"\0")]

    def message(self, content: bytes, prefix: bytes = b"m") -> list[memoryview]:
        """A logical message that belongs to no transaction."""
        lsn = self.forward()
        text = prefix + b"\0" + struct.pack("!I", len(content)) + content
        return [self.frame(struct.pack("!cBQ", b"M", 0, lsn) + text)]


def relation(oid: int = T, name: bytes | None = None, columns: tuple[bytes, ...] = (b"id",)) -> bytes:
    data = struct.pack("!cI", b"R", oid) + b"public\0" + (name or NAMES.get(oid, b"r%d" % oid)) + b"\0d"
    data += struct.pack("!H", len(columns))
    return data + b"".join(struct.pack("!B", 1) + column + b"\0" + struct.pack("!Ii", 23, -1) for column in columns)


def insert(value: int, oid: int = T) -> bytes:
    return row(b"I", new=(str(value).encode(),), oid=oid)


def truncate(*oids: int) -> bytes:
    return struct.pack(f"!cIB{len(oids)}I", b"T", len(oids), 0, *oids)


def begin_log(directory: Path, confirmed: Lsn = START, **options: Any) -> tuple[Writer, Assembly]:
    """A new log, or one that is there, and the way into it."""
    if not (directory / "manifest.jsonl").exists():
        create(directory, Header("7000000000000000000", "db", "slot", START))
    writer = Writer(directory, confirmed, **options)
    return writer, Assembly(writer)


def read(directory: Path, start: Lsn = INVALID_LSN) -> list[list[str]]:
    """The transactions of the log, each as what its changes say in short."""
    with Reader(directory) as reader:
        return [[said(change.message) for change in t.changes] for t in reader.transactions(start)]


def assert_sound(directory: Path) -> None:
    """LSNs and sequence numbers only grow, and there are no files but those the manifest names."""
    with Manifest(directory) as manifest:
        header, entries = manifest.header, list(manifest.entries())
    records = [entry for entry in entries if not isinstance(entry, RelationVersion)]
    ends = [record.end_lsn for record in records if record.end_lsn > header.start_lsn]
    assert ends == sorted(set(ends)), directory
    commits = [record.commit_lsn for record in records if isinstance(record, Transaction | Transactions)]
    assert commits == sorted(set(commits)), directory
    named = {segment.file for record in records for segment in getattr(record, "segments", ())}
    assert {path.name for path in directory.glob("*.arrow*")} <= named, directory


def said(message: m.Message) -> str:
    match message:
        case m.Insert(new=(value, *_)):
            assert isinstance(value, bytes)
            return value.decode()
        case m.Truncate(relations=relations):
            return f"truncate {sorted(relations)}"
        case m.LogicalMessage(content=content):
            return content.decode()
    raise AssertionError(message)
