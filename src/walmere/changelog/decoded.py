"""The messages of one definition, decoded together: what a row has now, and the texts that its types cannot hold."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from walmere.pgoutput.columns import DELETE, Values, decode_rows
from walmere.pgoutput.messages import Relation
from walmere.types.base import Cast, Mask, as_mask
from walmere.types.flat import nested
from walmere.types.text import readable

REJECTS: Final = pa.map_(pa.string(), pa.string())


class DecodedRows:
    """The messages of one definition, decoded. A TRUNCATE is not in `rows`."""

    def __init__(self, batch: pa.RecordBatch, relation: Relation, streamed: bool) -> None:
        messages = batch.column("message")
        truncates = as_mask(pc.equal(batch.column("kind"), "T"))
        self._places: pa.Array | None = None
        if truncates.any():
            messages = messages.filter(pa.array(~truncates))
            self._places = pa.array(np.cumsum(~truncates) - 1, mask=truncates)
        self.rows = decode_rows(messages, relation, streamed=streamed)

    def spread(self, array: pa.Array) -> pa.Array:
        """An array with an item per row as one with an item per message: null for a TRUNCATE."""
        return array if self._places is None else array.take(self._places)

    @cached_property
    def deleted(self) -> Mask | None:
        """Which rows were deleted; None: none."""
        found: Mask = self.rows.kind == DELETE
        return found if found.any() else None

    def new(self, place: int) -> Values:
        """The values of a column in the new tuple. For unchanged values, those of the old tuple, if it has them."""
        new, old = self.rows.new[place], self.rows.old[place]
        if new.unchanged is None:
            return new
        known = new.unchanged & as_mask(old.text.is_valid())
        return Values(pc.if_else(pa.array(known), old.text, new.text), new.unchanged & ~known)

    def current(self, place: int) -> Values:
        """The values of a column in the new tuple, and for deleted rows in the old one."""
        new = self.new(place)
        if self.deleted is None:
            return new
        return Values(pc.if_else(pa.array(self.deleted), self.rows.old[place].text, new.text), new.unchanged)


class Rejected:
    """Collects the rejected values of each row: a map of column names to texts."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._found: list[tuple[str, NDArray[np.intp], pa.Array]] = []

    def keep(self, name: str, text: pa.Array, cast: Cast) -> pa.Array:
        """Returns the values of the cast, and keeps the texts that it rejected under this name."""
        if cast.rejected is not None and cast.rejected.any():
            rows = np.flatnonzero(cast.rejected)
            self._found.append((name, rows, readable(text.take(pa.array(rows)))))
        return cast.values

    def maps(self) -> pa.Array:
        """For each row, its rejected values; null if it has none."""
        if not self._found:
            return pa.nulls(self._count, REJECTS)
        rows = np.concatenate([rows for _, rows, _ in self._found])
        order = pa.array(np.argsort(rows, kind="stable"))
        keys = pa.concat_arrays([pa.repeat(name, len(rows)) for name, rows, _ in self._found])
        texts = pa.concat_arrays([text for *_, text in self._found])
        pairs = pa.StructArray.from_arrays(
            [keys.take(order), texts.take(order)], fields=[REJECTS.key_field, REJECTS.item_field]
        )
        counts = np.bincount(rows, minlength=self._count)
        return nested(REJECTS, counts, counts > 0, pairs)
