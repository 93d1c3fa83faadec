"""Find records of a manifest by LSN, without reading all of it.

`walmere status` may run often, and a manifest may have hundreds of thousands of lines. Its LSNs only grow, so the first
record after an LSN is found by bisection, and the last one by reading backwards.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from walmere.changelog.manifest_file import ManifestFile
from walmere.changelog.records import Transaction, Transactions, parse_record
from walmere.lsn import Lsn

if TYPE_CHECKING:
    from walmere.pgoutput.relation import RelationVersion

_RECORD: Final = re.compile(rb'[0-9a-f]{8} \{"([a-z]+)":\{"end_lsn":"([0-9A-F]+)/([0-9A-F]+)"')
_HEAD_BYTES: Final = 100
"""`_RECORD` matches within this many bytes of a line."""
_RELATION: Final = b' {"relation":'
_COMMITS: Final = (b"transactions", b"transaction")
_BLOCK: Final = re.compile(rb"\[(\d+),\d+,\d+,")
"""The beginning of a block: its relation. (A list of aborted subtransactions may look the same.)"""


class ManifestSearch(ManifestFile):
    """A manifest as it was when it was opened."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._first = self.position
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._end = self._map.rfind(b"\n") + 1  # an incomplete line after it is torn, or being written

    def close(self) -> None:
        """Close the file."""
        self._map.close()
        super().close()

    @property
    def end_lsn(self) -> Lsn:
        """Everything that committed before this LSN is in the log."""
        for _, lsn, at in self._backwards():
            if self._content(at) is not None:
                return lsn
        return self.header.start_lsn

    @property
    def last_commit_time(self) -> int | None:
        """The commit time of the newest transaction, in microseconds of Unix time."""
        for kind, _, at in self._backwards():
            if kind in _COMMITS and (record := self._record(at)) is not None:
                return record.commit_time
        return None

    def records_after(self, lsn: Lsn, relations: Set[int]) -> Iterator[Transactions | Transaction]:
        """The committed records that end after an LSN and may have changes of these relations, in commit order.

        The caller may remove relations from the set while it reads; when it is empty, this ends.
        """
        for at, line in self._commit_lines(lsn):
            if not relations:
                return
            found = map(int, _BLOCK.findall(line))
            if not relations.isdisjoint(found) and (record := self._record(at)) is not None:
                yield record

    def commits_after(self, lsn: Lsn) -> Iterator[Transactions | Transaction]:
        """All committed records that end after an LSN, in commit order."""
        for at, _ in self._commit_lines(lsn):
            if (record := self._record(at)) is not None:
                yield record

    def relations(self) -> Iterator[RelationVersion]:
        """All definitions of relations, without reading the records between them."""
        from walmere.changelog.manifest import parse_relation  # noqa: PLC0415  `walmere status` needs none

        at = self._map.find(_RELATION, self._first)
        while 0 <= at < self._end:
            begin = self._map.rfind(b"\n", 0, at) + 1
            content = self._content(begin)
            if content is not None:
                yield parse_relation(content["relation"])
            at = self._map.find(_RELATION, at + 1)

    def offset_after(self, lsn: Lsn) -> int:
        """The byte offset of the first record after an LSN: a `Manifest` can read on from there."""
        return self._first_after(lsn)

    def _commit_lines(self, lsn: Lsn) -> Iterator[tuple[int, bytes]]:
        """Byte offset and text of the lines of committed records that end after an LSN."""
        at = self._first_after(lsn)
        while at < self._end:
            end = self._map.find(b"\n", at) + 1
            line = self._map[at:end]
            head = _RECORD.match(line)
            if head is not None and head[1] in _COMMITS:
                yield at, line
            at = end

    def _first_after(self, lsn: Lsn) -> int:
        """The offset of the first line after an LSN."""
        low, high = self._first, self._end
        while low < high:
            begin = max(low, self._map.rfind(b"\n", low, (low + high) // 2) + 1)
            at, found = begin, None
            while at < high and found is None:  # a definition of a relation has no LSN to compare
                found = self._lsn(at)
                at = self._map.find(b"\n", at) + 1
            if found is None or found > lsn:
                high = begin
            else:
                low = at
        return low

    def _backwards(self) -> Iterator[tuple[bytes, Lsn, int]]:
        """Kind, end LSN and offset of each record, the last one first."""
        end = self._end
        while end > self._first:
            begin = self._map.rfind(b"\n", 0, end - 1) + 1
            if (head := _RECORD.match(self._map[begin : begin + _HEAD_BYTES])) is not None:
                yield head[1], _lsn(head), begin
            end = begin

    def _lsn(self, at: int) -> Lsn | None:
        head = _RECORD.match(self._map[at : at + _HEAD_BYTES])
        return None if head is None else _lsn(head)

    def _record(self, at: int) -> Transactions | Transaction | None:
        content = self._content(at)
        record = None if content is None else parse_record(content)
        return record if isinstance(record, Transactions | Transaction) else None

    def _content(self, at: int) -> dict[str, Any] | None:
        """The line at this offset, checked; None if it is the last one and torn."""
        self.position = at
        return self._line()


def _lsn(head: re.Match[bytes]) -> Lsn:
    return Lsn(int(head[2], 16) << 32 | int(head[3], 16))
