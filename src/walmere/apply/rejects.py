"""Rejects: a value that the target's type cannot hold is NULL in the table, and its text is in the rejects table.

Each mirrored table has its own rejects table, with LSN, key of the row, column and text, so that no value is lost.
Bytes that are not UTF-8 are written as backslash escapes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from walmere.errors import NotMirrored
from walmere.names import TableName
from walmere.types.base import Codec


def rejected_key(column: str) -> NotMirrored:
    """The error for a rejected value in a key: NULL cannot identify a row in the target."""
    return NotMirrored(
        f"casting column {column}, which is part of the key",
        "it has a value that the target's type cannot hold, such as infinity or a date BC",
        "choose another REPLICA IDENTITY, or remove the table from the publication",
    )


class Rejects:
    """Collects the rejects of a batch of one table."""

    SCHEMA: ClassVar[pa.Schema] = pa.schema(
        [("lsn", pa.int64()), ("key", pa.string()), ("column", pa.string()), ("value", pa.string())]
    )

    def __init__(self, key: Sequence[str]) -> None:
        self._key = key
        self._found: list[tuple[int, str, str, str]] = []

    @staticmethod
    def table(name: TableName) -> TableName:
        """The rejects table of a table."""
        return TableName(f"_rejects.{name.namespace}", name.name)

    def cast(self, text: pa.Table, codecs: Sequence[Codec], lsn: NDArray[np.uint64]) -> list[pa.Array]:
        """Cast all columns of a batch of text, and collect what is rejected."""
        casts = [each.cast(column) for column, each in zip(text.columns, codecs, strict=True)]
        shown = text
        for place, (name, cast, each) in enumerate(zip(text.column_names, casts, codecs, strict=True)):
            if each.hides and name in self._key:  # the key is shown as the target has it
                shown = shown.set_column(place, name, cast.values.cast(pa.binary()))
        for name, cast in zip(text.column_names, casts, strict=True):
            if cast.rejected is not None and cast.rejected.any():
                if name in self._key:
                    raise rejected_key(name)
                self._keep(shown, name, np.flatnonzero(cast.rejected), lsn)
        return [cast.values for cast in casts]

    def _keep(self, text: pa.Table, name: str, rows: NDArray[np.intp], lsn: NDArray[np.uint64]) -> None:
        """Collect rejects of a column. They are rare, so a loop over rows is fine."""
        taken = text.take(pa.array(rows))
        keys: list[dict[str, Any]] = taken.select(list(self._key)).to_pylist() if self._key else [{}] * len(rows)
        for row, key, value in zip(rows, keys, taken.column(name).to_pylist(), strict=True):
            shown = {column: None if part is None else _readable(part) for column, part in key.items()}
            self._found.append((int(lsn[row]), json.dumps(shown, ensure_ascii=False), name, _readable(value)))

    def rows(self) -> pa.RecordBatch:
        """The rejects, as rows of the rejects table."""
        columns = list(zip(*self._found, strict=True)) or [()] * len(self.SCHEMA)
        return pa.RecordBatch.from_arrays(
            [pa.array(column, field.type) for column, field in zip(columns, self.SCHEMA, strict=True)],
            schema=self.SCHEMA,
        )


def _readable(value: bytes) -> str:
    return value.decode(errors="backslashreplace")
