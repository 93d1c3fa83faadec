"""Row messages → Arrow columns, a block at a time and never a row at a time.

The messages of one relation are in an Arrow binary array, one after the other. A message has its kind, the OID, perhaps
an old tuple, and the new tuple; a tuple has one value after the other, each with its length. So a message can only be
read from its start to its end, but this can be done for all rows at once: `position` is an array with one position per
row. One step reads the byte there (a NumPy gather) and the length, and advances all positions. A block needs about ten
array operations per column, for any number of rows.

After a step, the values of a column are known as (start, end) in the raw bytes. They are not copied one by one. The raw
bytes get a second array of offsets, value, gap, value, gap, …, which makes them an Arrow binary array without a copy;
every second element, from the first, is the column. The starts must be ascending, so a row without a value (null,
unchanged, absent) has an empty one inside its own message.

As in `decode`, no input is trusted: every position is compared with the end of its message before it is read. When a
row fails, `decode` decodes that message, so that both give the same error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from walmere.errors import ProtocolError
from walmere.pgoutput.decode import decode
from walmere.pgoutput.messages import Relation

_Bytes: TypeAlias = NDArray[np.uint8]
_Places: TypeAlias = NDArray[np.int64]
_Mask: TypeAlias = NDArray[np.bool_]

INSERT, UPDATE, DELETE = b"IUD"
KEY, OLD, NEW = b"KON"
_TEXT, _NULL, _UNCHANGED, _BINARY = b"tnub"

_LARGE: Final = 1 << 31
"""From this many bytes on, a block needs 64-bit offsets."""

_DOING: Final = "decoding a block of rows"
_HINT: Final = "if this repeats, the change log or the connection is damaged"


@dataclass(frozen=True, slots=True)
class Values:
    """One column of one tuple of every row."""

    text: pa.Array  # binary (large_binary for a block of 2 GiB or more); null: NULL, unchanged, or no such tuple
    unchanged: _Mask | None = None  # where the value is an unchanged TOASTed one; None: nowhere


@dataclass(frozen=True, slots=True)
class Rows:
    """A block of rows. All arrays have the length and order of the block.

    A row has a new tuple unless `kind` is DELETE, and an old one unless `old_kind` is 0; this distinguishes an absent
    tuple from one that is all NULL. With KEY, only the columns of the key have values.
    """

    relation: Relation
    kind: _Bytes  # INSERT, UPDATE, DELETE
    xid: NDArray[np.uint32] | None  # of the subtransaction, if the block is streamed
    new: tuple[Values, ...]  # per column of the relation
    old_kind: _Bytes  # 0, KEY, OLD
    old: tuple[Values, ...]

    def __len__(self) -> int:
        return len(self.kind)


def decode_rows(messages: pa.BinaryArray | pa.LargeBinaryArray, relation: Relation, *, streamed: bool = False) -> Rows:
    """Decode Insert, Update and Delete messages of one relation.

    `streamed`: they came inside streams and have an xid. A malformed block raises `ProtocolError`; its offset is the
    start of the wrong message, counted from the first byte of the block.
    """
    block = _Block(messages, relation, streamed)
    count = len(messages)
    position = block.start + (5 if streamed else 1)
    block.check(position + 5 > block.end, "it is too short for a row message")
    kind = block.data[block.start]
    oid = block.u32(position)
    block.check(oid != relation.oid, f"it belongs to another relation than {relation.oid}")
    position += 4
    tuple_kind = block.data[position]

    if (kind == INSERT).all():  # the usual case: no old tuples, and every row has a new one
        block.check(tuple_kind != NEW, "its new tuple is missing")
        new, position = block.tuple_of(None, position)
        block.check(position != block.end, "there are bytes after its end")
        absent = Values(pa.nulls(count, block.type))
        old = (absent,) * len(relation.columns)
        return Rows(relation, kind, block.xid, new, np.zeros(count, np.uint8), old)

    block.check((kind != INSERT) & (kind != UPDATE) & (kind != DELETE), "it is not an Insert, Update or Delete")
    has_old = (tuple_kind == KEY) | (tuple_kind == OLD)
    block.check(has_old & (kind == INSERT), "an Insert has an old tuple")
    block.check(~has_old & (kind == DELETE), "a Delete has no old tuple")
    old, position = block.tuple_of(np.flatnonzero(has_old), position)
    has_new = kind != DELETE
    block.check(has_new & (position >= block.end), "its new tuple is missing")
    rows = np.flatnonzero(has_new)
    begins = np.ones(count, np.bool_)
    begins[rows] = block.data[position[rows]] == NEW
    block.check(~begins, "its new tuple is missing")
    new, position = block.tuple_of(rows, position)
    block.check(position != block.end, "there are bytes after its end")
    return Rows(relation, kind, block.xid, new, np.where(has_old, tuple_kind, np.uint8(0)), old)


class _Block:
    """The raw bytes of a block, and the start and end of each message in them."""

    def __init__(self, messages: Any, relation: Relation, streamed: bool) -> None:
        self.relation = relation
        self.streamed = streamed
        self.start, self.end, self.buffer = _layout(messages)
        self.data: _Bytes = np.frombuffer(self.buffer, np.uint8)
        self.type = pa.large_binary() if len(self.data) >= _LARGE else pa.binary()
        # Every four adjacent bytes as a number, overlapping: reading a length is one gather instead of four.
        words = max(len(self.data) - 3, 0)
        self.words = np.ndarray((words,), ">u4", self.data if words else b"", strides=(1,))
        self.even = np.arange(0, 2 * len(self.start), 2)
        self.xid: NDArray[np.uint32] | None = None
        if streamed:
            self.check(self.start + 5 > self.end, "it is too short for a row message")
            self.xid = self.words[self.start + 1].astype(np.uint32)

    def u32(self, position: _Places) -> _Places:
        return self.words[position].astype(np.int64)

    def check(self, bad: _Mask, wrong: str, rows: _Places | None = None) -> None:
        if bad.any():
            first = int(bad.argmax())
            self.fail(first if rows is None else int(rows[first]), wrong)

    def fail(self, row: int, wrong: str) -> NoReturn:
        start, end = int(self.start[row]), int(self.end[row])
        try:
            decode(bytes(self.data[start:end]), streamed=self.streamed)
        except ProtocolError as error:
            wrong = f"{error.wrong} (at its offset {error.offset})"
        raise ProtocolError(_DOING, f"message {row} of {len(self.start)}: {wrong}", _HINT, start)

    def tuple_of(self, rows: _Places | None, position: _Places) -> tuple[tuple[Values, ...], _Places]:
        """Read the tuple at `position` in these rows (None: all rows). Returns it and the positions after it."""
        if rows is not None and not len(rows):
            absent = Values(pa.nulls(len(position), self.type))
            return (absent,) * len(self.relation.columns), position
        here = position if rows is None else position[rows]
        end = self.end if rows is None else self.end[rows]
        self.check(here + 3 > end, "a tuple is cut off", rows)
        count = self.data[here + 1].astype(np.int64) << 8 | self.data[here + 2]
        columns = len(self.relation.columns)
        self.check(count != columns, f"a tuple does not have the {columns} columns of the relation", rows)
        here = here + 3
        found = []
        for _ in range(columns):
            values, here = self.column(rows, here, end)
            found.append(values)
        if rows is not None:
            position = position.copy()
            position[rows] = here
            here = position
        return tuple(found), here

    def column(self, rows: _Places | None, here: _Places, end: _Places) -> tuple[Values, _Places]:
        """Read the value that begins at `here` in these rows. Returns it and the positions after it."""
        self.check(here >= end, "a value is missing", rows)
        letter = self.data[here]
        text = letter == _TEXT
        if text.all():
            here = here + 5
            self.check(here > end, "the length of a value is cut off", rows)
            after = here + self.u32(here - 4)
            self.check(after > end, "a value is cut off", rows)
            return self.values(rows, here, after, None, None), after
        unchanged = letter == _UNCHANGED
        self.check(letter == _BINARY, "a value is in binary format, which was not requested", rows)
        self.check(~(text | unchanged | (letter == _NULL)), "a value has an unknown kind", rows)
        with_text = np.flatnonzero(text)
        start = here[with_text] + 5
        inside = rows[with_text] if rows is not None else with_text
        self.check(start > end[with_text], "the length of a value is cut off", inside)
        stop = start + self.u32(start - 4)
        self.check(stop > end[with_text], "a value is cut off", inside)
        here = here + 1
        after = here.copy()
        here[with_text] = start
        after[with_text] = stop
        return self.values(rows, here, after, text, unchanged if unchanged.any() else None), after

    def values(
        self, rows: _Places | None, start: _Places, stop: _Places, valid: _Mask | None, unchanged: _Mask | None
    ) -> Values:
        """The bytes from `start` to `stop` of these rows, null elsewhere and where not `valid`."""
        count = len(self.start)
        if rows is not None and len(rows) < count:
            everywhere = np.zeros(count, np.bool_)
            everywhere[rows] = True if valid is None else valid
            valid = everywhere
            if unchanged is not None:
                everywhere = np.zeros(count, np.bool_)
                everywhere[rows] = unchanged
                unchanged = everywhere
        offsets = np.empty(2 * count, np.int64 if self.type == pa.large_binary() else np.int32)
        if rows is None:
            offsets[0::2], offsets[1::2] = start, stop
        else:
            offsets[0::2] = offsets[1::2] = self.start
            offsets[2 * rows], offsets[2 * rows + 1] = start, stop
        buffers = [None, pa.py_buffer(offsets), self.buffer]
        alternating = pa.Array.from_buffers(self.type, max(2 * count - 1, 0), buffers)
        text = alternating.take(pa.array(self.even))
        if valid is not None:
            bitmap = pa.py_buffer(np.packbits(valid, bitorder="little"))
            text = pa.Array.from_buffers(self.type, count, [bitmap, *text.buffers()[1:]])
        return Values(text, unchanged)


def _layout(messages: Any) -> tuple[_Places, _Places, Any]:
    """Start and end of each message, counted from the first byte of the first one, and the bytes."""
    wide = messages.type == pa.large_binary()
    if not wide and messages.type != pa.binary():
        raise TypeError(f"a block must be a binary or large_binary array, not {messages.type}")
    if messages.null_count:
        raise ProtocolError(_DOING, "a message is null", _HINT, 0)
    if not len(messages):
        return np.empty(0, np.int64), np.empty(0, np.int64), pa.py_buffer(b"")
    _, where, data = messages.buffers()
    there = np.frombuffer(where, np.int64 if wide else np.int32)
    offsets: _Places = there[messages.offset :][: len(messages) + 1].astype(np.int64)
    size = 0 if data is None else data.size
    if len(offsets) <= len(messages) or offsets[0] < 0 or offsets[-1] > size or (np.diff(offsets) < 0).any():
        raise ProtocolError(_DOING, "the offsets of the block are not in order", _HINT, 0)
    first, last = int(offsets[0]), int(offsets[-1])
    offsets -= first
    return offsets[:-1], offsets[1:], data.slice(first, last - first) if data is not None else pa.py_buffer(b"")
