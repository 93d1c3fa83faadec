"""What a block of rows must decode to, by the one-message decoder; and that decode_rows agrees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pytest

from walmere.errors import ProtocolError
from walmere.pgoutput import UNCHANGED, Binary, Delete, Insert, Relation, RowMessage, Tuple, Update, Value, decode
from walmere.pgoutput.columns import Rows, Values, decode_rows


def row_or_none(data: bytes, relation: Relation, streamed: bool) -> RowMessage | None:
    """The row, or None if it has no place in a block of that relation."""
    try:
        message = decode(data, streamed=streamed)
    except ProtocolError:
        return None
    if not isinstance(message, RowMessage) or message.relation != relation.oid:
        return None
    for values in (new_of(message), *old_of(message)):
        if values is not None and (len(values) != len(relation.columns) or any(isinstance(v, Binary) for v in values)):
            return None
    return message


def new_of(message: RowMessage) -> Tuple | None:
    return None if isinstance(message, Delete) else message.new


def old_of(message: RowMessage) -> tuple[Tuple | None, Tuple | None]:
    return (None, None) if isinstance(message, Insert) else (message.key, message.old)


def values_of(columns: Sequence[Values], present: Sequence[bool]) -> list[Tuple | None]:
    """The columns, as the tuples they were."""
    pivot: list[list[Value]] = [[] for _ in present]
    for column in columns:
        assert len(column.text) == len(present)
        column.text.validate(full=True)
        for row, value in enumerate(column.text.to_pylist()):
            untouched = column.unchanged is not None and column.unchanged[row]
            assert not untouched or (value is None and present[row])
            pivot[row].append(UNCHANGED if untouched else value)
    for values, there in zip(pivot, present, strict=True):
        assert there or all(value is None for value in values)
    return [tuple(values) if there else None for values, there in zip(pivot, present, strict=True)]


def as_messages(rows: Rows) -> list[RowMessage]:
    """Rows, back as messages."""
    new = values_of(rows.new, [kind != ord("D") for kind in rows.kind])
    old = values_of(rows.old, [bool(kind) for kind in rows.old_kind])
    made: list[RowMessage] = []
    for i, kind in enumerate(rows.kind):
        xid = None if rows.xid is None else int(rows.xid[i])
        key_of, old_of = (old[i] if rows.old_kind[i] == ord(letter) else None for letter in "KO")
        after = new[i]
        if kind == ord("D"):
            made.append(Delete(rows.relation.oid, key_of, old_of, xid))
            continue
        assert after is not None
        if kind == ord("I"):
            assert not rows.old_kind[i]
            made.append(Insert(rows.relation.oid, after, xid))
        else:
            made.append(Update(rows.relation.oid, key_of, old_of, after, xid))
    return made


def assert_agrees(messages: Sequence[bytes], relation: Relation, *, streamed: bool, block: pa.Array = None) -> bool:
    """decode_rows gives what decode gives for each; or names a message that decode would not have. True if it gave."""
    if block is None:
        block = pa.array(messages, pa.binary())
    expected = [row_or_none(message, relation, streamed) for message in messages]
    if all(expected_row is not None for expected_row in expected):
        rows = decode_rows(block, relation, streamed=streamed)
        assert len(rows) == len(messages)
        assert rows.kind.dtype == rows.old_kind.dtype == np.uint8
        assert as_messages(rows) == expected
        return True
    with pytest.raises(ProtocolError) as caught:
        decode_rows(block, relation, streamed=streamed)
    starts = accumulate(map(len, messages), initial=0)
    assert caught.value.offset in {start for start, row in zip(starts, expected, strict=False) if row is None}
    return False
