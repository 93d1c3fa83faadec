"""Rejects: the text of what a type cannot hold, with the key of its row."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from walmere.apply.rejects import Rejects
from walmere.errors import NotMirrored
from walmere.types.codec import codec

TEXT, INT4, DATE = 25, 23, 1082


def cast(rejects: Rejects, types: dict[str, int], *rows: tuple[bytes | None, ...]) -> list[list[object]]:
    names = list(types)
    columns = [pa.array(column, pa.binary()) for column in zip(*rows, strict=True)]
    lsn = np.arange(1, len(rows) + 1, dtype=np.uint64)
    arrays = rejects.cast(pa.table(columns, names=names), [codec(oid, -1, {}) for oid in types.values()], lsn)
    return [array.to_pylist() for array in arrays]


def test_text_that_is_not_utf8_is_kept_as_escapes() -> None:
    rejects = Rejects(("id",))
    rows = [(b"1", b"caf\xc3\xa9"), (b"2", b"caf\xe9"), (b"3", None), (b"4", b"\xff\xfe")]
    assert cast(rejects, {"id": INT4, "note": TEXT}, *rows) == [[1, 2, 3, 4], ["café", None, None, None]]
    assert rejects.rows().to_pylist() == [
        {"lsn": 2, "key": '{"id": "2"}', "column": "note", "value": r"caf\xe9"},
        {"lsn": 4, "key": '{"id": "4"}', "column": "note", "value": r"\xff\xfe"},
    ]


def test_a_key_that_is_not_utf8_refuses_the_table() -> None:
    with pytest.raises(NotMirrored, match="column id, which is part of the key"):
        cast(Rejects(("id",)), {"day": DATE, "id": TEXT}, (b"infinity", b"\xe9"))
