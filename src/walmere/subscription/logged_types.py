"""The types of columns in the change log that are not built in.

A subscription that mirrors has them with the states of its tables. Otherwise, and for types that are newer than the
last run, the source is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

from walmere.config import Source
from walmere.publisher import catalog
from walmere.publisher.connect import connect, translate_errors
from walmere.subscription.tables import Tables
from walmere.types import PgType
from walmere.types.builtin import BUILT_IN


class LoggedTypes:
    """Looks up types. Each is asked for once."""

    def __init__(self, directory: Path, source: Source) -> None:
        self._source = source
        self._directory = directory
        self._known: dict[int, PgType] | None = None
        self._asked: set[int] = set(BUILT_IN)

    def __call__(self, oids: Iterable[int]) -> Mapping[int, PgType]:
        """All types that are known, with those of these OIDs that the source still has."""
        wanted = set(oids) - self._asked
        if not wanted:
            return self._known or {}
        if self._known is None:
            self._known = dict(Tables(self._directory).types)
        if missing := wanted - self._known.keys():
            doing = "reading types"
            with closing(connect(self._source, "walmere log")) as connection, translate_errors(self._source, doing):
                self._known |= catalog.types_of(connection, missing)
        self._asked |= wanted
        return self._known
