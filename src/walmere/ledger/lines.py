"""The file of points, on a disk or in an object store.

On a disk, a line is appended. An object cannot be appended to. So in a store the file is in pieces:

    ledger.jsonl       the first line, and the newest lines. Its first line says which pieces are before them:
                       {"format": …, "pieces": [first, end], "writer": "…"}
    ledger-….jsonl     older lines, in pieces with consecutive numbers, which never change

With every line, `ledger.jsonl` is replaced. When it is too large, its lines become a piece first. A reader that does
not find a piece reads `ledger.jsonl` again: its writer has replaced all pieces meanwhile.

`ledger.jsonl` is replaced by compare-and-set, and names its writer. A process that was thought dead, and goes on after
another one has become the writer, is refused.
"""

from __future__ import annotations

import json
import uuid
from typing import Any, Final, Protocol

from walmere.directory import Directory
from walmere.errors import ChangeLogDamaged, SinkError

PIECE_BYTES: Final = 64 << 10
_ATTEMPTS: Final = 10
_PIECES: Final = "pieces"
_WRITER: Final = "writer"


class Lines(Protocol):
    """A file with a first line of JSON. It has one writer, and any number of readers."""

    def read(self) -> bytes | None:
        """All lines; None if there is no file."""

    def replace(self, content: bytes) -> None:
        """Become the writer, and replace all lines."""

    def append(self, line: bytes) -> None:
        """Append a line to a file that exists, durably."""


def lines(directory: Directory, name: str) -> Lines:
    """The file of this name, which need not exist."""
    return LocalLines(directory, name) if directory.local else StoredLines(directory, name)


class LocalLines:
    """On a disk."""

    def __init__(self, directory: Directory, name: str) -> None:
        self._directory = directory
        self._name = name

    def read(self) -> bytes | None:
        return self._directory.read(self._name)

    def replace(self, content: bytes) -> None:
        self._directory.replace(self._name, content)

    def append(self, line: bytes) -> None:
        self._directory.append(self._name, line)


class StoredLines:
    """In an object store."""

    def __init__(self, directory: Directory, name: str) -> None:
        self._directory = directory
        self._store = directory.store
        self._name = name
        self._writer = uuid.uuid4().hex
        self._header: dict[str, Any] = {}
        self._newest = b""  # the lines in the object itself
        self._etag: str | None = None  # of the object; None: what it has is not known

    def read(self) -> bytes | None:
        for _ in range(_ATTEMPTS):
            found = self._store.get(self._name)
            if found is None:
                return None
            first, newest = _split(found[0])
            pieces = self._directory.map(self._store.get, map(self._piece, range(*_pieces(_parsed(first)))))
            if all(each is not None for each in pieces):
                return b"".join([first, *(each[0] for each in pieces if each is not None), newest])
        where = f"{self._directory.location}/{self._name}"
        raise ChangeLogDamaged(f"reading {where}", "pieces of it are missing", "`walmere run` writes it again")

    def replace(self, content: bytes) -> None:
        first, rest = _split(content)
        old = range(0)
        found = self._store.get(self._name)
        if found is not None:
            self._etag, old = found[1], range(*_pieces(_parsed(_split(found[0])[0])))
        whole, self._newest = _pieced(rest)
        begin = max([old.stop, *(number + 1 for number in self._numbers())])
        self._directory.map(lambda each: self._store.put(self._piece(each[0]), each[1]), list(enumerate(whole, begin)))
        self._header = {**_parsed(first), _PIECES: [begin, begin + len(whole)], _WRITER: self._writer}
        if found is None:
            if not self._store.create(self._name, self._content()):
                raise self._taken()
            self._etag = None
        else:
            self._put()
        self._store.delete(self._piece(number) for number in self._numbers() if number < begin)

    def append(self, line: bytes) -> None:
        if self._etag is None:
            self._open()
        if len(self._newest) + len(line) > PIECE_BYTES:
            begin, end = _pieces(self._header)
            self._store.put(self._piece(end), self._newest)
            self._header[_PIECES] = [begin, end + 1]
            self._newest = b""
        self._newest += line
        self._put()

    def _open(self) -> None:
        """Find out what the object has, after this process has created it, or a put of it has failed."""
        found = self._store.get(self._name)
        first, self._newest = _split(b"{}\n" if found is None else found[0])
        self._header = _parsed(first)
        if found is None or self._header.get(_WRITER) != self._writer:
            raise self._taken()
        self._etag = found[1]

    def _put(self) -> None:
        etag, self._etag = self._etag or "", None
        self._etag = self._store.replace_if(self._name, self._content(), etag)
        if self._etag is None:
            raise self._taken()

    def _content(self) -> bytes:
        return json.dumps(self._header, separators=(",", ":"), ensure_ascii=False).encode() + b"\n" + self._newest

    def _taken(self) -> SinkError:
        return another_writer(f"{self._directory.location}/{self._name}")

    def _piece(self, number: int) -> str:
        stem, _, suffix = self._name.rpartition(".")
        return f"{stem}-{number:010d}.{suffix}"

    def _numbers(self) -> list[int]:
        """The numbers of all pieces that exist; some may be left from a process that was killed."""
        stem, _, suffix = self._name.rpartition(".")
        names = (each.name for each in self._store.list_directory()[0])
        found = (name.removeprefix(f"{stem}-").removesuffix(f".{suffix}") for name in names)
        return [int(each) for each in found if each.isdigit()]


def another_writer(where: str) -> SinkError:
    """The error of a process that is no longer the writer."""
    wrong = "another process has become the writer of this subscription's points"
    return SinkError(f"writing {where}", wrong, "stop one of the two processes")


def _split(content: bytes) -> tuple[bytes, bytes]:
    """The first line, and the others."""
    first, newline, rest = content.partition(b"\n")
    return first + newline, rest


def _parsed(first: bytes) -> dict[str, Any]:
    try:
        header = json.loads(first)
    except ValueError:
        return {}
    return header if isinstance(header, dict) else {}


def _pieces(header: dict[str, Any]) -> tuple[int, int]:
    begin, end = header.get(_PIECES) or (0, 0)
    return begin, end


def _pieced(rest: bytes) -> tuple[list[bytes], bytes]:
    """Lines in whole pieces, and what is left."""
    pieces = []
    while len(rest) > PIECE_BYTES:
        end = rest.rfind(b"\n", 0, PIECE_BYTES) + 1 or rest.find(b"\n") + 1 or len(rest)
        pieces.append(rest[:end])
        rest = rest[end:]
    return pieces, rest
